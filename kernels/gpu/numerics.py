"""Device code that all kernels share: the rules of `reference` in Triton.

Note:

* `x / s` in Triton is an approximate division; `tl.div_rn` is the true one.
* There is no portable rounding. Adding and subtracting 1.5·2^23 rounds a float32 half to even, but only below
  2^22. So clamp first, to integer bounds, which gives the same result as clamping afterwards.
* Comparisons with NaN are false. Every `where` here is written so that NaN stays NaN.
* Bounds arrive as low − z and high − z: integers are C = codes − z throughout, and z alone is never needed.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDER = tl.constexpr(12582912.0)  # 1.5 · 2^23
TF32_BITS = tl.constexpr(-8192)  # 0xFFFFE000: sign, exponent and the ten mantissa bits that TF32 keeps


@triton.jit
def round_half_even(x):
    return (x + ROUNDER) - ROUNDER


@triton.jit
def clamp(x, low, high):
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def integers(x, scale, low, high):
    """C = clamp(round(x / s), low − z, high − z), in float32; NaN stays NaN."""
    return round_half_even(clamp(tl.div_rn(x, scale), low, high))


@triton.jit
def by_threshold(weight, threshold, inner, outer):
    """±(outer if |w| > Δ, else inner): `quantize_by_threshold`. NaN stays NaN, but is 0 if inner is."""
    level = tl.where(tl.abs(weight) > threshold, outer, inner)
    codes = tl.where(weight < 0, -level, level)
    return tl.where((weight == weight) | (inner == 0), codes, weight)


@triton.jit
def lsq(grad, x, scale, low, high):
    """Gradient of x, and of the scale by element; an element is inside if x/s moved by at most one half."""
    ratio = tl.div_rn(x, scale)
    codes = round_half_even(clamp(ratio, low, high))
    moved = codes - ratio
    saturated = tl.abs(moved) > 0.5
    return tl.where(saturated, 0.0, grad), tl.where(saturated, codes, moved) * grad


@triton.jit
def dot_with_integers(grad, codes, sums, PRECISION: tl.constexpr):
    """sums + grad·codes on tensor cores, where `codes` are integers of at most 8 bits, exact in TF32.

    "split": float32 as the sum of two TF32 numbers, each multiplied exactly; what is lost is below 2^-21 of
    an element. "tf32" drops the second. "ieee" is float32 hardware. 16-bit operands need none of this.
    """
    if PRECISION == "split":
        high = (grad.to(tl.int32, bitcast=True) & TF32_BITS).to(tl.float32, bitcast=True)
        low = tl.where(high == grad, 0.0, grad - high)  # Inf − Inf would be NaN
        sums = tl.dot(low, codes, sums, input_precision="tf32")
        sums = tl.dot(high, codes, sums, input_precision="tf32")
    else:
        sums = tl.dot(grad, codes, sums, input_precision=PRECISION)
    return sums
