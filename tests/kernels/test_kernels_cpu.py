"""The C++ training ops on every CPU target of this machine: exactly the reference's integers, its sums to the
last bit but one, its treatment of NaN; any layout, any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mrem_deploy.kernels import backends
from mrem_deploy.kernels import reference as reference
from mrem_deploy.kernels.quantized import Quantized
from mrem_deploy.numerics import Grid, activation_grid, asymmetric_grid, midrise_grid, symmetric_grid

_found = backends.extension().module
if _found is None:
    pytest.skip(f"no C++ extension here: {backends.extension().problem}", allow_module_level=True)
extension: Any = _found
from mrem_deploy.kernels.cpu import ops  # noqa: E402

TARGETS = [name for name, runs in extension.targets().items() if runs]
GRIDS = [
    activation_grid(8),
    asymmetric_grid(8, 17),
    asymmetric_grid(4, 0),
    symmetric_grid(4),
    symmetric_grid(2),
]
BY_THRESHOLD = {"twn": symmetric_grid(2), "midrise": midrise_grid()}
SHAPES = [
    (1, 1),
    (1, 63),  # below, at and above four vectors
    (7, 64),
    (3, 65),
    (97, 1),  # rows of one element
    (31, 127),  # primes
    (3, 40009),  # rows longer than a block
    (2, 3, 5, 17),
]


@pytest.fixture(params=TARGETS, autouse=True)
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    before = extension.active_target()
    extension.use_target(request.param)
    yield request.param
    extension.use_target(before)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scales(x: torch.Tensor, per_row: bool, seed: int = 1) -> torch.Tensor:
    shape = (*x.shape[:-1], 1) if per_row else ()
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.2 + 0.01


def assert_one_ulp(came: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums in float64, rounded once: another order can move the float32 result to a neighbour, no farther."""
    assert came.shape == expected.shape
    above = torch.nextafter(expected, torch.tensor(float("inf")))
    below = torch.nextafter(expected, torch.tensor(float("-inf")))
    near = (came == expected) | (came == above) | (came == below) | (came.isnan() & expected.isnan())
    assert near.all(), (came[~near], expected[~near])


def assert_gradients(came: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    torch.testing.assert_close(came[0], expected[0], rtol=0, atol=0, equal_nan=True)
    assert_one_ulp(came[1], expected[1])


# -- quantizing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_fake_quant_and_its_gradients_are_the_references(shape: tuple[int, ...], per_row: bool) -> None:
    for grid in GRIDS:
        x, grad = values(*shape), values(*shape, seed=2)
        scale = scales(x, per_row)
        assert torch.equal(ops.fake_quant(x, scale, grid), reference.fake_quant(x, scale, grid))
        assert_gradients(
            ops.fake_quant_backward(grad, x, scale, grid),
            reference.fake_quant_backward(grad, x, scale, grid),
        )


def test_ties_go_to_even_and_both_ends_saturate() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.4, 127.6, -128.5, -128.6, 1e30, -1e30])
    one = torch.tensor(1.0)
    expected = [0.0, 2, 2, 0, -2, -2, 126, 127, 127, -128, -128, 127, -128]
    assert ops.fake_quant(x, one, activation_grid(8)).tolist() == expected
    grad_x, grad_scale = ops.fake_quant_backward(torch.ones(13), x, one, activation_grid(8))
    inside = [1.0] * 8 + [0, 1, 0, 0, 0]  # -128.5 is moved by one half exactly: inside
    assert grad_x.tolist() == inside
    _, expected_scale = reference.fake_quant_backward(torch.ones(13), x, one, activation_grid(8))
    assert_one_ulp(grad_scale, expected_scale)


def test_a_true_division_and_no_product_with_the_inverse() -> None:
    grid = Grid(16, -32768, 32767)
    for step in (0.3, 0.7, 1.1):
        scale = torch.tensor(step)
        x = (torch.arange(10_000) + 0.5) * scale  # near ties, where the two ways part
        divided = (x / scale).round()
        assert not torch.equal(divided, (x * (1 / scale)).round())
        assert torch.equal(ops.fake_quant(x, scale, grid), divided * scale)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_nan_infinity_huge_and_denormal_values_as_in_the_reference(grid: Grid) -> None:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e-45, -1e-40, 0.0, -0.0])
    x = special.repeat(5)  # whole vectors and a rest
    grad = values(45)
    for scale in (torch.tensor(0.1), torch.tensor(1e-40), torch.tensor(1e38), torch.tensor(0.0)):
        torch.testing.assert_close(
            ops.fake_quant(x, scale, grid),
            reference.fake_quant(x, scale, grid),
            rtol=0,
            atol=0,
            equal_nan=True,
        )
        for part in (x, x[1:]):  # with NaN in the values, and (first element) without
            ours = ops.fake_quant_backward(grad[: len(part)], part, scale, grid)
            assert_gradients(ours, reference.fake_quant_backward(grad[: len(part)], part, scale, grid))
    assert ops.fake_quant(x, torch.tensor(0.1), grid)[::9].isnan().all()
    finite = x.nan_to_num(0.0).clamp(-1, 1)
    assert ops.fake_quant_backward(grad * float("nan"), finite, torch.tensor(0.1), grid)[1].isnan()


def test_a_step_of_zero_spoils_nothing_beyond_the_end() -> None:
    # x/0 saturates; lanes behind the last element would be 0/0 = NaN if they were counted.
    x, grad = torch.ones(17), torch.ones(17)
    _, grad_scale = ops.fake_quant_backward(grad, x, torch.tensor(0.0), symmetric_grid(4))
    assert grad_scale == 7 * 17


def test_strided_inputs_give_what_contiguous_ones_give() -> None:
    stored = values(3, 7, 5, 20)
    heads = stored.transpose(1, 2)  # (3, 5, 7, 20), as attention has them
    scale, grid = torch.tensor(0.05), activation_grid(8)
    layouts = [heads, heads.transpose(-1, -2), stored[:, ::2, 1:3], stored[..., ::3], stored[..., :1]]
    layouts += [values(1, 20).expand(6, 20), values(2, 3, 4, 5, 6).permute(3, 0, 2, 1, 4)]
    for x in layouts:
        grad = values(*reversed(x.shape), seed=3).permute(*reversed(range(x.dim())))  # strided as well
        plain = x.contiguous()
        assert torch.equal(ops.fake_quant(x, scale, grid), ops.fake_quant(plain, scale, grid))
        assert_gradients(
            ops.fake_quant_backward(grad, x, scale, grid),
            reference.fake_quant_backward(grad.contiguous(), plain, scale, grid),
        )
        assert ops.fake_quant(x, scale, grid).is_contiguous()


# -- scales of weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_twn_midrise_and_laq_are_the_references(shape: tuple[int, ...], per_row: bool) -> None:
    weight = values(*shape)
    for name in BY_THRESHOLD:
        assert_same_scales(name, weight, per_row)
    start = scales(weight, per_row) * 5
    for diagonal in (None, values(*shape, seed=4).abs()):
        for grid in (symmetric_grid(4), symmetric_grid(3)):
            came = ops.laq(weight, start, diagonal, grid, 2, per_row)
            assert_one_ulp(came, reference.laq(weight, start, diagonal, grid, 2, per_row))


def assert_same_scales(name: str, weight: torch.Tensor, per_row: bool) -> None:
    """Threshold and scale of twn or midrise against the reference."""
    both = (getattr(module, name)(weight, per_row) for module in (ops, reference))
    for came, expected in zip(*both, strict=True):
        assert_one_ulp(came, expected)


def test_rows_of_zeros_and_of_nan() -> None:
    weight = torch.stack(
        [torch.zeros(40), torch.full((40,), float("nan")), values(40), torch.full((40,), 1e-45)]
    )
    start = torch.full((4, 1), 0.5)
    for per_row in (True, False):
        for name in BY_THRESHOLD:
            assert_same_scales(name, weight, per_row)
        first = start if per_row else torch.tensor(0.5)
        grid = symmetric_grid(4)
        assert_one_ulp(
            ops.laq(weight, first, None, grid, 2, per_row),
            reference.laq(weight, first, None, grid, 2, per_row),
        )
    assert ops.twn(weight, True)[1][0] == 1  # harmless
    scales_found = ops.midrise(weight, True)[1].flatten().tolist()
    assert scales_found[0] == scales_found[3] == 2.0**-100  # zeros, and numbers that are as good as zeros
    assert scales_found[1] != scales_found[1]  # NaN


@pytest.mark.parametrize("hostile", [float("inf"), 3e38, -3e38, 1e-38])
def test_scales_beside_hostile_weights(hostile: float) -> None:
    for per_row in (True, False):
        weight = values(3, 70)
        weight[1, 3] = hostile
        for name in BY_THRESHOLD:
            assert_same_scales(name, weight, per_row)


@pytest.mark.parametrize("name", BY_THRESHOLD)
def test_codes_by_a_threshold_are_the_references(name: str) -> None:
    grid, nan, inf = BY_THRESHOLD[name], float("nan"), float("inf")
    special = torch.tensor([nan, inf, -inf, 0.0, -0.0, 0.5, -0.5, 0.6, -0.6, 1e-45, -1e-45, 3e38, -3e38])
    for weight in (special.repeat(4), special.repeat(5, 3)):  # whole vectors and a rest; rows
        for threshold in (torch.tensor(0.5), torch.tensor(0.0), torch.tensor(nan), torch.tensor(inf)):
            how = Quantized(torch.tensor(0.3), grid, threshold)
            expected = reference.operand_integers(weight, how)
            came = ops._operand(weight, how, dequantize=False)
            torch.testing.assert_close(came, expected, rtol=0, atol=0, equal_nan=True)
            came = ops._operand(weight, how, dequantize=True)
            torch.testing.assert_close(came, expected * how.scale, rtol=0, atol=0, equal_nan=True)
    assert ops._operand(special, how, dequantize=False)[0].isnan() == (name == "midrise")


# -- products ------------------------------------------------------------------------------------------------


def quantized_weight(kind: str, per_row: bool, weight: torch.Tensor) -> Quantized:
    """How one kind of weight is quantized."""
    if kind in BY_THRESHOLD:
        threshold, scale = getattr(reference, kind)(weight, per_row)
        return Quantized(scale, BY_THRESHOLD[kind], threshold)
    learned = kind == "learned"
    return Quantized(scales(weight, per_row), symmetric_grid(8 if learned else 4), learned=learned)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("kind", ["twn", "midrise", "learned", "loss-aware"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (63, 65, 31), (37, 1, 5), (65, 130, 1)])
def test_linear_and_its_gradients_are_the_references(
    shape: tuple[int, int, int], kind: str, per_row: bool
) -> None:
    rows, inner, outer = shape
    x, weight, bias, grad = (
        values(rows, inner),
        values(outer, inner, seed=1),
        values(outer),
        values(rows, outer),
    )
    step = torch.tensor(0.03)
    w_quant = quantized_weight(kind, per_row, weight)
    for grid in (activation_grid(8), asymmetric_grid(8, 90)):
        both = (Quantized(step, grid), w_quant)
        for added in (bias, None):
            # Integers below 2^24 add up exactly in any order, and are scaled once: so equal, bit for bit.
            assert torch.equal(ops.linear(x, weight, added, *both), reference.linear(x, weight, added, *both))
        for need_x, need_weight in ((True, True), (True, False), (False, True)):
            needs = (need_x, need_weight)
            ours = ops.linear_backward(grad, x, weight, *both, *needs)
            theirs = reference.linear_backward(grad, x, weight, *both, *needs)
            exact = reference.linear_backward(
                grad.double(), x.double(), weight.double(), *map(in_double, both), *needs
            )
            assert_as_close_as_the_reference(ours, theirs, exact)


def in_double(how: Quantized) -> Quantized:
    return Quantized(*(part.double() if isinstance(part, torch.Tensor) else part for part in how))


def assert_as_close_as_the_reference(
    ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, ...]
) -> None:
    """Our error against float64 is at most twice that of the float32 reference, plus a few roundings.

    An element whose x/s lies within a rounding of a tie or an end may fall on the other side in float64: such
    elements are where the reference itself is far off, and there ours must agree with the reference.
    """
    for came, plain, truth in zip(ours, theirs, exact, strict=True):
        assert came.shape == plain.shape
        if not came.numel():
            continue
        size = float(truth.abs().max()) + 1e-30
        error, allowed = (came - truth).abs(), 2 * (plain - truth).abs() + 1e-5 * size
        assert (error <= allowed).all(), (float(error.max()), size)


@pytest.mark.parametrize("layout", ["attention", "contiguous", "plain matrices"])
def test_matmul_and_its_gradients_are_the_references(layout: str) -> None:
    if layout == "attention":  # (2, 3, 13, 16) and the transposed view of keys
        a = values(2, 13, 48).view(2, 13, 3, 16).transpose(1, 2)
        b = values(2, 11, 48, seed=1).view(2, 11, 3, 16).transpose(1, 2).transpose(-1, -2)
    elif layout == "contiguous":
        a, b = values(2, 3, 7, 5), values(2, 3, 5, 65, seed=1)
    else:
        a, b = values(5, 7).T, values(5, 3, seed=1)
    both = (
        Quantized(torch.tensor(0.02), asymmetric_grid(8, 100)),
        Quantized(torch.tensor(0.05), activation_grid(8)),
    )
    product = ops.matmul(a, b, *both)
    assert torch.equal(product, reference.matmul(a, b, *both))
    assert product.is_contiguous()
    grad = values(*product.shape, seed=2)
    ours = ops.matmul_backward(grad, a, b, *both)
    theirs = reference.matmul_backward(grad, a, b, *both)
    exact = reference.matmul_backward(grad.double(), a.double(), b.double(), *map(in_double, both))
    assert_as_close_as_the_reference(ours, theirs, exact)
    assert ours[0].is_contiguous()
    assert ours[2].is_contiguous()


@pytest.mark.parametrize("name", BY_THRESHOLD)
def test_a_scale_for_all_beside_a_threshold_per_row(name: str) -> None:
    x, weight, step = values(5, 20), values(6, 20, seed=1), torch.tensor(0.05)
    threshold, _ = getattr(reference, name)(weight, True)
    both = (Quantized(step, activation_grid(8)), Quantized(torch.tensor(0.7), BY_THRESHOLD[name], threshold))
    ours = ops.linear(x, weight, None, *both)
    assert torch.equal(ours, reference.linear(x, weight, None, *both))


# -- threads, targets, types ---------------------------------------------------------------------------------


def everything(x: torch.Tensor, per_row: bool) -> list[torch.Tensor]:
    grid, scale = symmetric_grid(4), scales(x, per_row)
    found = [ops.fake_quant(x, scale, grid), *ops.fake_quant_backward(x * 3, x, scale, grid)]
    for name, own in BY_THRESHOLD.items():
        threshold, alpha = getattr(ops, name)(x, per_row)
        found += [threshold, alpha, ops._operand(x, Quantized(alpha, own, threshold), dequantize=True)]
    return [*found, ops.laq(x, scale * 5, x.abs(), grid, 2, per_row)]


@pytest.mark.parametrize("per_row", [False, True])
def test_neither_threads_nor_targets_change_a_bit(per_row: bool) -> None:
    x = values(2203, 509)  # 69 blocks: from 64 on, threads share them (parallel.h)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = everything(x, per_row)
        torch.set_num_threads(2)
        together = everything(x, per_row)
        extension.use_target("scalar")
        portable = everything(x, per_row)
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, alone, together))
    assert all(map(torch.equal, alone, portable))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types_are_the_references(dtype: torch.dtype) -> None:
    x, weight = values(5, 20).to(dtype), values(6, 20).to(dtype)
    scale = torch.tensor(0.05, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    grid = activation_grid(8)
    assert torch.equal(ops.fake_quant(x, scale, grid), reference.fake_quant(x, scale, grid))
    how = Quantized(scale, grid)
    for name, own in BY_THRESHOLD.items():
        threshold, alpha = getattr(ops, name)(weight, True)
        assert all(map(torch.equal, (threshold, alpha), getattr(reference, name)(weight, True)))
        for w_quant in (how, Quantized(alpha, own, threshold)):
            came = ops.linear(x, weight, None, how, w_quant)
            assert came.dtype == dtype
            assert torch.equal(came, reference.linear(x, weight, None, how, w_quant))
