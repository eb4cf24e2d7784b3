"""What a validation found, as types: the content of validation.json, the verdict and the notes on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mrem_deploy.base import machine
from mrem_deploy.deploy.census import Census
from mrem_deploy.deploy.own_runtime import BothWays
from mrem_deploy.deploy.providers import note_on
from mrem_deploy.evaluate.accuracy import BY_ONNXRUNTIME, FULL_PRECISION, ONNX, QUANTIZED, TORCH, Accuracy
from mrem_deploy.evaluate.fidelity import Fidelity

FORMAT = 1
TITLES = {FULL_PRECISION: "full precision", QUANTIZED: "torch quantized", ONNX: "ONNX"}
# Expected agreement of ONNX with torch, by bits of the activations: a coarser scale makes each flip larger.
EXPECTED_AGREEMENT = {4: 97.0}
EXPECTED_AGREEMENT_ELSE = 99.0
ROUNDING = 1e-9  # points: 88.5 − 87.5 must not exceed 1.0 by the last bit
NO_INTEGERS = "no matmul runs on integers: this file is small, but not faster"
Measures = dict[str, dict[str, dict[str, float]]]  # other model -> split -> measure -> percent


@dataclass(frozen=True)
class OnnxFile:
    """What an ONNX file says about itself."""

    file: str
    profile: str | None
    recipe_digest: str | None
    opset: int | None
    size_mb: float  # with separate files of weights
    result_digest: str | None = None  # of the frozen model that was exported
    changed_since_export: bool | None = None  # None: an earlier release wrote it

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Steadiness:
    """Percent of some examples that get the same prediction as in a batch: alone, and with more padding.

    A user's batches are not ours: a prediction that depends on its neighbours would be a defect.
    """

    examples: int
    alone: float
    padded: float


@dataclass(frozen=True)
class Findings:
    """What running the ONNX model showed. The other models are full precision, and QUANTIZED: the same model
    in torch, perhaps on a sample of the examples."""

    file: OnnxFile
    agreement: Measures
    steadiness: Steadiness
    layer_errors: dict[str, float]  # ONNX against torch, relative
    census: Census
    onnxruntime: str  # its version
    threads: int  # 0: onnxruntime chose
    fidelity: dict[str, dict[str, Fidelity]] = field(default_factory=dict)  # other model -> split
    torch_examples: dict[str, int] = field(default_factory=dict)  # split -> examples compared with torch
    both_ways: BothWays | None = None  # with and without the CPU runtime's operators, if the file has any

    def to_dict(self) -> dict[str, Any]:
        """The key "onnx" of validation.json."""
        return {
            **self.file.to_dict(),
            "agreement": self.agreement,
            "fidelity": {
                other: {split: own.to_dict() for split, own in by_split.items()}
                for other, by_split in self.fidelity.items()
            },
            "torch_examples": self.torch_examples,
            "steady": asdict(self.steadiness),
            "layer_errors": self.layer_errors,
            "nodes": self.census.to_dict(),
            "onnxruntime": self.onnxruntime,
            "threads": self.threads or "chosen by onnxruntime",
            **({"both_ways": self.both_ways.to_dict()} if self.both_ways else {}),
        }


@dataclass(frozen=True)
class Verdict:
    """Whether the metric of the ONNX model stays within `max_drop` points of full precision."""

    passed: bool
    drop: float  # points lost, of the split that lost most
    split: str
    max_drop: float

    @property
    def sentence(self) -> str:
        fell = f"{self.drop:.2f} points below" if self.drop > 0 else f"{-self.drop:.2f} points above"
        limit = f"{self.max_drop:g} {'is' if self.max_drop == 1 else 'are'} allowed"
        return f"{'passed' if self.passed else 'FAILED'}: {fell} full precision on {self.split}; {limit}"


@dataclass(frozen=True)
class Validation:
    """A validated ONNX model: the content of validation.json."""

    findings: Findings
    accuracy: Accuracy
    verdict: Verdict
    notes: tuple[str, ...]  # what a careful reader should know besides the verdict
    model: str | None
    bits: str
    task: str
    full_precision_from: str  # "measured" or "metrics.json"

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "passed": self.verdict.passed,
            "verdict": self.verdict.sentence,
            "remarks": list(self.notes),
            "max_drop": self.verdict.max_drop,
            "drop": self.verdict.drop,
            "model": self.model,
            "bits": self.bits,
            "task": self.task,
            "full_precision_from": self.full_precision_from,
            "accuracy": self.accuracy.to_dict(),
            "onnx": self.findings.to_dict(),
            "environment": machine.describe_machine(),
        }

    def headline(self) -> dict[str, Any]:
        """The few numbers that metrics.json and the report quote: the key "onnx" of metrics.json."""
        found = self.findings
        return {
            "profile": found.file.profile,
            "file": found.file.file,
            "opset": found.file.opset,
            "size_mb": found.file.size_mb,
            "onnxruntime": found.onnxruntime,
            "metric": self.accuracy.onnx,
            "drop": self.verdict.drop,
            "agreement": _first(found.agreement[QUANTIZED]),
            "agreement_full_precision": _first(found.agreement[FULL_PRECISION]),
            "integer_products": found.census.integer_count,
            "float_products": found.census.floating_count,
            "providers": list(found.census.providers),
            "torch_examples": next(iter(found.torch_examples.values()), None),
        }


def verdict_on(accuracy: Accuracy, max_drop: float) -> Verdict:
    """The split that lost most decides."""
    metric = accuracy.metric
    drops = {
        name: split.scores[FULL_PRECISION][metric] - split.scores[ONNX][metric]
        for name, split in accuracy.splits.items()
    }
    worst = max(drops, key=lambda name: drops[name])
    return Verdict(drops[worst] <= max_drop + ROUNDING, drops[worst], worst, max_drop)


def notes_on(findings: Findings, activation_bits: int) -> list[str]:
    """What a careful reader should know besides the verdict."""
    expected, notes = _expected(activation_bits), disagreements(findings, activation_bits)
    steady = findings.steadiness
    for share, how in ((steady.alone, "alone"), (steady.padded, "with more padding")):
        if share < expected:
            notes.append(
                f"{share:.2f}% of {steady.examples} examples get the same prediction {how} as in a batch"
            )
    if not findings.census.integer:
        notes.append(note_on(findings.census.providers) or NO_INTEGERS)
    return notes


def clearly_differ(findings: Findings, activation_bits: int) -> bool:
    """Whether ONNX and torch agree less than usual on some split, by more than a sample of examples explains:
    two standard errors."""
    expected = _expected(activation_bits)
    for split, measures in findings.agreement.get(QUANTIZED, {}).items():
        error = findings.fidelity.get(QUANTIZED, {}).get(split, Fidelity()).flips_error or 0.0
        if next(iter(measures.values())) + 2 * error < expected:
            return True
    return False


def _expected(activation_bits: int) -> float:
    return EXPECTED_AGREEMENT.get(activation_bits, EXPECTED_AGREEMENT_ELSE)


def disagreements(findings: Findings, activation_bits: int) -> list[str]:
    """A sentence for every split on which ONNX and torch agree less than usual."""
    expected = _expected(activation_bits)
    notes = []
    for split, measures in findings.agreement.get(QUANTIZED, {}).items():
        share, count = next(iter(measures.values())), findings.torch_examples.get(split)
        where = f"{count:,} examples of {split}" if count else split
        if share < expected:
            notes.append(
                f"ONNX and torch agree for {share:.2f}% of {where}; {expected:g}% or more are usual at "
                f"{activation_bits}-bit activations"
            )
    return notes


def _first(by_split: Mapping[str, Mapping[str, float]]) -> float:
    return next(iter(next(iter(by_split.values())).values()))


def table_rows(validation: Validation) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows for people: models down, splits and agreements across."""
    accuracy, agreement = validation.accuracy, validation.findings.agreement
    compared = [name for name in (QUANTIZED, FULL_PRECISION) if name in agreement]
    measure = next(iter(next(iter(agreement[QUANTIZED].values()))))
    # where the accuracy has each of them: "quantized" is the one that decides
    keys = (FULL_PRECISION, TORCH if accuracy.scored_by == BY_ONNXRUNTIME else QUANTIZED, ONNX)
    head = ["model"]
    rows = [[title] for title in TITLES.values()]
    for split, scores in accuracy.splits.items():
        head.append(f"{accuracy.metric} {split}")
        for row, key in zip(rows, keys, strict=True):
            value = scores.score(key, accuracy.metric)
            row.append("—" if value is None else f"{value:.2f}")
        for other in compared:
            head.append(f"{measure} with {TITLES[other]}, %")
            for row, name in zip(rows, TITLES, strict=True):
                row.append(f"{agreement[other][split][measure]:.2f}" if name == ONNX else "")
    return tuple(head), [tuple(row) for row in rows]
