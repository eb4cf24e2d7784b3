"""DeBERTa's products with relative positions (quant/disentangled.py), as ONNX operators.

The projected positions do not depend on the text. Their codes are computed here, once, and stored: a matrix
of 8-bit codes for each product of each block, (heads, positions, d). A run gathers the rows of its distances.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import nn

from mrem_deploy.export.codes import Codes, Multiplies
from mrem_deploy.models.architectures import Anatomy
from mrem_deploy.numerics import quantize
from mrem_deploy.quant.frozen import FixedScale, FrozenModel, frozen_linear

PROJECTIONS = {  # of positions: where those of q and k do it, and where there are others
    "c2p": ("key_proj", "pos_key_proj"),
    "p2c": ("query_proj", "pos_query_proj"),
}


def projected(frozen: FrozenModel, found: Anatomy, attention: str, product: str) -> torch.Tensor:
    """The positions as the product's right operand, before it is quantized: (heads, positions, d)."""
    encoder = found.blocks[0].removesuffix(".layer.0")
    embeddings = frozen.full[f"{encoder}.rel_embeddings.weight"]
    if (gamma := frozen.full.get(f"{encoder}.LayerNorm.weight")) is not None:
        beta, epsilon = frozen.full[f"{encoder}.LayerNorm.bias"], frozen.config.layer_norm_eps
        embeddings = F.layer_norm(embeddings, gamma.shape, gamma, beta, epsilon)
    shared = found.positions.shared
    name = f"{attention}.{PROJECTIONS[product][0 if shared else 1]}"
    point = f"{attention}.position_quantizer" if shared else f"{name}.input_quantizer"
    own = FixedScale(frozen.scales[point]) if point in frozen.scales else nn.Identity()
    with torch.no_grad():
        rows = frozen_linear(frozen, name, frozen.full.get(f"{name}.bias"), own)(embeddings)
    return rows.unflatten(-1, (frozen.config.num_attention_heads, -1)).transpose(0, 1)


def disentangled_scores(
    lowering: Multiplies, name: str, query: ir.Value, key: ir.Value, rows: ir.Value | None, scaling: float
) -> ir.Value:
    """The sum of three products; queries and keys are quantized once for two of them."""
    assert rows is not None
    q, k = (lowering.quantize(x, f"{name}.scores.{side}") for x, side in ((query, "left"), (key, "right")))
    build, turned = lowering.build, f"{name}.scores.right.moved.turned"
    columns = build.op("Transpose", k.codes if k else key, name=turned, perm=[0, 1, 3, 2])
    of_columns = replace(k, codes=columns) if k else None
    scores = lowering.multiply(f"{name}.scores", query, q, columns, of_columns, scaling)
    content = {"c2p": (query, q), "p2c": (key, k)}
    for product in lowering.found.positions.products:
        more = _position_scores(lowering, name, product, *content[product], rows, scaling)
        scores = build.op("Add", scores, more, name=f"{name}.with.{product}")
    return scores


def _position_scores(
    lowering: Multiplies,
    name: str,
    product: str,
    content: ir.Value,
    content_codes: Codes | None,
    rows: ir.Value,
    factor: float,
) -> ir.Value:
    """content·positions·factor, moved to where the distances are: (B, heads, T, T). `rows` are (2, 2T)."""
    build, title = lowering.build, f"{name}.{product}"
    table = projected(lowering.frozen, lowering.found, name, product)
    which = build.constant(0 if product == "c2p" else 1, np.int64, f"rows.{product}")
    rows = build.op("Gather", rows, which, name=f"{title}.rows", axis=0)
    scale = lowering.frozen.scales.get(f"{title}.right")
    values: Any = table.float().numpy()
    if scale is not None:
        kind, shift = (np.uint8, 128) if lowering.profile.zero_points else (np.int8, 0)
        values = (quantize(table, scale.scale, scale.grid).numpy() + shift).astype(kind)
    stored = build.initializer(ir.tensor(np.ascontiguousarray(values), name=f"{title}.positions"))
    used = build.op("Gather", stored, rows, name=f"{title}.used", axis=1)
    used = build.op("Transpose", used, name=f"{title}.turned", perm=[0, 2, 1])  # (heads, d, 2T)
    codes = None if scale is None else lowering.stored_codes(used, f"{title}.right", scale)
    y = lowering.multiply(title, content, content_codes, used, codes, factor)
    y = _skewed(lowering, title, y)
    return build.op("Transpose", y, name=f"{title}.scores", perm=[0, 1, 3, 2]) if product == "p2c" else y


def _skewed(lowering: Multiplies, title: str, y: ir.Value) -> ir.Value:
    """(B, heads, T, 2T) → (B, heads, T, T): row i begins at T − 1 − i."""
    build = lowering.build

    def numbers(*values: int) -> ir.Value:
        return build.constant(values, np.int64, f"numbers.{values}")

    tokens = build.op("Shape", y, name=f"{title}.tokens", start=2, end=3)
    less = build.op("Sub", tokens, numbers(1), name=f"{title}.tokens.less")
    flat = build.op("Reshape", y, numbers(0, 0, -1), name=f"{title}.flat")
    flat = build.op("Slice", flat, less, numbers(-1), numbers(2), name=f"{title}.flat.cut")
    shape = build.op("Concat", numbers(0, 0), tokens, numbers(-1), name=f"{title}.shape", axis=0)
    square = build.op("Reshape", flat, shape, name=f"{title}.rows.moved")
    return build.op("Slice", square, numbers(0), tokens, numbers(3), name=f"{title}.square")
