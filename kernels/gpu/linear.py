"""Y = Q(X)·Q(W)ᵀ + b, and its gradients, which make the integers of X and W again.

Note: a weight's scale for each row runs along the columns of Y, where it scales the finished sums, but along
the summed dimension of dX = dY·Q(W), where it multiplies dY, not the integers.
"""

from __future__ import annotations

import torch

from mrem_deploy.kernels.gpu.codes import make_codes
from mrem_deploy.kernels.gpu.launching import blocks
from mrem_deploy.kernels.gpu.products import Operand, as_batches, gradient, product
from mrem_deploy.kernels.quantized import Quantized

# Tiles of about 128 quantize what they read. If more than TILES_WORTH_CODES read the same element, codes are
# made once: a true division and a rounding take the time of some thirty int8 products (docs/kernels-gpu.md).
TILE, TILES_WORTH_CODES = 128, 2


def wants_codes(rows: int, columns: int) -> bool:
    return max(blocks(rows, TILE), blocks(columns, TILE)) > TILES_WORTH_CODES


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x_quant: Quantized,
    w_quant: Quantized,
    codes: bool | None = None,
) -> torch.Tensor:
    """`codes` makes int8 codes beforehand, or not; None decides by size. The result is the same."""
    left, right = Operand.of(x, x_quant), Operand.of(weight, w_quant)
    if bias is not None:
        bias = bias.contiguous()
    made = None
    if wants_codes(x.shape[0], weight.shape[0]) if codes is None else codes:
        made = (
            make_codes(x, left.scale, None, left.span),
            make_codes(weight, right.scale, right.threshold, right.span),
        )
    return product(left, right.mT, bias, made)[0, 0]


def linear_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    x_quant: Quantized,
    w_quant: Quantized,
    need_x: bool,
    need_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    left, right = Operand.of(x, x_quant), Operand.of(weight, w_quant)
    grad = as_batches(grad)
    grad_x, grad_x_scale, grad_weight, grad_w_scale = (x.new_empty(0) for _ in range(4))
    if need_x:
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        found = gradient(grad, right, of=left, out=as_batches(grad_x), learned=True)
        assert found is not None
        grad_x_scale = found.reshape(x_quant.scale.shape)
    if need_weight:
        grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        found = gradient(grad.mT, left, of=right, out=as_batches(grad_weight), learned=w_quant.learned)
        if found is not None:
            grad_w_scale = found.reshape(w_quant.scale.shape)
    return grad_x, grad_x_scale, grad_weight, grad_w_scale
