"""Low-bit codes to bytes and back: the stored form of quantized weights.

Code i takes the bits [i·b, (i+1)·b) of one dense little-endian bit stream: the first code sits in the lowest
bits of the first byte. Codes are two's complement. For 2 and 4 bits this is the element order of ONNX's INT2
and INT4. Note: codes are always signed. Shift an unsigned code 0…15 by its zero point before packing; 15 is
refused at 4 bits, not wrapped to -1.
"""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import NDArray

from mrem_deploy.kernels import backends

PACKABLE_BITS = (2, 3, 4, 8)


def packed_size(count: int, bits: int) -> int:
    """Bytes that `count` codes take: ceil(count · bits / 8)."""
    _check_bits(bits)
    return (_checked_count(count) * bits + 7) // 8


def pack(codes: NDArray[np.int8], bits: int) -> NDArray[np.uint8]:
    """The bytes of `codes` of any shape, in row-major order.

    The unused high bits of the last byte are zero.
    """
    _check_bits(bits)
    _check_array("codes", codes, np.int8)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if codes.size and (codes.min() < low or codes.max() > high):
        raise ValueError(
            f"expected codes of {bits} bits, {low} to {high}, got {codes.min()} to {codes.max()}: "
            "clip when quantizing, subtract the zero point of unsigned codes, or use more "
            "bits"
        )
    return backends.implementation().pack(np.ascontiguousarray(codes).reshape(-1), bits)


def unpack(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.int8]:
    """The `count` codes in `packed` as a flat array; the inverse of `pack`."""
    expected = packed_size(count, bits)
    _check_array("packed", packed, np.uint8)
    if packed.size != expected:
        raise ValueError(
            f"expected {expected} bytes for {count} codes of {bits} bits, got {packed.size}: the bits or the "
            "shape differ from those at packing, or the file is damaged: write it again"
        )
    return backends.implementation().unpack(
        np.ascontiguousarray(packed).reshape(-1), bits, operator.index(count)
    )


def _check_bits(bits: int) -> None:
    if isinstance(bits, bool) or bits not in PACKABLE_BITS:
        raise ValueError(f"expected bits to be one of {PACKABLE_BITS}, got {bits!r}")


def _checked_count(count: int) -> int:
    try:
        number = operator.index(count)
    except TypeError:
        raise TypeError(f"expected the count of codes as an integer, got {count!r}") from None
    if number < 0:
        raise ValueError(f"expected a count of codes of at least 0, got {number}")
    return number


def _check_array(name: str, array: object, dtype: type[np.generic]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        got = f"{array.dtype} array" if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(
            f"expected {name} as a NumPy array of {np.dtype(dtype)}, got a {got}: "
            "convert a tensor with .cpu().numpy(), and the type with .astype after checking the range"
        )
