"""Integer weights as ONNX initializers: the codes of the frozen model, packed; nothing is recomputed."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from mrem_deploy.export.profiles import INT2_OPSET, INT4_OPSET, Profile
from mrem_deploy.kernels import pack

PACKED_BITS = {ir.DataType.INT2: 2, ir.DataType.INT4: 4}


def carrier(profile: Profile, bits: int, opset: int, spacing: int = 1) -> ir.DataType:
    """The ONNX type that stores weights of `bits`.

    Codes 2 apart (midrise) fit INT2 only as consecutive integers, which operators must turn into codes again.
    """
    if profile.bit_fields:
        return ir.DataType.UINT8
    if profile.packed and bits == 2 and opset >= INT2_OPSET and (spacing == 1 or profile.cast_weights):
        return ir.DataType.INT2
    if profile.packed and bits <= 4 and opset >= INT4_OPSET:
        return ir.DataType.INT4
    return ir.DataType.UINT8 if bits == 8 and profile.zero_points else ir.DataType.INT8


def integer_tensor(codes: np.ndarray, dtype: ir.DataType, name: str) -> ir.TensorProtocol:
    """Signed codes of any shape in INT2, INT4 (packed, first element in the lowest bits), INT8, or UINT8
    with zero point 128."""
    if dtype == ir.DataType.UINT8:
        return ir.tensor((codes.astype(np.int16) + 128).astype(np.uint8), name=name)
    if dtype not in PACKED_BITS:
        return ir.tensor(np.ascontiguousarray(codes, dtype=np.int8), name=name)
    packed = pack(np.ascontiguousarray(codes, dtype=np.int8), PACKED_BITS[dtype])
    return ir.PackedTensor(packed, dtype, shape=codes.shape, name=name)
