"""Weights as the CPU runtime reads them: bytes of unsigned codes, in panels (linears) or rows (tables).

A value is spacing · u + low, with u the unsigned code in the file. The runtime multiplies the bytes where
they lie, so the file's order is that of its registers:

* panels, (P, S, 64): 16 outputs and 4·F inputs are 64 bytes, with F codes in a byte. Byte 4c + k of panel p
  and step s holds at bits f·b the code of input s·4·F + 4·f + k and output 16·p + c;
* rows, (V, R): code j of a row is in byte j // F at bits (j % F)·b.

What is beyond the last input, output or code is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

COLUMNS, INPUTS = 16, 4  # of 64 bytes: outputs, and neighbouring inputs of each


@dataclass(frozen=True)
class Stored:
    """How codes are held: value = spacing · u + low, u in `bits`."""

    bits: int
    spacing: int
    low: int

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    def unsigned(self, codes: np.ndarray) -> np.ndarray:
        return ((codes.astype(np.int16) - self.low) // self.spacing).astype(np.uint8)

    def table(self) -> np.ndarray:
        """The codes in every byte, (256, F)."""
        fields = np.arange(256)[:, None] >> np.arange(0, 8, self.bits) & 2**self.bits - 1
        return (fields * self.spacing + self.low).astype(np.int8)

    def attributes(self, prefix: str = "") -> dict[str, int]:
        return {f"{prefix}{key}": getattr(self, key) for key in ("bits", "spacing", "low")}


def stored_as(bits: int, spacing: int) -> Stored:
    """Where weights of `bits` go; 3 bits take 4, because a byte holds no whole number of them."""
    if bits == 2:
        return Stored(2, spacing, -3 if spacing == 2 else -1)
    return Stored(4, 1, -8) if bits < 8 else Stored(8, 1, -128)


def panels(codes: np.ndarray, stored: Stored) -> np.ndarray:
    """Signed codes (inputs, outputs) → (P, S, 64)."""
    fields = stored.per_byte
    steps, count = -(-codes.shape[0] // (INPUTS * fields)), -(-codes.shape[1] // COLUMNS)
    padded = np.zeros((steps * fields * INPUTS, count * COLUMNS), np.uint8)
    padded[: codes.shape[0], : codes.shape[1]] = stored.unsigned(codes)
    parts = padded.reshape(steps, fields, INPUTS, count, COLUMNS).transpose(3, 0, 4, 2, 1)
    return _joined(parts, stored.bits).reshape(count, steps, COLUMNS * INPUTS)


def rows(codes: np.ndarray, stored: Stored) -> np.ndarray:
    """Signed codes (V, E) → (V, R)."""
    fields = stored.per_byte
    padded = np.zeros((codes.shape[0], -(-codes.shape[1] // fields) * fields), np.uint8)
    padded[:, : codes.shape[1]] = stored.unsigned(codes)
    return _joined(padded.reshape(codes.shape[0], -1, fields), stored.bits)


def _joined(parts: np.ndarray, bits: int) -> np.ndarray:
    """The last axis into one byte, its first entry in the lowest bits."""
    joined = np.zeros(parts.shape[:-1], np.uint8)
    for field in range(parts.shape[-1]):
        joined |= parts[..., field] << np.uint8(field * bits)
    return joined
