"""The CPU runtime, a package of its own (`mrem_runtime`): whether it is here, and sessions that use it.

Note: a file of profile mrem-cpu runs without it, too, but as slowly as `ort-cpu`. So it is never an error
that the package is missing. It is imported only when asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from mrem_deploy.deploy.providers import CPU, Placement
from mrem_deploy.export.profiles import RUNTIME

PACKAGE = "mrem_runtime"
INSTALL = "make wheel-runtime, then pip install dist/mrem_runtime-*.whl (docs/runtime.md)"


def problem() -> str:
    """Why its operators cannot run here; "" if they can."""
    if find_spec(PACKAGE) is None:
        return "mrem-runtime is not installed"
    try:
        package().library()
        package().target()
    except (OSError, ValueError, AttributeError) as error:
        return f"mrem-runtime cannot be used: {error}"
    return ""


def package() -> ModuleType:
    import mrem_runtime

    return mrem_runtime


def describe() -> str:
    """Its version and the instruction set that it uses; only where there is no problem."""
    return f"mrem-runtime {package().version()}, CPU target {package().target()}"


def has_operators(model: Path) -> bool:
    """Whether an ONNX file has nodes of the runtime."""
    try:
        return RUNTIME.encode() in model.read_bytes()
    except OSError:
        return False


def placed(where: Placement, model: Path) -> Placement:
    """Where the model runs, with the runtime's operators if it has any and they can run."""
    if where.first != CPU or not has_operators(model) or problem():
        return where
    return replace(where, library=str(package().library()))


@dataclass(frozen=True)
class BothWays:
    """A file with operators of the runtime, run with them and, as functions, without."""

    runtime: str  # version and instruction set
    agreement: dict[str, dict[str, float]]  # by split: the predictions of the two, in percent
    scores: dict[str, dict[str, float]]  # by split: without the operators

    def to_dict(self) -> dict[str, Any]:
        return {"runtime": self.runtime, "agreement": self.agreement, "scores_without": self.scores}


@dataclass(frozen=True)
class NextTo:
    """The file for the CPU runtime, run with its operators, next to the file that was validated: both on the
    same examples of the first split."""

    runtime: str  # version and instruction set
    examples: int
    metric: float
    onnx_metric: float  # of the validated file
    agreement: float  # the predictions of the two, in percent

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> NextTo:
        return cls(**content)
