"""Insert quantizers into a model: which layers and operands get them, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention

from mrem_deploy.models.architectures import Anatomy, anatomy
from mrem_deploy.models.positions import counting_positions
from mrem_deploy.quant.disentangled import disentangle
from mrem_deploy.quant.hot_rows import make_hot_quantizer
from mrem_deploy.quant.layers import ATTENTION, Matmul, QuantEmbedding, QuantLinear, _RegisteredMPNetAttention
from mrem_deploy.quant.quantizers import LearnedScale, make_weight_quantizer
from mrem_deploy.quant.spec import QuantSpec
from mrem_deploy.quant.t5 import register_t5


def quantize_hidden(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pre-hook of a module whose linears (q, k, v; gate, up) read one quantized tensor."""
    if args:
        return (module.input_quantizer(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": module.input_quantizer(kwargs["hidden_states"])}


def prepare(model: PreTrainedModel, attention_function: str = ATTENTION) -> Anatomy:
    """Give the model our attention function (or another registered one) with plain matmuls; its
    outputs stay the same."""
    found = anatomy(model)
    model.config._attn_implementation = attention_function
    if found.architecture.causal:
        model.config.use_cache = False  # of keys and values, for texts that are generated
    base: Any = model.get_submodule(found.base)
    if found.architecture.positions_from_mask:
        base.__class__ = counting_positions(base.__class__)
    for name in found.attentions:
        attention = model.get_submodule(name)
        if isinstance(attention, MPNetSelfAttention):
            attention.__class__ = _RegisteredMPNetAttention
            attention.attention_function = attention_function
    if found.architecture.disentangled:
        encoder = model.get_submodule(found.blocks[0].rpartition(".layer.")[0])
        disentangle(encoder, [model.get_submodule(name) for name in found.attentions], attention_function)
    if found.architecture.lent:
        register_t5(base, [model.get_submodule(name) for name in found.attentions], attention_function)
    for name in found.attentions:
        place_products(found, name, model.get_submodule(name), {})
    return found


def place_products(found: Anatomy, name: str, attention: Any, scales: Mapping[str, nn.Module]) -> None:
    """The matmuls of the attention module `name`, with those quantizers of `scales` that are theirs."""
    for product in ("scores", "context"):
        sides = (scales.get(f"{name}.{product}.{side}") for side in ("left", "right"))
        setattr(attention, product, Matmul(*sides))
    # The first operand is a query or a key, which `scores` has as well.
    content = {"c2p": attention.scores.left, "p2c": attention.scores.right}
    for product in found.positions.products:
        setattr(attention, product, Matmul(None, scales.get(f"{name}.{product}.right"), content[product]))
    if found.positions.shared:
        attention.position_quantizer = scales.get(f"{name}.position_quantizer", nn.Identity())


def activation_points(found: Anatomy, spec: QuantSpec) -> dict[str, bool]:
    """Name of every activation quantizer -> whether it is asymmetric; with `spec.symmetric` none is."""
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
            points |= {f"{name}.{product}.right": False for product in found.positions.products}
        if found.positions.shared and f"{name}.input_quantizer" in points:
            points[f"{name}.position_quantizer"] = False
    return {name: asymmetric and not spec.symmetric for name, asymmetric in points.items()}


def insert_quantizers(
    model: PreTrainedModel,
    spec: QuantSpec,
    scales: dict[str, LearnedScale],
    counts: torch.Tensor | None = None,
) -> None:
    """Turn a prepared model into the fake-quant model, in place.

    `scales` holds the initial activation quantizers by the names of `activation_points`. `counts` says how
    often every token occurs in the calibration sentences: hot rows are chosen by it.
    Rules: (1) every linear but the head, and the word embedding, unless `keep_fp` matches its
    name; (2) q, k and v share the input quantizer of their attention module, the halves of a gated
    feed-forward network that of theirs, and an operand of two products has one quantizer; (3) 32 bits mean
    identity; (4) the word embedding is quantized as `QuantSpec.embedding` says. If `keep_fp` matches one of
    q, k and v, that one still reads the tensor quantized for the others.
    """
    found = anatomy(model)
    for name in found.linears:
        if spec.keeps(name):
            continue
        owner = found.shared_inputs.get(name)
        shared = scales.get(f"{owner}.input_quantizer") if owner else None
        own = nn.Identity() if owner else scales.get(f"{name}.input_quantizer", nn.Identity())
        linear = model.get_submodule(name)
        quantizer = make_weight_quantizer(linear.weight, spec.linear(name))
        replace_module(model, name, QuantLinear(linear, quantizer, own, shared))
    share_inputs(model, found, scales)
    for name in found.attentions:
        place_products(found, name, model.get_submodule(name), scales)
    embedding = model.get_submodule(found.word_embedding)
    embedding.sparse = True  # also at full precision only rows that occur are updated
    of_rows = spec.embedding(found.word_embedding)
    quantizer = make_weight_quantizer(embedding.weight, of_rows)
    if not isinstance(quantizer, nn.Identity):
        hot = make_hot_quantizer(embedding.weight, quantizer, of_rows, counts)
        replace_module(model, found.word_embedding, QuantEmbedding(embedding, quantizer, hot))


def share_inputs(model: PreTrainedModel, found: Anatomy, quantizers: Mapping[str, nn.Module]) -> None:
    """Let attention and gates quantize their input once, for all linears that read it."""
    for name in found.readers:
        shared = quantizers.get(f"{name}.input_quantizer")
        if shared is not None:
            reader = model.get_submodule(name)
            reader.input_quantizer = shared
            reader.register_forward_pre_hook(quantize_hidden, with_kwargs=True)


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
