"""Centring: shift activations by a constant per channel, so that few-bit codes are spent on what varies.

A quantizer has one scale for a tensor, but channels of BERT's hidden states lie far from zero, each on its
own side. Subtracting the mean of every channel costs nothing at run time, because the constant moves into
biases that are there already. `centre` does so in a full-precision model; its predictions stay the same up to
rounding:

* output h of a LayerNorm: its bias − z. Linears that read h: bias + W·z. The linear whose output is added to
  h (the residual connection): bias + z;
* keys: bias of the key projection − z. All scores of a query change alike, which softmax does not see, unless
  keys are multiplied with positions, too (DeBERTa);
* values, and with them the context: bias of the value projection − z, bias of the output projection + W·z.

Hidden states between blocks are shifted then. `Part` adds the shift back, so that losses, streams and
reports see the usual ones. The output of the last block is never shifted: heads and users read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from mrem_deploy.base import interrupt
from mrem_deploy.models.architectures import Anatomy
from mrem_deploy.models.parts import HIDDEN_SHIFTS

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shift:
    """One tensor to centre. `source` produces it and has a bias, the other linears make up for the change."""

    source: str  # LayerNorm or linear: bias − z
    readers: tuple[str, ...] = ()  # linears: bias + W·z
    residual: str | None = None  # linear: bias + z
    hidden: int | None = None  # the input of this block is shifted


def shifts_of(model: PreTrainedModel, found: Anatomy) -> list[Shift]:
    """What can be centred in this model: nothing where the architecture has no biases to move it into."""
    norms, names = found.architecture.norms, found.architecture.shared_input
    if norms is None:
        return []
    shifts = []
    before = ".".join(filter(None, [found.base, norms.embedding]))
    for number, (block, attention) in enumerate(zip(found.blocks, found.attentions, strict=True)):
        _, key, value = (f"{attention}.{name}" for name in names)
        output = f"{block}.{norms.attention_output}"
        middle, reader = f"{block}.{norms.middle}", f"{block}.{norms.feed_forward[0]}"
        inputs = tuple(f"{attention}.{name}" for name in names)
        if not found.positions.shared:  # else the projections read positions, too, which are not shifted
            shifts.append(Shift(before, inputs, output, hidden=number))
        if "p2c" not in found.positions.products:
            shifts.append(Shift(key))
        shifts += [
            Shift(value, (output,)),
            Shift(middle, (reader,), f"{block}.{norms.feed_forward[1]}"),
        ]
        before = f"{block}.{norms.last}"
    if hasattr(model.get_submodule(found.base), "embeddings_project"):  # ELECTRA: not the input of block 0
        shifts = [shift for shift in shifts if shift.hidden != 0]
    return [shift for shift in shifts if _has_biases(model, shift)]


def _has_biases(model: PreTrainedModel, shift: Shift) -> bool:
    names = (shift.source, *shift.readers, *([shift.residual] if shift.residual else []))
    return all(getattr(model.get_submodule(name), "bias", None) is not None for name in names)


@torch.no_grad()
def channel_means(
    model: PreTrainedModel, shifts: Iterable[Shift], batches: Iterable[Batch]
) -> dict[str, torch.Tensor]:
    """Mean over real tokens of every channel, by the name of the layer that produces the tensor."""
    sums: dict[str, torch.Tensor] = {}
    mask = torch.empty(0, dtype=torch.bool)

    def add(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], output: torch.Tensor) -> None:
            seen = output[mask].double().sum(dim=0)
            sums[name] = sums[name] + seen if name in sums else seen

        return hook

    handles = [model.get_submodule(s.source).register_forward_hook(add(s.source)) for s in shifts]
    tokens = 0
    try:
        for batch in interrupt.steps(batches):
            mask = batch["attention_mask"].bool()
            tokens += int(mask.sum())
            model(**{name: value for name, value in batch.items() if name != "labels"})
    finally:
        for handle in handles:
            handle.remove()
    return {name: (total / tokens).float() for name, total in sums.items()}


@torch.no_grad()
def centre(model: PreTrainedModel, found: Anatomy, means: dict[str, torch.Tensor]) -> None:
    """Shift the tensors of `means` in a full-precision model, in place."""
    hidden: dict[int, torch.Tensor] = {}
    for shift in shifts_of(model, found):
        source = model.get_submodule(shift.source)
        z = means[shift.source].to(source.bias)
        source.bias -= z
        for name in shift.readers:
            reader = model.get_submodule(name)
            reader.bias += (reader.weight.double() @ z.double()).to(reader.bias)
        if shift.residual is not None:
            model.get_submodule(shift.residual).bias += z
        if shift.hidden is not None:
            hidden[shift.hidden] = z
    setattr(model, HIDDEN_SHIFTS, hidden)
