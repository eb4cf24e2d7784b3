"""Quantizers against values computed by hand or by brute force, and their gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from mrem_deploy.kernels import fake_quant
from mrem_deploy.numerics import Grid, activation_grid, asymmetric_grid, symmetric_grid
from mrem_deploy.quant.quantizers import (
    LAQ,
    LAQ_ITERATIONS,
    TWN,
    LearnedScale,
    Midrise,
    make_weight_quantizer,
    search_scale,
)
from mrem_deploy.quant.spec import USUAL_QUANTIZERS, QuantSpec, WeightSpec

GRIDS = [
    symmetric_grid(3),
    activation_grid(8),
    activation_grid(4),
    asymmetric_grid(8, 17),
    asymmetric_grid(4, 0),
]


def plain(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return module(weight)


# Learned step (LSQ)


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


# TWN


def test_twn_per_tensor_by_hand() -> None:
    weight = torch.tensor([[1.0, -0.5, 0.25], [-2.0, 0.0, 0.75]])
    # mean|w| = 4.5/6 = 0.75, Δ = 0.525; kept 1, 2, 0.75, so α = 3.75/3 = 1.25. −0.5 just fails.
    codes, alpha = TWN(per_channel=False).codes_and_scale(weight)
    assert codes.tolist() == [[1, 0, 0], [-1, 0, 1]]
    assert alpha.tolist() == 1.25
    assert plain(TWN(per_channel=False), weight).tolist() == [[1.25, 0, 0], [-1.25, 0, 1.25]]


def test_twn_per_channel_by_hand() -> None:
    weight = torch.tensor([[1.0, -0.5, 0.25], [-2.0, 0.0, 0.75]])
    # row 1: mean 7/12, Δ = 0.408, α = (1 + 0.5)/2; row 2: mean 2.75/3, Δ = 0.642, α = (2 + 0.75)/2
    codes, alpha = TWN(per_channel=True).codes_and_scale(weight)
    assert codes.tolist() == [[1, -1, 0], [-1, 0, 1]]
    assert alpha.tolist() == [[0.75], [1.375]]


@pytest.mark.parametrize(("small", "code"), [(0.69, 0), (0.71, 1)])  # mean|w| = 1, so Δ = 0.7
def test_twn_threshold_is_seven_tenths_of_the_mean(small: float, code: int) -> None:
    codes, alpha = TWN(per_channel=False).codes_and_scale(torch.tensor([small, small - 2]))
    assert codes.tolist() == [code, -1]
    assert alpha.item() == pytest.approx(1.0 if code else 2 - small)


def test_twn_threshold_is_strict() -> None:
    # In fp64, mean|w| = 1 and Δ = 0.7 exactly as computed: a weight on the threshold is dropped.
    delta = 0.7 * 1.0
    weight = torch.tensor([delta, 2 - delta], dtype=torch.float64)
    codes, alpha = TWN(per_channel=False).codes_and_scale(weight)
    assert codes.tolist() == [0, 1]
    assert alpha.item() == 2 - delta


@pytest.mark.parametrize("per_channel", [False, True])
def test_twn_of_zeros_is_zero_with_a_valid_step(per_channel: bool) -> None:
    weight = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    codes, alpha = TWN(per_channel).codes_and_scale(weight)
    assert codes.abs().sum() == 0
    assert bool((alpha == 1).all())


def test_twn_zero_row_does_not_disturb_its_neighbours() -> None:
    codes, alpha = TWN(per_channel=True).codes_and_scale(torch.tensor([[0.0, 0.0], [3.0, -3.0]]))
    assert codes.tolist() == [[0, 0], [1, -1]]
    assert alpha.tolist() == [[1.0], [3.0]]


# Midrise


def test_midrise_per_tensor_by_hand() -> None:
    weight = torch.tensor([[4.0, -1.0, 0.5], [-2.0, 0.0, 0.5]])
    # mean|w| = 8/6, so Δ₀ = 5/3 and q = 3, 1, 1, 3, 1, 1; α₁ = (12 + 1 + 0.5 + 6 + 0 + 0.5)/22 = 10/11.
    # Δ₁ = 20/11 gives the same q, hence the same α.
    codes, alpha = Midrise(per_channel=False).codes_and_scale(weight)
    assert codes.tolist() == [[3, -1, 1], [-3, 1, 1]]
    assert alpha.item() == torch.tensor(10 / 11).item()
    assert torch.equal(plain(Midrise(per_channel=False), weight), codes * alpha)


def test_midrise_per_channel_by_hand() -> None:
    weight = torch.tensor([[4.0, -1.0, 0.0], [-1.0, 1.0, 1.0]])
    # row 1: mean 5/3, Δ₀ = 25/12, q = 3, 1, 1, α = 13/11; row 2: Δ₀ = 1.25, all q = 1, α = 1.
    codes, alpha = Midrise(per_channel=True).codes_and_scale(weight)
    assert codes.tolist() == [[3, -1, 1], [-1, 1, 1]]
    assert alpha.tolist() == [[torch.tensor(13 / 11).item()], [1.0]]


@pytest.mark.parametrize("per_channel", [False, True])
def test_midrise_step_by_step(per_channel: bool) -> None:
    """The definition written out slowly, on weights whose codes still change in the second alternation."""
    weight = torch.randn(7, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3
    codes, alpha = Midrise(per_channel).codes_and_scale(weight)
    changed = 0
    for number, group in enumerate(weight.tolist() if per_channel else [weight.flatten().tolist()]):
        a, history = 0.625 * sum(abs(w) for w in group) / len(group), []
        for _ in range(2):
            q = [3 if abs(w) > 2 * a else 1 for w in group]
            a = sum(abs(w) * k for w, k in zip(group, q, strict=True)) / sum(k * k for k in q)
            history.append(q)
        changed += history[0] != history[1]
        assert alpha.reshape(-1)[number].item() == pytest.approx(a, rel=1e-12)
        expected = [(-1 if w < 0 else 1) * (3 if abs(w) > 2 * a else 1) for w in group]
        assert codes.reshape(alpha.numel(), -1)[number].tolist() == expected
    assert changed


@pytest.mark.parametrize("seed", range(4))
def test_midrise_is_near_the_best_of_all_scales(seed: int) -> None:
    """On normal weights: within 1% of the best α of a fine search, and far better than TWN."""
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    alphas = torch.linspace(0.2, 1.0, 801, dtype=torch.float64)
    levels = alphas[:, None, None] * torch.tensor([-3.0, -1.0, 1.0, 3.0], dtype=torch.float64)
    least = float((weight[None, :, None] - levels).square().amin(-1).sum(-1).min())
    error, ternary = (
        float((plain(kind(per_channel=False), weight) - weight).square().sum()) for kind in (Midrise, TWN)
    )
    assert error <= 1.01 * least
    assert error < 0.75 * ternary


@pytest.mark.parametrize("per_channel", [False, True])
def test_midrise_of_zeros_is_nearly_zero_with_a_valid_step(per_channel: bool) -> None:
    weight = torch.zeros(2, 2)
    codes, alpha = Midrise(per_channel).codes_and_scale(weight)
    assert bool((codes == 1).all())  # no code stands for zero
    assert bool((alpha == 2.0**-100).all())
    values = plain(Midrise(per_channel), weight)
    assert torch.equal(values + torch.tensor(1e-12), torch.full((2, 2), 1e-12))  # adds nothing
    assert bool((alpha * 1e-6 >= torch.finfo(torch.float32).tiny).all())  # times a scale: not denormal


def test_midrise_zero_row_does_not_disturb_its_neighbours() -> None:
    codes, alpha = Midrise(per_channel=True).codes_and_scale(torch.tensor([[0.0, -0.0], [3.0, -1.0]]))
    assert codes.tolist() == [[1, 1], [3, -1]]
    assert alpha.tolist() == [[2.0**-100], [1.0]]


def test_a_weight_on_the_midrise_grid_keeps_its_codes() -> None:
    codes = torch.tensor([[-3.0, -1, 1, 3, 1, -3], [3, 1, -1, -1, 1, 1]])
    weight = codes * 0.25
    module = Midrise(per_channel=True)
    assert torch.equal(module.codes_and_scale(weight)[0], codes)
    assert torch.equal(plain(module, weight), weight)
    assert torch.equal(plain(module, plain(module, weight)), weight)


# LAQ


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


# What holds for all of them


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("bits", "bound"), [(2, 1), (3, 3), (4, 7), (8, 127)])
def test_a_weight_on_the_grid_keeps_its_codes(bits: int, bound: int, per_channel: bool) -> None:
    """Grid points are fixed points: exactly, because ¼ makes every product and sum below exact."""
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(-bound, bound + 1, (4, 16), generator=generator).double()
    codes[:, 0] = bound  # each row reaches the end, else a finer grid would do as well
    weight = codes * 0.25
    quantizer = "twn" if bits == 2 else "auto"  # midrise has its own test
    module = make_weight_quantizer(weight, WeightSpec(bits, per_channel, quantizer))
    if isinstance(
        module, LearnedScale
    ):  # the step is searched on a coarse grid, then learned: put it on the spot
        nn.init.constant_(module.log_scale, torch.tensor(0.25, dtype=torch.float64).log().item())
        weight = codes * module.scale.detach()
    assert torch.equal(plain(module, weight), weight)
    assert torch.equal(module.codes_and_scale(weight)[0], codes)
    assert torch.equal(plain(module, plain(module, weight)), weight)


@pytest.mark.parametrize("kind", ["twn", "midrise", "laq"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_twn_midrise_and_laq_pass_the_gradient_straight_through(kind: str, per_channel: bool) -> None:
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(3), requires_grad=True)
    gradient = torch.randn(3, 4, generator=torch.Generator().manual_seed(4))
    module = make_weight_quantizer(weight, WeightSpec(4 if kind == "laq" else 2, per_channel, kind))
    out = module(weight)
    assert not torch.equal(out.detach(), weight.detach())
    out.backward(gradient)
    assert weight.grad is not None
    assert torch.equal(weight.grad, gradient)
    assert [name for name, _ in module.named_parameters()] == []  # nothing but the weight is learned


@pytest.mark.parametrize(("bits", "kind"), [(2, "twn"), (2, "midrise"), *((b, "auto") for b in (3, 4, 8))])
@pytest.mark.parametrize("per_channel", [False, True])
def test_forward_is_codes_times_scale(bits: int, kind: str, per_channel: bool) -> None:
    """What freezing relies on, bit for bit in fp32."""
    weight = torch.randn(5, 33, generator=torch.Generator().manual_seed(5))
    module = make_weight_quantizer(weight, WeightSpec(bits, per_channel, kind))
    codes, scale = module.codes_and_scale(weight)
    assert scale.shape == ((5, 1) if per_channel else ())
    assert torch.equal(codes, codes.round())
    assert codes.abs().max() <= module.grid.high
    assert torch.equal(codes.to(torch.int8) * scale, plain(module, weight))


@pytest.mark.parametrize(("bits", "kind"), [(2, "twn"), (2, "midrise"), (4, "auto"), (8, "auto")])
@pytest.mark.parametrize(
    ("rows", "width"),
    [
        (1, 1),  # the smallest table
        (37, 3),  # narrower than a vector register, and an odd number of rows
        (41, 129),  # one more than a power of two
        (1021, 384),  # MiniLM's width; a prime number of rows, more than are searched at a time
        (5003, 16),  # enough rows for torch to split the work between threads
    ],
)
def test_rows_after_the_lookup_equal_the_rows_of_the_table(
    bits: int, kind: str, rows: int, width: int
) -> None:
    """Bit for bit in fp32: a frozen table must give what training saw, whatever the order of sums."""
    generator = torch.Generator().manual_seed(rows)
    table = torch.randn(rows, width, generator=generator)
    table[0] = 0.0  # the padding row
    module = make_weight_quantizer(table, WeightSpec(bits, per_channel=True, quantizer=kind))
    for shape in ((1, 1), (1, 5), (3, 7), (4, 32)):
        ids = torch.randint(rows, shape, generator=generator)
        ids[0, 0] = 0
        with torch.no_grad():
            assert torch.equal(module.rows(table[ids], ids), module(table)[ids])


@pytest.mark.parametrize(
    ("bits", "asked", "expected"),
    [
        (2, "auto", Midrise),
        (3, "auto", LearnedScale),
        (4, "auto", LAQ),
        (8, "auto", LearnedScale),
        (2, "laq", LAQ),
        (2, "uniform", LearnedScale),
        (8, "laq", LAQ),
        (2, "twn", TWN),
        (2, "midrise", Midrise),
        (4, "midrise", LAQ),  # a layer of another width in a model with 2 bits elsewhere
        (3, "midrise", LearnedScale),
        (4, "twn", LAQ),
    ],
)
def test_the_quantizer_follows_the_bits_or_the_wish(bits: int, asked: str, expected: type) -> None:
    assert type(make_weight_quantizer(torch.randn(3, 3), WeightSpec(bits, quantizer=asked))) is expected


@pytest.mark.parametrize(
    ("bits", "asked", "linear", "embedding"),
    [
        ((2, 2), "midrise", "midrise", "midrise"),
        ((2, 4), "midrise", "midrise", "laq"),
        ((4, 2), "midrise", "laq", "midrise"),
        ((2, 2), "twn", "twn", "twn"),
        ((2, 4), "twn", "twn", "laq"),
        ((2, 2), "laq", "laq", USUAL_QUANTIZERS[2]),
        ((2, 8), "auto", USUAL_QUANTIZERS[2], "uniform"),
    ],
)
def test_two_bit_quantizers_are_for_the_embedding_too(
    bits: tuple[int, int], asked: str, linear: str, embedding: str
) -> None:
    spec = QuantSpec(*bits, 8, weight_quantizer=asked)
    assert spec.linear("a").kind == linear
    assert spec.embedding("b").kind == embedding


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
