"""Y = Q(A)·Q(B) over batches, attention's q·kᵀ and p·v, and its gradients.

Both operands are activations with one scale each, and both get LSQ's gradients. Note: dB is computed as
dBᵀ = dYᵀ·Q(A) and written through transposed strides, so that integers are always the right-hand operand.
Transposed views of heads are read in place.
"""

from __future__ import annotations

import torch

from mrem_deploy.kernels.gpu.products import Operand, as_batches, gradient, product
from mrem_deploy.kernels.quantized import Quantized


def matmul(a: torch.Tensor, b: torch.Tensor, a_quant: Quantized, b_quant: Quantized) -> torch.Tensor:
    y = product(Operand.of(a, a_quant), Operand.of(b, b_quant))
    return y.view(*a.shape[:-1], b.shape[-1])


def matmul_backward(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, a_quant: Quantized, b_quant: Quantized
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    left, right = Operand.of(a, a_quant), Operand.of(b, b_quant)
    grad = as_batches(grad)
    grad_a = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    grad_b = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    by_a = gradient(grad, right.mT, of=left, out=as_batches(grad_a), learned=True)
    by_b = gradient(grad.mT, left, of=right.mT, out=as_batches(grad_b).mT, learned=True)
    assert by_a is not None
    assert by_b is not None
    return grad_a, by_a.reshape(a_quant.scale.shape), grad_b, by_b.reshape(b_quant.scale.shape)
