"""LAQ against brute force, and its alternation step by step."""

from __future__ import annotations

import itertools

import pytest
import torch
from quant_specs import plain

from mrem_deploy.numerics import Grid, symmetric_grid
from mrem_deploy.quant.quantizers import (
    LAQ,
    LAQ_ITERATIONS,
)


def least_alpha(weight: torch.Tensor, codes: torch.Tensor, curvature: torch.Tensor) -> torch.Tensor:
    return (curvature * weight * codes).sum() / (curvature * codes * codes).sum()


def best_of_all(weight: torch.Tensor, curvature: torch.Tensor, grid: Grid) -> tuple[float, torch.Tensor]:
    """Brute force: every assignment of codes with its best α > 0; the least weighted error."""
    choices = torch.tensor(list(itertools.product(range(grid.low, grid.high + 1), repeat=weight.numel())))
    codes = choices.to(weight.dtype)
    norm = (codes * codes * curvature).sum(1)
    dot = (codes * weight * curvature).sum(1)
    alpha = torch.where(dot > 0, dot / norm.clamp(min=1e-300), 0.0)
    error = (curvature * (weight - alpha[:, None] * codes).square()).sum(1)
    best = int(error.argmin())
    return float(error[best]), codes[best]


def weighted_error(module: LAQ, weight: torch.Tensor, curvature: torch.Tensor) -> float:
    return float((curvature * (weight - plain(module, weight)).square()).sum())


@pytest.mark.parametrize("seed", range(6))
def test_laq_is_near_the_best_of_all_codes(seed: int) -> None:
    """3 bits and 4 weights leave 2,401 assignments. Alternation finds a local optimum; on these it is
    within a tenth of the weight's own size of the best one, and its codes and α agree with each other."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, generator=generator, dtype=torch.float64)
    grid, ones = symmetric_grid(3), torch.ones(4, dtype=torch.float64)
    module = LAQ(weight, grid, per_channel=False)
    least, _ = best_of_all(weight, ones, grid)
    came = weighted_error(module, weight, ones)
    assert came >= least - 1e-12
    assert came <= least + 0.01 * float(weight.square().sum())


def test_laq_finds_codes_and_scale_of_a_weight_on_the_grid() -> None:
    """Here the brute-force optimum is exact: error 0, codes 3, −2, 0, 1 and α = 0.25."""
    codes = torch.tensor([3.0, -2.0, 0.0, 1.0], dtype=torch.float64)
    weight = 0.25 * codes
    least, best = best_of_all(weight, torch.ones(4, dtype=torch.float64), symmetric_grid(3))
    assert least == 0.0
    assert best.tolist() == codes.tolist()
    came, alpha = LAQ(weight, symmetric_grid(3), per_channel=False).codes_and_scale(weight)
    assert came.tolist() == codes.tolist()
    assert alpha.item() == 0.25


@pytest.mark.parametrize("curvature", ["identity", "adam"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_laq_alternation_step_by_step(curvature: str, per_channel: bool) -> None:
    """The definition written out slowly: b = clamp(round(w/α)), α = ΣDwb/ΣDb², a fixed number of times."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    diagonal = torch.rand(3, 5, generator=generator, dtype=torch.float64) + 0.1
    module = LAQ(weight, symmetric_grid(4), per_channel, curvature)
    if curvature == "adam":
        module.diagonal.copy_(diagonal)
    else:
        diagonal = torch.ones_like(weight)
    groups = (
        [[(r, c) for c in range(5)] for r in range(3)]
        if per_channel
        else [[(r, c) for r in range(3) for c in range(5)]]
    )
    start = module.start.reshape(-1)
    codes, alpha = module.codes_and_scale(weight)
    for number, group in enumerate(groups):
        w = [weight[i].item() for i in group]
        d = [diagonal[i].item() for i in group]
        a = start[number].item() * sum(abs(v) for v in w) / len(w)
        for _ in range(LAQ_ITERATIONS):
            b = [max(-7, min(7, round(v / a))) for v in w]  # Python rounds half to even, too
            a = sum(x * y * z for x, y, z in zip(d, w, b, strict=True)) / sum(
                x * y * y for x, y in zip(d, b, strict=True)
            )
        assert alpha.reshape(-1)[number].item() == pytest.approx(a, rel=1e-12)
        assert [codes[i].item() for i in group] == [max(-7, min(7, round(v / a))) for v in w]


def test_curvature_pulls_the_scale_towards_the_weights_that_matter() -> None:
    weight = torch.tensor([1.0, 0.43, -0.71, 0.05, 0.29], dtype=torch.float64)
    module = LAQ(weight, symmetric_grid(3), per_channel=False, curvature="adam")
    before, _ = module.codes_and_scale(weight), module.diagonal.fill_(1.0)
    module.diagonal[1] = 1000.0
    after = plain(module, weight)
    identity = LAQ(weight, symmetric_grid(3), per_channel=False)
    assert torch.equal(before[0] * before[1], plain(identity, weight))  # D = 1 is the identity
    assert abs(after[1] - weight[1]) < abs(plain(identity, weight)[1] - weight[1])
    codes, alpha = module.codes_and_scale(weight)
    assert alpha.item() == pytest.approx(least_alpha(weight, codes, module.diagonal).item(), rel=1e-12)


@pytest.mark.parametrize("curvature", ["identity", "adam"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_laq_of_zeros_is_zero_with_a_valid_step(per_channel: bool, curvature: str) -> None:
    # The padding row of a word embedding is all zeros in most checkpoints.
    weight = torch.zeros(2, 3)
    codes, alpha = LAQ(weight, symmetric_grid(4), per_channel, curvature).codes_and_scale(weight)
    assert codes.abs().sum() == 0
    assert bool((alpha > 0).all())
    assert bool(alpha.isfinite().all())


def test_laq_zero_row_does_not_disturb_its_neighbours() -> None:
    weight = torch.tensor([[0.0, 0.0, 0.0], [0.7, -0.2, 0.1]], dtype=torch.float64)
    codes, alpha = LAQ(weight, symmetric_grid(4), per_channel=True).codes_and_scale(weight)
    assert codes.tolist() == [[0, 0, 0], [7, -2, 1]]
    assert alpha[1].item() == pytest.approx(0.1, rel=1e-12)


def test_laq_does_not_drift_when_it_is_called_again() -> None:
    weight = torch.randn(6, 7, generator=torch.Generator().manual_seed(2))
    module = LAQ(weight, symmetric_grid(4), per_channel=False)
    first, second = module.codes_and_scale(weight), module.codes_and_scale(weight)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
