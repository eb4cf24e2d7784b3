"""How one operand of a matmul is quantized: what the ops take next to its values."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from mrem_deploy.numerics import Grid


class Quantized(NamedTuple):
    """An operand's scale and grid. With a `threshold` its integers come from a comparison, not from rounding:
    sign(w)·[|w| > threshold] on a ternary grid, ±1 and ±3 on a midrise one.

    `learned`: the scale is a learned parameter (LSQ) and gets a gradient, and values outside the range get
    none. Otherwise the scale is a function of the operand (TWN, midrise, LAQ), and the operand's gradient
    passes straight through. Scales of activations are always learned: the ops read `learned` of weights only.
    """

    scale: torch.Tensor  # one number, or (rows, 1): one for each row of a weight
    grid: Grid
    threshold: torch.Tensor | None = None  # one number or (rows, 1)
    learned: bool = False
