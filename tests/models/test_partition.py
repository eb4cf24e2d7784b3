"""Cutting blocks into modules: the best of all cuts, and the cuts a user gives."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from tiny_models import ARCHITECTURES, BLOCKS, tiny_model

from mrem_deploy.base.errors import UserError
from mrem_deploy.models.partition import balanced_cuts, block_costs, module_cuts


def weights_of(costs: list[float], cuts: list[int]) -> list[float]:
    return [sum(costs[start:stop]) for start, stop in pairwise(cuts)]


@pytest.mark.parametrize(
    "costs",
    [
        [1.0] * 12,  # BERT-base
        [1.0] * 7,  # no equal shares
        [5.0, 1.0, 1.0, 1.0, 1.0, 1.0],  # a giant first
        [1.0, 1.0, 1.0, 1.0, 9.0],  # a giant last
        [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0],
        [3.0, 9.0, 5.0, 6.0],  # the least sum of squares is not the least heaviest module
        [8.0, 1.0, 8.0, 5.0, 3.0, 8.0, 1.0],  # the best end has not the best beginning
        [2.0],  # one block
    ],
)
def test_no_other_cuts_are_better(costs: list[float]) -> None:
    """Brute force over all cuts: the least heaviest module and, among those, the least sum of squares."""
    for modules in range(1, len(costs) + 1):
        everything = [[0, *inner, len(costs)] for inner in combinations(range(1, len(costs)), modules - 1)]

        def badness(cuts: list[int]) -> tuple[float, float]:
            weights = weights_of(costs, cuts)
            return max(weights), sum(weight * weight for weight in weights)

        came = balanced_cuts(costs, modules)
        assert came in everything
        assert badness(came) == min(badness(cuts) for cuts in everything)


def test_known_cuts() -> None:
    assert balanced_cuts([1.0] * 12, 4) == [0, 3, 6, 9, 12]
    assert balanced_cuts([1.0] * 12, 1) == [0, 12]
    assert balanced_cuts([1.0] * 3, 3) == [0, 1, 2, 3]


@pytest.mark.parametrize("modules", [0, -1, 4])  # none, a slip of the keyboard, one more than blocks
def test_a_count_that_does_not_fit_is_refused(modules: int) -> None:
    with pytest.raises(UserError) as caught:
        balanced_cuts([1.0] * 3, modules)
    assert "3 blocks" in caught.value.problem
    assert str(modules) in caught.value.problem


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_count_or_explicit_cuts(kind: str) -> None:
    model = tiny_model(kind)
    assert module_cuts(model, 1) == [0, BLOCKS]
    assert module_cuts(model, BLOCKS) == [0, 1, 2, 3]
    assert module_cuts(model, [1]) == [0, 1, 3]
    assert module_cuts(model, [2]) == [0, 2, 3]
    assert module_cuts(model, [1, 2]) == [0, 1, 2, 3]


@pytest.mark.parametrize("cuts", [[0], [3], [2, 1], [1, 1], [1, 4]])  # both ends, falling, twice, beyond
def test_cuts_that_do_not_rise_inside_the_model_are_refused(cuts: list[int]) -> None:
    with pytest.raises(UserError) as caught:
        module_cuts(tiny_model(), cuts)
    assert str(cuts) in caught.value.problem
    assert "1 and 2" in caught.value.problem


def test_the_cost_of_a_block_is_its_parameters() -> None:
    costs = block_costs(tiny_model())
    # q, k, v and output: 4·(16·16 + 16); feed-forward: 16·24 + 24 and 24·16 + 16; two norms of 2·16
    block = 4 * (16 * 16 + 16) + (16 * 24 + 24) + (24 * 16 + 16) + 2 * 32
    assert costs[:-1] == [block, block]
    head = (16 * 16 + 16) + (16 * 3 + 3)  # pooler and classifier, nearly free
    assert costs[-1] == pytest.approx(block + 0.02 * head)
