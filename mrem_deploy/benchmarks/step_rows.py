"""A row of `benchmark step`: one bit setting and style of scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mrem_deploy.benchmarks.timing import Comparison


@dataclass(frozen=True)
class OtherKernels:
    """The same quantized step by another implementation."""

    cost: Comparison  # against the unquantized step
    speed_up: Comparison  # its time over that of the first kernels

    def to_dict(self) -> dict[str, Any]:
        return {**self.cost.to_dict(), "speed_up": self.speed_up.ratio_dict()}


@dataclass(frozen=True)
class StepRow:
    """One bit setting and style of scales."""

    bits: str
    per_channel: bool
    kernels: str  # the first of those that were compared
    cost: Comparison  # its quantized step against the unquantized one
    others: dict[str, OtherKernels]
    checked: dict[str, float]  # what the proof of quantization counted

    @property
    def title(self) -> str:
        return f"{self.bits} {style_name(self.per_channel)}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "bits": self.bits,
            "per_channel": self.per_channel,
            **self.cost.to_dict(),
            "kernels": self.kernels,
            "others": {name: other.to_dict() for name, other in self.others.items()},
            "checked": self.checked,
        }


def style_name(per_channel: bool) -> str:
    return "per channel" if per_channel else "per tensor"
