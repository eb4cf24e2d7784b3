"""Trace a model into its skeleton: an ONNX graph with markers where quantization matters.

The trace runs Hugging Face's own forward code, so positions, masks, rotary embeddings, relative biases and
heads are not written a second time here. Whatever a profile decides is one marker in the graph, a node of our
own domain with the layer's name; `lower.py` replaces every marker:

    mrem.Embedding(ids)                 the word embedding
    mrem.Linear(x)                      any linear but the head, with the quantizer of its input
    mrem.Attention(q, k, v, mask)       (B, heads, T, d) three times → (B, T, heads, d); k and v: fewer heads
    mrem.DisentangledAttention(q, k, v, mask, rows)  the same of DeBERTa; rows of distances (2, 2T)
    mrem.Gelu(x)                        one operator from opset 20 on, five before
    mrem.Hidden(x)                      a name for the embeddings' output and for every block's

The skeleton holds what stays full precision but no quantized weights, so it is small. It is traced at the
lowest opset of all profiles: none of its operators changes its meaning up to the highest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.activations import GELUActivation
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function, eager_mask

from mrem_deploy.export.tracing import traced
from mrem_deploy.models.architectures import Anatomy
from mrem_deploy.quant.frozen import FrozenModel, shell
from mrem_deploy.quant.insert import replace_module

DOMAIN = "mrem"
OPSET = 18
ATTENTION = "mrem-skeleton"
OUTPUTS = {
    "sequence-classification": ("logits",),
    "token-classification": ("logits",),
    "question-answering": ("start_logits", "end_logits"),
    "feature-extraction": ("last_hidden_state",),
}


def _marker(op: str, inputs: tuple[torch.Tensor, ...], shape: Any, name: str, **more: float) -> torch.Tensor:
    """One node of our domain in the traced graph; it runs only inside a trace."""
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{op}", inputs, {"name": name, **more}, dtype=torch.float32, shape=shape, version=1
    )


class _Linear(nn.Module):
    weight = None  # T5 looks at its type

    def __init__(self, name: str, linear: nn.Linear) -> None:
        super().__init__()
        self.name, self.width = name, linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _marker("Linear", (x,), (*x.shape[:-1], self.width), self.name)


class _Gelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _marker("Gelu", (x,), x.shape, "gelu")


class _Embedding(nn.Module):
    def __init__(self, name: str, embedding: nn.Embedding) -> None:
        super().__init__()
        self.name, self.width, self.padding_idx = name, embedding.embedding_dim, embedding.padding_idx
        self.factor = getattr(embedding, "embed_scale", None)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = _marker("Embedding", (ids,), (*ids.shape, self.width), self.name)
        return rows if self.factor is None else rows * self.factor


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    positions: tuple[torch.Tensor, ...] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The marker of attention, with the signature that transformers' registry requires."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    batch, heads, tokens, width = query.shape
    inputs = (query, key, value) if attention_mask is None else (query, key, value, attention_mask)
    kind = "Attention"
    if positions is not None:  # (rows of distances, embeddings): what comes of the latter is stored
        kind, inputs = "DisentangledAttention", (*inputs, positions[0])
    shape = (batch, tokens, heads, width)
    return _marker(kind, inputs, shape, module.mrem_name, scaling=float(scaling)), None


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Additive mask. If every token may attend to every other, one row per sentence is enough: (B, 1, 1, T)
    broadcasts over the queries, and nothing of size T² is made."""
    if kwargs.get("mask_function") is not bidirectional_mask_function:
        return eager_mask(*args, **{**kwargs, "use_vmap": False})  # vmap cannot be traced
    dtype = kwargs.get("dtype", torch.float32)
    seen = kwargs["attention_mask"][:, None, None, :].bool()
    return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)


@dataclass(frozen=True)
class Skeleton:
    """The trace of one model. Profiles lower copies of it, so one trace serves them all."""

    model: ir.Model
    anatomy: Anatomy

    def copy(self) -> ir.Model:
        """A graph to change freely: nodes and values are new, the stored tensors are shared."""
        return self.model.clone()


def trace(frozen: FrozenModel) -> Skeleton:
    """The skeleton of a frozen model, with dynamic batch and sequence."""
    model, found = shell(frozen, ATTENTION)
    model.float()
    _place_markers(model, found)
    return Skeleton(traced(model, OUTPUTS[frozen.head], OPSET).model, found)


def _place_markers(model: PreTrainedModel, found: Anatomy) -> None:
    for name in found.linears:
        replace_module(model, name, _Linear(name, model.get_submodule(name)))
    embedding = model.get_submodule(found.word_embedding)
    replace_module(model, found.word_embedding, _Embedding(found.word_embedding, embedding))
    for name in found.attentions:
        model.get_submodule(name).mrem_name = name
    for name, part in list(model.named_modules()):
        if isinstance(part, GELUActivation):
            replace_module(model, name, _Gelu())

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (_marker("Hidden", (args[0],), args[0].shape, "hidden.0"), *args[1:]), kwargs
        hidden = kwargs["hidden_states"]
        return args, {**kwargs, "hidden_states": _marker("Hidden", (hidden,), hidden.shape, "hidden.0")}

    def leave(number: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            named = _marker("Hidden", (hidden,), hidden.shape, f"hidden.{number}")
            return (named, *output[1:]) if isinstance(output, tuple) else named

        return hook

    model.get_submodule(found.blocks[0]).register_forward_pre_hook(enter, with_kwargs=True)
    for index, name in enumerate(found.blocks):
        model.get_submodule(name).register_forward_hook(leave(index + 1))
