"""The training ops by Triton kernels, with the contract of `reference`, on a GPU.

What the kernels do not compute goes to the reference on the same device: float64, grids of more than 256
codes in matmuls, and sums of integers that could exceed 2^31.
"""

from __future__ import annotations

import torch

from mrem_deploy.kernels import reference
from mrem_deploy.kernels.gpu import fake_quant as elementwise
from mrem_deploy.kernels.gpu import linear as linear_op
from mrem_deploy.kernels.gpu import matmul as matmul_op
from mrem_deploy.kernels.gpu import midrise as midrise_op
from mrem_deploy.kernels.gpu import weight_scales
from mrem_deploy.kernels.gpu.codes import int8_range
from mrem_deploy.kernels.quantized import Quantized
from mrem_deploy.numerics import Grid

Tensor = torch.Tensor
LARGEST_CODE = 2**22  # the largest number that `numerics.round_half_even` rounds
LARGEST_SUM = 2**31 - 1


def _serves(x: Tensor, *grids: Grid) -> bool:
    reach = max((max(abs(g.low), abs(g.high), abs(g.zero_point)) for g in grids), default=0)
    return x.dtype != torch.float64 and 2 * reach < LARGEST_CODE


def _serves_product(x: Tensor, summed: int, left: Quantized, right: Quantized) -> bool:
    one, other = int8_range(left.grid), int8_range(right.grid)
    if x.dtype == torch.float64 or one is None or other is None:
        return False
    return (
        4 * summed * max(one.largest, 128) * max(other.largest, 128) <= LARGEST_SUM
    )  # four terms with offsets


def fake_quant(x: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    return (elementwise if _serves(x, grid) else reference).fake_quant(x, scale, grid)


def fake_quant_backward(grad: Tensor, x: Tensor, scale: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    serving = elementwise if _serves(x, grid) else reference
    return serving.fake_quant_backward(grad, x, scale, grid)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, x_quant: Quantized, w_quant: Quantized) -> Tensor:
    serving = linear_op if _serves_product(x, x.shape[-1], x_quant, w_quant) else reference
    return serving.linear(x, weight, bias, x_quant, w_quant)


def linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    x_quant: Quantized,
    w_quant: Quantized,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    serving = linear_op if _serves_product(x, 1, x_quant, w_quant) else reference
    return serving.linear_backward(grad, x, weight, x_quant, w_quant, need_x, need_weight)


def matmul(a: Tensor, b: Tensor, a_quant: Quantized, b_quant: Quantized) -> Tensor:
    serving = matmul_op if _serves_product(a, a.shape[-1], a_quant, b_quant) else reference
    return serving.matmul(a, b, a_quant, b_quant)


def matmul_backward(
    grad: Tensor, a: Tensor, b: Tensor, a_quant: Quantized, b_quant: Quantized
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    serving = matmul_op if _serves_product(a, 1, a_quant, b_quant) else reference
    return serving.matmul_backward(grad, a, b, a_quant, b_quant)


def twn(weight: Tensor, per_row: bool) -> tuple[Tensor, Tensor]:
    return (weight_scales if _serves(weight) else reference).twn(weight, per_row)


def midrise(weight: Tensor, per_row: bool) -> tuple[Tensor, Tensor]:
    return (midrise_op if _serves(weight) else reference).midrise(weight, per_row)


def laq(
    weight: Tensor, start: Tensor, diagonal: Tensor | None, grid: Grid, iterations: int, per_row: bool
) -> Tensor:
    serving = weight_scales if _serves(weight, grid) else reference
    return serving.laq(weight, start, diagonal, grid, iterations, per_row)
