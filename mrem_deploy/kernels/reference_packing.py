"""Packing in plain NumPy: the explanation, the truth in the tests, the fallback without the C++ extension.

`packing` has checked the arguments. Blocks save memory: on its way each bit takes a byte, eight times the
memory of the codes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 20  # codes; a multiple of 8, so that every block ends at a byte boundary


def pack(codes: NDArray[np.int8], bits: int) -> NDArray[np.uint8]:
    """The low `bits` bits of every code, lowest bit first, one after the other."""
    packed = np.empty((codes.size * bits + 7) // 8, np.uint8)
    for start in range(0, codes.size, BLOCK):
        block = codes[start : start + BLOCK].view(np.uint8)[:, None]  # (n, 1)
        stream = np.unpackbits(block, axis=1, count=bits, bitorder="little")  # (n, bits)
        block_bytes = np.packbits(stream, bitorder="little")
        first = start * bits // 8
        packed[first : first + block_bytes.size] = block_bytes
    return packed


def unpack(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.int8]:
    """Read `count` codes of `bits` bits; the top bit of a code is its sign."""
    codes = np.empty(count, np.int8)
    for start in range(0, count, BLOCK):
        n = min(BLOCK, count - start)
        first, last = start * bits // 8, ((start + n) * bits + 7) // 8
        stream = np.unpackbits(packed[first:last], count=n * bits, bitorder="little").reshape(n, bits)
        # Two's complement: fill the byte above the code with copies of the sign bit.
        sign = np.repeat(stream[:, -1:], 8 - bits, axis=1)  # (n, 8 - bits)
        whole = np.packbits(np.concatenate([stream, sign], axis=1), axis=1, bitorder="little")  # (n, 1)
        codes[start : start + n] = whole.view(np.int8)[:, 0]
    return codes
