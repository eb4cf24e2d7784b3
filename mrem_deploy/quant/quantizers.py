"""Quantizers that training differentiates through.

Activations: LSQ, a learned scale per tensor (Esser et al., "Learned Step Size Quantization", 2020).
Weights: at 2 bits TWN (Li et al., "Ternary Weight Networks", 2016) or four levels without zero (`Midrise`),
at 4 LAQ (Hou & Kwok, "Loss-aware Weight Quantization", 2018), at 3 and 8 a learned uniform scale.

Note: a scale s is stored as log s. It stays positive, and one learning rate means the same *relative*
change for a scale of 1e-3 and of 10. LSQ's constant gradient factor is left out, because AdamW divides
any constant factor out again. Every quantizer maps (latent value, its own state) to (codes, scale) by a
pure function, so freezing gives exactly what the forward pass gave.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from mrem_deploy.kernels import fake_quant, laq, midrise, twn
from mrem_deploy.kernels.quantized import Quantized
from mrem_deploy.kernels.reference import operand_integers
from mrem_deploy.numerics import Grid, dequantize, midrise_grid, quantize, symmetric_grid
from mrem_deploy.quant.spec import WeightSpec

ROWS_AT_A_TIME = 512
LAQ_ITERATIONS = 2  # alternations per forward pass; the start was searched once


class WeightScale(Quantized):
    """What turns a latent weight into integers."""

    def integers(self, weight: torch.Tensor) -> torch.Tensor:
        return operand_integers(weight, self)


class WeightQuantizer(Protocol):
    """What layers need: the scale for a matmul, the fake-quantized weight, (codes, scale) when frozen."""

    grid: Grid

    def weight_scale(self, weight: torch.Tensor) -> WeightScale: ...

    def __call__(self, weight: torch.Tensor) -> torch.Tensor: ...

    def rows(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor: ...  # of an embedding table

    def codes_and_scale(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


class _StraightThrough(torch.autograd.Function):
    """Forward: the quantized weight. Backward: the gradient passes to the latent weight unchanged."""

    @staticmethod
    def forward(ctx: Any, latent: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
        return quantized

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class LearnedScale(nn.Module):
    """A uniform quantizer with a learned scale: activations, and weights of 3 and 8 bits."""

    def __init__(self, scale: torch.Tensor, grid: Grid) -> None:
        super().__init__()
        self.grid = grid
        self.log_scale = nn.Parameter(scale.log())

    @property
    def scale(self) -> torch.Tensor:
        return self.log_scale.exp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fake_quant(x, self.scale, self.grid)

    def weight_scale(self, weight: torch.Tensor) -> WeightScale:
        return WeightScale(self.scale, self.grid, learned=True)

    def rows(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return fake_quant(rows, F.embedding(ids, self.log_scale, sparse=True).exp(), self.grid)

    def codes_and_scale(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = self.scale.detach()
        return quantize(x.detach(), scale, self.grid), scale

    def extra_repr(self) -> str:
        return f"bits={self.grid.bits}, codes {self.grid.low}..{self.grid.high}, zero {self.grid.zero_point}"


def _reduce(x: torch.Tensor, per_channel: bool) -> torch.Tensor:
    """Sum over a row or over the entire tensor, in a shape that broadcasts against it."""
    return x.sum(dim=-1, keepdim=True) if per_channel else x.sum()


class _ByThreshold(nn.Module, ABC):
    """Codes by a threshold, which is a function of the weight, as the scale is; straight-through."""

    grid: Grid

    def __init__(self, per_channel: bool) -> None:
        super().__init__()
        self.per_channel = per_channel

    @abstractmethod
    def threshold_and_scale(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The formula: the threshold between codes, and the scale."""

    def weight_scale(self, weight: torch.Tensor) -> WeightScale:
        threshold, scale = self.threshold_and_scale(weight)
        return WeightScale(scale, self.grid, threshold)

    def codes_and_scale(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.weight_scale(weight)
        return found.integers(weight.detach()), found.scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        codes, alpha = self.codes_and_scale(weight)
        return _StraightThrough.apply(weight, codes.mul_(alpha))

    def rows(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self(rows)  # nothing per row is stored


class TWN(_ByThreshold):
    """TWN: Δ = 0.7·mean|w|, α = mean of |w| above Δ, ŵ = α·sign(w)·[|w| > Δ]."""

    grid = symmetric_grid(2)

    def threshold_and_scale(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return twn(weight, self.per_channel)


class Midrise(_ByThreshold):
    """All four codes of two bits: ŵ = ±α, or ±3α where |w| > Δ = 2α, with α by least squares.

    TWN has three codes, one of them 0. Here no weight is 0, at the same size.
    """

    grid = midrise_grid()

    def threshold_and_scale(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return midrise(weight, self.per_channel)


class LAQ(nn.Module):
    """LAQ: alternate codes b = clamp(round(w/α)) and α = ΣD·w·b / ΣD·b², D the diagonal curvature.

    Hou & Kwok take D from Adam's second moment, √v̂ + ε (`curvature="adam"`, set by the trainer
    after each step); the identity is what the group's published code uses. The alternation starts
    from α₀ = start · mean|w|; `start` is the best of a grid, searched once on the initial weight.
    """

    def __init__(
        self, weight: torch.Tensor, grid: Grid, per_channel: bool, curvature: str = "identity"
    ) -> None:
        super().__init__()
        self.grid = grid
        self.per_channel = per_channel
        self.curvature = curvature
        mean = self._mean_magnitude(weight.detach())
        best = search_scale(weight.detach(), grid, per_channel)
        self.register_buffer("start", best / mean)
        self.register_buffer("diagonal", torch.ones_like(weight) if curvature == "adam" else None)
        self.start: torch.Tensor
        self.diagonal: torch.Tensor | None

    def _mean_magnitude(self, weight: torch.Tensor) -> torch.Tensor:
        count = weight.shape[-1] if self.per_channel else weight.numel()
        mean = _reduce(weight.abs(), self.per_channel) / count
        return torch.where(mean > 0, mean, torch.ones_like(mean))

    def weight_scale(self, weight: torch.Tensor) -> WeightScale:
        scale = laq(weight, self.start, self.diagonal, self.grid, LAQ_ITERATIONS, self.per_channel)
        return WeightScale(scale, self.grid)

    def codes_and_scale(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.weight_scale(weight)
        return found.integers(weight.detach()), found.scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        codes, alpha = self.codes_and_scale(weight)
        return _StraightThrough.apply(weight, codes.mul_(alpha))

    def rows(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        latent = rows.detach()
        scale = laq(latent, self.start[ids], None, self.grid, LAQ_ITERATIONS, True)
        return _StraightThrough.apply(rows, WeightScale(scale, self.grid).integers(latent).mul_(scale))


def search_scale(x: torch.Tensor, grid: Grid, per_channel: bool = False, points: int = 60) -> torch.Tensor:
    """The scale of least squared error, over a geometric grid from 1% to 110% of the largest value.

    A search is more robust than a formula of the moments: hidden states of BERT and the second FFN
    matrix have outliers of hundreds of standard deviations.
    """
    if per_channel and x.shape[0] > ROWS_AT_A_TIME:  # pieces that stay in the cache: several times faster
        return torch.cat([search_scale(rows, grid, per_channel, points) for rows in x.split(ROWS_AT_A_TIME)])
    reach = max(grid.high - grid.zero_point, grid.zero_point - grid.low)
    top = x.abs().amax(dim=-1, keepdim=True) if per_channel else x.abs().amax()
    top = torch.where(top > 0, top, torch.ones_like(top))
    best_scale = top / reach
    best_error = torch.full_like(top, float("inf"))
    for ratio in torch.logspace(-2, 0.0414, points, dtype=torch.float64).tolist():
        scale = top * (ratio / reach)
        error = dequantize(quantize(x, scale, grid), scale, grid).sub_(x).square_()
        error = _reduce(error, per_channel)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
    return best_scale


def make_weight_quantizer(weight: torch.Tensor, spec: WeightSpec) -> nn.Module:
    """The quantizer of one weight, as `WeightSpec.kind` names it; 32 bits give the identity."""
    if not spec.is_quantized:
        return nn.Identity()
    grid = symmetric_grid(spec.bits)
    if spec.kind == "twn":
        return TWN(spec.per_channel)
    if spec.kind == "midrise":
        return Midrise(spec.per_channel)
    if spec.kind == "laq":
        return LAQ(weight, grid, spec.per_channel, spec.curvature)
    return LearnedScale(search_scale(weight.detach(), grid, spec.per_channel), grid)
