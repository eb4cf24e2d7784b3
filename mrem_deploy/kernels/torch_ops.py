"""The ops as torch knows them: schema, shapes for the compiler, gradients. Call them through `ops`.

A schema has no room for `Quantized`, so it is passed as its parts, and a grid as its integers. Note:
outputs are always row-major, whatever the strides of the inputs, because the compiler is promised that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mrem_deploy.kernels import backends
from mrem_deploy.kernels.quantized import Quantized
from mrem_deploy.numerics import Grid

Tensor = torch.Tensor


@torch.library.custom_op("mrem::fake_quant", mutates_args=())
def fake_quant(x: Tensor, scale: Tensor, grid: Sequence[int]) -> Tensor:
    return backends.ops_for(x).fake_quant(x, scale, Grid(*grid)).contiguous()


@torch.library.custom_op("mrem::fake_quant_backward", mutates_args=())
def fake_quant_backward(grad: Tensor, x: Tensor, scale: Tensor, grid: Sequence[int]) -> tuple[Tensor, Tensor]:
    grad_x, grad_scale = backends.ops_for(x).fake_quant_backward(grad, x, scale, Grid(*grid))
    return grad_x.contiguous(), grad_scale


@torch.library.custom_op("mrem::fake_quant_linear", mutates_args=())
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_scale: Tensor,
    w_scale: Tensor,
    threshold: Tensor | None,
    x_grid: Sequence[int],
    w_grid: Sequence[int],
    learned: bool,
) -> Tensor:
    x_quant = Quantized(x_scale, Grid(*x_grid))
    w_quant = Quantized(w_scale, Grid(*w_grid), threshold, learned)
    return backends.ops_for(x).linear(x, weight, bias, x_quant, w_quant)


@torch.library.custom_op("mrem::fake_quant_linear_backward", mutates_args=())
def linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    threshold: Tensor | None,
    x_grid: Sequence[int],
    w_grid: Sequence[int],
    learned: bool,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x_quant = Quantized(x_scale, Grid(*x_grid))
    w_quant = Quantized(w_scale, Grid(*w_grid), threshold, learned)
    return backends.ops_for(x).linear_backward(grad, x, weight, x_quant, w_quant, need_x, need_weight)


@torch.library.custom_op("mrem::fake_quant_matmul", mutates_args=())
def matmul(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_grid: Sequence[int], b_grid: Sequence[int]
) -> Tensor:
    a_quant, b_quant = Quantized(a_scale, Grid(*a_grid)), Quantized(b_scale, Grid(*b_grid))
    return backends.ops_for(a).matmul(a, b, a_quant, b_quant)


@torch.library.custom_op("mrem::fake_quant_matmul_backward", mutates_args=())
def matmul_backward(
    grad: Tensor,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_grid: Sequence[int],
    b_grid: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a_quant, b_quant = Quantized(a_scale, Grid(*a_grid)), Quantized(b_scale, Grid(*b_grid))
    return backends.ops_for(a).matmul_backward(grad, a, b, a_quant, b_quant)


@torch.library.custom_op("mrem::twn", mutates_args=())
def twn(weight: Tensor, per_row: bool) -> tuple[Tensor, Tensor]:
    return backends.ops_for(weight).twn(weight, per_row)


@torch.library.custom_op("mrem::midrise", mutates_args=())
def midrise(weight: Tensor, per_row: bool) -> tuple[Tensor, Tensor]:
    return backends.ops_for(weight).midrise(weight, per_row)


@torch.library.custom_op("mrem::laq", mutates_args=())
def laq(
    weight: Tensor,
    start: Tensor,
    diagonal: Tensor | None,
    grid: Sequence[int],
    iterations: int,
    per_row: bool,
) -> Tensor:
    return backends.ops_for(weight).laq(weight, start, diagonal, Grid(*grid), iterations, per_row)


# Shapes and types of the outputs, for the compiler.


@fake_quant.register_fake
def _(x: Tensor, scale: Tensor, grid: Sequence[int]) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@fake_quant_backward.register_fake
def _(grad: Tensor, x: Tensor, scale: Tensor, grid: Sequence[int]) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), _plain_like(scale)


@linear.register_fake
def _(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@linear_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    threshold: Tensor | None,
    x_grid: Sequence[int],
    w_grid: Sequence[int],
    learned: bool,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        _plain_like(x) if need_x else x.new_empty(0),
        _plain_like(x_scale) if need_x else x.new_empty(0),
        _plain_like(weight) if need_weight else x.new_empty(0),
        _plain_like(w_scale) if need_weight and learned else x.new_empty(0),
    )


@matmul.register_fake
def _(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


@matmul_backward.register_fake
def _(
    grad: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _plain_like(a), _plain_like(a_scale), _plain_like(b), _plain_like(b_scale)


@twn.register_fake
@midrise.register_fake
def _(weight: Tensor, per_row: bool) -> tuple[Tensor, Tensor]:
    return _weight_scale(weight, per_row), _weight_scale(weight, per_row)


@laq.register_fake
def _(weight: Tensor, start: Tensor, *rest: Any) -> Tensor:
    return _weight_scale(weight, per_row=rest[-1])


def _plain_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)  # row-major, whatever the strides of x


def _weight_scale(weight: Tensor, per_row: bool) -> Tensor:
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return weight.new_empty((*weight.shape[:-1], 1) if per_row else (), dtype=dtype)


# Gradients. Arguments that are not tensors have none.


def _keep_fake_quant(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, scale, ctx.grid = inputs
    ctx.save_for_backward(x, scale)


def _grad_fake_quant(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, scale = ctx.saved_tensors
    grad_x, grad_scale = fake_quant_backward(grad, x, scale, ctx.grid)
    return grad_x, grad_scale, None


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, x_scale, w_scale, threshold, ctx.x_grid, ctx.w_grid, ctx.learned = inputs
    ctx.save_for_backward(x, weight, x_scale, w_scale, threshold)


def _grad_linear(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    need_x, need_weight, need_bias, need_x_scale, need_w_scale, *_ = ctx.needs_input_grad
    need_x, need_weight = need_x or need_x_scale, need_weight or need_w_scale
    parts = linear_backward(
        grad, *ctx.saved_tensors, ctx.x_grid, ctx.w_grid, ctx.learned, need_x, need_weight
    )
    grad_x, grad_x_scale, grad_weight, grad_w_scale = parts
    return (
        grad_x if need_x else None,
        grad_weight if need_weight else None,
        grad.sum(dim=0) if need_bias else None,
        grad_x_scale if need_x else None,
        grad_w_scale if need_weight and ctx.learned else None,
        None,
        None,
        None,
        None,
    )


def _keep_matmul(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, a_scale, b_scale, ctx.a_grid, ctx.b_grid = inputs
    ctx.save_for_backward(a, b, a_scale, b_scale)


def _grad_matmul(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_a, grad_a_scale, grad_b, grad_b_scale = matmul_backward(
        grad, *ctx.saved_tensors, ctx.a_grid, ctx.b_grid
    )
    return grad_a, grad_b, grad_a_scale, grad_b_scale, None, None


fake_quant.register_autograd(_grad_fake_quant, setup_context=_keep_fake_quant)
linear.register_autograd(_grad_linear, setup_context=_keep_linear)
matmul.register_autograd(_grad_matmul, setup_context=_keep_matmul)
