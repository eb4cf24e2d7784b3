"""A quantized activation in a graph, and what makes products of such."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from mrem_deploy.export.builder import Builder
from mrem_deploy.export.profiles import Profile
from mrem_deploy.models.architectures import Anatomy
from mrem_deploy.quant.frozen import FrozenModel, FrozenScale


@dataclass(frozen=True)
class Codes:
    """A quantized activation: value = (codes − zero_point) · scale + offset."""

    codes: ir.Value
    scale: ir.Value
    zero_point: ir.Value
    scale_number: float  # the number in `scale`
    offset: float = 0.0  # what a profile without zero points must add after the matmul


class Multiplies(Protocol):
    """The part of a `Lowering` that the rules of single architectures use."""

    build: Builder
    frozen: FrozenModel
    found: Anatomy
    profile: Profile

    def quantize(self, x: ir.Value, name: str) -> Codes | None: ...

    def stored_codes(self, codes: ir.Value, name: str, frozen: FrozenScale) -> Codes: ...

    def multiply(
        self,
        name: str,
        left: ir.Value,
        a: Codes | None,
        right: ir.Value,
        b: Codes | None,
        factor: float = 1.0,
    ) -> ir.Value: ...
