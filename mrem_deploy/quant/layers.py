"""Quantized layers, and the attention function that uses them.

Both operands of every matmul are quantized: input and weight of each linear, and inside attention q, k,
the probabilities and v. One attention function, registered with transformers, serves every
architecture. The q, k and v projections share one input quantizer, so that an export may merge them
into one matrix. The full-precision teacher runs the same attention function with plain matmuls: teacher
and student differ only in their quantizers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention

from mrem_deploy.kernels import fake_quant_linear, fake_quant_matmul
from mrem_deploy.kernels.quantized import Quantized
from mrem_deploy.numerics import Grid
from mrem_deploy.quant.hot_rows import HotRowQuantizer

ATTENTION = "mrem"


class QuantLinear(nn.Module):
    """Y = Q_a(X)·Q_w(W)ᵀ + b; the bias stays full precision.

    Linears that share an input (q, k, v) get it already quantized by `shares`, the quantizer of their
    attention module: quantizing again on its grid changes nothing, and the scale gets its gradient there.
    """

    def __init__(
        self,
        linear: nn.Linear,
        weight_quantizer: Any,
        input_quantizer: nn.Module,
        shares: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.weight_quantizer: Any = weight_quantizer  # a WeightQuantizer, or the identity
        self.input_quantizer = input_quantizer
        self._shares = (shares,)  # in a tuple: it is another module's child, not ours

    def forward(self, x: torch.Tensor, shares: nn.Module | None = None) -> torch.Tensor:
        scale = input_scale(self.input_quantizer, shares or self._shares[0])
        if scale is None or isinstance(self.weight_quantizer, nn.Identity):  # one operand is full precision
            return F.linear(self.input_quantizer(x), self.weight_quantizer(self.weight), self.bias)
        weight_scale = self.weight_quantizer.weight_scale(self.weight)
        return fake_quant_linear(x, self.weight, self.bias, Quantized(*scale), weight_scale)

    def extra_repr(self) -> str:
        return f"in={self.weight.shape[1]}, out={self.weight.shape[0]}"


def read_quantized(linear: nn.Module, x: torch.Tensor, quantizer: nn.Module) -> torch.Tensor:
    """linear(x), where `quantizer` (unless the identity) has quantized x, not the attention module's."""
    if isinstance(linear, nn.Linear) or isinstance(quantizer, nn.Identity):
        return linear(x)
    return linear(x, quantizer)


def input_scale(own: Any, shared: Any) -> tuple[torch.Tensor, Grid] | None:
    """Scale and grid of a linear's input: `own` quantizes it here, or `shared` has done so before."""
    if not isinstance(own, nn.Identity):
        return own.scale, own.grid
    return None if shared is None else (shared.scale.detach(), shared.grid)


class QuantEmbedding(nn.Module):
    """Rows are looked up first and quantized after: each row has its own scale, so the result is
    that of quantizing the entire table, at the cost of the batch's rows only. For the same reason
    the gradient is sparse: the optimizer touches only rows that occurred."""

    def __init__(
        self, embedding: nn.Embedding, weight_quantizer: Any, hot_quantizer: HotRowQuantizer | None = None
    ) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.padding_idx = embedding.padding_idx
        # Gemma multiplies what it looks up; not persistent, as in its own embedding.
        self.register_buffer("factor", getattr(embedding, "embed_scale", None), persistent=False)
        self.factor: torch.Tensor | None
        self.weight_quantizer: Any = weight_quantizer  # a WeightQuantizer with per-row state
        self.hot_quantizer = hot_quantizer

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(ids, self.weight, self.padding_idx, sparse=True)  # (B, T, H)
        quantized = self.weight_quantizer.rows(rows, ids)
        if self.hot_quantizer is not None:
            quantized = self.hot_quantizer(rows, ids, quantized)
        return quantized if self.factor is None else quantized * self.factor.to(quantized.dtype)


class Matmul(nn.Module):
    """a·b with the quantizers of both operands in front (plain in the full-precision model).

    Where keys and values have fewer heads than queries, (B, heads, T, ·) times (B, groups, ·, ·): heads next
    to each other read the same group, so they are one matrix with more rows, and nothing is repeated.

    An operand that another product has, too, `shares` that one's quantizer on the left.
    """

    def __init__(
        self, left: nn.Module | None = None, right: nn.Module | None = None, shares: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.left: Any = left or nn.Identity()
        self.right: Any = right or nn.Identity()
        self._shares: Any = (shares,)  # in a tuple: it is another module's child, not ours

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dim() == 4 and a.shape[1] != b.shape[1]:
            rows = a.reshape(a.shape[0], b.shape[1], -1, a.shape[3])
            return self._product(rows, b).reshape(*a.shape[:3], b.shape[3])
        return self._product(a, b)

    def _product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        left, right = self._shares[0] or self.left, self.right
        if isinstance(left, nn.Identity) or isinstance(right, nn.Identity):
            return torch.matmul(left(a), right(b))
        return fake_quant_matmul(a, b, Quantized(left.scale, left.grid), Quantized(right.scale, right.grid))


def mrem_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    positions: tuple[torch.Tensor, ...] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax((Q̂·K̂ᵀ + what disentangled attention adds)·scaling + mask), quantized again before P̂·V̂.

    The scaling comes after the matmul: q and k are quantized as the projections leave them.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = module.scores(query, key.transpose(-1, -2))  # (B, heads, T, T)
    if positions is not None:
        scores = scores + module.position_scores(query, key, *positions)
    scores = scores * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    probabilities = scores.softmax(dim=-1)
    context = module.context(probabilities, value)  # (B, heads, T, d)
    return context.transpose(1, 2).contiguous(), probabilities


class _RegisteredMPNetAttention(MPNetSelfAttention):
    """MPNet's own attention code does not use transformers' registry; this one does."""

    attention_function: str

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, ...]:
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        q, k, v = (part(hidden_states).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        added = [bias for bias in (position_bias, attention_mask) if bias is not None]
        attend = ALL_ATTENTION_FUNCTIONS[self.attention_function]
        context, _ = attend(self, q, k, v, sum(added[1:], added[0]) if added else None)
        return (self.o(context.reshape(*hidden_states.shape[:-1], -1)),)


AttentionInterface.register(ATTENTION, mrem_attention)
AttentionMaskInterface.register(ATTENTION, eager_mask)
