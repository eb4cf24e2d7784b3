"""Sums over many blocks, the same in every run.

Every block writes its partial sum in float64; one program per result then adds them in a fixed order. Note:
atomics would save the second launch, but the last bits would differ from run to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mrem_deploy.kernels.gpu.launching import launch

BLOCK = 1024


@triton.jit
def sum_of(
    pointer,  # float64 (count)
    count,
    BLOCK: tl.constexpr,
):
    """The sum of `count` numbers: BLOCK running sums, then a tree."""
    sums = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sums += tl.load(pointer + at, mask=at < count, other=0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def add_partial_sums_kernel(
    partial_ptr,  # float64 (results, count), row-major
    result_ptr,  # float32 (results)
    count,
    BLOCK: tl.constexpr,
):
    result = tl.program_id(0)
    total = sum_of(partial_ptr + result.to(tl.int64) * count, count, BLOCK)
    tl.store(result_ptr + result, total.to(result_ptr.dtype.element_ty))


def add_partial_sums(partial: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """(results, blocks) in float64 to `shape`, one number for each result, in float32."""
    result = torch.empty(shape, dtype=torch.float32, device=partial.device)
    launch(add_partial_sums_kernel, partial.shape[0], partial, result, partial.shape[1], BLOCK=BLOCK)
    return result
