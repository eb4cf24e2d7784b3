"""Packing of low-bit codes: known bytes, exact round trips, both backends equal, wrong input refused."""

from __future__ import annotations

import os
import warnings
from types import ModuleType

import numpy as np
import pytest

from mrem_deploy import kernels
from mrem_deploy.base.errors import UserError
from mrem_deploy.kernels import backends, reference_packing

BITS = (2, 3, 4, 8)
# 0..70 passes every remainder of a group of eight codes several times; then primes, which leave a remainder.
LENGTHS = [*range(71), 127, 1021, 8191, 65537]


def need_extension() -> ModuleType:
    found = backends.extension()
    if found.module is None:
        if os.environ.get("MREM_REQUIRE_EXT", "") not in ("", "0"):
            pytest.fail(f"MREM_REQUIRE_EXT is set, but {found.problem}")
        pytest.skip(f"{found.problem}: the C++ backend cannot be tested here")
    return found.module


@pytest.fixture(params=["reference", "cpp"])
def each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpp":
        need_extension()
    monkeypatch.setenv("MREM_BACKEND", request.param)
    assert kernels.backend() == request.param
    return request.param


def random_codes(bits: int, count: int, seed: int = 0) -> np.ndarray:
    half = 1 << (bits - 1)
    return np.random.default_rng([seed, bits, count]).integers(-half, half, count, dtype=np.int8)


# By hand: code i is shifted left by i * bits in one number, whose bytes are listed lowest first.
KNOWN = [
    (2, [0, 1, -2, -1], [0b11_10_01_00]),
    (2, [-1], [0b11]),  # the unused bits are zero
    (2, [1, 1, 1, 1, -2], [0b01_01_01_01, 0b10]),
    (3, [-4, 3, -1, 1], [0xDC, 0x03]),  # 4 + 3·8 + 7·64 + 1·512 = 0x3DC: the third code straddles two bytes
    (3, [0, 1, 2, 3, -4, -3, -2, -1], [0x88, 0xC6, 0xFA]),  # octal 76543210
    (4, [-8, 7], [0x78]),  # the first code in the low half
    (4, [1, 2, -1], [0x21, 0x0F]),
    (8, [-128, -1, 0, 127], [0x80, 0xFF, 0x00, 0x7F]),
    (2, [], []),
    (3, [], []),
]


@pytest.mark.parametrize(("bits", "codes", "expected"), KNOWN)
def test_bytes_computed_by_hand(each_backend: str, bits: int, codes: list[int], expected: list[int]) -> None:
    packed = kernels.pack(np.array(codes, np.int8), bits)
    assert packed.dtype == np.uint8
    assert packed.tolist() == expected
    assert kernels.unpack(packed, bits, len(codes)).tolist() == codes


@pytest.mark.parametrize("bits", BITS)
def test_round_trip_at_every_length(each_backend: str, bits: int) -> None:
    for count in LENGTHS:
        codes = random_codes(bits, count)
        packed = kernels.pack(codes, bits)
        assert packed.size == kernels.packed_size(count, bits) == -(-count * bits // 8)
        restored = kernels.unpack(packed, bits, count)
        assert restored.dtype == np.int8
        np.testing.assert_array_equal(restored, codes, err_msg=f"{count} codes")


@pytest.mark.parametrize("bits", BITS)
def test_every_code_at_every_place_of_a_group(each_backend: str, bits: int) -> None:
    # Neighbours are all-zeros or all-ones, so that a bit spilled to either side shows.
    half = 1 << (bits - 1)
    for background in (0, -1):
        for place in range(9):
            for code in range(-half, half):
                codes = np.full(9, background, np.int8)
                codes[place] = code
                number = sum((int(c) % (1 << bits)) << (i * bits) for i, c in enumerate(codes))
                expected = number.to_bytes(kernels.packed_size(9, bits), "little")
                packed = kernels.pack(codes, bits)
                assert packed.tobytes() == expected
                np.testing.assert_array_equal(kernels.unpack(packed, bits, 9), codes)


@pytest.mark.parametrize("bits", BITS)
def test_cpp_equals_reference(bits: int) -> None:
    cpp = need_extension()
    draw = np.random.default_rng(1)
    # One length beyond the reference's block, so that its seam is compared too.
    for count in [*LENGTHS, *draw.integers(0, 5000, 100).tolist(), reference_packing.BLOCK + 13]:
        codes = random_codes(bits, count, seed=2)
        truth = reference_packing.pack(codes, bits)
        np.testing.assert_array_equal(cpp.pack(codes, bits), truth)
        # Random bytes: also the unused bits of the last byte are random, and must not be looked at.
        noise = draw.integers(0, 256, truth.size, dtype=np.uint8)
        np.testing.assert_array_equal(
            cpp.unpack(noise, bits, count), reference_packing.unpack(noise, bits, count)
        )


def test_unused_bits_are_not_looked_at(each_backend: str) -> None:
    assert kernels.unpack(np.array([0b11_11_11_01], np.uint8), 2, 1).tolist() == [1]
    assert kernels.unpack(np.array([0b11_111_010], np.uint8), 3, 1).tolist() == [2]


def test_codes_are_taken_in_row_major_order_whatever_their_layout(each_backend: str) -> None:
    codes = random_codes(4, 6 * 10).reshape(6, 10)
    for view in (codes, codes.T, codes[::2, 1::3], np.asfortranarray(codes)):
        expected = np.array(view.tolist(), np.int8).reshape(-1)
        packed = kernels.pack(view, 4)
        np.testing.assert_array_equal(kernels.unpack(packed, 4, view.size), expected)
    every_other = np.repeat(kernels.pack(codes, 4), 2)[::2]
    np.testing.assert_array_equal(kernels.unpack(every_other, 4, 60), codes.reshape(-1))


def test_input_may_be_read_only_and_is_not_aliased(each_backend: str) -> None:
    for bits in BITS:
        codes = random_codes(bits, 24)
        codes.setflags(write=False)
        packed = kernels.pack(codes, bits)
        packed.setflags(write=False)
        restored = kernels.unpack(packed, bits, 24)
        restored[:] = 0  # the result is the caller's own
        np.testing.assert_array_equal(kernels.unpack(packed, bits, 24), codes)


@pytest.mark.parametrize(("bits", "low", "high"), [(2, -2, 1), (3, -4, 3), (4, -8, 7), (8, -128, 127)])
def test_extremes_are_accepted_and_beyond_is_refused(
    each_backend: str, bits: int, low: int, high: int
) -> None:
    extremes = np.array([low, high] * 9, np.int8)
    np.testing.assert_array_equal(kernels.unpack(kernels.pack(extremes, bits), bits, 18), extremes)
    if bits == 8:
        return  # every int8 is a code of 8 bits
    for wrong in (low - 1, high + 1, -128, 127):
        for place in (0, 8, 17):
            codes = extremes.copy()
            codes[place] = wrong
            with pytest.raises(ValueError, match=rf"{low} to {high}, got .*{wrong}.*clip"):
                kernels.pack(codes, bits)


@pytest.mark.parametrize("bits", [0, 1, 5, 6, 7, 9, 16, -4, True, 2.5, "4", None])
def test_unknown_bits_are_refused(bits: object) -> None:
    for call in (
        lambda: kernels.pack(np.zeros(8, np.int8), bits),  # type: ignore[arg-type]
        lambda: kernels.unpack(np.zeros(4, np.uint8), bits, 8),  # type: ignore[arg-type]
        lambda: kernels.packed_size(8, bits),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=r"one of \(2, 3, 4, 8\)"):
            call()


def test_wrong_sizes_are_refused(each_backend: str) -> None:
    packed = kernels.pack(random_codes(3, 10), 3)  # 4 bytes
    for count in (7, 11, 1000):  # 3, 5 and 375 bytes
        with pytest.raises(ValueError, match=rf"for {count} codes of 3 bits, got 4"):
            kernels.unpack(packed, 3, count)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        kernels.unpack(packed, 3, -1)
    with pytest.raises(TypeError, match="as an integer"):
        kernels.unpack(packed, 3, 10.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "codes", [[1, 0], np.zeros(4), np.zeros(4, np.uint8), np.zeros(4, np.int64), b"\0\1"]
)
def test_wrong_types_are_refused_and_not_converted(codes: object) -> None:
    with pytest.raises(TypeError, match=r"array of int8.*convert"):
        kernels.pack(codes, 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"array of uint8"):
        kernels.unpack(np.zeros(2, np.int8), 4, 4)  # type: ignore[arg-type]


def test_extension_called_directly_is_memory_safe() -> None:
    cpp = need_extension()
    with pytest.raises(ValueError, match="5"):
        cpp.pack(np.zeros(8, np.int8), 5)
    with pytest.raises(ValueError, match="expected 3 packed bytes, but there are 2"):
        cpp.unpack(np.zeros(2, np.uint8), 3, 8)
    with pytest.raises(ValueError, match="negative"):
        cpp.unpack(np.zeros(0, np.uint8), 2, -1)
    with pytest.raises(TypeError):
        cpp.pack(np.zeros(8), 4)
    with pytest.raises(TypeError):
        cpp.pack(np.zeros((8, 2), np.int8)[:, 0], 4)  # strided: a copy must be the caller's decision


def test_backend_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for automatic in ("auto", ""):
        monkeypatch.setenv("MREM_BACKEND", automatic)
        assert kernels.backend() == ("reference" if backends.extension().module is None else "cpp")
    monkeypatch.setenv("MREM_BACKEND", "reference")
    assert kernels.backend() == "reference"
    assert backends.implementation() is reference_packing
    assert "MREM_BACKEND=reference" in kernels.describe_backend()
    monkeypatch.setenv("MREM_BACKEND", "gpu")
    with pytest.raises(UserError, match=r"auto, reference, cpp, triton; got 'gpu'"):
        kernels.backend()


def test_missing_extension_explains_itself_and_the_reference_takes_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "extension", lambda: backends.Extension(None, "it was not built"))
    monkeypatch.delenv("MREM_BACKEND", raising=False)
    backends._warn_once.cache_clear()
    codes = random_codes(2, 21)
    with pytest.warns(RuntimeWarning, match=r"it was not built.*slower.*compiler"):
        packed = kernels.pack(codes, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        np.testing.assert_array_equal(kernels.unpack(packed, 2, 21), codes)
    assert "slower" in kernels.describe_backend()
    monkeypatch.setenv("MREM_BACKEND", "cpp")
    with pytest.raises(UserError, match=r"it was not built(.|\n)*compiler"):
        kernels.pack(codes, 2)


def test_extension_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("old")
    old.INTERFACE = backends.INTERFACE - 1  # type: ignore[attr-defined]
    monkeypatch.setattr(backends.importlib, "import_module", lambda name: old)
    found = backends.extension.__wrapped__()
    assert found.module is None
    assert "another version" in found.problem
