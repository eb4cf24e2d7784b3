"""The training ops by the C++ extension, with the contract of `reference`, for float32 on the CPU.

Elementwise work (quantizing, its gradients, scaling, sums) is C++, one pass each; matmuls are torch's own, in
float32, on the operands made there. Other types and devices go to the reference.

Note: nothing is kept from one call to the next. A matmul's backward pass quantizes X and W again, which costs
a few percent of the matmul and the memory of one operand at a time: the operand of dX is freed before that of
dW is made.
"""

from __future__ import annotations

from typing import Any

import torch

from mrem_deploy.kernels import backends, reference
from mrem_deploy.kernels.quantized import Quantized
from mrem_deploy.numerics import Grid

Tensor = torch.Tensor
MOST_STRIDED = 4  # dimensions of an array that the extension reads in place
MOST_THREADS = 1024  # kMostThreads in bindings.cpp


def _load() -> Any:
    found = backends.extension()
    if found.module is None:
        raise ImportError(found.problem)
    backends.active_target()  # a wrong MREM_CPU_TARGET is an error here, not in the first kernel
    return found.module


_cpu = _load()


def serves(*tensors: Tensor | None) -> bool:
    """Whether the extension computes with all of them."""
    return all(t is None or (t.dtype == torch.float32 and t.device.type == "cpu") for t in tensors)


def _serves_operands(left: Quantized, right: Quantized, *tensors: Tensor | None) -> bool:
    return serves(left.scale, left.threshold, right.scale, right.threshold, *tensors)


def _threads() -> int:
    return min(torch.get_num_threads(), MOST_THREADS)


def _array(x: Tensor) -> Any:
    return x.detach().numpy()


def _plain(x: Tensor) -> Any:
    return x.detach().contiguous().numpy()


def _readable(x: Tensor, rows: bool = False) -> Tensor:
    """x itself if the extension can read it in place; for scales per row it must be contiguous."""
    in_place = x.is_contiguous() or (not rows and 0 < x.dim() <= MOST_STRIDED and x.stride(-1) == 1)
    return x if in_place else x.contiguous()


def _bounds(grid: Grid) -> tuple[int, int]:
    return grid.low - grid.zero_point, grid.high - grid.zero_point


def _quantized(x: Tensor, scale: Tensor, grid: Grid, dequantize: bool) -> Tensor:
    """The integers of x, or the values that they stand for; contiguous."""
    out = torch.empty(x.shape)
    x = _readable(x, rows=scale.numel() != 1)
    _cpu.quantize(_array(x), _plain(scale), *_bounds(grid), dequantize, out.numpy(), _threads())
    return out


def _operand(x: Tensor, how: Quantized, dequantize: bool) -> Tensor:
    """As `_quantized`, for an operand that may have a threshold."""
    scale, threshold, grid = how.scale, how.threshold, how.grid
    if threshold is None:
        return _quantized(x, scale, grid, dequantize)
    if threshold.numel() != scale.numel():  # one for all and one per row: give both one per row
        threshold, scale = (t.expand(x.shape[0], 1) if t.numel() == 1 else t for t in (threshold, scale))
    out = torch.empty(x.shape)
    factor = _plain(scale) if dequantize else None
    levels = grid.inner, grid.high
    threads = _threads()
    _cpu.quantize_by_threshold(_plain(x), _plain(threshold), *levels, factor, out.numpy(), threads)
    return out


def _batched_operand(x: Tensor, how: Quantized, dequantize: bool) -> Tensor:
    """(batch, M, K). For a transposed view, the result is the transposed view of a contiguous tensor."""
    if _is_transposed(x):
        return _batched_operand(x.transpose(-1, -2), how, dequantize).transpose(-1, -2)
    return _operand(x, how, dequantize).reshape(-1, *x.shape[-2:])


def _is_transposed(x: Tensor) -> bool:
    return x.stride(-1) != 1 and x.stride(-2) == 1


def _backward_into(by_quantized: Tensor, x: Tensor, how: Quantized) -> Tensor:
    """Turn the gradient of x̂ into that of x in place; returns the gradient of the scale."""
    scale, grid = how.scale, how.grid
    grad_scale = torch.empty(scale.shape)
    array = by_quantized.numpy()
    x = _readable(x, rows=scale.numel() != 1)
    _cpu.quantize_backward(
        array, _array(x), _plain(scale), *_bounds(grid), array, grad_scale.numpy(), _threads()
    )
    return grad_scale


def _scale_once(product: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """Rule 3 of the reference, in place."""
    scales = left.detach().reshape(-1) * right.detach().reshape(-1)
    _cpu.scale_product(product.numpy(), scales.numpy(), None if bias is None else _plain(bias), _threads())
    return product


def fake_quant(x: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    if not serves(x, scale):
        return reference.fake_quant(x, scale, grid)
    return _quantized(x, scale, grid, dequantize=True)


def fake_quant_backward(grad: Tensor, x: Tensor, scale: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    if not serves(grad, x, scale):
        return reference.fake_quant_backward(grad, x, scale, grid)
    grad_x, grad_scale = torch.empty(x.shape), torch.empty(scale.shape)
    _cpu.quantize_backward(
        _plain(grad),
        _array(_readable(x, rows=scale.numel() != 1)),
        _plain(scale),
        *_bounds(grid),
        grad_x.numpy(),
        grad_scale.numpy(),
        _threads(),
    )
    return grad_x, grad_scale


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, x_quant: Quantized, w_quant: Quantized) -> Tensor:
    if not _serves_operands(x_quant, w_quant, x, weight, bias):
        return reference.linear(x, weight, bias, x_quant, w_quant)
    codes = _operand(x, x_quant, dequantize=False)  # (rows, in)
    weight_codes = _operand(weight, w_quant, dequantize=False)  # (out, in)
    return _scale_once(torch.mm(codes, weight_codes.T), x_quant.scale, w_quant.scale, bias)


def linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    x_quant: Quantized,
    w_quant: Quantized,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not _serves_operands(x_quant, w_quant, grad, x, weight):
        return reference.linear_backward(grad, x, weight, x_quant, w_quant, need_x, need_weight)
    grad_x, grad_x_scale, grad_weight, grad_w_scale = (x.new_empty(0) for _ in range(4))
    if need_x:
        grad_x = torch.mm(grad, _operand(weight, w_quant, dequantize=True))
        grad_x_scale = _backward_into(grad_x, x, x_quant)
    if need_weight:
        grad_weight = torch.mm(grad.T, _operand(x, x_quant, dequantize=True))
        if w_quant.learned:
            grad_w_scale = _backward_into(grad_weight, weight, w_quant)
    return grad_x, grad_x_scale, grad_weight, grad_w_scale


def matmul(a: Tensor, b: Tensor, a_quant: Quantized, b_quant: Quantized) -> Tensor:
    if not _serves_operands(a_quant, b_quant, a, b):
        return reference.matmul(a, b, a_quant, b_quant)
    left = _batched_operand(a, a_quant, dequantize=False)  # (batch, M, K)
    right = _batched_operand(b, b_quant, dequantize=False)  # (batch, K, N)
    product = _scale_once(torch.bmm(left, right), a_quant.scale, b_quant.scale, None)
    return product.view(*a.shape[:-1], b.shape[-1])


def matmul_backward(
    grad: Tensor, a: Tensor, b: Tensor, a_quant: Quantized, b_quant: Quantized
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not _serves_operands(a_quant, b_quant, grad, a, b):
        return reference.matmul_backward(grad, a, b, a_quant, b_quant)
    by_product = grad.reshape(-1, *grad.shape[-2:])  # (batch, M, N)
    right = _batched_operand(b, b_quant, dequantize=True)
    grad_a, grad_a_scale = _operand_gradient(by_product, right.transpose(1, 2), a, a_quant)
    left = _batched_operand(a, a_quant, dequantize=True)
    grad_b, grad_b_scale = _operand_gradient(left.transpose(1, 2), by_product, b, b_quant)
    return grad_a, grad_a_scale, grad_b, grad_b_scale


def _operand_gradient(left: Tensor, right: Tensor, x: Tensor, how: Quantized) -> tuple[Tensor, Tensor]:
    """Gradients of an operand x and of its scale, where left·right is the gradient of x̂; row-major.

    For a transposed view the transposed product is computed: its rows are stored as those of x are.
    """
    if _is_transposed(x):
        swapped, grad_scale = _operand_gradient(
            right.transpose(1, 2), left.transpose(1, 2), x.transpose(-1, -2), how
        )
        return swapped.transpose(-1, -2).contiguous(), grad_scale
    grad_x = torch.bmm(left, right).view(x.shape)
    return grad_x, _backward_into(grad_x, x, how)


def twn(weight: Tensor, per_row: bool) -> tuple[Tensor, Tensor]:
    if not serves(weight):
        return reference.twn(weight, per_row)
    return _threshold_and_scale(_cpu.twn, weight, per_row)


def midrise(weight: Tensor, per_row: bool) -> tuple[Tensor, Tensor]:
    if not serves(weight):
        return reference.midrise(weight, per_row)
    return _threshold_and_scale(_cpu.midrise, weight, per_row)


def _threshold_and_scale(op: Any, weight: Tensor, per_row: bool) -> tuple[Tensor, Tensor]:
    shape = (*weight.shape[:-1], 1) if per_row else ()
    threshold, scale = torch.empty(shape), torch.empty(shape)
    op(_plain(weight), per_row, threshold.numpy(), scale.numpy(), _threads())
    return threshold, scale


def laq(
    weight: Tensor, start: Tensor, diagonal: Tensor | None, grid: Grid, iterations: int, per_row: bool
) -> Tensor:
    if not serves(weight, start, diagonal) or grid.zero_point:
        return reference.laq(weight, start, diagonal, grid, iterations, per_row)
    scale = torch.empty((*weight.shape[:-1], 1) if per_row else ())
    _cpu.laq(
        _plain(weight),
        _plain(start),
        None if diagonal is None else _plain(diagonal),
        grid.low,
        grid.high,
        iterations,
        per_row,
        scale.numpy(),
        _threads(),
    )
    return scale
