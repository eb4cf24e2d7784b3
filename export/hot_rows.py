"""Hot rows of the word embedding in ONNX: a small INT8 table beside the large one.

A map says for every token which row of the small table belongs to it. Row 0 of that table is zero and stands
for all tokens that are not hot. Their other part, the low-bit row, is zero for hot tokens: the sum of both is
exactly the one that counts.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch.nn.functional as F

from mrem_deploy.export.builder import Builder
from mrem_deploy.export.profiles import Profile
from mrem_deploy.export.tensors import integer_tensor
from mrem_deploy.quant.hot_rows import HotRows


def add_hot_rows(
    build: Builder, profile: Profile, name: str, ids: ir.Value, rows: ir.Value, hot: HotRows, vocabulary: int
) -> ir.Value:
    """`rows`, the low-bit rows of the tokens `ids`, plus their rows of the small table."""
    place = _place(build, profile, name, ids, hot, vocabulary)
    table, scales = _table(build, name, hot)
    if profile.lookup_codes:
        scale = build.initializer(ir.tensor(scales, name=f"{name}.hot.scale"))
        looked_up = build.op("Gather", table, place, name=f"{name}.hot.rows.codes", axis=0)
        values = build.op("Cast", looked_up, name=f"{name}.hot.rows.float", to=ir.DataType.FLOAT)
        row_scale = build.op("Gather", scale, place, name=f"{name}.hot.rows.scale", axis=0)
        added = build.op("Mul", values, row_scale, name=f"{name}.hot.rows")
    else:
        scale = build.initializer(ir.tensor(scales.reshape(-1), name=f"{name}.hot.scale"))
        floats = build.op("DequantizeLinear", table, scale, name=f"{name}.hot.table", axis=0)
        added = build.op("Gather", floats, place, name=f"{name}.hot.rows", axis=0)
    return build.op("Add", rows, added, name=f"{name}.rows.all")


def hot_tables(build: Builder, name: str, hot: HotRows, vocabulary: int) -> list[ir.Value]:
    """The map, the small table and its scales (K + 1,), for an operator that reads all three."""
    places = build.initializer(ir.tensor(_places(hot, vocabulary), name=f"{name}.hot.places"))
    table, scales = _table(build, name, hot)
    return [places, table, build.initializer(ir.tensor(scales.reshape(-1), name=f"{name}.hot.scale"))]


def _table(build: Builder, name: str, hot: HotRows) -> tuple[ir.Value, np.ndarray]:
    """The small table, and its scales as (K + 1, 1)."""
    first_zero = (0, 0, 1, 0)  # one row in front
    codes = integer_tensor(F.pad(hot.codes, first_zero).numpy(), ir.DataType.INT8, f"{name}.hot.codes")
    return build.initializer(codes), F.pad(hot.scale.float(), first_zero).numpy()


def _places(hot: HotRows, vocabulary: int) -> np.ndarray:
    """For every token its row of the small table, in the smallest type."""
    count = len(hot.ids)
    places = np.zeros(vocabulary, np.uint8 if count < 256 else np.uint16)
    places[hot.ids.numpy()] = np.arange(1, count + 1)
    return places


def _place(
    build: Builder, profile: Profile, name: str, ids: ir.Value, hot: HotRows, vocabulary: int
) -> ir.Value:
    """The rows of the small table that belong to the tokens `ids`.

    Packed files hold the map in the smallest type, with a Cast after it: Gather takes INT32. The other
    profiles are for readers that may lack such types, so it is INT32 in the file.
    """
    places = _places(hot, vocabulary)
    places = places if profile.packed else places.astype(np.int32)
    table = build.initializer(ir.tensor(places, name=f"{name}.hot.places"))
    place = build.op("Gather", table, ids, name=f"{name}.hot.place", axis=0)
    if not profile.packed:
        return place
    return build.op("Cast", place, name=f"{name}.hot.place.int32", to=ir.DataType.INT32)
