"""Mixed precision: 2, 4 or 8 bits for every layer, the best choice that fits a size.

min Σ error(layer, bits) over the choices with Σ bytes(layer, bits) ≤ budget, a knapsack with several sizes
per item. It is solved exactly: the layers of a model have few different shapes, hence few different sums of
bytes, and of choices with the same sum only the best is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.units import MIB
from mrem_deploy.kernels import packed_size
from mrem_deploy.models.architectures import Anatomy
from mrem_deploy.quant.hot_rows import hot_bytes, tensor_names
from mrem_deploy.quant.insert import activation_points, prepare
from mrem_deploy.quant.sensitivity import CHOICES, MEASURES, Batch, Group, groups_of
from mrem_deploy.quant.spec import QuantSpec

SCALE_BYTES = 4
HEADER_BYTES = 100  # per tensor of a safetensors file, besides its name; a little more than it really takes


@dataclass(frozen=True)
class MixedBits:
    """The bits chosen for every layer, and the errors that decided it."""

    budget_mb: float
    planned_mb: float
    sensitivity: str  # how the errors were measured
    layers: dict[str, int]
    errors: dict[str, dict[int, float]]  # by the first layer of a group, then by bits

    @property
    def layer_bits(self) -> tuple[tuple[str, int], ...]:
        """For `QuantSpec.layer_bits`."""
        return tuple(self.layers.items())

    def to_dict(self) -> dict[str, Any]:
        """As in metrics.json."""
        return {
            "budget_mb": self.budget_mb,
            "planned_mb": self.planned_mb,
            "sensitivity": self.sensitivity,
            "layers": self.layers,
            "errors": {
                name: {str(bits): error for bits, error in measured.items()}
                for name, measured in self.errors.items()
            },
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MixedBits:
        errors = {
            name: {int(bits): error for bits, error in measured.items()}
            for name, measured in values["errors"].items()
        }
        return cls(**{**values, "errors": errors})

    def manifest_notes(self) -> dict[str, Any]:
        """For the manifest, which has the bits of every layer already."""
        return {name: self.to_dict()[name] for name in ("budget_mb", "planned_mb", "sensitivity")}


@dataclass(frozen=True)
class Choices:
    """What every group of layers takes in bytes, and what it loses, with each number of bits."""

    groups: list[Group]
    costs: list[dict[int, int]]
    fixed: int  # bytes that no choice changes
    weights: dict[str, int]  # by layer: how many
    measure: str = ""
    errors: list[dict[int, float]] = field(default_factory=list)

    @classmethod
    def sizes(cls, teacher: PreTrainedModel, spec: QuantSpec) -> Choices:
        """Without errors, which take a while to measure.

        The teacher gets our attention function; its outputs stay the same.
        """
        found = prepare(teacher)
        groups = groups_of(found, spec)
        costs = [
            {bits: sum(layer_bytes(teacher, name, bits, found, spec) for name in group) for bits in CHOICES}
            for group in groups
        ]
        weights = {name: teacher.get_submodule(name).weight.numel() for group in groups for name in group}
        return cls(groups, costs, fixed_bytes(teacher, found, spec, groups), weights)

    def measured(
        self,
        teacher: PreTrainedModel,
        spec: QuantSpec,
        batches: Sequence[Batch],
        measure: str,
        seed: int = 0,
        counts: torch.Tensor | None = None,
    ) -> Choices:
        """With errors as `measure` finds them. `counts` of the tokens choose the embedding's hot rows."""
        errors = MEASURES[measure](teacher, self.groups, spec, batches, seed, counts)
        return replace(self, measure=measure, errors=errors)

    @property
    def least_bytes(self) -> int:
        """The smallest size. In a tiny model the hot rows of 2 bits may take more than 8 bits do."""
        return self.fixed + sum(min(cost.values()) for cost in self.costs)

    def bytes_with(self, bits: int) -> int:
        """The size with so many bits everywhere."""
        return self.fixed + sum(cost[bits] for cost in self.costs)

    def within_bytes(self, budget: int, budget_mb: float | None = None) -> MixedBits:
        """The bits that fit the budget with the least sum of errors; `budget_mb` is what is reported."""
        chosen = allocate(self.costs, self.errors, budget - self.fixed)
        size = self.fixed + sum(cost[bits] for cost, bits in zip(self.costs, chosen, strict=True))
        return MixedBits(
            size / MIB if budget_mb is None else budget_mb,
            size / MIB,
            self.measure,
            {name: bits for group, bits in zip(self.groups, chosen, strict=True) for name in group},
            {group[0]: measured for group, measured in zip(self.groups, self.errors, strict=True)},
        )


def choose_bits(
    teacher: PreTrainedModel,
    spec: QuantSpec,
    batches: Sequence[Batch],
    budget_mb: float,
    measure: str,
    seed: int = 0,
    counts: torch.Tensor | None = None,
) -> MixedBits:
    """The bits of every layer that fit the budget with the least sum of errors."""
    choices = Choices.sizes(teacher, spec)
    budget = int(budget_mb * MIB)
    least = choices.least_bytes
    if least > budget:
        raise UserError(
            f"--budget-mb {budget_mb:g} is too small: with 2 bits everywhere the model takes "
            f"{least / MIB:.3f} MiB, {choices.fixed / MIB:.3f} of them for what stays in full precision",
            f"give {math.ceil(1000 * least / MIB) / 1000:g} or more",
        )
    measured = choices.measured(teacher, spec, batches, measure, seed, counts)
    return measured.within_bytes(budget, budget_mb)


def layer_bytes(model: PreTrainedModel, name: str, bits: int, found: Anatomy, spec: QuantSpec) -> int:
    """Packed codes and scales of one layer; of the embedding its hot rows as well."""
    weight = model.get_submodule(name).weight
    if name != found.word_embedding:
        rows, hot = (weight.shape[0] if spec.linear(name).per_channel else 1), 0
    else:
        rows, hot = weight.shape[0], min(spec.hot_rows_at(bits), weight.shape[0])
    headers = sum(map(_header_bytes, tensor_names(name))) if hot else 0
    return packed_size(weight.numel(), bits) + SCALE_BYTES * rows + hot_bytes(hot, weight.shape[1]) + headers


def fixed_bytes(model: PreTrainedModel, found: Anatomy, spec: QuantSpec, groups: Sequence[Group]) -> int:
    """The bytes that no choice of bits changes: full precision, activation scales and the file's header."""
    chosen = {f"{name}.weight" for group in groups for name in group}
    full = {name: value for name, value in model.state_dict().items() if name not in chosen}
    scales = list(activation_points(found, spec)) if spec.quantizes_activations else []
    names = [*full, *scales, *chosen, *chosen]  # codes and scales of a layer are two tensors
    return (
        sum(value.numel() * value.element_size() for value in full.values())
        + SCALE_BYTES * len(scales)
        + sum(map(_header_bytes, names))
    )


def _header_bytes(name: str) -> int:
    """What a tensor takes in the file's header."""
    return len(name.encode()) + HEADER_BYTES


def allocate(
    costs: Sequence[Mapping[int, int]], errors: Sequence[Mapping[int, float]], budget: int
) -> list[int]:
    """The choice of each item that has the least sum of errors at a cost within the budget.

    A dynamic programme over the sums of costs; a state that costs more is kept only if its error is less.
    """
    rest = sum(min(cost.values()) for cost in costs)  # the least that the remaining items cost
    states: list[tuple[int, float, tuple[Any, ...]]] = [(0, 0.0, ())]  # cost, error, (earlier choices, last)
    for cost, error in zip(costs, errors, strict=True):
        rest -= min(cost.values())
        reached = [
            (spent + cost[bits], lost + error[bits], (before, bits))
            for spent, lost, before in states
            for bits in cost
            if spent + cost[bits] + rest <= budget
        ]
        states = []
        for state in sorted(reached, key=lambda state: state[:2]):
            if not states or state[1] < states[-1][1]:
                states.append(state)
    if not states:
        raise ValueError(f"no choice fits a budget of {budget}")
    chosen, chain = [], states[-1][2]
    while chain:
        chain, bits = chain
        chosen.append(bits)
    return chosen[::-1]
