"""Integer grids and rounding, against values computed by hand."""

from __future__ import annotations

import pytest
import torch

from mrem_deploy.numerics import (
    ACTIVATION_BITS,
    EMBEDDING_BITS,
    WEIGHT_BITS,
    Grid,
    activation_grid,
    asymmetric_grid,
    dequantize,
    from_stored,
    midrise_grid,
    quantize,
    quantize_by_threshold,
    symmetric_grid,
    to_stored,
)


@pytest.mark.parametrize(("bits", "bound"), [(2, 1), (3, 3), (4, 7), (8, 127)])
def test_symmetric_codes_are_the_same_on_both_sides(bits: int, bound: int) -> None:
    assert symmetric_grid(bits) == Grid(bits, -bound, bound, 0)


def test_only_eight_bit_activations_reach_one_further_down() -> None:
    assert activation_grid(8) == Grid(8, -128, 127, 0)  # where ONNX QuantizeLinear saturates
    assert activation_grid(4) == Grid(4, -7, 7, 0)


def test_asymmetric_codes_start_at_zero() -> None:
    assert asymmetric_grid(8, 0) == Grid(8, 0, 255, 0)
    assert asymmetric_grid(4, 15) == Grid(4, 0, 15, 15)
    assert symmetric_grid(4).signed
    assert not asymmetric_grid(4, 3).signed


@pytest.mark.parametrize(("bits", "zero_point"), [(4, -1), (4, 16), (8, 256)])  # one past either end
def test_a_zero_point_outside_the_codes_is_refused(bits: int, zero_point: int) -> None:
    with pytest.raises(ValueError, match=str(zero_point)):
        asymmetric_grid(bits, zero_point)


def test_the_bit_widths_are_those_of_the_paper() -> None:
    assert (WEIGHT_BITS, EMBEDDING_BITS, ACTIVATION_BITS) == ((2, 3, 4, 8, 32), (2, 4, 8, 32), (4, 8, 32))


def test_ties_go_to_the_even_code() -> None:
    x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5])
    came = quantize(x, torch.tensor(1.0), symmetric_grid(4))
    assert came.tolist() == [-2, -2, 0, 0, 2, 2, 4]


def test_a_tie_stays_where_it_was_when_the_zero_point_is_odd() -> None:
    # round(x/s) + 3, not round(x/s + 3): the latter would send 0.5 to 4 and 1.5 to 4.
    came = quantize(torch.tensor([-0.5, 0.5, 1.5]), torch.tensor(1.0), asymmetric_grid(4, 3))
    assert came.tolist() == [3, 3, 5]


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        (symmetric_grid(2), [-1, -1, -1, 0, 1, 1, 1]),
        (symmetric_grid(4), [-7, -7, -2, 0, 2, 7, 7]),
        (activation_grid(8), [-128, -127, -2, 0, 2, 127, 127]),  # only here −128 is a code
        (asymmetric_grid(8, 100), [0, 0, 98, 100, 102, 227, 228]),  # far from its upper end
        (asymmetric_grid(4, 1), [0, 0, 0, 1, 3, 15, 15]),
    ],
)
def test_both_ends_saturate(grid: Grid, expected: list[int]) -> None:
    x = torch.tensor([-64.0, -63.5, -1.0, 0.0, 1.0, 63.5, 64.0])
    came = quantize(x, torch.tensor(0.5), grid)
    assert came.tolist() == expected


def test_infinities_saturate() -> None:
    came = quantize(torch.tensor([float("-inf"), float("inf")]), torch.tensor(0.1), symmetric_grid(3))
    assert came.tolist() == [-3, 3]


def test_quantizing_divides_and_does_not_multiply_by_the_reciprocal() -> None:
    """Where the two differ in fp32, the quotient decides.

    s = 0.1f is a little above 1/10, so 2.5·s rounds to the float 0.25: 0.25/s is 2.5 (a tie, to 2),
    while the rounded reciprocal of s can lie on the other side. All k + ½ up to 127 are tried, and
    the test is void unless both ways differ for some of them.
    """
    differ = 0
    for scale_value in (0.1, 0.3, 0.7, 1.1, 1e-3):
        scale = torch.tensor(scale_value)
        x = (torch.arange(-127, 127) + 0.5) * scale
        quotient = (x.double() / scale.double()).float()  # fp64 division of floats, rounded: correct division
        expected = quotient.round().clamp(-127, 127)
        assert torch.equal(quantize(x, scale, symmetric_grid(8)), expected)
        differ += int((expected != (x * (1 / scale)).round().clamp(-127, 127)).sum())
    assert differ > 0


def test_the_input_is_left_alone() -> None:
    x = torch.tensor([0.3, 5.0])
    quantize(x, torch.tensor(1.0), asymmetric_grid(4, 2))
    assert x.tolist() == [0.30000001192092896, 5.0]


def test_dequantize_takes_the_zero_point_off() -> None:
    codes = torch.tensor([0.0, 3.0, 15.0])
    assert dequantize(codes, torch.tensor(0.5), asymmetric_grid(4, 3)).tolist() == [-1.5, 0.0, 6.0]
    assert dequantize(codes, torch.tensor(0.5), symmetric_grid(8)).tolist() == [0.0, 1.5, 7.5]
    assert codes.tolist() == [0.0, 3.0, 15.0]


@pytest.mark.parametrize(
    "grid",
    [
        symmetric_grid(2),
        symmetric_grid(3),
        activation_grid(8),
        asymmetric_grid(4, 5),
        asymmetric_grid(8, 255),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 0.1, 1e-3, 3.7])  # 0.1 and 3.7 are no binary fractions
def test_every_grid_point_is_a_fixed_point(grid: Grid, scale: float) -> None:
    codes = torch.arange(grid.low, grid.high + 1).float()
    values = dequantize(codes, torch.tensor(scale), grid)
    assert torch.equal(quantize(values, torch.tensor(scale), grid), codes)


def test_a_scale_per_row_is_broadcast() -> None:
    x = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    assert quantize(x, torch.tensor([[1.0], [0.25]]), symmetric_grid(4)).tolist() == [[1, 2], [4, 7]]


def test_the_midrise_grid_has_four_odd_codes() -> None:
    grid = midrise_grid()
    assert grid == Grid(2, -3, 3, 0, 2)
    assert (grid.signed, grid.inner) == (True, 1)
    assert list(range(grid.low, grid.high + 1, grid.spacing)) == [-3, -1, 1, 3]
    assert symmetric_grid(2).inner == symmetric_grid(8).inner == 0


@pytest.mark.parametrize(
    ("grid", "expected"),
    [(symmetric_grid(2), [-1, 0, 0, 0, 0, 0, 0, 1]), (midrise_grid(), [-3, -1, -1, 1, 1, 1, 1, 3])],
)
def test_a_threshold_decides_between_two_magnitudes(grid: Grid, expected: list[int]) -> None:
    # On the threshold a value is not above it; −0 counts as 0, and 0 as positive.
    x = torch.tensor([-0.51, -0.5, -0.1, -0.0, 0.0, 0.1, 0.5, 0.51])
    assert quantize_by_threshold(x, torch.tensor(0.5), grid).tolist() == expected
    doubled = quantize_by_threshold(x.double(), torch.tensor(0.5), grid)
    assert doubled.dtype == torch.float64
    assert doubled.tolist() == expected


def test_thresholds_by_row_infinities_and_nan() -> None:
    x = torch.tensor([[1.0, -3.0], [1.0, -3.0]])
    by_row = quantize_by_threshold(x, torch.tensor([[2.0], [0.5]]), midrise_grid())
    assert by_row.tolist() == [[1, -3], [3, -3]]
    special = torch.tensor([float("inf"), float("-inf"), float("nan")])
    one = torch.tensor(1.0)
    assert quantize_by_threshold(special, one, midrise_grid())[:2].tolist() == [3, -3]
    assert quantize_by_threshold(special, one, midrise_grid())[2].isnan()
    assert quantize_by_threshold(special, one, symmetric_grid(2)).tolist() == [1, -1, 0]


def test_odd_codes_are_stored_as_consecutive_integers() -> None:
    codes = torch.tensor([-3, -1, 1, 3], dtype=torch.int8)
    assert to_stored(codes, 2).tolist() == [-2, -1, 0, 1]  # what two bits in two's complement hold
    assert from_stored(to_stored(codes, 2), 2).tolist() == codes.tolist()
    assert to_stored(codes.numpy(), 2).dtype == codes.numpy().dtype
    assert to_stored(codes, 2).dtype == from_stored(codes, 2).dtype == torch.int8
    for every in (to_stored, from_stored):
        assert every(codes, 1).tolist() == codes.tolist()
