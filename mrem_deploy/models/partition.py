"""Cut L blocks into N consecutive modules of balanced cost, or check the cuts that a user gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn
from transformers import PreTrainedModel

from mrem_deploy.base.errors import UserError
from mrem_deploy.models.architectures import anatomy


def block_costs(model: PreTrainedModel) -> list[float]:
    """Cost of each block: its parameters (a linear's work per token); the head counts for the last."""
    found = anatomy(model)
    costs = [float(sum(p.numel() for p in model.get_submodule(name).parameters())) for name in found.blocks]
    inside = set(found.blocks)
    head = sum(
        p.numel()
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and not any(name.startswith(block + ".") for block in inside)
        for p in part.parameters()
    )
    # A head that reads one token per sentence costs almost nothing compared with a block that reads all.
    costs[-1] += 0.02 * head
    return costs


def balanced_cuts(costs: Sequence[float], modules: int) -> list[int]:
    """Boundaries [0, …, L] that minimise the heaviest module, then the sum of squares.

    A dynamic programme over (modules used, blocks placed) runs once for each goal, because the best start
    for the first goal may be a poor one for the second. L is small, so clarity matters more than speed.
    """
    count = len(costs)
    if not 1 <= modules <= count:
        raise UserError(
            f"the model has {count} blocks, so --modules must be 1 to {count}; got {modules}",
            f"use --modules {max(1, min(modules, count))} or fewer",
        )
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    def best(add: Callable[[float, float], float]) -> tuple[float, list[int]]:
        """The least total and its cuts; `add` combines a module's cost with the total of those before."""
        row: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
        for used in range(1, modules + 1):
            row = {
                stop: min(
                    (add(total, prefix[stop] - prefix[start]), [*cuts, stop])
                    for start, (total, cuts) in row.items()
                    if start < stop
                )
                for stop in range(used, count - (modules - used) + 1)
            }
        return row[count]

    heaviest, _ = best(max)
    return best(lambda total, cost: total + cost**2 if cost <= heaviest else float("inf"))[1]


def module_cuts(model: PreTrainedModel, modules: int | Sequence[int]) -> list[int]:
    """`modules` is a count, or explicit cut points such as [4, 8] for a 12-block model."""
    costs = block_costs(model)
    if isinstance(modules, int):
        return balanced_cuts(costs, modules)
    cuts = [0, *modules, len(costs)]
    if any(later <= earlier for earlier, later in pairwise(cuts)):
        raise UserError(
            f"cut points must rise strictly between 1 and {len(costs) - 1}; got {list(modules)}",
            "name the first block of every module but the first, for example --modules 3,6,9",
        )
    return cuts
