"""How `--target-drop` found its model: the sizes that were tried, and what each was estimated to lose."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mrem_deploy.result.reading import given


@dataclass(frozen=True)
class Attempt:
    """One choice of bits per layer, trained, and what it loses on sentences that nothing was trained on."""

    rung: int = 0  # its place on the way from 2 to 8 bits
    size_mb: float = math.nan
    bits: float = math.nan  # mean over the weights that are quantized
    full: bool = True  # trained in full; otherwise briefly, to see where to begin
    steps: int = 0
    drop: float = math.nan  # points below full precision
    error: float = 0.0  # one standard error of it
    flips: float | None = None
    kl: float | None = None

    @property
    def bound(self) -> float:
        """What is compared with the target: the drop and one standard error."""
        return self.drop + self.error

    def meets(self, target: float) -> bool:
        return self.bound <= target

    def __str__(self) -> str:
        how = "" if self.full else f" after {self.steps} steps"
        return f"{self.size_mb:.1f} MiB ({self.bits:.1f} bits){how}: drop {self.drop:.2f} ± {self.error:.2f}"


@dataclass(frozen=True)
class TargetDrop:
    """What was asked for, how it was estimated, and the way there; `chosen` is the rung of the result."""

    target: float = math.nan
    estimate: str = ""
    examples: int = 0
    met: bool = False
    chosen: int = 0
    attempts: tuple[Attempt, ...] = ()

    @property
    def result(self) -> Attempt | None:
        return next((one for one in self.attempts if one.full and one.rung == self.chosen), None)

    def sentence(self) -> str:
        """The outcome in words."""
        found = self.result
        if found is None:
            return f"at most {self.target:g} points: nothing was trained in full"
        if self.met:
            return f"at most {self.target:g} points: met with {found}"
        return f"at most {self.target:g} points: NOT met, not even with 8 bits; the best is {found}"

    def to_dict(self) -> dict[str, Any]:
        """As in metrics.json."""
        return {**vars(self), "attempts": [dict(vars(attempt)) for attempt in self.attempts]}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TargetDrop:
        attempts = tuple(Attempt(**given(Attempt, each)) for each in content.get("attempts") or ())
        return cls(**given(cls, content) | {"attempts": attempts})
