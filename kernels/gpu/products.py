"""The two kernels behind `linear` and `matmul`: integers times integers, and a gradient times integers.

    product   Y = (Ca·Cb)·(sa·sb) + bias          int8 tensor cores, int32 sums: exact, any order
    gradient  dV = lsq(G·(C·s))                   float32 or 16 bits times integers, then LSQ on request

The second serves all four gradients of the two ops: dX = dY·Q(W), dW = dYᵀ·Q(X), dA = dY·Q(B)ᵀ and
dBᵀ = dYᵀ·Q(A); transposition only changes strides. Batches have an outer and an inner index, so that a head's
view into (batch, token, head, feature) needs no copy.

Note: every tile quantizes the elements that it reads. That is cheap with few tiles, as in attention, but with
many it costs more than the matmul; then `linear` makes int8 codes once, and the kernel reads these (CODES).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mrem_deploy.kernels.gpu.codes import Codes, Range, carry, int8_range
from mrem_deploy.kernels.gpu.launching import blocks, launch, vendor
from mrem_deploy.kernels.gpu.numerics import by_threshold, dot_with_integers, integers, lsq
from mrem_deploy.kernels.gpu.partial_sums import add_partial_sums
from mrem_deploy.kernels.gpu.tuning import Tile, run_tiled
from mrem_deploy.kernels.quantized import Quantized

UNSPECIALIZED = ("a_low", "a_high", "a_offset", "b_low", "b_high", "b_offset", "b_inner")  # vary by layer
LONGEST_STRIDE = 2**31 // 256  # offsets within a tile have 32 bits, and no tile is longer than 256


@triton.jit
def tile_of(program, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Batch, tile row and tile column. GROUP rows of tiles run together, to reuse the cache."""
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    batch = program // (down * across)
    tile = program % (down * across)
    first = tile // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    return batch, first + tile % (GROUP * across) % height, tile % (GROUP * across) // height


@triton.jit(do_not_specialize=UNSPECIALIZED)
def product_kernel(
    a_ptr,  # (batch, M, K), any strides: values, or with CODES int8 integers
    b_ptr,  # (batch, K, N), any strides: like a
    y_ptr,  # (batch, M, N), row-major
    bias_ptr,  # (N) or None
    a_scale_ptr,  # (1)
    b_scale_ptr,  # (1), or with stride_scale 1 (N)
    threshold_ptr,  # like b_scale; None if B's integers come from rounding
    a_sums_ptr,  # int32 (M) with CODES: sums over the rows of A; otherwise None
    b_sums_ptr,  # int32 (N) with CODES: sums over the columns of B; otherwise None
    a_poison_ptr,  # float32 (M) with CODES: 0 or NaN; otherwise None
    b_poison_ptr,  # float32 (N) with CODES: 0 or NaN; otherwise None
    M,
    N,
    K,
    inner,
    stride_a_outer,
    stride_a_inner,
    stride_am,
    stride_ak,
    stride_b_outer,
    stride_b_inner,
    stride_bk,
    stride_bn,
    stride_scale,
    a_low,
    a_high,
    a_offset,
    b_low,
    b_high,
    b_offset,
    b_inner,
    CODES: tl.constexpr,
    A_OFFSET: tl.constexpr,
    B_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    batch, tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    outer, within = (batch // inner).to(tl.int64), (batch % inner).to(tl.int64)
    first_m, first_n = tile_m.to(tl.int64) * BLOCK_M, tile_n.to(tl.int64) * BLOCK_N
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    in_m, in_n = first_m + m < M, first_n + n < N
    # 64-bit starts, 32-bit offsets within a tile.
    a_start = a_ptr + outer * stride_a_outer + within * stride_a_inner + first_m * stride_am
    b_start = b_ptr + outer * stride_b_outer + within * stride_b_inner + first_n * stride_bn
    a_at = a_start + m[:, None] * stride_am + k[None, :] * stride_ak
    b_at = b_start + k[:, None] * stride_bk + n[None, :] * stride_bn
    a_scale = tl.load(a_scale_ptr)
    b_scale = tl.load(b_scale_ptr + (first_n + n) * stride_scale, mask=in_n, other=1.0)
    if threshold_ptr is not None:
        threshold = tl.load(threshold_ptr + (first_n + n) * stride_scale, mask=in_n, other=0.0)

    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    a_sums, a_nans = tl.zeros((BLOCK_M,), tl.int32), tl.zeros((BLOCK_M,), tl.int32)
    b_sums, b_nans = tl.zeros((BLOCK_N,), tl.int32), tl.zeros((BLOCK_N,), tl.int32)
    for start in range(0, K, BLOCK_K):
        in_k = k < K - start
        a_inside, b_inside = in_m[:, None] & in_k[None, :], in_k[:, None] & in_n[None, :]
        a = tl.load(a_at, mask=a_inside, other=0)
        b = tl.load(b_at, mask=b_inside, other=0)
        if not CODES:
            a_c = integers(a.to(tl.float32), a_scale, a_low, a_high)
            if threshold_ptr is None:
                b_c = integers(b.to(tl.float32), b_scale[None, :], b_low, b_high)
            else:
                b_c = by_threshold(b.to(tl.float32), threshold[None, :], b_inner, b_high)
            a, a_nan = carry(a_c, a_offset, a_inside)
            b, b_nan = carry(b_c, b_offset, b_inside)
            a_nans += tl.sum(a_nan.to(tl.int32), axis=1)
            b_nans += tl.sum(b_nan.to(tl.int32), axis=0)
            if B_OFFSET:
                a_sums += tl.sum(a.to(tl.int32), axis=1)
            if A_OFFSET:
                b_sums += tl.sum(b.to(tl.int32), axis=0)
        sums = tl.dot(a, b, sums, out_dtype=tl.int32)
        a_at += BLOCK_K * stride_ak
        b_at += BLOCK_K * stride_bk

    if CODES:
        a_poison = tl.load(a_poison_ptr + first_m + m, mask=in_m, other=0.0)
        b_poison = tl.load(b_poison_ptr + first_n + n, mask=in_n, other=0.0)
        if B_OFFSET:
            a_sums = tl.load(a_sums_ptr + first_m + m, mask=in_m, other=0)
        if A_OFFSET:
            b_sums = tl.load(b_sums_ptr + first_n + n, mask=in_n, other=0)
    else:
        a_poison = tl.where(a_nans > 0, float("nan"), 0.0)
        b_poison = tl.where(b_nans > 0, float("nan"), 0.0)
    # Σ(a + da)(b + db) = Σab + da·(Σb + K·db) + db·Σa
    if A_OFFSET:
        sums += a_offset * (b_sums + K * b_offset)[None, :]
    if B_OFFSET:
        sums += b_offset * a_sums[:, None]
    y = sums.to(tl.float32) * (a_scale * b_scale)[None, :]
    y += a_poison[:, None] + b_poison[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + first_n + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    y_at = y_ptr + batch.to(tl.int64) * M * N + (first_m + m)[:, None] * N + (first_n + n)[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit(do_not_specialize=("c_low", "c_high", "c_inner", "v_low", "v_high"))
def gradient_kernel(
    grad_ptr,  # (batch, H, R), any strides
    c_ptr,  # (batch, R, J), any strides: values that are quantized again
    v_ptr,  # (batch, H, J), any strides: values whose gradient is computed; read only with LSQ
    out_ptr,  # (batch, H, J), any strides
    partial_ptr,  # float64 (programs), or with V_SCALE_PER_ROW (H, tiles across): sums for v's scale
    c_scale_ptr,  # (1), or with C_SCALE_PER_ROW (R)
    threshold_ptr,  # like c_scale; None if C's integers come from rounding
    v_scale_ptr,  # (1), or with V_SCALE_PER_ROW (H)
    H,
    J,
    R,
    inner,
    stride_g_outer,
    stride_g_inner,
    stride_gi,
    stride_gr,
    stride_c_outer,
    stride_c_inner,
    stride_cr,
    stride_cj,
    stride_v_outer,
    stride_v_inner,
    stride_vi,
    stride_vj,
    stride_o_outer,
    stride_o_inner,
    stride_oi,
    stride_oj,
    c_low,
    c_high,
    c_inner,
    v_low,
    v_high,
    LSQ: tl.constexpr,
    C_SCALE_PER_ROW: tl.constexpr,
    V_SCALE_PER_ROW: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    program = tl.program_id(0)
    batch, tile_i, tile_j = tile_of(program, H, J, BLOCK_M, BLOCK_N, GROUP)
    outer, within = (batch // inner).to(tl.int64), (batch % inner).to(tl.int64)
    first_i, first_j = tile_i.to(tl.int64) * BLOCK_M, tile_j.to(tl.int64) * BLOCK_N
    i, j, r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    in_i, in_j = first_i + i < H, first_j + j < J
    g_start = grad_ptr + outer * stride_g_outer + within * stride_g_inner + first_i * stride_gi
    c_start = c_ptr + outer * stride_c_outer + within * stride_c_inner + first_j * stride_cj
    g_at = g_start + i[:, None] * stride_gi + r[None, :] * stride_gr
    c_at = c_start + r[:, None] * stride_cr + j[None, :] * stride_cj
    c_scale = tl.load(c_scale_ptr)

    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, R, BLOCK_K):
        in_r = r < R - start
        grad = tl.load(g_at, mask=in_i[:, None] & in_r[None, :], other=0.0)
        c_inside = in_r[:, None] & in_j[None, :]
        values = tl.load(c_at, mask=c_inside, other=0.0).to(tl.float32)
        if C_SCALE_PER_ROW:
            # The scale varies along the sum; multiplying the integers by it would make them inexact.
            scale = tl.load(c_scale_ptr + start + r, mask=in_r, other=1.0)
            grad = grad.to(tl.float32) * scale[None, :]
            row_scale = scale[:, None]
        else:
            row_scale = c_scale
        if threshold_ptr is None:
            c = integers(values, row_scale, c_low, c_high)
        else:
            if C_SCALE_PER_ROW:
                threshold = tl.load(threshold_ptr + start + r, mask=in_r, other=0.0)[:, None]
            else:
                threshold = tl.load(threshold_ptr)
            c = by_threshold(values, threshold, c_inner, c_high)
        c = tl.where(c_inside, c, 0.0)  # past the end it is 0/0 if the scale is 0
        sums = dot_with_integers(grad, c.to(grad.dtype), sums, PRECISION)
        g_at += BLOCK_K * stride_gr
        c_at += BLOCK_K * stride_cr
    if not C_SCALE_PER_ROW:
        sums = sums * c_scale

    inside = in_i[:, None] & in_j[None, :]
    if LSQ:
        v_start = v_ptr + outer * stride_v_outer + within * stride_v_inner
        v_at = v_start + (first_i + i)[:, None] * stride_vi + (first_j + j)[None, :] * stride_vj
        v = tl.load(v_at, mask=inside, other=0.0).to(tl.float32)
        if V_SCALE_PER_ROW:
            v_scale = tl.load(v_scale_ptr + first_i + i, mask=in_i, other=1.0)[:, None]
        else:
            v_scale = tl.load(v_scale_ptr)
        sums, by_scale = lsq(sums, v, v_scale, v_low, v_high)
        by_scale = tl.where(inside, by_scale, 0.0).to(tl.float64)
        if V_SCALE_PER_ROW:
            across = tl.cdiv(J, BLOCK_N)
            tl.store(partial_ptr + (first_i + i) * across + tile_j, tl.sum(by_scale, axis=1), mask=in_i)
        else:
            tl.store(partial_ptr + program, tl.sum(tl.sum(by_scale, axis=1), axis=0))
    out_start = out_ptr + outer * stride_o_outer + within * stride_o_inner
    out_at = out_start + (first_i + i)[:, None] * stride_oi + (first_j + j)[None, :] * stride_oj
    tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=inside)


class Operand(NamedTuple):
    """Matrices and how they are quantized: scales, the range of the integers, and thresholds if any."""

    values: torch.Tensor  # (outer, inner, rows, columns), any strides
    scale: torch.Tensor  # (1) or (rows)
    span: Range
    threshold: torch.Tensor | None = None  # like scale

    @classmethod
    def of(cls, x: torch.Tensor, how: Quantized) -> Operand:
        """x (…, rows, columns) as batches; its scales and thresholds as dense vectors."""
        span = int8_range(how.grid)
        assert span is not None  # `ops` has checked it
        threshold = None if how.threshold is None else how.threshold.reshape(-1).contiguous()
        return cls(as_batches(x), how.scale.reshape(-1).contiguous(), span, threshold)

    @property
    def per_row(self) -> bool:
        return self.scale.numel() > 1

    @property
    def mT(self) -> Operand:
        return self._replace(values=self.values.mT)


def as_batches(x: torch.Tensor) -> torch.Tensor:
    """(outer, inner, rows, columns); a view, unless batch dimensions do not merge or strides are too long."""
    x = x.reshape(-1, *x.shape[-3:]) if x.dim() > 4 else x[(None,) * (4 - x.dim())]
    return x if max(x.stride()[-2:]) <= LONGEST_STRIDE else x.contiguous()


def product(
    a: Operand, b: Operand, bias: torch.Tensor | None = None, codes: tuple[Codes, Codes] | None = None
) -> torch.Tensor:
    """Y = Q(A)·Q(B) + bias, row-major; `codes` are those of A and of Bᵀ (one batch), made beforehand."""
    outer, inner, rows, summed = a.values.shape
    columns = b.values.shape[-1]
    y = torch.empty(outer, inner, rows, columns, dtype=a.values.dtype, device=a.values.device)
    read, notes = (a.values, b.values), tuple[torch.Tensor | None, ...]((None,) * 4)
    if codes is not None:
        left, right = codes
        read = (as_batches(left.carried), as_batches(right.carried.mT))
        notes = (left.sums, right.sums, left.poison, right.poison)

    def run(tile: Tile) -> None:
        launch(
            product_kernel,
            outer * inner * blocks(rows, tile.m) * blocks(columns, tile.n),
            *read,
            y,
            bias,
            *(a.scale, b.scale, b.threshold if codes is None else None),
            *notes,
            *(rows, columns, summed, inner),
            *(*read[0].stride(), *read[1].stride(), int(b.per_row)),
            *(*a.span[:3], *b.span),
            CODES=codes is not None,
            A_OFFSET=a.span.offset != 0,
            B_OFFSET=b.span.offset != 0,
            **tile.constants,
            **tile.options,
        )

    sizes = (outer * inner, rows, columns, summed)
    run_tiled("product" if codes is None else "codes", sizes, a.values, "", run)
    return y


def gradient(
    grad: torch.Tensor, quantized: Operand, of: Operand, out: torch.Tensor, learned: bool
) -> torch.Tensor | None:
    """out = G·Q(C), with LSQ's mask if the scale of `of` is learned; then returns that scale's gradient.

    G (…, H, R), C (…, R, J) with scales along R, `of` and out (…, H, J) with scales along H.
    """
    outer, inner, rows, summed = grad.shape
    columns = out.shape[-1]
    of_per_row = learned and of.per_row
    precision = _precision(grad.dtype, quantized.per_row)
    partial = torch.empty(0, dtype=torch.float64, device=grad.device)

    def run(tile: Tile) -> None:
        nonlocal partial
        across = blocks(columns, tile.n)
        programs = outer * inner * blocks(rows, tile.m) * across
        partial = partial.new_empty((rows, across) if of_per_row else (1, programs))
        launch(
            gradient_kernel,
            programs,
            *(grad, quantized.values, of.values, out, partial),
            *(quantized.scale, quantized.threshold, of.scale),
            *(rows, columns, summed, inner),
            *(*grad.stride(), *quantized.values.stride(), *of.values.stride(), *out.stride()),
            *(*quantized.span[:2], quantized.span.inner, *of.span[:2]),
            LSQ=learned,
            C_SCALE_PER_ROW=quantized.per_row,
            V_SCALE_PER_ROW=of_per_row,
            PRECISION=precision,
            **tile.constants,
            **tile.options,
        )

    variant = f"{precision}{'-lsq' if learned else ''}"
    run_tiled("gradient", (outer * inner, rows, columns, summed), grad, variant, run)
    return add_partial_sums(partial, of.scale.shape) if learned else None


def _precision(dtype: torch.dtype, scale_per_row: bool) -> str:
    """How `dot_with_integers` multiplies. TF32 alone only if the user sets torch's own switch."""
    if vendor() == "hip" or (dtype != torch.float32 and not scale_per_row):
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "split"
