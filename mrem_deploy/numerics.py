"""The only definition of integer grids, rounding, quantize and dequantize.

Every other file (quantizers, frozen layers, C++ and Triton kernels, ONNX export) must give the same
integers as the code here. Two rules keep them equal everywhere:

* quantize by *division* `x / s`, never by `x * (1 / s)`: the two differ at ties;
* round half to even (`torch.round`, `std::nearbyint`, ONNX QuantizeLinear), never half away.

Loads no torch: tensors bring their own operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

UNQUANTIZED_BITS = 32  # the bit width that means "leave it in full precision"
WEIGHT_BITS = (2, 3, 4, 8, UNQUANTIZED_BITS)
EMBEDDING_BITS = (2, 4, 8, UNQUANTIZED_BITS)
ACTIVATION_BITS = (4, 8, UNQUANTIZED_BITS)


@dataclass(frozen=True)
class Grid:
    """The integers low..high; `zero_point` is the code that stands for the real number 0."""

    bits: int
    low: int
    high: int
    zero_point: int = 0

    @property
    def signed(self) -> bool:
        return self.low < 0


def symmetric_grid(bits: int) -> Grid:
    """Ω(b) of the paper: −2^(b−1)+1 … 2^(b−1)−1. Two bits are the ternary codes −1, 0, 1."""
    bound = 2 ** (bits - 1) - 1
    return Grid(bits, -bound, bound)


def activation_grid(bits: int) -> Grid:
    """Symmetric activations. At 8 bits the lowest code is −128, not −127: there ONNX QuantizeLinear
    saturates, so it needs no Clip (which costs time) in front of it."""
    return Grid(8, -128, 127) if bits == 8 else symmetric_grid(bits)


def asymmetric_grid(bits: int, zero_point: int) -> Grid:
    """Codes 0 … 2^b−1 for mostly positive activations (after softmax and GELU)."""
    high = 2**bits - 1
    if not 0 <= zero_point <= high:
        raise ValueError(f"zero point must be in 0..{high} for {bits} bits, got {zero_point}")
    return Grid(bits, 0, high, zero_point)


def quantize(x: torch.Tensor, scale: torch.Tensor, grid: Grid) -> torch.Tensor:
    """codes = clamp(round(x / s) + z, low, high), as integers stored in the dtype of x.

    The zero point is added after rounding (it is an integer, so the tie stays where it was).
    """
    codes = (x / scale).round_()
    if grid.zero_point:
        codes += grid.zero_point
    return codes.clamp_(grid.low, grid.high)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, grid: Grid) -> torch.Tensor:
    """x̂ = (codes − z) · s."""
    return (codes - grid.zero_point) * scale if grid.zero_point else codes * scale
