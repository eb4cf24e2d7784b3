"""Scales of weights: TWN's threshold and α, LAQ's alternation. Formulas: `reference.twn` and `reference.laq`.

With a scale for each row, one program does everything for its rows. With one scale, the tensor is cut into at
most SPANS spans; a small kernel adds their float64 partial sums in a fixed order and computes what the next
kernel needs. The device functions know only where each span starts and stops; `midrise` uses some of them.
Note: a Python constant is a float32 in a kernel. 0.7 is written 7/10 in float64, which gives the same double
as Python's 0.7. And an integer argument of 1 is compiled in as a constant, which has no `.to`: see `float64`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mrem_deploy.kernels.gpu.launching import ROWS, blocks, launch
from mrem_deploy.kernels.gpu.numerics import integers
from mrem_deploy.kernels.gpu.partial_sums import sum_of
from mrem_deploy.numerics import Grid

ROW_BLOCK = 256
SPANS = 256  # of an entire tensor: about two programs for each multiprocessor
SPAN_BLOCK = 1024
SPAN_TILE = {"ROWS": 1, "BLOCK": SPAN_BLOCK}


@triton.jit
def float64(number):
    """An integer argument as a float64, also where it is 1 and thus a constant."""
    return tl.full((), number, tl.float64)


@triton.jit
def load_block(
    pointer,  # the flat tensor
    start,  # (ROWS): where each span starts
    stop,  # (ROWS)
    at,
    BLOCK: tl.constexpr,
):
    """One block of each span, `at` elements after its start, zeros past its end: (ROWS, BLOCK)."""
    here = start[:, None] + at + tl.arange(0, BLOCK)[None, :]
    inside = here < stop[:, None]
    return tl.load(pointer + here, mask=inside, other=0.0).to(tl.float32), inside


@triton.jit
def magnitudes(
    weight_ptr,  # the flat tensor
    start,  # (ROWS)
    stop,  # (ROWS)
    length,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Σ|w|"""
    total = tl.zeros((ROWS, BLOCK), tl.float64)
    for at in range(0, length, BLOCK):
        weight, _ = load_block(weight_ptr, start, stop, at, BLOCK)
        total += tl.abs(weight).to(tl.float64)
    return tl.sum(total, axis=1)


@triton.jit
def kept_magnitudes(
    weight_ptr,  # the flat tensor
    start,  # (ROWS)
    stop,  # (ROWS)
    length,
    threshold,  # (ROWS)
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Σ|w| and the count, over |w| > Δ. A NaN is not above Δ, but NaN·0 is NaN, so it is added."""
    total = tl.zeros((ROWS, BLOCK), tl.float64)
    count = tl.zeros((ROWS, BLOCK), tl.float64)
    for at in range(0, length, BLOCK):
        weight, _ = load_block(weight_ptr, start, stop, at, BLOCK)
        magnitude = tl.abs(weight)
        kept = magnitude > threshold[:, None]
        total += tl.where(kept | (magnitude != magnitude), magnitude, 0.0).to(tl.float64)
        count += kept.to(tl.float64)
    return tl.sum(total, axis=1), tl.sum(count, axis=1)


@triton.jit
def laq_sums(
    weight_ptr,  # the flat tensor
    diagonal_ptr,  # like weight, or None
    start,  # (ROWS)
    stop,  # (ROWS)
    length,
    alpha,  # (ROWS)
    low,
    high,
    zero_point,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ΣD·w·b and ΣD·b²"""
    numerator = tl.zeros((ROWS, BLOCK), tl.float64)
    denominator = tl.zeros((ROWS, BLOCK), tl.float64)
    for at in range(0, length, BLOCK):
        weight, inside = load_block(weight_ptr, start, stop, at, BLOCK)
        codes = integers(weight, alpha[:, None], low, high).to(tl.float64) + zero_point
        codes = tl.where(inside, codes, 0.0)
        weighted, norm = weight.to(tl.float64), codes * codes
        if diagonal_ptr is not None:
            diagonal, _ = load_block(diagonal_ptr, start, stop, at, BLOCK)
            weighted, norm = weighted * diagonal.to(tl.float64), norm * diagonal.to(tl.float64)
        numerator += weighted * codes
        denominator += norm
    return tl.sum(numerator, axis=1), tl.sum(denominator, axis=1)


@triton.jit
def twn_threshold(total, count):
    seven_tenths = tl.full((), 7.0, tl.float64) / tl.full((), 10.0, tl.float64)
    return (seven_tenths * total / float64(count)).to(tl.float32)


@triton.jit
def twn_alpha(total, kept):
    """In a tensor of zeros nothing is kept; its scale is 1."""
    return tl.where(kept > 0, total / tl.maximum(kept, 1.0), 1.0).to(tl.float32)


@triton.jit
def laq_start(start, total, count):
    mean = (total / float64(count)).to(tl.float32)
    return start * tl.where(mean > 0, mean, 1.0)


@triton.jit
def laq_step(alpha, numerator, denominator):
    """An alternation whose sums give no positive α keeps the last one."""
    usable = (denominator > 0) & (numerator > 0)
    found = numerator / tl.where(usable, denominator, 1.0)
    return tl.where(usable, found.to(tl.float32), alpha)


# -- a scale for each row ----------------------------------------------------------------------------------


@triton.jit
def twn_rows_kernel(
    weight_ptr,  # (rows, columns), row-major
    threshold_ptr,  # (rows)
    alpha_ptr,  # (rows)
    rows,
    columns,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = row * columns
    stop = tl.where(row < rows, start + columns, start)
    threshold = twn_threshold(magnitudes(weight_ptr, start, stop, columns, ROWS, BLOCK), columns)
    total, kept = kept_magnitudes(weight_ptr, start, stop, columns, threshold, ROWS, BLOCK)
    tl.store(threshold_ptr + row, threshold, mask=row < rows)
    tl.store(alpha_ptr + row, twn_alpha(total, kept), mask=row < rows)


@triton.jit
def laq_rows_kernel(
    weight_ptr,  # (rows, columns), row-major
    diagonal_ptr,  # like weight, or None
    start_ptr,  # (1), or with stride_start 1 (rows)
    alpha_ptr,  # (rows)
    rows,
    columns,
    stride_start,
    iterations,
    low,
    high,
    zero_point,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = row * columns
    stop = tl.where(row < rows, start + columns, start)
    total = magnitudes(weight_ptr, start, stop, columns, ROWS, BLOCK)
    alpha = laq_start(tl.load(start_ptr + row * stride_start, mask=row < rows, other=1.0), total, columns)
    for _ in range(iterations):
        numerator, denominator = laq_sums(
            weight_ptr, diagonal_ptr, start, stop, columns, alpha, low, high, zero_point, ROWS, BLOCK
        )
        alpha = laq_step(alpha, numerator, denominator)
    tl.store(alpha_ptr + row, alpha, mask=row < rows)


# -- one scale: partial sums of spans, then one program -----------------------------------------------------


@triton.jit
def magnitude_spans_kernel(
    weight_ptr,  # (count)
    partial_ptr,  # float64 (spans)
    count,
    span,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = number.to(tl.int64) * span
    total = magnitudes(weight_ptr, start, tl.minimum(start + span, count), span, ROWS, BLOCK)
    tl.store(partial_ptr + number, total, mask=start < count)


@triton.jit
def twn_threshold_kernel(
    partial_ptr,  # float64 (spans)
    threshold_ptr,  # (1)
    count,
    spans,
    BLOCK: tl.constexpr,
):
    tl.store(threshold_ptr, twn_threshold(sum_of(partial_ptr, spans, BLOCK), count))


@triton.jit
def kept_spans_kernel(
    weight_ptr,  # (count)
    threshold_ptr,  # (1)
    partial_ptr,  # float64 (2, spans): sums, counts
    count,
    span,
    spans,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = number.to(tl.int64) * span
    stop = tl.minimum(start + span, count)
    threshold = tl.load(threshold_ptr + tl.zeros((ROWS,), tl.int32))
    total, kept = kept_magnitudes(weight_ptr, start, stop, span, threshold, ROWS, BLOCK)
    tl.store(partial_ptr + number, total, mask=start < count)
    tl.store(partial_ptr + spans + number, kept, mask=start < count)


@triton.jit
def twn_alpha_kernel(
    partial_ptr,  # float64 (2, spans): sums, counts
    alpha_ptr,  # (1)
    spans,
    BLOCK: tl.constexpr,
):
    total, kept = sum_of(partial_ptr, spans, BLOCK), sum_of(partial_ptr + spans, spans, BLOCK)
    tl.store(alpha_ptr, twn_alpha(total, kept))


@triton.jit
def laq_start_kernel(
    partial_ptr,  # float64 (spans)
    start_ptr,  # (1)
    alpha_ptr,  # (1)
    count,
    spans,
    BLOCK: tl.constexpr,
):
    tl.store(alpha_ptr, laq_start(tl.load(start_ptr), sum_of(partial_ptr, spans, BLOCK), count))


@triton.jit
def laq_spans_kernel(
    weight_ptr,  # (count)
    diagonal_ptr,  # (count) or None
    alpha_ptr,  # (1)
    partial_ptr,  # float64 (2, spans): numerators, denominators
    count,
    span,
    spans,
    low,
    high,
    zero_point,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = number.to(tl.int64) * span
    stop = tl.minimum(start + span, count)
    alpha = tl.load(alpha_ptr + tl.zeros((ROWS,), tl.int32))
    numerator, denominator = laq_sums(
        weight_ptr, diagonal_ptr, start, stop, span, alpha, low, high, zero_point, ROWS, BLOCK
    )
    tl.store(partial_ptr + number, numerator, mask=start < count)
    tl.store(partial_ptr + spans + number, denominator, mask=start < count)


@triton.jit
def laq_step_kernel(
    partial_ptr,  # float64 (2, spans): numerators, denominators
    alpha_ptr,  # (1)
    spans,
    BLOCK: tl.constexpr,
):
    numerator, denominator = sum_of(partial_ptr, spans, BLOCK), sum_of(partial_ptr + spans, spans, BLOCK)
    tl.store(alpha_ptr, laq_step(tl.load(alpha_ptr), numerator, denominator))


# -- launchers ---------------------------------------------------------------------------------------------


def row_block(columns: int) -> int:
    return min(ROW_BLOCK, int(triton.next_power_of_2(columns)))


def spans_of(count: int) -> tuple[int, int]:
    """The elements of a span, a multiple of a block, and the number of spans."""
    span = blocks(blocks(count, SPANS), SPAN_BLOCK) * SPAN_BLOCK
    return span, blocks(count, span)


def twn(weight: torch.Tensor, per_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    weight = weight.contiguous()
    shape = (*weight.shape[:-1], 1) if per_row else ()
    threshold, alpha = (torch.empty(shape, dtype=torch.float32, device=weight.device) for _ in range(2))
    if per_row:
        rows, columns = alpha.numel(), weight.shape[-1]
        tile = {"ROWS": ROWS, "BLOCK": row_block(columns)}
        launch(twn_rows_kernel, blocks(rows, ROWS), weight, threshold, alpha, rows, columns, **tile)
        return threshold, alpha
    count = weight.numel()
    span, spans = spans_of(count)
    partial = torch.empty(2, spans, dtype=torch.float64, device=weight.device)
    launch(magnitude_spans_kernel, spans, weight, partial, count, span, **SPAN_TILE)
    launch(twn_threshold_kernel, 1, partial, threshold, count, spans, BLOCK=SPANS)
    launch(kept_spans_kernel, spans, weight, threshold, partial, count, span, spans, **SPAN_TILE)
    launch(twn_alpha_kernel, 1, partial, alpha, spans, BLOCK=SPANS)
    return threshold, alpha


def laq(
    weight: torch.Tensor,
    start: torch.Tensor,
    diagonal: torch.Tensor | None,
    grid: Grid,
    iterations: int,
    per_row: bool,
) -> torch.Tensor:
    weight, start = weight.contiguous(), start.contiguous()
    diagonal = None if diagonal is None else diagonal.contiguous()
    shape = (*weight.shape[:-1], 1) if per_row else ()
    alpha = torch.empty(shape, dtype=torch.float32, device=weight.device)
    codes = float(grid.low - grid.zero_point), float(grid.high - grid.zero_point), float(grid.zero_point)
    if per_row:
        rows, columns = alpha.numel(), weight.shape[-1]
        numbers = rows, columns, int(start.numel() > 1), iterations, *codes
        tile = {"ROWS": ROWS, "BLOCK": row_block(columns)}
        launch(laq_rows_kernel, blocks(rows, ROWS), weight, diagonal, start, alpha, *numbers, **tile)
        return alpha
    count = weight.numel()
    span, spans = spans_of(count)
    partial = torch.empty(2, spans, dtype=torch.float64, device=weight.device)
    launch(magnitude_spans_kernel, spans, weight, partial, count, span, **SPAN_TILE)
    launch(laq_start_kernel, 1, partial, start, alpha, count, spans, BLOCK=SPANS)
    for _ in range(iterations):
        sizes = count, span, spans
        launch(laq_spans_kernel, spans, weight, diagonal, alpha, partial, *sizes, *codes, **SPAN_TILE)
        launch(laq_step_kernel, 1, partial, alpha, spans, BLOCK=SPANS)
    return alpha
