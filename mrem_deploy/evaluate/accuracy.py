"""The scores of models on the evaluation splits, as types, for `metrics.json` and `validation.json`.

`to_dict` writes the keys of those files in their order. `from_dict` also reads files that lack some of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mrem_deploy.evaluate.fidelity import Fidelity

# "quantized" is what a result is judged by; `scored_by` says in which runtime it was run. "torch" and "onnx"
# are the same model there, where both were run on the entire split.
FULL_PRECISION, QUANTIZED, TORCH, ONNX = "full_precision", "quantized", "torch", "onnx"
MODELS = (FULL_PRECISION, QUANTIZED, TORCH, ONNX)  # in the order of every table
BY_TORCH, BY_ONNXRUNTIME = "torch", "onnxruntime"


@dataclass(frozen=True)
class SplitScores:
    """One evaluation split: the metrics of every model, and how sure the change by quantization is."""

    examples: int
    digest: str = ""  # names the tokens of the split
    windows: int | None = None  # where an example is more than one of them
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # model -> metric -> percent
    lost: int | None = None  # examples that only full precision gets right
    gained: int | None = None  # examples that only the quantized model gets right
    paired: str = "accuracy"  # the metric that `lost` and `gained` count
    change: dict[str, dict[str, float]] = field(default_factory=dict)  # metric -> change with its error
    fidelity: dict[str, Fidelity] = field(default_factory=dict)  # model -> against full precision

    def score(self, model: str, metric: str) -> float | None:
        return self.scores.get(model, {}).get(metric)

    def to_dict(self) -> dict[str, Any]:
        result: dict[str, Any] = {"examples": self.examples, "digest": self.digest}
        if self.windows is not None:
            result["windows"] = self.windows
        result |= self.scores
        if self.lost is not None and self.gained is not None:
            result |= {"lost": self.lost, "gained": self.gained}
            result |= {"paired": self.paired} if self.paired != "accuracy" else {}
        result |= {"change": self.change} if self.change else {}
        fidelity = {model: own.to_dict() for model, own in self.fidelity.items()}
        return result | ({"fidelity": fidelity} if fidelity else {})

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> SplitScores:
        return cls(
            examples=content.get("examples", 0),
            digest=content.get("digest", ""),
            windows=content.get("windows"),
            scores={model: dict(content[model]) for model in MODELS if content.get(model)},
            lost=content.get("lost"),
            gained=content.get("gained"),
            paired=content.get("paired", "accuracy"),
            change=content.get("change") or {},
            fidelity={m: Fidelity.from_dict(own) for m, own in (content.get("fidelity") or {}).items()},
        )


@dataclass(frozen=True)
class Accuracy:
    """The task's metric of every model on the first split, and all metrics of all splits."""

    metric: str
    splits: dict[str, SplitScores] = field(default_factory=dict)
    quoted: dict[str, float] = field(default_factory=dict)  # model -> the headline
    scored_by: str | None = None  # BY_TORCH or BY_ONNXRUNTIME; older files do not say (it was torch)

    @property
    def full_precision(self) -> float | None:
        return self.quoted.get(FULL_PRECISION)

    @property
    def quantized(self) -> float | None:
        return self.quoted.get(QUANTIZED)

    @property
    def onnx(self) -> float | None:
        return self.quoted.get(ONNX)

    @property
    def change(self) -> float | None:
        """Points that quantization gains or, as usual, loses."""
        full, quantized = self.full_precision, self.quantized
        return None if full is None or quantized is None else quantized - full

    @property
    def fidelity(self) -> Fidelity:
        """Of the quantized model on the first split; empty where full precision was not run."""
        first = next(iter(self.splits.values()), None)
        return first.fidelity.get(QUANTIZED, Fidelity()) if first else Fidelity()

    def to_dict(self) -> dict[str, Any]:
        splits = {name: split.to_dict() for name, split in self.splits.items()}
        headline = {"metric": self.metric, **self.quoted, **self.fidelity.to_dict()}
        return headline | ({"scored_by": self.scored_by} if self.scored_by else {}) | {"splits": splits}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Accuracy:
        return cls(
            metric=str(content.get("metric", "")),
            splits={name: SplitScores.from_dict(s) for name, s in (content.get("splits") or {}).items()},
            quoted={model: content[model] for model in MODELS if content.get(model) is not None},
            scored_by=content.get("scored_by"),
        )
