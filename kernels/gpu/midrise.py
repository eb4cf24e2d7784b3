"""Threshold and scale of weights on the midrise grid, ±1 and ±3. The formula: `reference.midrise`.

q is 3 where |w| > Δ and 1 elsewhere, so Σ|w|q and Σq² follow from the sums that TWN needs: of all |w|, and of
those above Δ with their number. The rest is as in `weight_scales`: a program for some rows, or spans.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mrem_deploy.kernels.gpu.launching import ROWS, blocks, launch
from mrem_deploy.kernels.gpu.partial_sums import sum_of
from mrem_deploy.kernels.gpu.weight_scales import (
    SPAN_TILE,
    SPANS,
    float64,
    kept_magnitudes,
    kept_spans_kernel,
    magnitude_spans_kernel,
    magnitudes,
    row_block,
    spans_of,
)
from mrem_deploy.kernels.reference import MIDRISE_ALTERNATIONS, MIDRISE_LEAST, MIDRISE_START

START = tl.constexpr(MIDRISE_START)  # 5/8 and a power of two: exact in float32
LEAST = tl.constexpr(MIDRISE_LEAST)
ALTERNATIONS = tl.constexpr(MIDRISE_ALTERNATIONS)


@triton.jit
def scale_of(numerator, denominator):
    """Rounded once, and at least LEAST; NaN stays NaN."""
    found = (numerator / denominator).to(tl.float32)
    return tl.where(found < LEAST, LEAST, found)


@triton.jit
def first_scale(total, count):
    return scale_of(total * START, float64(count))


@triton.jit
def next_scale(total, count, above, number):
    """Σ|w|q / Σq², from Σ|w| over all `count` weights and over the `number` of those above Δ."""
    return scale_of(total + 2 * above, float64(count) + 8 * number)


@triton.jit
def midrise_rows_kernel(
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
    total = magnitudes(weight_ptr, start, stop, columns, ROWS, BLOCK)
    alpha = first_scale(total, columns)
    for _ in range(ALTERNATIONS):
        above, number = kept_magnitudes(weight_ptr, start, stop, columns, 2 * alpha, ROWS, BLOCK)
        alpha = next_scale(total, columns, above, number)
    tl.store(threshold_ptr + row, 2 * alpha, mask=row < rows)
    tl.store(alpha_ptr + row, alpha, mask=row < rows)


@triton.jit
def midrise_first_kernel(
    total_ptr,  # float64 (spans): sums of |w|
    threshold_ptr,  # (1)
    count,
    spans,
    BLOCK: tl.constexpr,
):
    tl.store(threshold_ptr, 2 * first_scale(sum_of(total_ptr, spans, BLOCK), count))


@triton.jit
def midrise_next_kernel(
    total_ptr,  # float64 (spans): sums of |w|
    partial_ptr,  # float64 (2, spans): sums of |w| above the threshold, counts
    threshold_ptr,  # (1)
    alpha_ptr,  # (1)
    count,
    spans,
    BLOCK: tl.constexpr,
):
    total = sum_of(total_ptr, spans, BLOCK)
    above, number = sum_of(partial_ptr, spans, BLOCK), sum_of(partial_ptr + spans, spans, BLOCK)
    alpha = next_scale(total, count, above, number)
    tl.store(threshold_ptr, 2 * alpha)
    tl.store(alpha_ptr, alpha)


def midrise(weight: torch.Tensor, per_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    weight = weight.contiguous()
    shape = (*weight.shape[:-1], 1) if per_row else ()
    threshold, alpha = (torch.empty(shape, dtype=torch.float32, device=weight.device) for _ in range(2))
    if per_row:
        rows, columns = alpha.numel(), weight.shape[-1]
        tile = {"ROWS": ROWS, "BLOCK": row_block(columns)}
        launch(midrise_rows_kernel, blocks(rows, ROWS), weight, threshold, alpha, rows, columns, **tile)
        return threshold, alpha
    count = weight.numel()
    span, spans = spans_of(count)
    total = torch.empty(spans, dtype=torch.float64, device=weight.device)
    partial = torch.empty(2, spans, dtype=torch.float64, device=weight.device)
    launch(magnitude_spans_kernel, spans, weight, total, count, span, **SPAN_TILE)
    launch(midrise_first_kernel, 1, total, threshold, count, spans, BLOCK=SPANS)
    for _ in range(MIDRISE_ALTERNATIONS):
        launch(kept_spans_kernel, spans, weight, threshold, partial, count, span, spans, **SPAN_TILE)
        launch(midrise_next_kernel, 1, total, partial, threshold, alpha, count, spans, BLOCK=SPANS)
    return threshold, alpha
