"""x̂ = s·(clamp(round(x/s) + z, low, high) − z), and LSQ's gradients, each in one pass over memory.

The tensor is read as rows with a scale each; with one scale for all it is a single long row. Note: the
gradient of a scale is not an atomic sum. Each block writes a partial sum, and these are added in a fixed
order, in float64 (rule 4 of `reference`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mrem_deploy.kernels.gpu.launching import blocks, launch
from mrem_deploy.kernels.gpu.numerics import integers, lsq
from mrem_deploy.kernels.gpu.partial_sums import add_partial_sums
from mrem_deploy.numerics import Grid

LARGEST_BLOCK = 2048  # elements; limited by memory, so one size is good for all


@triton.jit
def fake_quant_kernel(
    x_ptr,  # (rows, columns), row-major
    scale_ptr,  # (rows)
    y_ptr,  # (rows, columns), row-major
    columns,
    low,
    high,
    BLOCK: tl.constexpr,
):
    per_row = tl.cdiv(columns, BLOCK)
    row, block = tl.program_id(0) // per_row, tl.program_id(0) % per_row
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = row.to(tl.int64) * columns + at
    inside = at < columns
    scale = tl.load(scale_ptr + row)
    x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
    y = integers(x, scale, low, high) * scale
    tl.store(y_ptr + here, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def fake_quant_backward_kernel(
    grad_ptr,  # (rows, columns), row-major
    x_ptr,  # (rows, columns), row-major
    scale_ptr,  # (rows)
    grad_x_ptr,  # (rows, columns), row-major
    partial_ptr,  # float64 (rows, blocks of a row): sums of the scale's gradient
    columns,
    low,
    high,
    BLOCK: tl.constexpr,
):
    per_row = tl.cdiv(columns, BLOCK)
    row, block = tl.program_id(0) // per_row, tl.program_id(0) % per_row
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = row.to(tl.int64) * columns + at
    inside = at < columns
    scale = tl.load(scale_ptr + row)
    x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + here, mask=inside, other=0.0).to(tl.float32)
    grad_x, by_scale = lsq(grad, x, scale, low, high)
    tl.store(grad_x_ptr + here, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
    by_scale = tl.where(inside, by_scale, 0.0)  # past the end it is 0/0 if the scale is 0
    tl.store(partial_ptr + tl.program_id(0), tl.sum(by_scale.to(tl.float64), axis=0))


def _layout(x: torch.Tensor, scale: torch.Tensor) -> tuple[int, int, int]:
    """Rows, columns, and the block that suits them."""
    columns = x.numel() if scale.numel() == 1 else x.shape[-1]
    return x.numel() // columns, columns, min(LARGEST_BLOCK, int(triton.next_power_of_2(columns)))


def fake_quant(x: torch.Tensor, scale: torch.Tensor, grid: Grid) -> torch.Tensor:
    x, scale = x.contiguous(), scale.contiguous()
    y = torch.empty_like(x)
    rows, columns, block = _layout(x, scale)
    bounds = float(grid.low - grid.zero_point), float(grid.high - grid.zero_point)
    launch(fake_quant_kernel, rows * blocks(columns, block), x, scale, y, columns, *bounds, BLOCK=block)
    return y


def fake_quant_backward(
    grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    grad, x, scale = grad.contiguous(), x.contiguous(), scale.contiguous()
    grad_x = torch.empty_like(grad)
    rows, columns, block = _layout(x, scale)
    partial = torch.empty(rows, blocks(columns, block), dtype=torch.float64, device=x.device)
    bounds = float(grid.low - grid.zero_point), float(grid.high - grid.zero_point)
    tensors = grad, x, scale, grad_x, partial
    launch(fake_quant_backward_kernel, partial.numel(), *tensors, columns, *bounds, BLOCK=block)
    return grad_x, add_partial_sums(partial, scale.shape)
