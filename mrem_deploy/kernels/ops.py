"""The training ops as everyone calls them: what they mean, and checks of their arguments.

    fake_quant         quantize and dequantize with a learned scale (LSQ)
    fake_quant_linear  Y = Q(X)·Q(W)ᵀ + b
    fake_quant_matmul  Y = Q(A)·Q(B), batched: attention's two matmuls
    twn, midrise, laq  scales of weights

The formulas are in `reference`, schema and gradients in `torch_ops`, the choice of a backend in `backends`.
Note: matmuls keep X and W for the backward pass and quantize them again there. They multiply integers and
scale once, in training and in evaluation (rule 3 of `reference`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import torch

from mrem_deploy.kernels import torch_ops
from mrem_deploy.kernels.quantized import Quantized
from mrem_deploy.numerics import Grid

Tensor = torch.Tensor
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def fake_quant(x: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """x̂, differentiable in x and in the scale: one number, or one for each row (x.shape[:-1] + (1,))."""
    _check_values("x", x)
    _check_scale("scale", scale, x, x.shape)
    _check_rounded("grid", grid)
    return torch_ops.fake_quant(x, scale, astuple(grid))


def fake_quant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, x_quant: Quantized, w_quant: Quantized
) -> Tensor:
    """X (…, in), W (out, in) -> (…, out); differentiable in X, W, the bias and the learned scales."""
    _check_values("x", x)
    _check_values("weight", weight, like=x)
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"expected x of shape (…, in) and weight of shape (out, in), got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if bias is not None:
        _check_values("bias", bias, like=x)
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"expected one bias for each of {weight.shape[0]} outputs, got {tuple(bias.shape)}"
            )
    _check_single("x_quant", x_quant, x)
    _check_scale("w_quant.scale", w_quant.scale, x, weight.shape)
    if w_quant.threshold is not None:
        _check_scale("w_quant.threshold", w_quant.threshold, x, weight.shape)
        if w_quant.learned:
            raise ValueError(
                "a weight with a threshold has no learned scale: give either a threshold or learned"
            )
    else:
        _check_rounded("w_quant.grid", w_quant.grid)
    rows = x.reshape(-1, x.shape[-1])
    y = torch_ops.linear(
        rows,
        weight,
        bias,
        x_quant.scale,
        w_quant.scale,
        w_quant.threshold,
        astuple(x_quant.grid),
        astuple(w_quant.grid),
        w_quant.learned,
    )
    return y.reshape(*x.shape[:-1], -1)


def fake_quant_matmul(a: Tensor, b: Tensor, a_quant: Quantized, b_quant: Quantized) -> Tensor:
    """A (…, M, K) times B (…, K, N), same batch dimensions, one scale each; either may be a view."""
    _check_values("a", a)
    _check_values("b", b, like=a)
    fits = a.dim() == b.dim() >= 2 and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2]
    if not fits:
        raise ValueError(f"expected (…, M, K) and (…, K, N), got {tuple(a.shape)} and {tuple(b.shape)}")
    _check_single("a_quant", a_quant, a)
    _check_single("b_quant", b_quant, a)
    return torch_ops.matmul(a, b, a_quant.scale, b_quant.scale, astuple(a_quant.grid), astuple(b_quant.grid))


def twn(weight: Tensor, per_row: bool) -> tuple[Tensor, Tensor]:
    """Threshold and scale of ternary weights. They have no gradient: the weight's passes straight through."""
    _check_values("weight", weight)
    return torch_ops.twn(weight.detach(), per_row)


def midrise(weight: Tensor, per_row: bool) -> tuple[Tensor, Tensor]:
    """Threshold and scale of weights on the midrise grid, ±1 and ±3; without a gradient, as in `twn`."""
    _check_values("weight", weight)
    return torch_ops.midrise(weight.detach(), per_row)


def laq(
    weight: Tensor, start: Tensor, diagonal: Tensor | None, grid: Grid, iterations: int, per_row: bool
) -> Tensor:
    """Loss-aware scale; `start` is the first scale in units of mean|w|, `diagonal` the curvature."""
    _check_values("weight", weight)
    if diagonal is not None:
        _check_values("diagonal", diagonal, like=weight)
        if diagonal.shape != weight.shape:
            raise ValueError(
                f"expected a curvature for each weight, {tuple(weight.shape)}, got {tuple(diagonal.shape)}"
            )
    _check_scale("start", start, weight, weight.shape)
    _check_rounded("grid", grid)
    if (start.numel() == 1) == per_row and weight.numel() != weight.shape[-1]:
        raise ValueError(
            f"expected {'one start for each row' if per_row else 'one start'}, got {start.numel()}"
        )
    return torch_ops.laq(weight.detach(), start, diagonal, astuple(grid), iterations, per_row)


def _check_values(name: str, x: Tensor, like: Tensor | None = None) -> None:
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"expected {name} to be a tensor of 16-, 32- or 64-bit floats, got {got}")
    if like is not None and (x.dtype != like.dtype or x.device != like.device):
        raise TypeError(
            f"expected {name} as {like.dtype} on {like.device}, like the other operand, got {x.dtype} on "
            f"{x.device}: convert one of them with .to()"
        )
    if x.numel() == 0:
        raise ValueError(f"{name} is empty, {tuple(x.shape)}: skip empty batches")


def _check_single(name: str, how: Quantized, x: Tensor) -> None:
    """Activations are quantized per tensor, and never by a threshold."""
    if how.scale.numel() != 1:
        raise ValueError(
            f"expected one {name}.scale: activations are quantized per tensor, got {how.scale.numel()}"
        )
    if how.threshold is not None:
        raise ValueError(f"expected no {name}.threshold: only a linear's weight can have one")
    _check_scale(f"{name}.scale", how.scale, x, x.shape)
    _check_rounded(f"{name}.grid", how.grid)


def _check_rounded(name: str, grid: Grid) -> None:
    """Rounding gives consecutive integers."""
    if grid.spacing != 1:
        raise ValueError(f"expected {name} of consecutive integers, got {grid}: it needs a threshold")


def _check_scale(name: str, scale: Tensor, x: Tensor, shape: Sequence[int]) -> None:
    expected = torch.float64 if x.dtype == torch.float64 else torch.float32
    if not isinstance(scale, Tensor) or scale.dtype != expected or scale.device != x.device:
        got = f"{scale.dtype} on {scale.device}" if isinstance(scale, Tensor) else type(scale).__name__
        raise TypeError(f"expected {name} as {expected} on {x.device}, got {got}")
    if scale.numel() != 1 and tuple(scale.shape) != (*shape[:-1], 1):
        raise ValueError(
            f"expected {name} to be one number or one for each row, {(*shape[:-1], 1)}, got "
            f"{tuple(scale.shape)}"
        )
