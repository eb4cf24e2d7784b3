"""Integers of a matrix in int8, made once for a matmul in which many tiles would make them again.

An integer C = code − z of an unsigned 8-bit grid is between −z and 255 − z and may not fit int8. So C − d is
stored, with d = 0 if C fits and d = 128 − z otherwise, and the matmul corrects for d with the sums over each
row. Note: int8 has no NaN. `poison` has 0 or NaN for each row, and the matmul adds it to its result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mrem_deploy.kernels.gpu.launching import ROWS, blocks, launch
from mrem_deploy.kernels.gpu.numerics import by_threshold, integers
from mrem_deploy.numerics import Grid

LARGEST_BLOCK = 512


@triton.jit
def carry(c, offset, inside):
    """C − d as int8, 0 outside of the matrix, so that sums do not count it; and whether C is NaN."""
    is_nan = (c != c) & inside
    return tl.where(inside & (c == c), c - offset, 0.0).to(tl.int8), is_nan


@triton.jit
def codes_kernel(
    x_ptr,  # (rows, columns), any strides
    scale_ptr,  # (1), or with stride_scale 1 (rows)
    threshold_ptr,  # like scale; None if integers come from rounding
    codes_ptr,  # int8 (rows, columns), row-major: C − d
    sums_ptr,  # int32 (rows): Σ(C − d)
    poison_ptr,  # float32 (rows): 0, or NaN if the row has one
    rows,
    columns,
    stride_row,
    stride_column,
    stride_scale,
    low,
    high,
    offset,
    inner,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = row < rows
    scale = tl.load(scale_ptr + row * stride_scale, mask=in_rows, other=1.0)
    if threshold_ptr is not None:
        threshold = tl.load(threshold_ptr + row * stride_scale, mask=in_rows, other=0.0)
    total = tl.zeros((ROWS, BLOCK), tl.int32)
    nans = tl.zeros((ROWS, BLOCK), tl.int32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = in_rows[:, None] & (column < columns)[None, :]
        x_at = x_ptr + row[:, None] * stride_row + column[None, :] * stride_column
        x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
        if threshold_ptr is None:
            c = integers(x, scale[:, None], low, high)
        else:
            c = by_threshold(x, threshold[:, None], inner, high)
        carried, is_nan = carry(c, offset, inside)
        tl.store(codes_ptr + row[:, None] * columns + column[None, :], carried, mask=inside)
        total += carried.to(tl.int32)
        nans += is_nan.to(tl.int32)
    tl.store(sums_ptr + row, tl.sum(total, axis=1), mask=in_rows)
    tl.store(poison_ptr + row, tl.where(tl.sum(nans, axis=1) > 0, float("nan"), 0.0), mask=in_rows)


class Range(NamedTuple):
    """The integers C = code − z of a grid, the d that is subtracted to fit int8, and the least |code|."""

    low: float
    high: float
    offset: int
    inner: float

    @property
    def largest(self) -> int:
        return int(max(-self.low, self.high))


def int8_range(grid: Grid) -> Range | None:
    """None if no offset makes them fit: more than 256 codes."""
    low, high = grid.low - grid.zero_point, grid.high - grid.zero_point
    if high - low > 255:
        return None
    return Range(low, high, 0 if low >= -128 and high <= 127 else low + 128, grid.inner)


class Codes(NamedTuple):
    """A matrix stored in int8, its sums over rows, and 0 or NaN for each row."""

    carried: torch.Tensor  # int8 (rows, columns)
    sums: torch.Tensor  # int32 (rows)
    poison: torch.Tensor  # float32 (rows)


def make_codes(x: torch.Tensor, scale: torch.Tensor, threshold: torch.Tensor | None, span: Range) -> Codes:
    """x (rows, columns) with any strides; scale and threshold one number, or one for each row."""
    rows, columns = x.shape
    codes = Codes(
        torch.empty(rows, columns, dtype=torch.int8, device=x.device),
        torch.empty(rows, dtype=torch.int32, device=x.device),
        torch.empty(rows, dtype=torch.float32, device=x.device),
    )
    stride_scale = 0 if scale.numel() == 1 else 1
    block = min(LARGEST_BLOCK, int(triton.next_power_of_2(columns)))
    numbers = rows, columns, *x.stride(), stride_scale, *span
    launch(codes_kernel, blocks(rows, ROWS), x, scale, threshold, *codes, *numbers, ROWS=ROWS, BLOCK=block)
    return codes
