"""Low-bit weights in plain bytes, unpacked by shifts and masks: for readers without INT4 and INT2.

A byte holds 2 codes of 4 bits or 4 of 2 bits. Field f of a row of bytes, from the lowest bits up, is the f-th
part of the row's columns, so unpacking is a mask for each field and one Concat. onnxruntime folds this for a
constant when it loads the file. Codes become 0, 1, … (midrise: 0, 2, 4, 6), with `middle` as zero point:
value = (byte − middle) · scale, in UINT8, which integer matmuls take as it is.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from mrem_deploy.export.builder import Builder
from mrem_deploy.numerics import to_stored
from mrem_deploy.quant.frozen import FrozenWeight

MOST_BITS = 4  # more are a byte each


def _width(bits: int) -> int:
    return 2 if bits == 2 else 4


def middle(weight: FrozenWeight) -> int:
    """The byte that stands for 0."""
    return weight.spacing * 2 ** (_width(weight.bits) - 1) - (weight.spacing - 1)


def pack_rows(codes: np.ndarray, weight: FrozenWeight) -> np.ndarray:
    """(rows, columns) → (rows, bytes); columns that are missing in the last field are 0."""
    bits = _width(weight.bits)
    fields = 8 // bits
    part = math.ceil(codes.shape[1] / fields)
    shifted = to_stored(codes, weight.spacing).astype(np.int16) + 2 ** (bits - 1)
    padded = np.pad(shifted.astype(np.uint8), ((0, 0), (0, part * fields - codes.shape[1])))
    packed = np.zeros((len(codes), part), np.uint8)
    for field in range(fields):
        packed |= padded[:, field * part : (field + 1) * part] << np.uint8(field * bits)
    return packed


def stored(build: Builder, codes: np.ndarray, weight: FrozenWeight, name: str) -> ir.Value:
    """The bytes as an initializer."""
    return build.initializer(ir.tensor(pack_rows(codes, weight), name=f"{name}.bytes"))


def unpack(build: Builder, packed: ir.Value, columns: int, weight: FrozenWeight, name: str) -> ir.Value:
    """The operators that turn bytes (…, bytes) into codes (…, columns) with zero point `middle`."""
    bits = _width(weight.bits)
    fields, doubled = 8 // bits, weight.spacing - 1
    mask = build.constant((2**bits - 1) * weight.spacing, np.uint8, f"mask.{bits}.{weight.spacing}")
    parts = []
    for field in range(fields):
        right, value = field * bits - doubled, packed
        if right:
            by = build.constant(abs(right), np.uint8, f"shift.{abs(right)}")
            direction = "RIGHT" if right > 0 else "LEFT"
            value = build.op("BitShift", value, by, name=f"{name}.shift.{field}", direction=direction)
        if right < 8 - bits:  # the highest field is alone after its shift
            value = build.op("BitwiseAnd", value, mask, name=f"{name}.field.{field}")
        parts.append(value)
    whole = build.op("Concat", *parts, name=f"{name}.uint8", axis=-1)
    if columns % fields == 0:
        return whole
    start, end, axis = (build.constant([n], np.int64, f"slice.{n}") for n in (0, columns, -1))
    return build.op("Slice", whole, start, end, axis, name=f"{name}.cut")
