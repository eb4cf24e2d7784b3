"""Learned scales (LSQ), and the search for a first scale, against values computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mrem_deploy.kernels import fake_quant
from mrem_deploy.numerics import Grid, activation_grid, asymmetric_grid, symmetric_grid
from mrem_deploy.quant.quantizers import (
    LearnedScale,
    search_scale,
)

GRIDS = [
    symmetric_grid(3),
    activation_grid(8),
    activation_grid(4),
    asymmetric_grid(8, 17),
    asymmetric_grid(4, 0),
]


def test_lsq_symmetric_by_hand() -> None:
    x = torch.tensor(
        [-9.0, -1.75, -0.25, 0.0, 0.25, 0.75, 1.25, 9.0]
    )  # with s = ½: −18, −3.5, −.5, 0, .5, 1.5, 2.5, 18
    came = fake_quant(x, torch.tensor(0.5), symmetric_grid(4))
    assert came.tolist() == [-3.5, -2.0, 0.0, 0.0, 0.0, 1.0, 1.0, 3.5]


def test_lsq_asymmetric_by_hand() -> None:
    x = torch.tensor(
        [-1.0, -0.5, -0.25, 0.25, 0.75, 6.5, 7.0]
    )  # with s = ½ and z = 1: codes −1, 0, 1, 1, 3, 14, 15
    came = fake_quant(x, torch.tensor(0.5), asymmetric_grid(4, 1))
    assert came.tolist() == [-0.5, -0.5, 0.0, 0.0, 1.0, 6.5, 7.0]
    assert fake_quant(torch.tensor([7.5]), torch.tensor(0.5), asymmetric_grid(4, 1)).tolist() == [7.0]


def test_lsq_gradients_by_hand() -> None:
    x = torch.tensor([-9.0, 0.3, 1.6, 9.0], dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    fake_quant(x, scale, symmetric_grid(4)).backward(
        torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)
    )
    assert x.grad is not None
    assert scale.grad is not None
    assert x.grad.tolist() == [0.0, 10.0, 100.0, 0.0]
    # −7·1 (saturated) + (1 − 0.6)·10 + (3 − 3.2)·100 + 7·1000 (saturated)
    assert scale.grad.item() == pytest.approx(-7 + 4 - 20 + 7000, abs=1e-9)


@pytest.mark.parametrize("grid", GRIDS)
def test_lsq_gradients_against_finite_differences(grid: Grid) -> None:
    """The surrogate holds the rounding fixed: x̂ = s·(x/s + r) inside, with r = round(x/s) − x/s as it
    is at this point, and s·(end − z) outside. It equals the quantizer here and is smooth, so central
    differences of it are the gradients that LSQ defines."""
    generator = torch.Generator().manual_seed(0)
    scale0 = torch.tensor(0.13, dtype=torch.float64)
    low, high = grid.low - grid.zero_point, grid.high - grid.zero_point
    # Wide enough to saturate at both ends.
    x0 = (torch.rand(200, generator=generator, dtype=torch.float64) * 1.5 - 0.25) * (high - low) + low
    x0 = x0 * scale0
    ratio = x0 / scale0
    held = ratio.round() - ratio
    inside = (ratio.round() >= low) & (ratio.round() <= high)
    assert bool(inside.any())
    assert bool((ratio.round() < low).any())
    assert bool((ratio.round() > high).any())
    weights = torch.randn(200, generator=generator, dtype=torch.float64)

    def surrogate(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        # x/s enters the rounded value as x/s + r, and x̂ = s·(x/s + r) = x + s·r: LSQ differentiates
        # the rounding straight through, d round(x/s) = d(x/s).
        return torch.where(inside, x + s * held, s * ratio.clamp(low, high))

    x, scale = x0.clone().requires_grad_(), scale0.clone().requires_grad_()
    out = fake_quant(x, scale, grid)
    torch.testing.assert_close(out, surrogate(x0, scale0), rtol=0, atol=1e-12)
    (out * weights).sum().backward()
    assert x.grad is not None
    assert scale.grad is not None
    eps = 1e-6
    up, down = (surrogate(x0, scale0 + d) for d in (eps, -eps))
    numeric = ((up - down) * weights).sum() / (2 * eps)
    assert scale.grad.item() == pytest.approx(numeric.item(), rel=1e-6)
    numeric_x = (surrogate(x0 + eps, scale0) - surrogate(x0 - eps, scale0)) * weights / (2 * eps)
    torch.testing.assert_close(x.grad, numeric_x, rtol=1e-6, atol=1e-8)


def test_a_step_is_learned_by_its_logarithm() -> None:
    step = LearnedScale(torch.tensor(0.5, dtype=torch.float64), symmetric_grid(4))
    step(torch.tensor([9.0], dtype=torch.float64)).sum().backward()  # d/ds = 7, so d/d(log s) = 7·s
    assert step.log_scale.grad is not None
    assert step.log_scale.grad.item() == pytest.approx(3.5, rel=1e-12)


def test_a_scale_per_channel_collects_only_its_own_row() -> None:
    scale = torch.tensor([[0.5], [2.0]], dtype=torch.float64, requires_grad=True)
    x = torch.tensor([[9.0, 9.0], [-99.0, 2.0]], dtype=torch.float64)
    fake_quant(x, scale, symmetric_grid(4)).sum().backward()
    assert scale.grad is not None
    assert scale.grad.tolist() == [[14.0], [-7.0]]  # 7 + 7, and −7 + (1 − 1)


def test_no_gradient_is_made_that_nobody_asked_for() -> None:
    scale = torch.tensor(0.5, requires_grad=True)
    fake_quant(torch.ones(3), scale, symmetric_grid(4)).sum().backward()  # x needs none
    x = torch.ones(3, requires_grad=True)
    fake_quant(x, torch.tensor(0.5), symmetric_grid(4)).sum().backward()  # the scale needs none
    assert x.grad is not None
    assert scale.grad is not None


# The search for a first step


def error_of(x: torch.Tensor, scale: torch.Tensor, grid: Grid) -> float:
    return float((fake_quant(x, scale, grid) - x).square().sum())


@pytest.mark.parametrize("grid", GRIDS)
def test_the_search_beats_its_neighbours(grid: Grid) -> None:
    x = torch.randn(500, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    if not grid.signed:
        x = nn.functional.gelu(x)  # what such grids are for
    scale = search_scale(x, grid)
    assert error_of(x, scale, grid) <= 1.02 * min(error_of(x, scale * f, grid) for f in (0.5, 0.8, 1.25, 2.0))


def test_the_search_gives_up_a_giant_value_when_that_is_better() -> None:
    # One weight in 10,000 at 60 standard deviations: a step that reaches it would round the others to 0.
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(7))
    x[0] = 60.0
    assert float(search_scale(x, symmetric_grid(4))) < 60.0 / 7 / 4


def test_the_search_by_rows_is_the_search_of_each_row() -> None:
    # 1,030 rows are searched in three pieces; the last has 6.
    x = torch.randn(1030, 5, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    x[3] = 0.0
    together = search_scale(x, symmetric_grid(4), per_channel=True)
    assert together.shape == (1030, 1)
    for row in (0, 3, 511, 512, 1029):
        assert (
            together[row].item() == search_scale(x[row : row + 1], symmetric_grid(4), per_channel=True).item()
        )


def test_the_step_of_zeros_is_positive() -> None:
    assert float(search_scale(torch.zeros(4), symmetric_grid(8))) > 0
