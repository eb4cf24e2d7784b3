"""Every Triton op against the reference. Not collected by itself: Triton must be told before it is imported
whether to interpret, so `test_kernels_gpu_interpreter` and `test_kernels_gpu_device` run this file in a
process of its own, with MREM_TEST_DEVICE saying where the tensors are.

Integers, forward products and masks are compared exactly. Gradients of products are held to a bound on their
rounding error against float64 (`gradient_bound`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import cycle

import pytest
import torch

from mrem_deploy.kernels import reference as reference
from mrem_deploy.kernels.gpu import linear as linear_op
from mrem_deploy.kernels.gpu import ops
from mrem_deploy.kernels.quantized import Quantized
from mrem_deploy.numerics import Grid, activation_grid, asymmetric_grid, midrise_grid, symmetric_grid

DEVICE = torch.device(os.environ.get("MREM_TEST_DEVICE", "cpu"))
# bfloat16 is silently wrong in Triton's interpreter.
SIXTEEN = [torch.float16] if DEVICE.type == "cpu" else [torch.float16, torch.bfloat16]
GRIDS = [
    symmetric_grid(2),
    symmetric_grid(4),
    activation_grid(8),  # −128 … 127
    asymmetric_grid(4, 5),
    asymmetric_grid(8, 0),  # C up to 255: carried with an offset
    asymmetric_grid(8, 128),  # C from −128 to 127: fits as it is
    asymmetric_grid(8, 201),
]
BY_THRESHOLD = {"twn": symmetric_grid(2), "midrise": midrise_grid()}
INF, NAN = float("inf"), float("nan")
HOSTILE = [INF, -INF, 3.4e38, -3.4e38, 1e-45, -1e-40, 1.2e-38, 0.0, -0.0]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int, spread: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape) * spread).to(DEVICE, dtype)


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, device=DEVICE)


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in every value; NaN where NaN."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def close_sum(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Both are float64 sums rounded once; their order may move the last bit."""
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=2.0**-22, atol=1e-30, equal_nan=True)


def close_scale(got: torch.Tensor, expected: torch.Tensor) -> None:
    """As `close_sum`, for scales as small as 2^-100, where an absolute tolerance would hide everything."""
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=2.0**-22, atol=0, equal_nan=True)


# -- fake_quant --------------------------------------------------------------------------------------------


# One element, primes, both sides of a power of two, more than one block.
@pytest.mark.parametrize("shape", [(1,), (7, 1), (3, 65), (2, 3, 63), (2, 2049)])
@pytest.mark.parametrize("per_row", [False, True])
def test_fake_quant(shape: tuple[int, ...], per_row: bool) -> None:
    scale = torch.rand(*shape[:-1], 1).to(DEVICE) + 0.02 if per_row else number(0.11)
    for grid in GRIDS:
        x, grad = normal(*shape, spread=4), normal(*shape)
        same(ops.fake_quant(x, scale, grid), reference.fake_quant(x, scale, grid))
        got, expected = (o.fake_quant_backward(grad, x, scale, grid) for o in (ops, reference))
        same(got[0], expected[0])
        close_sum(got[1], expected[1])


@pytest.mark.parametrize("grid", GRIDS)
def test_fake_quant_at_ties_and_at_both_ends(grid: Grid) -> None:
    # Multiples of half a step, all exact in float32, from below the lowest code to above the highest.
    x = (torch.arange(-2 * 300, 2 * 300 + 1).float() * 0.125).to(DEVICE)
    scale = number(0.25)
    got = ops.fake_quant(x, scale, grid)
    same(got, reference.fake_quant(x, scale, grid))
    assert got.min() == (grid.low - grid.zero_point) * 0.25
    assert got.max() == (grid.high - grid.zero_point) * 0.25
    grad = torch.ones_like(x)
    for left, right in zip(
        ops.fake_quant_backward(grad, x, scale, grid),
        reference.fake_quant_backward(grad, x, scale, grid),
        strict=True,
    ):
        same(left, right)  # sums of eighths: exact


@pytest.mark.parametrize("step", [0.1, 1e-38, 1e-42, 1e30, 0.0, INF, NAN])
def test_fake_quant_of_hostile_values(step: float) -> None:
    x = torch.tensor([*HOSTILE, NAN, 1.0], device=DEVICE)
    grad = torch.arange(1.0, len(x) + 1, device=DEVICE)
    for grid in (activation_grid(8), asymmetric_grid(8, 3)):
        same(ops.fake_quant(x, number(step), grid), reference.fake_quant(x, number(step), grid))
        got, expected = (o.fake_quant_backward(grad, x, number(step), grid) for o in (ops, reference))
        same(got[0], expected[0])
        close_sum(got[1], expected[1])


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_fake_quant_of_16_bits_and_other_strides(dtype: torch.dtype) -> None:
    x = normal(9, 62, dtype=dtype).t()[::2]
    grad = normal(1, 1, dtype=dtype).expand(x.shape)
    grid = activation_grid(8)
    got = ops.fake_quant(x, number(0.03), grid)
    same(got, reference.fake_quant(x, number(0.03), grid))
    got_grads, expected = (o.fake_quant_backward(grad, x, number(0.03), grid) for o in (ops, reference))
    same(got_grads[0], expected[0])
    close_sum(got_grads[1], expected[1])


# -- products ----------------------------------------------------------------------------------------------


def gradient_bound(grad: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    """How far float32 may be from grad @ quantized in float64, by element.

    2^-24 for each of R sums and for the two scalings; 2^-21 for a float32 as two TF32 numbers.
    """
    units = (grad.shape[-1] + 4) * 2.0**-24 + 2.0**-21
    return units * (grad.double().abs() @ quantized.double().abs())


def check_gradient(
    got: torch.Tensor,
    got_step: torch.Tensor | None,
    grad: torch.Tensor,
    quantized: torch.Tensor,
    of: torch.Tensor,
    scale: torch.Tensor,
    grid: Grid,
) -> None:
    """`got` = lsq(grad @ quantized), or without got_step the product alone."""
    truth = grad.double() @ quantized.double()
    bound = gradient_bound(grad, quantized)
    by_step_bound = None
    if got_step is not None:
        one = torch.ones_like(of)
        mask, _ = reference.fake_quant_backward(one, of, scale, grid)
        ratio = reference.wide(of) / scale
        codes = ratio.round().clamp(grid.low - grid.zero_point, grid.high - grid.zero_point)
        slope = torch.where(mask == 0, codes, codes - ratio).double()
        expected_step = reference.sum_to_scale(slope * truth, scale.double())
        by_step_bound = reference.sum_to_scale(slope.abs() * bound, scale.double())
        by_step_bound += expected_step.abs() * 2.0**-23
        assert got_step.shape == scale.shape
        assert ((got_step.double() - expected_step).abs() <= by_step_bound).all()
        truth, bound = truth * mask.double(), bound * mask.double()
    if got.dtype != torch.float32:  # rounded once more
        bound = bound + truth.abs() * torch.finfo(got.dtype).eps
        bound = bound + torch.finfo(got.dtype).smallest_normal
    assert got.shape == truth.shape
    assert ((got.double() - truth).abs() <= bound).all()


def test_the_gradient_bound_tells_tf32_from_float32() -> None:
    grad, integers = normal(64, 64), normal(64, 64, spread=50).round()
    shortened = (grad.view(torch.int32) & -8192).view(torch.float32)
    error = (shortened.double() @ integers.double() - grad.double() @ integers.double()).abs()
    assert (error > gradient_bound(grad, integers)).double().mean() > 0.9


# (rows, out, in): one of each, K = 1, both sides of a tile, primes, several tiles and steps.
SHAPES = cycle([(65, 63, 67), (1, 1, 1), (2, 130, 1), (64, 64, 64), (7, 5, 129), (131, 3, 2)])
X_GRIDS = cycle(  # five, so that each meets every kind of weight, scale and bias
    [
        activation_grid(8),
        asymmetric_grid(8, 37),
        symmetric_grid(4),
        asymmetric_grid(8, 255),
        asymmetric_grid(4, 5),
    ]
)
LINEARS = [
    (next(SHAPES), next(X_GRIDS), kind, per_row, bias)
    for kind in ("learned", "learned 3 bits", "twn", "midrise", "laq")
    for per_row in (False, True)
    for bias in (False, True)
]


def weight_quant(weight: torch.Tensor, kind: str, per_row: bool) -> Quantized:
    rows = weight.shape[0]
    if kind in BY_THRESHOLD:
        threshold, scale = getattr(reference, kind)(weight, per_row)
        return Quantized(scale, BY_THRESHOLD[kind], threshold)
    if kind == "laq":
        start = torch.full((rows, 1) if per_row else (), 0.4, device=DEVICE)
        scale = reference.laq(weight, start, None, symmetric_grid(4), 2, per_row)
        return Quantized(scale, symmetric_grid(4))
    scale = torch.rand(rows, 1).to(DEVICE) * 0.01 + 0.01 if per_row else number(0.013)
    return Quantized(scale, symmetric_grid(8 if kind == "learned" else 3), learned=True)


@pytest.mark.parametrize(("shape", "x_grid", "kind", "per_row", "with_bias"), LINEARS)
def test_linear(shape: tuple[int, int, int], x_grid: Grid, kind: str, per_row: bool, with_bias: bool) -> None:
    rows, out, summed = shape
    x, weight = normal(rows, summed, spread=3), normal(out, summed)
    bias = normal(out) if with_bias else None
    both = (Quantized(number(0.04), x_grid), weight_quant(weight, kind, per_row))
    expected = reference.linear(x, weight, bias, *both)
    for codes in (False, True):
        same(linear_op.linear(x, weight, bias, *both, codes=codes), expected)
    grad = normal(rows, out)
    got = ops.linear_backward(grad, x, weight, *both, need_x=True, need_weight=True)
    check_linear_gradients(got, grad, x, weight, *both)


def check_linear_gradients(
    got: tuple[torch.Tensor, ...],
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    x_quant: Quantized,
    w_quant: Quantized,
) -> None:
    grad_x, grad_x_scale, grad_weight, grad_w_scale = got
    # Products of an integer and a float32 scale are exact in float64.
    weight_hat = reference.operand_integers(weight, w_quant).double() * w_quant.scale.double()
    x_hat = reference.operand_integers(x, x_quant).double() * x_quant.scale.double()
    check_gradient(grad_x, grad_x_scale, grad, weight_hat, x, x_quant.scale, x_quant.grid)
    by_scale = grad_w_scale if w_quant.learned else None
    check_gradient(grad_weight, by_scale, grad.T, x_hat, weight, w_quant.scale, w_quant.grid)
    assert w_quant.learned or grad_w_scale.numel() == 0


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("per_row", [False, True])
def test_linear_of_16_bits(dtype: torch.dtype, per_row: bool) -> None:
    x, weight, bias = normal(33, 70, dtype=dtype), normal(66, 70, dtype=dtype), normal(66, dtype=dtype)
    both = (Quantized(number(0.03), asymmetric_grid(8, 90)), weight_quant(weight, "learned", per_row))
    same(ops.linear(x, weight, bias, *both), reference.linear(x, weight, bias, *both))
    grad = normal(33, 66, dtype=dtype)
    got = ops.linear_backward(grad, x, weight, *both, need_x=True, need_weight=True)
    check_linear_gradients(got, grad, x, weight, *both)


@pytest.mark.parametrize("zero_point", [0, 1, 127, 128, 129, 255])
def test_unsigned_codes_that_do_not_fit_int8_are_exact(zero_point: int) -> None:
    """At both extremes of every code, where a wrong offset or an overflow would show."""
    x = torch.tensor([-1e9, 1e9], device=DEVICE).repeat(3, 33)  # codes 0 and 255
    x[1], x[2] = 1e9, -1e9
    weight = torch.tensor([1e9, 1e9, -1e9], device=DEVICE).repeat(5, 22)
    quants = (
        Quantized(number(1.0), asymmetric_grid(8, zero_point)),
        Quantized(number(1.0), symmetric_grid(8)),
    )
    expected = reference.linear(x, weight, None, *quants)
    assert expected.abs().max() < 2**24
    for codes in (False, True):
        same(linear_op.linear(x, weight, None, *quants, codes=codes), expected)
    # Both operands with an offset.
    grids = (asymmetric_grid(8, zero_point), asymmetric_grid(8, 255 - zero_point))
    both = tuple(Quantized(number(1.0), grid) for grid in grids)
    same(ops.matmul(x, x.T, *both), reference.matmul(x, x.T, *both))


@pytest.mark.parametrize("kind", BY_THRESHOLD)
def test_linear_reads_other_strides(kind: str) -> None:
    x, weight = normal(66, 40).t(), normal(64, 2 * 66)[:, ::2]
    both = (Quantized(number(0.05), activation_grid(8)), weight_quant(weight, kind, True))
    expected = reference.linear(x, weight, None, *both)
    for codes in (False, True):
        same(linear_op.linear(x, weight, None, *both, codes=codes), expected)
    grad = normal(1, 64).expand(40, 64)
    got = ops.linear_backward(grad, x, weight, *both, need_x=True, need_weight=True)
    assert all(part.is_contiguous() for part in got)
    check_linear_gradients(got, grad, x, weight, *both)


@pytest.mark.parametrize("kind", ["learned", *BY_THRESHOLD])
def test_linear_with_nan_and_infinity(kind: str) -> None:
    x, weight = normal(5, 67), normal(6, 67)
    both = (Quantized(number(0.05), asymmetric_grid(8, 40)), weight_quant(weight, kind, True))
    x[0, :9] = torch.tensor(HOSTILE)
    x[1, 66], weight[2, 5], weight[3, 0], weight[4, 1] = NAN, NAN, INF, -INF
    expected = reference.linear(x, weight, None, *both)
    assert expected.isnan().any()
    assert not expected.isnan().all()
    for codes in (False, True):
        same(linear_op.linear(x, weight, None, *both, codes=codes), expected)
    grad = normal(5, 6)
    grad[4, 4] = INF
    got, truth = (
        o.linear_backward(grad, x, weight, *both, need_x=True, need_weight=True) for o in (ops, reference)
    )
    for left, right in zip(got, truth, strict=True):
        # The same numbers up to rounding, and NaN and infinities in the same places.
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-3, equal_nan=True)


def test_linear_backward_computes_only_what_is_needed() -> None:
    x, weight, grad = normal(3, 4), normal(5, 4), normal(3, 5)
    both = (Quantized(number(0.1), symmetric_grid(4)), weight_quant(weight, "learned", True))
    whole = ops.linear_backward(grad, x, weight, *both, need_x=True, need_weight=True)
    for need_x, need_weight in ((True, False), (False, True), (False, False)):
        needs = {"need_x": need_x, "need_weight": need_weight}
        got = ops.linear_backward(grad, x, weight, *both, **needs)
        for part, full, needed in zip(got, whole, (need_x, need_x, need_weight, need_weight), strict=True):
            same(part, full if needed else x.new_empty(0))


def check_matmul(a: torch.Tensor, b: torch.Tensor, a_grid: Grid, b_grid: Grid) -> None:
    left, right = Quantized(number(0.04), a_grid), Quantized(number(0.03), b_grid)
    expected = reference.matmul(a, b, left, right)
    same(ops.matmul(a, b, left, right), expected)
    grad = normal(*expected.shape, dtype=a.dtype).mT.contiguous().mT
    grad_a, grad_a_scale, grad_b, grad_b_scale = ops.matmul_backward(grad, a, b, left, right)
    assert grad_a.is_contiguous()
    assert grad_b.is_contiguous()
    a_hat = reference.operand_integers(a, left).double() * left.scale.double()
    b_hat = reference.operand_integers(b, right).double() * right.scale.double()
    check_gradient(grad_a, grad_a_scale, grad, b_hat.mT, a, left.scale, left.grid)
    check_gradient(grad_b.mT, grad_b_scale, grad.mT, a_hat, b.mT, right.scale, right.grid)


@pytest.mark.parametrize("shape", [(1, 1, 1), (65, 63, 7), (5, 66, 65)])
def test_matmul_of_two_matrices(shape: tuple[int, int, int]) -> None:
    rows, columns, summed = shape
    check_matmul(
        normal(rows, summed, spread=3),
        normal(summed, columns, spread=3),
        activation_grid(8),
        symmetric_grid(4),
    )


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN])
def test_attention_products_read_heads_in_place(dtype: torch.dtype) -> None:
    query, key, value = (normal(2, 9, 3, 16, dtype=dtype).transpose(1, 2) for _ in range(3))
    check_matmul(query, key.transpose(-1, -2), activation_grid(8), activation_grid(8))
    scores = torch.rand(2, 3, 9, 9).to(DEVICE, dtype)
    check_matmul(scores, value, asymmetric_grid(8, 0), activation_grid(8))


def test_matmul_with_many_batch_dimensions() -> None:
    a, b = normal(2, 1, 3, 5, 4).transpose(0, 2), normal(3, 1, 2, 4, 6)
    check_matmul(a, b, asymmetric_grid(4, 7), symmetric_grid(8))


def test_what_the_kernels_do_not_serve_runs_in_plain_torch() -> None:
    wide_grid = Grid(16, -32768, 32767)
    x, weight = normal(3, 4), normal(5, 4)
    how = Quantized(number(1e-3), wide_grid)
    arguments = (x, weight, None, how, how)
    same(ops.linear(*arguments), reference.linear(*arguments))
    double = (x.double(), number(0.1).double(), symmetric_grid(4))
    same(ops.fake_quant(*double), reference.fake_quant(*double))
    for name in BY_THRESHOLD:
        for left, right in both_scales(name, weight.double(), True):
            same(left, right)


# -- scales of weights -------------------------------------------------------------------------------------


def both_scales(
    name: str, weight: torch.Tensor, per_row: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Threshold and scale of twn or midrise: ours and the reference's."""
    return zip(*(getattr(module, name)(weight, per_row) for module in (ops, reference)), strict=True)


# One weight, primes, rows around the block of a row, several spans of a whole tensor.
@pytest.mark.parametrize("shape", [(1, 1), (67, 3), (3, 257), (5, 1031)])
@pytest.mark.parametrize("per_row", [False, True])
def test_scales_of_weights(shape: tuple[int, int], per_row: bool) -> None:
    weight, diagonal = normal(*shape), torch.rand(shape).to(DEVICE)
    weight[0] = 0  # a row of zeros has the scale 1 (twn) or 2^-100 (midrise)
    for name in BY_THRESHOLD:
        for left, right in both_scales(name, weight, per_row):
            close_scale(left, right)
    start = torch.rand((shape[0], 1) if per_row else ()).to(DEVICE) * 0.3 + 0.1
    for curvature in (None, diagonal):
        for bits, iterations in ((4, 2), (3, 0)):
            arguments = (weight, start, curvature, symmetric_grid(bits), iterations, per_row)
            close_sum(ops.laq(*arguments), reference.laq(*arguments))


@pytest.mark.parametrize("per_row", [False, True])
def test_scales_of_hostile_weights(per_row: bool) -> None:
    start = torch.full((3, 1) if per_row else (), 0.5, device=DEVICE)
    for hostile in ([NAN, 1.0], [INF, 1.0], [1e-45, -1e-40], [3e38, -3e38]):
        weight = normal(3, 70)
        weight[1, 3:5] = torch.tensor(hostile)
        for name in BY_THRESHOLD:
            for left, right in both_scales(name, weight, per_row):
                close_scale(left, right)
        arguments = (weight, start, None, symmetric_grid(4), 2, per_row)
        close_sum(ops.laq(*arguments), reference.laq(*arguments))


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_scales_of_16_bit_weights(dtype: torch.dtype) -> None:
    weight = normal(66, 40, dtype=dtype).t()
    for per_row in (False, True):
        for name in BY_THRESHOLD:
            for left, right in both_scales(name, weight, per_row):
                close_scale(left, right)
                assert left.dtype == torch.float32


# -- every run gives the same bits -------------------------------------------------------------------------


def test_two_runs_give_the_same_bits() -> None:
    x, weight, grad = normal(130, 70), normal(70, 70), normal(130, 70)
    both = (Quantized(number(0.04), activation_grid(8)), weight_quant(weight, "learned", True))
    runs = [ops.linear_backward(grad, x, weight, *both, need_x=True, need_weight=True) for _ in range(2)]
    for left, right in zip(*runs, strict=True):
        same(left, right)
