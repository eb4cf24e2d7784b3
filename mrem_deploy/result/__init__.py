"""The folder that `mrem quantize` writes, as a type: `open_result(folder).metrics.accuracy.quantized`.

mrem.json, mrem.safetensors    the quantized model (quant/artifact.py), with config.json and the tokenizer
model*.onnx, onnx/             one file per export profile (export/profiles.py)
recipe.yaml                    the options that made it
metrics.json                   what it scores and what it cost: `Metrics`
history.json                   loss curves and error per layer: `History`
examples.safetensors           predictions for every evaluation example (evaluate/examples.py)
validation.json                the ONNX file against the torch model (deploy/validation.py)
report.html, report.md, README.md, plots/    pages for people (report/)
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import path_of
from mrem_deploy.evaluate.accuracy import Accuracy
from mrem_deploy.result.history import HISTORY, Curve, History, LayerErrors
from mrem_deploy.result.metrics import (
    METRICS,
    Cost,
    HeldOut,
    Metrics,
    Onnx,
    OnnxCheck,
    Parallel,
    Qat,
    Sizes,
    WorkerCost,
)
from mrem_deploy.result.target import Attempt, TargetDrop

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from mrem_deploy.recipe import Recipe

__all__ = [
    "Accuracy", "Attempt", "CARD", "Cost", "Curve", "HISTORY", "HeldOut", "History", "LayerErrors",
    "METRICS", "Metrics", "Onnx", "OnnxCheck", "PLOTS", "Parallel", "Qat", "RECIPE", "REPORT_HTML",
    "REPORT_MD", "Result", "Sizes", "TargetDrop", "WorkerCost", "open_result",
]  # fmt: skip

RECIPE = "recipe.yaml"
REPORT_HTML, REPORT_MD, CARD, PLOTS = "report.html", "report.md", "README.md", "plots"


class Result:
    """A result folder. What is in it is read when it is first asked for."""

    def __init__(self, folder: str | Path, metrics: Metrics | None = None) -> None:
        self.folder = Path(folder)
        if metrics is not None:
            self.metrics = metrics

    def __repr__(self) -> str:
        return f"Result({str(self.folder)!r})"

    @cached_property
    def metrics(self) -> Metrics:
        return Metrics.read(self.folder)

    @cached_property
    def history(self) -> History:
        return History.read(self.folder)

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe that made it."""
        from mrem_deploy.recipe import from_yaml, make_recipe

        return make_recipe(from_yaml(self.folder / RECIPE))

    def load(self) -> PreTrainedModel:
        """The quantized model in torch: call it like the original."""
        from mrem_deploy.quant.frozen import load

        return load(self.folder)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        from mrem_deploy.models.loading import load_tokenizer

        return load_tokenizer(self.folder)

    def onnx(self, profile: str = "ort-cpu") -> Path:
        """The ONNX file of an export profile."""
        from mrem_deploy.export.profiles import PROFILES, find_profile

        path = find_profile(profile).path_in(self.folder)
        if not path.is_file():
            there = [(p.path_in(self.folder), p.name) for p in PROFILES.values()]
            found = [f"{path.name} ({name})" for path, name in there if path.is_file()]
            raise UserError(
                f"{self.folder} has no {path.name}, the ONNX model of profile {profile}; "
                f"it has {', '.join(found) or 'no ONNX model'}",
                f"write it: python -m mrem_deploy.export {self.folder} --profile {profile}",
            )
        return path

    def session(self, profile: str | None = None, threads: int = 0) -> Any:
        """The ONNX model in an onnxruntime session: by default the file for the CPU runtime with its
        operators, if both are here, else that of ort-cpu."""
        from mrem_deploy.deploy import own_runtime
        from mrem_deploy.deploy.providers import ON_CPU
        from mrem_deploy.deploy.runtime import open_session
        from mrem_deploy.export.profiles import PROFILES

        if profile is None:
            fused = [p.name for p in PROFILES.values() if p.fused and (self.folder / p.file).is_file()]
            profile = fused[0] if fused and not own_runtime.problem() else "ort-cpu"
        path = self.onnx(profile)
        return open_session(path, threads, own_runtime.placed(ON_CPU, path))


def open_result(folder: str | Path) -> Result:
    """A folder that `mrem quantize` wrote."""
    from mrem_deploy.quant.artifact import MANIFEST

    path = path_of("the result folder", folder)
    if not (path / MANIFEST).is_file():
        missing = f"it has no {MANIFEST}" if path.is_dir() else "there is no such folder"
        raise UserError(f"{path} is not a result folder: {missing}", "give the --out folder of mrem quantize")
    return Result(path)
