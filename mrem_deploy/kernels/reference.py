"""The training ops in plain torch: the explanation, the truth in the tests, and the fallback on every device.

`ops` has checked the arguments. Four rules make every other backend give the same integers:

1. codes = clamp(round(x / s) + z, low, high), by `numerics.quantize`: a true division, half to even;
2. a weight with a threshold is ±(high if |w| > Δ, else inner), by `numerics.quantize_by_threshold`: ternary
   with Δ from `twn`, ±1 and ±3 with Δ from `midrise`;
3. a matmul multiplies integers and scales once: y = (Cx·Cw)·(sx·sw), then + b. Sums of integers below 2^24
   are exact in float32, so y does not depend on the order of the sum: not on batch, padding or machine;
4. sums over weights and gradients of scales are taken in float64 and rounded once.

Inputs of 16 bits are computed in float32 and rounded at the end. NaN stays NaN in the values; the gradient of
a scale is NaN if any element of x or of the incoming gradient is.
"""

from __future__ import annotations

import torch

from mrem_deploy.kernels.quantized import Quantized
from mrem_deploy.numerics import Grid, dequantize, quantize, quantize_by_threshold

TWN_THRESHOLD = 0.7  # Δ = 0.7 · mean|w|, the constant of the TWN paper
MIDRISE_START = 0.625  # α₀ = 0.625 · mean|w|, so that Δ₀ = 1.25 · mean|w|
MIDRISE_ALTERNATIONS = 2
MIDRISE_LEAST = 2.0**-100  # α of zeros: adds nothing to an activation, and s·α is not denormal


def wide(x: torch.Tensor) -> torch.Tensor:
    """In the type of the computation: float32 for 16-bit types, otherwise unchanged."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def integers(x: torch.Tensor, scale: torch.Tensor, grid: Grid) -> torch.Tensor:
    """C = codes − z: the integers that are multiplied, as floating-point numbers."""
    codes = quantize(wide(x), scale, grid)
    return codes - grid.zero_point if grid.zero_point else codes


def operand_integers(x: torch.Tensor, how: Quantized) -> torch.Tensor:
    """The integers of a matmul's operand: by rounding, or by its threshold."""
    if how.threshold is None:
        return integers(x, how.scale, how.grid)
    return quantize_by_threshold(wide(x), how.threshold, how.grid)


def fake_quant(x: torch.Tensor, scale: torch.Tensor, grid: Grid) -> torch.Tensor:
    """x̂ = s·(clamp(round(x/s) + z, low, high) − z); scale is one number, or one for each row."""
    return dequantize(quantize(wide(x), scale, grid), scale, grid).to(x.dtype)


def fake_quant_backward(
    grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and of the scale (Esser et al., "Learned Step Size Quantization", eq. 3 and 5).

    dx̂/dx = 1 inside the range, 0 where it saturates;
    dx̂/ds = round(x/s) − x/s inside, the saturated integer (low − z or high − z) outside.
    An element is inside where rounding and clamping moved x/s by at most one half.
    """
    ratio = wide(x) / scale
    codes = ratio.round().clamp_(grid.low - grid.zero_point, grid.high - grid.zero_point)
    moved = codes - ratio
    saturated = moved.abs() > 0.5
    by_scale = torch.where(saturated, codes, moved) * wide(grad)
    return grad.masked_fill(saturated, 0.0), sum_to_scale(by_scale, scale)


def sum_to_scale(by_element: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scale.numel() == 1:
        return by_element.sum(dtype=torch.float64).to(scale.dtype).reshape(scale.shape)
    return by_element.sum(dim=-1, keepdim=True, dtype=torch.float64).to(scale.dtype)


def scale_once(
    product: torch.Tensor, left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Rule 3: the product of integers times the product of the scales, rounded, then the bias."""
    scaled = product * (left.reshape(-1) * right.reshape(-1))
    return scaled if bias is None else scaled + bias


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, x_quant: Quantized, w_quant: Quantized
) -> torch.Tensor:
    """Y = Q(X)·Q(W)ᵀ + b; X (rows, in), W (out, in) with one scale or (out, 1)."""
    product = operand_integers(x, x_quant) @ operand_integers(weight, w_quant).T
    added = None if bias is None else wide(bias)
    return scale_once(product, x_quant.scale, w_quant.scale, added).to(x.dtype)


def linear_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    x_quant: Quantized,
    w_quant: Quantized,
    need_x: bool,
    need_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of X, its scale, W and its scale; empty tensors for what is not needed.

    Only X and W were kept: the quantized operands are made again. Learned weights have LSQ's gradients,
    others (TWN, midrise, LAQ) the straight-through one, and their scale, a function of W, has none.
    """
    nothing = x.new_empty(0)
    wide_grad = wide(grad)
    grad_x = grad_x_scale = grad_weight = grad_w_scale = nothing
    if need_x:
        by_quantized = wide_grad @ (operand_integers(weight, w_quant) * w_quant.scale)
        grad_x, grad_x_scale = fake_quant_backward(by_quantized, x, x_quant.scale, x_quant.grid)
        grad_x = grad_x.to(x.dtype)
    if need_weight:
        grad_weight = wide_grad.T @ (operand_integers(x, x_quant) * x_quant.scale)
        if w_quant.learned:
            grad_weight, grad_w_scale = fake_quant_backward(grad_weight, weight, w_quant.scale, w_quant.grid)
        grad_weight = grad_weight.to(weight.dtype)
    return grad_x, grad_x_scale, grad_weight, grad_w_scale


def matmul(a: torch.Tensor, b: torch.Tensor, a_quant: Quantized, b_quant: Quantized) -> torch.Tensor:
    """Y = Q(A)·Q(B) over any batch dimensions; A (…, M, K), B (…, K, N), one scale each."""
    product = operand_integers(a, a_quant) @ operand_integers(b, b_quant)
    return scale_once(product, a_quant.scale, b_quant.scale, None).to(a.dtype)


def matmul_backward(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, a_quant: Quantized, b_quant: Quantized
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of A, its scale, B and its scale."""
    wide_grad = wide(grad)
    by_a = wide_grad @ (operand_integers(b, b_quant) * b_quant.scale).transpose(-1, -2)
    by_b = (operand_integers(a, a_quant) * a_quant.scale).transpose(-1, -2) @ wide_grad
    grad_a, grad_a_scale = fake_quant_backward(by_a, a, a_quant.scale, a_quant.grid)
    grad_b, grad_b_scale = fake_quant_backward(by_b, b, b_quant.scale, b_quant.grid)
    return grad_a.to(a.dtype), grad_a_scale, grad_b.to(b.dtype), grad_b_scale


def _sum(x: torch.Tensor, per_row: bool) -> torch.Tensor:
    """In float64, over each row or over the entire tensor; broadcasts against it."""
    return x.sum(dim=-1, keepdim=True, dtype=torch.float64) if per_row else x.sum(dtype=torch.float64)


def twn(weight: torch.Tensor, per_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Threshold Δ = 0.7·mean|w| and scale α = mean of |w| above it (Li et al., "Ternary Weight Networks").

    In a row of zeros nothing is above it; the scale is then 1, which is valid and harmless.
    """
    magnitude = wide(weight).abs()
    count = weight.shape[-1] if per_row else weight.numel()
    threshold = (TWN_THRESHOLD * _sum(magnitude, per_row) / count).to(magnitude.dtype)
    kept = magnitude > threshold
    kept_count = _sum(kept, per_row)
    alpha = _sum(magnitude * kept, per_row) / kept_count.clamp(min=1)
    return threshold, torch.where(kept_count > 0, alpha, torch.ones_like(alpha)).to(magnitude.dtype)


def midrise(weight: torch.Tensor, per_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Threshold Δ = 2α and scale α of ŵ = ±α, ±3α: two alternations of q = 3 if |w| > Δ, else 1, and of the
    least-squares α = Σ|w|q / Σq², from α₀ = 0.625·mean|w|.

    No code stands for 0. A row of zeros has the least scale, 2^-100, so its values are 0 for all purposes.
    """
    magnitude = wide(weight).abs()

    def scale(numerator: torch.Tensor, denominator: torch.Tensor | float) -> torch.Tensor:
        return (numerator / denominator).to(magnitude.dtype).clamp(min=MIDRISE_LEAST)

    count = weight.shape[-1] if per_row else weight.numel()
    alpha = scale(MIDRISE_START * _sum(magnitude, per_row), count)
    for _ in range(MIDRISE_ALTERNATIONS):
        q = torch.where(magnitude > 2 * alpha, 3.0, 1.0).double()
        alpha = scale(_sum(magnitude * q, per_row), _sum(q * q, per_row))
    return 2 * alpha, alpha


def laq(
    weight: torch.Tensor,
    start: torch.Tensor,
    diagonal: torch.Tensor | None,
    grid: Grid,
    iterations: int,
    per_row: bool,
) -> torch.Tensor:
    """α after alternating b = clamp(round(w/α)) and α = ΣD·w·b / ΣD·b² (Hou & Kwok, "Loss-aware Weight
    Quantization"), from α₀ = start · mean|w|; D is the diagonal curvature, absent the identity.

    An alternation whose sums give no positive α keeps the last one.
    """
    weight = wide(weight)
    count = weight.shape[-1] if per_row else weight.numel()
    mean = (_sum(weight.abs(), per_row) / count).to(weight.dtype)
    alpha = start * torch.where(mean > 0, mean, torch.ones_like(mean))
    weighted = weight.double() if diagonal is None else weight.double() * diagonal
    for _ in range(iterations):
        codes = quantize(weight, alpha, grid).double()
        norm = codes * codes if diagonal is None else codes * codes * diagonal
        numerator, denominator = _sum(weighted * codes, per_row), _sum(norm, per_row)
        usable = (denominator > 0) & (numerator > 0)
        found = numerator / torch.where(usable, denominator, torch.ones_like(denominator))
        alpha = torch.where(usable, found.to(weight.dtype), alpha)
    return alpha
