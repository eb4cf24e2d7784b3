"""history.json as types: how training went.

The report shows these as plots; whoever compares several runs needs the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrem_deploy.base.files import write_json
from mrem_deploy.result.reading import given, read_part

HISTORY = "history.json"
FORMAT = 1

Curve = Sequence[Sequence[float]]  # [[step, loss], …]


@dataclass(frozen=True)
class LayerErrors:
    """How far the output of every layer is from full precision, before and after training."""

    layers: Sequence[str] = ()
    before: Sequence[float] = ()
    after: Sequence[float] = ()
    unit: str = "relative RMS error"

    @classmethod
    def between(cls, before: Mapping[str, float], after: Mapping[str, float]) -> LayerErrors:
        return cls(list(before), list(before.values()), list(after.values()))


@dataclass(frozen=True)
class History:
    """How a run went: the loss of every trained unit, from input to output, and the error per layer."""

    curves: Mapping[str, Curve] = field(default_factory=dict)
    layer_errors: LayerErrors = field(default_factory=LayerErrors)
    heldout: Mapping[str, Curve] = field(default_factory=dict)  # [[steps done, held-out loss], …] by module

    def to_dict(self) -> dict[str, Any]:
        errors = self.layer_errors
        heldout = {name: [list(point) for point in curve] for name, curve in self.heldout.items()}
        return {
            "format": FORMAT,
            "curves": {name: [list(point) for point in curve] for name, curve in self.curves.items()},
            "layer_errors": {name: list(getattr(errors, name)) for name in ("layers", "before", "after")},
            **({"heldout": heldout} if heldout else {}),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> History:
        errors = LayerErrors(**given(LayerErrors, content.get("layer_errors") or {}))
        return cls(content.get("curves") or {}, errors, content.get("heldout") or {})

    def write(self, folder: Path) -> None:
        write_json(folder / HISTORY, self.to_dict())

    @classmethod
    def read(cls, folder: Path) -> History:
        return read_part(cls, folder / HISTORY)
