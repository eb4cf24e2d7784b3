"""The training ops by Triton kernels, with the contract of `reference`, on a GPU.

What the kernels do not compute goes to the reference on the same device: float64, grids of more than 256
codes in matmuls, sums of integers that could exceed 2^31, and ops whose kernel Triton cannot compile for this
GPU, with one warning each.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import triton

from mrem_deploy.kernels import reference
from mrem_deploy.kernels.gpu import fake_quant as elementwise
from mrem_deploy.kernels.gpu import linear as linear_op
from mrem_deploy.kernels.gpu import matmul as matmul_op
from mrem_deploy.kernels.gpu import midrise as midrise_op
from mrem_deploy.kernels.gpu import weight_scales
from mrem_deploy.kernels.gpu.codes import int8_range
from mrem_deploy.kernels.gpu.launching import DoesNotCompile, dry_run
from mrem_deploy.kernels.quantized import Quantized
from mrem_deploy.numerics import Grid

Tensor = torch.Tensor
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
LARGEST_CODE = 2**22  # the largest number that `numerics.round_half_even` rounds
LARGEST_SUM = 2**31 - 1
_without_kernel: set[tuple[object, ...]] = set()  # op, type and device for which Triton cannot make one


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


def _run(op: str, serving: Any, *arguments: Any) -> Any:
    """The op by Triton's kernels, or by the reference where Triton cannot make them for this GPU."""
    kind = (op, arguments[0].dtype, arguments[0].device)
    if serving is not reference and kind not in _without_kernel:
        try:
            return getattr(serving, op)(*arguments)
        except DoesNotCompile as error:
            if dry_run() is not None:
                raise
            _without_kernel.add(kind)
            warnings.warn(
                f"{op} is computed in plain torch, which is slower: Triton {triton.__version__} cannot "
                f"compile its kernel for this GPU ({error})",
                RuntimeWarning,
                stacklevel=3,
            )
    return getattr(reference, op)(*arguments)


def fake_quant(x: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    y: Tensor = _run("fake_quant", elementwise if _serves(x, grid) else reference, x, scale, grid)
    return y


def fake_quant_backward(grad: Tensor, x: Tensor, scale: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    serving = elementwise if _serves(x, grid) else reference
    found: tuple[Tensor, Tensor] = _run("fake_quant_backward", serving, grad, x, scale, grid)
    return found


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, x_quant: Quantized, w_quant: Quantized) -> Tensor:
    serving = linear_op if _serves_product(x, x.shape[-1], x_quant, w_quant) else reference
    y: Tensor = _run("linear", serving, x, weight, bias, x_quant, w_quant)
    return y


def linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    x_quant: Quantized,
    w_quant: Quantized,
    need_x: bool,
    need_weight: bool,
) -> Gradients:
    serving = linear_op if _serves_product(x, 1, x_quant, w_quant) else reference
    found: Gradients = _run(
        "linear_backward", serving, grad, x, weight, x_quant, w_quant, need_x, need_weight
    )
    return found


def matmul(a: Tensor, b: Tensor, a_quant: Quantized, b_quant: Quantized) -> Tensor:
    serving = matmul_op if _serves_product(a, a.shape[-1], a_quant, b_quant) else reference
    y: Tensor = _run("matmul", serving, a, b, a_quant, b_quant)
    return y


def matmul_backward(grad: Tensor, a: Tensor, b: Tensor, a_quant: Quantized, b_quant: Quantized) -> Gradients:
    serving = matmul_op if _serves_product(a, 1, a_quant, b_quant) else reference
    found: Gradients = _run("matmul_backward", serving, grad, a, b, a_quant, b_quant)
    return found


def twn(weight: Tensor, per_row: bool) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _run(
        "twn", weight_scales if _serves(weight) else reference, weight, per_row
    )
    return found


def midrise(weight: Tensor, per_row: bool) -> tuple[Tensor, Tensor]:
    serving = midrise_op if _serves(weight) else reference
    found: tuple[Tensor, Tensor] = _run("midrise", serving, weight, per_row)
    return found


def laq(
    weight: Tensor, start: Tensor, diagonal: Tensor | None, grid: Grid, iterations: int, per_row: bool
) -> Tensor:
    serving = weight_scales if _serves(weight, grid) else reference
    alpha: Tensor = _run("laq", serving, weight, start, diagonal, grid, iterations, per_row)
    return alpha
