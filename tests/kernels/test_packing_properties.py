"""Packing, whatever the codes: unpacking gives them back, and C++ gives the bytes of the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import properties  # noqa: F401 (how long to search)
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrem_deploy.kernels import backends, pack, packed_size, reference_packing, unpack

extension: Any = backends.extension().module
BITS = st.sampled_from((2, 3, 4, 8))
all_bytes = st.integers(0, 5000).map(lambda size: (bytes(range(256)) * 20)[:size])
bytes_of_any_length = st.binary(max_size=300) | all_bytes


def placed(content: bytes, offset: int, dtype: type[np.generic]) -> np.ndarray:
    """An array of these bytes at an address that is `offset` past a multiple of 64."""
    room = np.zeros(len(content) + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    room[start : start + len(content)] = np.frombuffer(content, np.uint8)
    return room[start : start + len(content)].view(dtype)


def codes_in(content: bytes, bits: int, offset: int = 0) -> np.ndarray:
    """Any bytes as codes of so many bits."""
    spread = placed(content, offset, np.int8)
    spread[:] = (spread.astype(np.int16) << (8 - bits)).astype(np.int8) >> (8 - bits)
    return spread


@given(bytes_of_any_length, BITS, st.integers(0, 63), st.integers(1, 4), st.integers(1, 3))
def test_unpacking_gives_the_codes_back(content: bytes, bits: int, offset: int, rows: int, step: int) -> None:
    """Any shape, layout and alignment; codes are taken in row-major order."""
    flat = codes_in(content, bits, offset)
    shaped = flat[: flat.size // rows * rows].reshape(rows, -1)
    for codes in (flat, shaped, shaped.T, shaped[:, ::step], flat[::-step]):
        packed = pack(codes, bits)
        assert packed.size == packed_size(codes.size, bits) == -(-codes.size * bits // 8)
        np.testing.assert_array_equal(unpack(packed, bits, codes.size), codes.reshape(-1))


@pytest.mark.skipif(extension is None, reason=f"no C++ extension here: {backends.extension().problem}")
@given(bytes_of_any_length, BITS, st.integers(0, 63), st.integers(0, 8))
def test_cpp_gives_the_bytes_of_the_reference(content: bytes, bits: int, offset: int, fewer: int) -> None:
    codes = codes_in(content, bits, offset)
    np.testing.assert_array_equal(extension.pack(codes, bits), reference_packing.pack(codes, bits))
    # As packed bytes: any number of codes that takes this many bytes, with anything in the unused bits.
    packed = placed(content, offset, np.uint8)
    count = max(0, packed.size * 8 // bits - fewer)
    if packed_size(count, bits) == packed.size:
        expected = reference_packing.unpack(packed, bits, count)
        np.testing.assert_array_equal(extension.unpack(packed, bits, count), expected)
        half = 1 << (bits - 1)
        assert ((-half <= expected) & (expected < half)).all()


@given(st.binary(max_size=40), st.integers(-3, 400), st.integers(-1, 10))
def test_bytes_of_the_wrong_size_are_refused(content: bytes, count: int, bits: int) -> None:
    packed = np.frombuffer(content, np.uint8)
    fits = bits in (2, 3, 4, 8) and count >= 0 and -(-count * bits // 8) == packed.size
    if fits:
        assert unpack(packed, bits, count).size == count
    else:
        with pytest.raises(ValueError, match="expected"):
            unpack(packed, bits, count)
