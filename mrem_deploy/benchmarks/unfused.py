"""The rival of the fused ops: quantizers as one writes them in PyTorch, from ordinary operations.

Autograd then keeps what each operation needs: x/s, the clamped ratio, the codes and the quantized copies, of
inputs and of weights. Values and gradients are those of `kernels.reference` up to rounding (matmuls multiply
dequantized numbers here), except for the half step beyond each end of the range, which is outside here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from mrem_deploy.kernels.quantized import Quantized
from mrem_deploy.kernels.reference import operand_integers
from mrem_deploy.numerics import Grid
from mrem_deploy.quant import layers, quantizers

Tensor = torch.Tensor


def fake_quant(x: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """LSQ: the straight-through estimator on the rounding alone gives its gradients of x and of the scale."""
    ratio = (x / scale).clamp(grid.low - grid.zero_point, grid.high - grid.zero_point)
    return (ratio + (ratio.round() - ratio).detach()) * scale


def fake_quant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, x_quant: Quantized, w_quant: Quantized
) -> Tensor:
    if w_quant.learned:
        quantized = fake_quant(weight, w_quant.scale, w_quant.grid)
    else:
        codes = operand_integers(weight.detach(), w_quant)
        quantized = weight + (codes * w_quant.scale - weight).detach()
    return F.linear(fake_quant(x, x_quant.scale, x_quant.grid), quantized, bias)


def fake_quant_matmul(a: Tensor, b: Tensor, a_quant: Quantized, b_quant: Quantized) -> Tensor:
    return fake_quant(a, a_quant.scale, a_quant.grid) @ fake_quant(b, b_quant.scale, b_quant.grid)


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
