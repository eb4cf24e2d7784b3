"""Which parts of a model a worker holds, when several workers train it together.

Every worker starts with the entire model and searches a share of its scales. `release` frees the
memory of the others' parts; `collect` brings them to rank 0 when all are trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple

import torch
from torch import nn

from mrem_deploy.models.parts import Part
from mrem_deploy.numerics import Grid
from mrem_deploy.quant.quantizers import LearnedScale
from mrem_deploy.train.mrem_p.crew import Crew, gather, owner_of


class HeldParts:
    """The parts of teacher and student; this worker keeps its own."""

    def __init__(self, crew: Crew, models: Sequence[Sequence[Part]]) -> None:
        self._crew = crew
        self._models = models
        self._shapes: dict[int, torch.Size] = {}

    def release(self) -> None:
        """Free every tensor that belongs to other workers' parts only."""
        own = {id(tensor) for index, part in self._parts() if self._owns(index) for tensor in _tensors(part)}
        for _, part in self._parts():
            for tensor in _tensors(part):
                if id(tensor) not in own and id(tensor) not in self._shapes:
                    self._shapes[id(tensor)] = tensor.shape
                    tensor.data = tensor.data.new_empty(0)

    def collect(self) -> None:
        """Fill what rank 0 had released with the owners' tensors. All workers must call it."""
        if self._crew.leads:
            for _, part in self._parts():
                for tensor in _tensors(part):
                    if id(tensor) in self._shapes and tensor.numel() == 0:
                        tensor.data = tensor.data.new_empty(self._shapes[id(tensor)])
        for index, part in self._parts():
            gather(self._crew, list(_tensors(part)), self._owner(index))

    def _parts(self) -> Iterator[tuple[int, Part]]:
        for parts in self._models:
            yield from enumerate(parts)

    def _owner(self, index: int) -> int:
        return owner_of(index, self._crew.world, len(self._models[0]))

    def _owns(self, index: int) -> bool:
        return self._owner(index) == self._crew.rank


def share_scales(crew: Crew, own: dict[str, LearnedScale]) -> dict[str, LearnedScale]:
    """All initial activation quantizers, from the share that each worker has searched; exact to the bit."""
    plain = {name: [scale.log_scale.tolist(), astuple(scale.grid)] for name, scale in own.items()}
    scales = dict(own)
    for theirs in crew.exchange("the scales", plain):
        for name, (log_scale, grid) in theirs.items():
            if name not in own:
                scales[name] = LearnedScale(torch.ones(()), Grid(*grid))
                scales[name].log_scale.data = torch.tensor(log_scale)
    return scales


def _tensors(part: Part) -> Iterator[nn.Parameter | torch.Tensor]:
    """Parameters and buffers of a part, each once, in an order that all workers share."""
    state = part.view.state_dict(keep_vars=True)
    yield from {id(tensor): tensor for tensor in state.values()}.values()
