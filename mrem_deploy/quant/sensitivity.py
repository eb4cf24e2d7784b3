"""How much the model's output suffers when one layer's weight gets few bits: two measures.

`error`: quantize the one layer and run the model; the squared error of its outputs on a few batches.
`hessian`: to second order, tr(H)/n · ‖Q(w) − w‖² (Shen et al., "Q-BERT", 2020; Dong et al., "HAWQ-V2",
2020), with H the Hessian of that same squared error, its trace by Hutchinson's estimate.

Neither needs labels. Both are sums over layers to first approximation, which is what the choice under a
budget (`mixed.py`) needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mrem_deploy.base import interrupt
from mrem_deploy.base.progress import track
from mrem_deploy.models.architectures import Anatomy, anatomy
from mrem_deploy.models.parts import PartOutput, carve
from mrem_deploy.quant.hot_rows import make_hot_quantizer
from mrem_deploy.quant.quantizers import make_weight_quantizer
from mrem_deploy.quant.spec import QuantSpec

Batch = dict[str, torch.Tensor]
Group = tuple[str, ...]  # layers that get the same bits
CHOICES = (2, 4, 8)  # bits that a layer may get
PROBES = 16  # random vectors per batch of Hutchinson's estimate


def groups_of(found: Anatomy, spec: QuantSpec) -> list[Group]:
    """The groups of layers that get bits, in order; q, k and v are one group, because export merges them."""
    grouped: dict[str, list[str]] = {}
    for name in (found.word_embedding, *found.linears):
        if not spec.keeps(name):
            grouped.setdefault(found.shared_inputs.get(name, name), []).append(name)
    return [tuple(names) for names in grouped.values()]


def quantized_weight(
    model: PreTrainedModel, name: str, bits: int, spec: QuantSpec, counts: torch.Tensor | None = None
) -> torch.Tensor:
    """The values that a layer's weight would have with so many bits, before any training.

    `counts` of the tokens choose the embedding's hot rows.
    """
    weight = model.get_submodule(name).weight
    given = replace(spec, layer_bits=((name, bits),))
    own = given.embedding(name) if name == anatomy(model).word_embedding else given.linear(name)
    quantizer: Any = make_weight_quantizer(weight, own)
    codes, scale = quantizer.codes_and_scale(weight)
    values = (codes * scale).detach()
    hot = make_hot_quantizer(weight, quantizer, own, counts)
    return (
        values
        if hot is None
        else hot(weight, torch.arange(len(weight), device=weight.device), values).detach()
    )


def output_error(found: PartOutput, reference: PartOutput, mask: torch.Tensor) -> torch.Tensor:
    """Mean squared error of the model's outputs, per token where they follow the tokens."""
    pairs = zip(found.outputs, reference.outputs, strict=True)
    real = mask.bool()
    return torch.stack(
        [((a - b)[real] if found.per_token else a - b).square().mean() for a, b in pairs]
    ).sum()


@contextmanager
def _weights(model: PreTrainedModel, values: dict[str, torch.Tensor]) -> Iterator[None]:
    """Replace weights inside of the block."""
    weights = {name: model.get_submodule(name).weight for name in values}
    kept = {name: weight.data for name, weight in weights.items()}
    try:
        for name, value in values.items():
            weights[name].data = value
        yield
    finally:
        for name, value in kept.items():
            weights[name].data = value


@torch.no_grad()
def by_error(
    model: PreTrainedModel,
    groups: Sequence[Group],
    spec: QuantSpec,
    batches: Sequence[Batch],
    counts: torch.Tensor | None = None,
) -> list[dict[int, float]]:
    """For every group and number of bits, the output error with that group alone quantized.

    What comes before the group is the same each time, so the hidden states of each batch are kept.
    """
    found = anatomy(model)
    parts = carve(model, list(range(len(found.blocks) + 1)))
    entering: list[list[torch.Tensor | None]] = []  # by batch: the input of every block
    references: list[PartOutput] = []
    for batch in interrupt.steps(batches):
        hidden: list[torch.Tensor | None] = [None]
        for part in parts:
            result = part(hidden[-1], batch)
            hidden.append(result.hidden[-1])
        entering.append(hidden)
        references.append(result)
    errors: list[dict[int, float]] = [{} for _ in groups]
    for group, measured in track(list(zip(groups, errors, strict=True)), "sensitivity", unit="layer"):
        first = _block_of(group[0], found)
        for bits in CHOICES:
            total = 0.0
            values = {name: quantized_weight(model, name, bits, spec, counts) for name in group}
            with _weights(model, values):
                for batch, inputs, reference in zip(batches, entering, references, strict=True):
                    interrupt.check()
                    state = inputs[first]
                    for part in parts[first:]:
                        result = part(state, batch)
                        state = result.hidden[-1]
                    total += float(output_error(result, reference, batch["attention_mask"]))
            measured[bits] = total / len(batches)
    return errors


def _block_of(layer: str, found: Anatomy) -> int:
    """The block that a layer belongs to: the first has the embeddings, the last the pooler."""
    for index, block in enumerate(found.blocks):
        if layer.startswith(f"{block}."):
            return index
    inside = [i for i, name in enumerate(found.linears) if name.startswith(f"{found.blocks[0]}.")]
    before = layer == found.word_embedding or found.linears.index(layer) < inside[0]
    return 0 if before else len(found.blocks) - 1


def by_hessian(
    model: PreTrainedModel,
    groups: Sequence[Group],
    spec: QuantSpec,
    batches: Sequence[Batch],
    seed: int,
    counts: torch.Tensor | None = None,
) -> list[dict[int, float]]:
    """For every group and number of bits, Σ tr(H)/n · ‖Q(w) − w‖² over its layers."""
    names = [name for group in groups for name in group]
    weights = [model.get_submodule(name).weight for name in names]
    whole = carve(model, [0, model.config.num_hidden_layers])[0]
    generator = torch.Generator().manual_seed(seed)
    traces = torch.zeros(len(names), dtype=torch.float64)
    for weight in weights:
        weight.requires_grad_(True)
    try:
        for batch in track(batches, "sensitivity: Hessian"):
            with torch.no_grad():
                reference = whole(None, batch)
            loss = output_error(whole(None, batch), reference, batch["attention_mask"])
            traces += hutchinson_traces(loss, weights, PROBES, generator) / len(batches)
    finally:
        for weight in weights:
            weight.requires_grad_(False)
    curvature = {
        name: max(float(trace), 0.0) / weight.numel()
        for name, trace, weight in zip(names, traces, weights, strict=True)
    }

    def error(name: str, bits: int) -> float:
        moved = quantized_weight(model, name, bits, spec, counts) - model.get_submodule(name).weight
        return curvature[name] * float(moved.double().square().sum())

    return [{bits: sum(error(name, bits) for name in group) for bits in CHOICES} for group in groups]


def hutchinson_traces(
    loss: torch.Tensor, parameters: Sequence[nn.Parameter], probes: int, generator: torch.Generator
) -> torch.Tensor:
    """For every parameter the trace of its block of the Hessian: E[vᵀ(Hv)] over random signs v.

    All blocks share a product with H, whose off-diagonal blocks then add noise of mean zero.
    """
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    used = [i for i, gradient in enumerate(gradients) if gradient is not None and gradient.requires_grad]
    traces = torch.zeros(len(parameters), dtype=torch.float64)
    chosen = [parameters[i] for i in used]
    for _ in interrupt.steps(range(probes if used else 0)):
        signs = [_signs(parameter, generator) for parameter in chosen]
        products = torch.autograd.grad(
            [gradients[i] for i in used], chosen, signs, retain_graph=True, allow_unused=True
        )
        for i, sign, product in zip(used, signs, products, strict=True):
            if product is not None:
                traces[i] += float((sign * product).double().sum()) / probes
    return traces


def _signs(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8)
    return drawn.to(like.device, like.dtype).mul_(2).sub_(1)


Measure = Callable[
    [PreTrainedModel, Sequence[Group], QuantSpec, Sequence[Batch], int, torch.Tensor | None],
    list[dict[int, float]],
]
MEASURES: dict[str, Measure] = {
    "error": lambda model, groups, spec, batches, seed, counts: by_error(
        model, groups, spec, batches, counts
    ),
    "hessian": by_hessian,
}
