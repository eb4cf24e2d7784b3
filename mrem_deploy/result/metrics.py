"""metrics.json as types: what the quantized model scores, and what it cost to make.

`to_dict` writes the keys of the file in their order. `from_dict` also reads files that lack some of them:
a number that is missing or null becomes NaN, a part that is missing None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrem_deploy.base.files import write_json
from mrem_deploy.deploy.own_runtime import NextTo
from mrem_deploy.evaluate.accuracy import Accuracy
from mrem_deploy.result.reading import given, part, read_part
from mrem_deploy.result.target import TargetDrop

if TYPE_CHECKING:  # these modules load torch, which reading a file does not need
    from mrem_deploy.quant.mixed import MixedBits
    from mrem_deploy.train.job import ProcessCost, QatChoice, WorkerReport

METRICS = "metrics.json"
FORMAT = 1


@dataclass(frozen=True)
class WorkerCost:
    """What one process of the training cost."""

    name: str = ""
    peak_memory_mb: float = math.nan
    cpu_seconds: float | None = None  # known where several processes trained
    report: WorkerReport | None = None  # of a worker of MREM-P

    def to_dict(self) -> dict[str, Any]:
        result: dict[str, Any] = {"name": self.name, "peak_memory_mb": self.peak_memory_mb}
        if self.cpu_seconds is not None:
            result["cpu_seconds"] = self.cpu_seconds
        return result | (self.report.to_dict() if self.report else {})

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> WorkerCost:
        own = given(cls, content)
        rest = {key: value for key, value in content.items() if key not in own}
        if not rest:
            return cls(**own)
        from mrem_deploy.train.job import WorkerReport

        return cls(**own, report=part(WorkerReport, rest))

    @classmethod
    def of_all(cls, costs: Sequence[ProcessCost], reports: Sequence[WorkerReport]) -> tuple[WorkerCost, ...]:
        """By rank. Only MREM-P has reports, and only it has several processes."""
        if len(costs) == 1:
            return (cls("main", costs[0].peak_memory_mb, report=reports[0] if reports else None),)
        pairs = zip(costs, reports, strict=True)
        return tuple(
            cls(f"worker {rank}", cost.peak_memory_mb, cost.cpu_seconds, report)
            for rank, (cost, report) in enumerate(pairs)
        )


@dataclass(frozen=True)
class Cost:
    """Time and memory of a run. Memory is in MiB, like every `_mb`."""

    train_seconds: float = math.nan
    total_seconds: float = math.nan
    train_cpu_seconds: float | None = None  # of all workers; a resumed run does not know its first part's
    peak_memory_mb: float = math.nan  # of the largest worker
    memory_kind: str = ""  # how it was measured
    workers: tuple[WorkerCost, ...] = ()
    calibration_samples: int | None = None
    heldout_samples: int | None = None
    stages: Mapping[str, float] = field(default_factory=dict)  # seconds by name

    def to_dict(self) -> dict[str, Any]:
        workers = [worker.to_dict() for worker in self.workers]
        result = {**vars(self), "workers": workers, "stages": dict(self.stages)}
        if self.heldout_samples is None:
            del result["heldout_samples"]
        return result

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Cost:
        workers = tuple(map(WorkerCost.from_dict, content.get("workers") or ()))
        return cls(**given(cls, content) | {"workers": workers})


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model in MiB."""

    full_precision_mb: float = math.nan
    quantized_mb: float = math.nan  # of mrem.safetensors
    formula_mb: float | None = None  # as the paper counts
    onnx_mb: float | None = None

    def to_dict(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Sizes:
        return cls(**given(cls, content))


@dataclass(frozen=True)
class OnnxCheck:
    """What the validation of an ONNX file found; scores and agreements are percentages of the first split."""

    onnxruntime: str = ""
    metric: float = math.nan
    drop: float = math.nan  # points below full precision, of the split that lost most
    agreement: float = math.nan  # with the quantized model in torch
    agreement_full_precision: float = math.nan
    integer_products: int = 0  # matmuls that run on integers
    float_products: int = 0
    providers: tuple[str, ...] = ()
    torch_examples: int | None = None  # on which the agreement with torch was measured; older files: all

    @property
    def products(self) -> int:
        return self.integer_products + self.float_products


@dataclass(frozen=True)
class Onnx:
    """An exported file: of the first profile, which the report is about, or for the CPU runtime."""

    file: str = ""
    profile: str | None = None
    opset: int | None = None
    size_mb: float = math.nan
    recipe_digest: str | None = None
    check: OnnxCheck | None = None  # None: it was not validated
    next_to: NextTo | None = None  # of the file for the CPU runtime, where its operators could run

    def to_dict(self) -> dict[str, Any]:
        if self.check is None:
            order = ("file", "profile", "recipe_digest", "opset", "size_mb")
            compared = {"next_to": self.next_to.to_dict()} if self.next_to else {}
            return {name: getattr(self, name) for name in order} | compared
        own = {name: getattr(self, name) for name in ("profile", "file", "opset", "size_mb")}
        check = {name: value for name, value in vars(self.check).items() if value is not None}
        return {**own, **check, "providers": list(self.check.providers)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Onnx:
        check = None
        if "metric" in content:
            providers = tuple(content.get("providers") or ())
            check = OnnxCheck(**given(OnnxCheck, content) | {"providers": providers})
        next_to = part(NextTo, content.get("next_to"))
        return cls(**given(cls, content) | {"check": check, "next_to": next_to})


@dataclass(frozen=True)
class Parallel:
    """How the modules of MREM-P depended on each other."""

    staleness: int = 0
    teacher_forcing_steps: float = 0.0
    # module -> [(age, times used), …] of its inputs, an age being steps of the module before it
    ages: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "ages": {name: [list(pair) for pair in ages] for name, ages in self.ages.items()},
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Parallel:
        ages = {
            name: [(age, times) for age, times in own] for name, own in (content.get("ages") or {}).items()
        }
        return cls(**given(cls, content) | {"ages": ages})


@dataclass(frozen=True)
class Qat:
    """What quantization-aware training was trained on, and what its result was chosen by."""

    epochs: tuple[float, ...] = ()
    training_samples: int | None = None
    training_split: int | None = None  # samples that there are
    training_windows: int | None = None  # more than samples where texts are cut into several
    choice: QatChoice | None = None

    def to_dict(self) -> dict[str, Any]:
        own = {**vars(self), "epochs": list(self.epochs)}
        choice = own.pop("choice")
        return {**own, "chosen_on_the_evaluation_split": choice.to_dict() if choice else None}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Qat:
        choice, epochs = None, tuple(content.get("epochs") or ())
        if content.get("chosen_on_the_evaluation_split"):
            from mrem_deploy.train.job import QatChoice

            choice = part(QatChoice, content["chosen_on_the_evaluation_split"])
        return cls(**given(cls, content) | {"epochs": epochs, "choice": choice})


@dataclass(frozen=True)
class HeldOut:
    """The loss of one module on sentences that nothing was trained on."""

    before: float | None = None  # its training; None: not measured, as by rem, ptq and qat
    end: float = math.nan  # of its training
    best: float = math.nan  # in the state that is the result: compare methods by this one
    best_step: int | None = None  # the training steps that led to it; None: there was no choice

    @classmethod
    def of(cls, curve: Sequence[tuple[int, float]]) -> HeldOut:
        """From (steps done, loss), the first before training if there are several."""
        end = curve[-1][1]
        if len(curve) == 1:
            return cls(None, end, end)
        step, best = min(curve, key=lambda point: point[1])
        return cls(curve[0][1], end, best, step)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> HeldOut:
        return cls(**given(cls, content))


@dataclass(frozen=True)
class Metrics:
    """metrics.json: what the quantized model scores, and what it cost to make."""

    task: str = ""
    data: str = ""
    model: str = ""
    method: str = ""
    bits: str = ""
    hot_rows: int = 0  # rows of the word embedding with 8 bits
    seed: int | None = None
    accuracy: Accuracy = field(default_factory=lambda: Accuracy(""))
    cost: Cost = field(default_factory=Cost)
    environment: Mapping[str, Any] = field(default_factory=dict)  # of base/machine.py, as it is
    size: Sizes = field(default_factory=Sizes)
    onnx: Onnx | None = None
    runtime: Onnx | None = None  # the file for the CPU runtime, if it was exported besides
    parallel: Parallel | None = None  # of MREM-P
    mixed: MixedBits | None = None  # with --bits auto
    target: TargetDrop | None = None  # with --target-drop
    qat: Qat | None = None
    heldout: Mapping[str, HeldOut] = field(default_factory=dict)  # by module, from input to output
    base_model: str | None = None  # hub id and licence of the original, where they are known
    license: str | None = None

    def to_dict(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "format": FORMAT,
            "task": self.task,
            "data": self.data,
            "model": self._source(),
            "method": self.method,
            "bits": self.bits,
            **({"hot_rows": self.hot_rows} if self.hot_rows else {}),
            "seed": self.seed,
            "accuracy": self.accuracy.to_dict(),
            "cost": self.cost.to_dict(),
            "environment": dict(self.environment),
        }
        parts = {
            "parallel": self.parallel,
            "mixed_precision": self.mixed,
            "target_drop": self.target,
            "qat": self.qat,
            "size": self.size,
            "onnx": self.onnx,
            "runtime": self.runtime,
        }
        result |= {name: part.to_dict() for name, part in parts.items() if part is not None}
        heldout = {name: module.to_dict() for name, module in self.heldout.items()}
        return result | ({"heldout": heldout} if heldout else {})

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Metrics:
        bits, model = content.get("bits"), content.get("model")
        source = model if isinstance(model, Mapping) else {"name": model}
        return cls(
            **given(cls, content)
            | {
                "model": str(source.get("name") or ""),
                "base_model": source.get("base_model"),
                "license": source.get("license"),
                "bits": "-".join(map(str, bits)) if isinstance(bits, list | tuple) else str(bits or ""),
                "accuracy": Accuracy.from_dict(content.get("accuracy") or {}),
                "cost": Cost.from_dict(content.get("cost") or {}),
                "size": Sizes.from_dict(content.get("size") or {}),
                "onnx": part(Onnx, content.get("onnx")),
                "runtime": part(Onnx, content.get("runtime")),
                "parallel": part(Parallel, content.get("parallel")),
                "mixed": _mixed(content.get("mixed_precision")),
                "target": part(TargetDrop, content.get("target_drop")),
                "qat": part(Qat, content.get("qat")),
                "heldout": {n: HeldOut.from_dict(m) for n, m in (content.get("heldout") or {}).items()},
            }
        )

    def _source(self) -> str | dict[str, str]:
        known = {"base_model": self.base_model, "license": self.license}
        more = {name: value for name, value in known.items() if value}
        return {"name": self.model, **more} if more else self.model

    def write(self, folder: Path) -> None:
        write_json(folder / METRICS, self.to_dict())

    @classmethod
    def read(cls, folder: Path) -> Metrics:
        return read_part(cls, folder / METRICS)


def _mixed(content: Mapping[str, Any] | None) -> MixedBits | None:
    if not content:
        return None
    from mrem_deploy.quant.mixed import MixedBits

    return part(MixedBits, content)
