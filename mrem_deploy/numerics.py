"""The only definition of integer grids, rounding, quantize and dequantize.

Every other file (quantizers, frozen layers, C++ and Triton kernels, ONNX export) must give the same
integers as the code here. Two rules keep them equal everywhere:

* quantize by *division* `x / s`, never by `x * (1 / s)`: the two differ at ties;
* round half to even (`torch.round`, `std::nearbyint`, ONNX QuantizeLinear), never half away.

Weights of 2 bits may be quantized by a threshold (`quantize_by_threshold`): a comparison instead of rounding.

Loads no torch: tensors bring their own operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

Integers = TypeVar("Integers", bound=Any)  # a tensor or an array

UNQUANTIZED_BITS = 32  # the bit width that means "leave it in full precision"
WEIGHT_BITS = (2, 3, 4, 8, UNQUANTIZED_BITS)
EMBEDDING_BITS = (2, 4, 8, UNQUANTIZED_BITS)
ACTIVATION_BITS = (4, 8, UNQUANTIZED_BITS)


@dataclass(frozen=True)
class Grid:
    """The integers low..high, `spacing` apart; `zero_point` is the code that stands for the real number 0.

    With a spacing of 2 they are odd: −3, −1, 1, 3. No code stands for 0, and the zero point is 0.
    """

    bits: int
    low: int
    high: int
    zero_point: int = 0
    spacing: int = 1

    @property
    def signed(self) -> bool:
        return self.low < 0

    @property
    def inner(self) -> int:
        """The code of least magnitude: 0, or 1 if all codes are odd."""
        return self.spacing // 2


def symmetric_grid(bits: int) -> Grid:
    """Ω(b) of the paper: −2^(b−1)+1 … 2^(b−1)−1. Two bits are the ternary codes −1, 0, 1."""
    bound = 2 ** (bits - 1) - 1
    return Grid(bits, -bound, bound)


def midrise_grid() -> Grid:
    """The four codes −3, −1, 1, 3 of two bits. A step of the quantizer rises at 0: hence its name."""
    return Grid(2, -3, 3, spacing=2)


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


def quantize_by_threshold(x: torch.Tensor, threshold: torch.Tensor, grid: Grid) -> torch.Tensor:
    """codes = (−1 if x < 0, else 1) · (high if |x| > Δ, else inner), in the dtype of x; for z = 0.

    On a midrise grid NaN stays NaN. On a ternary one it is above no threshold and becomes 0.
    """
    codes = (x.abs() > threshold).to(x.dtype).mul_(grid.high - grid.inner).add_(grid.inner)
    codes = codes.where(~(x < 0), -codes)
    return codes.where(~x.isnan(), x) if grid.inner else codes


def to_stored(codes: Integers, spacing: int) -> Integers:
    """The consecutive integers that files hold for codes `spacing` apart: −3, −1, 1, 3 are −2, −1, 0, 1."""
    return codes if spacing == 1 else (codes - spacing // 2) // spacing


def from_stored(stored: Integers, spacing: int) -> Integers:
    """The inverse of `to_stored`."""
    return stored if spacing == 1 else stored * spacing + spacing // 2


def dequantize(codes: torch.Tensor, scale: torch.Tensor, grid: Grid) -> torch.Tensor:
    """x̂ = (codes − z) · s."""
    return (codes - grid.zero_point) * scale if grid.zero_point else codes * scale
