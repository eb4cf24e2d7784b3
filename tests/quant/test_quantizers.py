"""Quantizers against values computed by hand or by brute force, and their gradients."""

from __future__ import annotations

import pytest
import torch
from quant_specs import plain
from torch import nn

from mrem_deploy.quant.quantizers import (
    LAQ,
    TWN,
    LearnedScale,
    Midrise,
    make_weight_quantizer,
)
from mrem_deploy.quant.spec import USUAL_QUANTIZERS, QuantSpec, WeightSpec

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
