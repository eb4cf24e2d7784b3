"""Quantized layers, and their insertion into a Hugging Face model.

Both operands of every matrix multiplication are quantized: input and weight of each linear, and
inside attention q, k, the probabilities and v. One attention function, registered with
transformers, serves every architecture; q, k and v projections share one input quantizer, so that
an export may merge them into one matrix. The full-precision teacher runs the same attention
function with plain matrix products: teacher and student differ in their quantizers and in nothing
else.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention

from mrem_deploy.kernels import fake_quant_linear, fake_quant_matmul
from mrem_deploy.models.architectures import Anatomy, anatomy
from mrem_deploy.numerics import FULL_PRECISION, Grid
from mrem_deploy.quant.quantizers import LearnedStep, make_weight_quantizer

ATTENTION = "mrem"


@dataclass(frozen=True)
class QuantSpec:
    """How the model is quantized; the part of a recipe that the layers need."""

    weight_bits: int = 4
    embedding_bits: int = 4
    activation_bits: int = 8
    per_channel: bool = False
    symmetric: bool = False  # no asymmetric activations at all (TensorRT)
    weight_quantizer: str = "auto"
    curvature: str = "identity"
    keep_fp: tuple[str, ...] = ()
    layer_bits: tuple[tuple[str, int], ...] = ()  # of layers that do not have the bits above

    def keeps(self, name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.keep_fp)

    def bits_of(self, name: str, usual: int) -> int:
        """Bits of one layer's weight: its own where it has any, else the `usual` ones of its kind."""
        return FULL_PRECISION if self.keeps(name) else dict(self.layer_bits).get(name, usual)

    def weight_quantizer_of(self, name: str, weight: torch.Tensor) -> nn.Module:
        """The quantizer of a linear's weight; the identity where it stays full precision."""
        bits = self.bits_of(name, self.weight_bits)
        if bits == FULL_PRECISION:
            return nn.Identity()
        return make_weight_quantizer(weight, bits, self.per_channel, self.weight_quantizer, self.curvature)

    def embedding_quantizer_of(self, name: str, weight: torch.Tensor) -> nn.Module:
        """The same for the word embedding, which is always quantized per row."""
        bits = self.bits_of(name, self.embedding_bits)
        return nn.Identity() if bits == FULL_PRECISION else make_weight_quantizer(weight, bits, per_row=True)


class QuantLinear(nn.Module):
    """Y = Q_a(X)·Q_w(W)ᵀ + b; the bias stays full precision.

    Linears that share an input (q, k, v) get it already quantized by `shares`, the quantizer of their
    attention module: on its grid quantizing again changes nothing, and the step has its gradient there.
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = input_step(self.input_quantizer, *self._shares)
        if step is None or isinstance(self.weight_quantizer, nn.Identity):  # one operand is full precision
            return F.linear(self.input_quantizer(x), self.weight_quantizer(self.weight), self.bias)
        return fake_quant_linear(
            x, self.weight, self.bias, *step, *self.weight_quantizer.weight_scale(self.weight)
        )

    def extra_repr(self) -> str:
        return f"in={self.weight.shape[1]}, out={self.weight.shape[0]}"


def input_step(own: Any, shared: Any) -> tuple[torch.Tensor, Grid] | None:
    """Step and grid of a linear's input, which `own` quantizes here or `shared` has quantized before."""
    if not isinstance(own, nn.Identity):
        return own.scale, own.grid
    return None if shared is None else (shared.scale.detach(), shared.grid)


class QuantEmbedding(nn.Module):
    """Rows are looked up first and quantized after: each row has its own scale, so the result is
    that of quantizing the whole table, at the cost of the batch's rows only. For the same reason
    the gradient is sparse: the optimizer touches only rows that occurred."""

    def __init__(self, embedding: nn.Embedding, weight_quantizer: Any) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.padding_idx = embedding.padding_idx
        self.weight_quantizer: Any = weight_quantizer  # a WeightQuantizer with per-row state

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(ids, self.weight, self.padding_idx, sparse=True)  # (B, T, H)
        return self.weight_quantizer.rows(rows, ids)


class Matmul(nn.Module):
    """a·b with the quantizers of both operands in front (plain in the full-precision model)."""

    def __init__(self, left: nn.Module | None = None, right: nn.Module | None = None) -> None:
        super().__init__()
        self.left: Any = left or nn.Identity()
        self.right: Any = right or nn.Identity()

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        left, right = self.left, self.right
        if isinstance(left, nn.Identity) or isinstance(right, nn.Identity):
            return torch.matmul(left(a), right(b))
        return fake_quant_matmul(a, b, left.scale, left.grid, right.scale, right.grid)


def mrem_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(Q̂·K̂ᵀ·scaling + mask), quantized again before P̂·V̂.

    The scaling comes after the product: q and k are quantized as the projections leave them.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = module.scores(query, key.transpose(-1, -2)) * scaling  # (B, heads, T, T)
    if attention_mask is not None:
        scores = scores + attention_mask
    probabilities = scores.softmax(dim=-1)
    context = module.context(probabilities, value)  # (B, heads, T, d)
    return context.transpose(1, 2).contiguous(), probabilities


class _RegisteredMPNetAttention(MPNetSelfAttention):
    """MPNet's own attention code does not ask transformers' registry; this one does."""

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


def quantize_hidden(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook of an attention module: its q, k and v projections read one quantized tensor."""
    if args:
        return (module.input_quantizer(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": module.input_quantizer(kwargs["hidden_states"])}


def prepare(model: PreTrainedModel, attention_function: str = ATTENTION) -> Anatomy:
    """Give the model our attention function (or another registered one) with plain products; its
    outputs stay the same."""
    found = anatomy(model)
    model.config._attn_implementation = attention_function
    for name in found.attentions:
        attention = model.get_submodule(name)
        if isinstance(attention, MPNetSelfAttention):
            attention.__class__ = _RegisteredMPNetAttention
            attention.attention_function = attention_function
        attention.scores, attention.context = Matmul(), Matmul()
    return found


def activation_points(found: Anatomy, spec: QuantSpec) -> dict[str, bool]:
    """Name of every activation quantizer -> whether it is asymmetric (before `--symmetric`)."""
    points: dict[str, bool] = {}
    for name in found.linears:
        if not spec.keeps(name):
            owner = found.shared_inputs.get(name, name)
            points[f"{owner}.input_quantizer"] = name in found.positive_inputs
    for name in found.attentions:
        if not spec.keeps(name):
            points[f"{name}.scores.left"] = points[f"{name}.scores.right"] = False
            points[f"{name}.context.left"] = True
            points[f"{name}.context.right"] = False
    return {name: asymmetric and not spec.symmetric for name, asymmetric in points.items()}


def insert_quantizers(model: PreTrainedModel, spec: QuantSpec, steps: dict[str, LearnedStep]) -> None:
    """Turn a prepared model into the fake-quant model, in place.

    `steps` holds the initialised activation quantizers by the names of `activation_points`.
    Rules: (1) every linear but the head, and the word embedding, unless `keep_fp` matches its
    name; (2) q, k, v share the input quantizer of their attention module; (3) 32 bits mean
    identity; (4) the word embedding is always quantized per row. Where `keep_fp` spares one of q, k
    and v, it still reads the tensor quantized for the others.
    """
    found = anatomy(model)
    for name in found.linears:
        if spec.keeps(name):
            continue
        owner = found.shared_inputs.get(name)
        shared = steps.get(f"{owner}.input_quantizer") if owner else None
        step = nn.Identity() if owner else steps.get(f"{name}.input_quantizer", nn.Identity())
        linear = model.get_submodule(name)
        quantizer = spec.weight_quantizer_of(name, linear.weight)
        replace_module(model, name, QuantLinear(linear, quantizer, step, shared))
    for name in found.attentions:
        attention = model.get_submodule(name)
        shared = steps.get(f"{name}.input_quantizer")
        if shared is not None and name in found.shared_inputs.values():
            attention.input_quantizer = shared
            attention.register_forward_pre_hook(quantize_hidden, with_kwargs=True)
        for product in ("scores", "context"):
            sides = (steps.get(f"{name}.{product}.{side}") for side in ("left", "right"))
            setattr(attention, product, Matmul(*sides))
    embedding = model.get_submodule(found.word_embedding)
    embedding.sparse = True  # also at full precision only rows that occur are updated
    quantizer = spec.embedding_quantizer_of(found.word_embedding, embedding.weight)
    if not isinstance(quantizer, nn.Identity):
        replace_module(model, found.word_embedding, QuantEmbedding(embedding, quantizer))


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


def quantized_names(model: nn.Module) -> Sequence[str]:
    """Names of the layers whose weight is quantized, in order."""
    return [name for name, part in model.named_modules() if isinstance(part, QuantLinear | QuantEmbedding)]
