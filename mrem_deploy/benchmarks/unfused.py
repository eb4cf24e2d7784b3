"""The rival of the fused ops: quantizers as one writes them in PyTorch, from ordinary operations.

Autograd then keeps what each of them needs: x/s, the clamped ratio, the codes and the quantized copies, of
inputs and of weights. Values and gradients are those of `kernels.reference_ops`, up to rounding (products are
of dequantized numbers here) and to the half step beyond each end of the range, which counts as outside here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from mrem_deploy.kernels.reference import weight_integers
from mrem_deploy.numerics import Grid
from mrem_deploy.quant import layers, quantizers

Tensor = torch.Tensor


def fake_quant(x: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """LSQ: the straight-through estimator on the rounding alone gives its gradients of x and of the step."""
    ratio = (x / scale).clamp(grid.low - grid.zero_point, grid.high - grid.zero_point)
    return (ratio + (ratio.round() - ratio).detach()) * scale


def fake_quant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_scale: Tensor,
    x_grid: Grid,
    w_scale: Tensor,
    w_grid: Grid,
    threshold: Tensor | None = None,
    learned: bool = False,
) -> Tensor:
    if learned:
        quantized = fake_quant(weight, w_scale, w_grid)
    else:
        codes = weight_integers(weight.detach(), w_scale, w_grid, threshold)
        quantized = weight + (codes * w_scale - weight).detach()
    return F.linear(fake_quant(x, x_scale, x_grid), quantized, bias)


def fake_quant_matmul(
    a: Tensor, b: Tensor, a_scale: Tensor, a_grid: Grid, b_scale: Tensor, b_grid: Grid
) -> Tensor:
    return fake_quant(a, a_scale, a_grid) @ fake_quant(b, b_scale, b_grid)


@contextmanager
def unfused() -> Iterator[None]:
    """Inside, quantized layers compute with the functions above."""
    places: list[tuple[Any, str, Any]] = [
        (quantizers, "fake_quant", fake_quant),
        (layers, "fake_quant_linear", fake_quant_linear),
        (layers, "fake_quant_matmul", fake_quant_matmul),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    try:
        for module, name, function in places:
            setattr(module, name, function)
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)
