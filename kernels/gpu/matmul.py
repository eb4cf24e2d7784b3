"""Y = Q(A)·Q(B) over batches, attention's q·kᵀ and p·v, and its gradients.

Both are activations with one step each, and both get LSQ's gradients. What a reader would get wrong: dB is
computed as dBᵀ = dYᵀ·Q(A) and written through transposed strides, so that integers are always the right-hand
operand; and transposed views of heads are read in place.
"""

from __future__ import annotations

import torch

from mrem_deploy.kernels.gpu.codes import int8_range
from mrem_deploy.kernels.gpu.products import Operand, as_batches, gradient, product
from mrem_deploy.numerics import Grid


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    a_grid: Grid,
    b_scale: torch.Tensor,
    b_grid: Grid,
) -> torch.Tensor:
    y = product(_operand(a, a_scale, a_grid), _operand(b, b_scale, b_grid))
    return y.view(*a.shape[:-1], b.shape[-1])


def matmul_backward(
    grad: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    a_grid: Grid,
    b_scale: torch.Tensor,
    b_grid: Grid,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    left, right = _operand(a, a_scale, a_grid), _operand(b, b_scale, b_grid)
    grad = as_batches(grad)
    grad_a = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    grad_b = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    by_a = gradient(grad, right.mT, of=left, out=as_batches(grad_a), learned=True)
    by_b = gradient(grad.mT, left, of=right.mT, out=as_batches(grad_b).mT, learned=True)
    assert by_a is not None
    assert by_b is not None
    return grad_a, by_a.reshape(a_scale.shape), grad_b, by_b.reshape(b_scale.shape)


def _operand(x: torch.Tensor, scale: torch.Tensor, grid: Grid) -> Operand:
    span = int8_range(grid)
    assert span is not None  # `ops` asked before
    return Operand(as_batches(x), scale.reshape(-1), span)
