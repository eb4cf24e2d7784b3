"""An ONNX model compared with the torch models it was made from, for `validate` and the end of `quantize`.

Note: the ONNX model does not equal the torch model number for number. Both multiply the same integers, but
softmax, GELU and LayerNorm differ in their last bits. That moves a few activations across a boundary, and
such flips grow with depth. So the error is measured per layer, and the predictions decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from mrem_deploy.base import machine
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.units import MIB
from mrem_deploy.data.encoded import Encoded, sorted_batches
from mrem_deploy.deploy.census import Census, census
from mrem_deploy.deploy.runtime import feed, onnx_predictor, open_session, require, with_outputs
from mrem_deploy.evaluate.accuracy import FULL_PRECISION, MODELS, ONNX, QUANTIZED, Accuracy
from mrem_deploy.evaluate.agreement import AGREEMENTS
from mrem_deploy.evaluate.evaluation import BATCH_SIZE, Evaluation
from mrem_deploy.evaluate.layer_error import RelativeErrors, layers_of
from mrem_deploy.evaluate.predict import Predictor, predict
from mrem_deploy.models.loading import longest_input
from mrem_deploy.models.parts import carve
from mrem_deploy.recipe import Recipe

FORMAT = 1
TITLES = {FULL_PRECISION: "full precision", QUANTIZED: "torch quantized", ONNX: "ONNX"}
RESULT = "validation.json"
MAX_DROP = 1.0  # points, unless the user gives another limit
ERROR_BATCHES = 4  # batches over which the error per layer is measured, from the longest to the shortest
# Expected agreement of ONNX with torch, by bits of the activations: a coarser scale makes each flip larger.
EXPECTED_AGREEMENT = {4: 97.0}
EXPECTED_AGREEMENT_ELSE = 99.0
STEADY_EXAMPLES = 64  # predicted once more alone, and once more with padding
PADDING = 16  # tokens
ROUNDING = 1e-9  # points: 88.5 − 87.5 must not exceed 1.0 by the last bit


@dataclass(frozen=True)
class OnnxFile:
    """What an ONNX file says about itself."""

    file: str
    profile: str | None
    recipe_digest: str | None
    opset: int | None
    size_mb: float  # with separate files of weights

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
    """What running the ONNX model showed."""

    file: OnnxFile
    agreement: dict[str, dict[str, dict[str, float]]]  # other model -> split -> measure -> percent
    steadiness: Steadiness
    layer_errors: dict[str, float]  # ONNX against torch, relative
    census: Census
    onnxruntime: str  # its version
    threads: int  # 0: onnxruntime chose

    def to_dict(self) -> dict[str, Any]:
        """The key "onnx" of validation.json."""
        return {
            **self.file.to_dict(),
            "agreement": self.agreement,
            "steady": asdict(self.steadiness),
            "layer_errors": self.layer_errors,
            "nodes": self.census.to_dict(),
            "onnxruntime": self.onnxruntime,
            "threads": self.threads or "chosen by onnxruntime",
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
        }


def validated(
    findings: Findings,
    accuracy: Accuracy,
    recipe: Recipe,
    task: str,
    max_drop: float = MAX_DROP,
    notes: Sequence[str] = (),
    full_precision_from: str = "measured",
) -> Validation:
    """The verdict on what `examine` found; `notes` are added to those that follow from it."""
    return Validation(
        findings,
        accuracy,
        verdict_on(accuracy, max_drop),
        (*notes_on(findings, recipe.spec.activation_bits), *notes),
        recipe.model,
        recipe.bits,
        task,
        full_precision_from,
    )


def examine(
    model: Path,
    evaluation: Evaluation,
    quantized: PreTrainedModel,
    threads: int = 0,
    providers: Sequence[str] | None = None,
) -> Findings:
    """Predict the evaluation split with the ONNX model, and compare it with the other models."""
    predictor = onnx_predictor(open_session(model, threads, providers))
    evaluation.add(ONNX, predictor)
    check_finite(model, evaluation)
    first = next(iter(evaluation.splits.values()))
    batches = _spread(sorted_batches(first.encoded.lengths, BATCH_SIZE))
    others = [name for name in (QUANTIZED, FULL_PRECISION) if name in first.predictions]
    counted = census(model, first.encoded.batch(batches[-1]), threads, providers)
    return Findings(
        file=describe_file(model),
        agreement={name: evaluation.agreement(ONNX, name) for name in others},
        steadiness=measure_steadiness(evaluation, predictor, longest_input(quantized)),
        layer_errors=onnx_layer_errors(model, quantized, first.encoded, batches, threads, providers),
        census=counted,
        onnxruntime=_version(),
        threads=threads,
    )


def check_finite(model: Path, evaluation: Evaluation) -> None:
    """Refuse a model that predicts NaN or Inf; it has no metric."""
    rows = (row for split in evaluation.splits.values() for row in split.predictions[ONNX])
    broken = sum(not bool(np.isfinite(row).all()) for row in rows)
    if broken:
        raise UserError(
            f"{model} gives NaN or Inf for {broken} of the examples",
            "the model or the runtime is at fault: export it again, and try another version of onnxruntime",
        )


def measure_steadiness(evaluation: Evaluation, predictor: Predictor, longest: int | None) -> Steadiness:
    """`longest` is the model's limit of tokens, None without one."""
    split = next(iter(evaluation.splits.values()))
    encoded = split.encoded
    count = min(STEADY_EXAMPLES, len(encoded))
    indices = np.linspace(0, len(encoded) - 1, count).round().astype(int)
    some = encoded.take(indices)
    room = PADDING if longest is None else max(0, longest - int(some.lengths.max()))
    in_batch = [split.predictions[ONNX][i] for i in indices]
    found = []
    for name, other in (("alone", predictor), ("padded", _with_padding(predictor, some, min(PADDING, room)))):
        rows = predict(other, some, f"evaluate ONNX {name}", 1, evaluation.pooling)
        found.append(next(iter(AGREEMENTS[evaluation.task.kind](in_batch, rows).values())))
    return Steadiness(count, *found)


def _with_padding(predictor: Predictor, encoded: Encoded, tokens: int) -> Predictor:
    """The same predictor on batches with that much more padding; its outputs for the padding are cut off."""

    def predict_padded(batch: dict[str, torch.Tensor]) -> list[np.ndarray]:
        width = batch["input_ids"].shape[1]
        longer = {
            name: torch.nn.functional.pad(value, (0, tokens), value=encoded.pad.get(name, 0))
            for name, value in batch.items()
        }
        outputs = predictor(longer)
        per_token = len(outputs) > 1 or outputs[0].ndim == 3
        return [value[:, :width] for value in outputs] if per_token else outputs

    return predict_padded


def describe_file(model: Path) -> OnnxFile:
    require("onnx")
    import onnx

    graph = onnx.load(model, load_external_data=False)
    notes = {entry.key: entry.value for entry in graph.metadata_props}
    separate = {  # files of weights of more than 2 GiB
        entry.value
        for tensor in graph.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    size = sum((model.parent / name).stat().st_size for name in (model.name, *separate))
    opset = next((entry.version for entry in graph.opset_import if entry.domain in ("", "ai.onnx")), None)
    return OnnxFile(model.name, notes.get("profile"), notes.get("recipe_digest"), opset, size / MIB)


def _version() -> str:
    import onnxruntime

    return str(onnxruntime.__version__)


def _spread(batches: list[np.ndarray]) -> list[np.ndarray]:
    """A few batches, evenly over all of them."""
    chosen = np.linspace(0, len(batches) - 1, min(ERROR_BATCHES, len(batches))).round().astype(int)
    return [batches[i] for i in chosen]


@torch.no_grad()
def onnx_layer_errors(
    model: Path,
    quantized: PreTrainedModel,
    encoded: Encoded,
    batches: list[np.ndarray],
    threads: int = 0,
    providers: Sequence[str] | None = None,
) -> dict[str, float]:
    """‖onnx − torch‖ / ‖torch‖ of the embedding output, every block and the output, over real tokens.

    The layers are read from a copy of the graph in which they are outputs; a layer whose name the graph
    lacks is left out.
    """
    count = quantized.config.num_hidden_layers
    values = {"embeddings": "hidden.0", **{f"block {i}": f"hidden.{i}" for i in range(1, count + 1)}}
    copy, options = with_outputs(model, list(values.values()))
    session = open_session(copy, threads, providers, options, title=str(model))
    names = [entry.name for entry in session.get_outputs()]
    whole = carve(quantized, [0, count])[0]
    device = next(quantized.parameters()).device
    errors = RelativeErrors()
    for indices in batches:
        batch = encoded.batch(indices)
        outputs = session.run(None, feed(session, batch))
        found = {name: torch.from_numpy(value) for name, value in zip(names, outputs, strict=True)}
        result = whole(None, {name: value.to(device) for name, value in batch.items()})
        mask = batch["attention_mask"].bool()
        layers = {
            layer: whole.unshifted(found[name], block)[mask]
            for block, (layer, name) in enumerate(values.items())
            if name in found
        }
        last = [value for name, value in found.items() if name not in values.values()]
        masked = [value[mask] if result.per_token else value for value in last]
        layers["output"] = torch.cat([value.flatten() for value in masked])
        for layer, reference in layers_of(result, {"attention_mask": mask.to(device)}).items():
            if layer in layers:
                errors.add(layer, layers[layer], reference.cpu())
    return errors.result()


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
    notes = []
    expected = EXPECTED_AGREEMENT.get(activation_bits, EXPECTED_AGREEMENT_ELSE)
    for split, measures in findings.agreement.get(QUANTIZED, {}).items():
        share = next(iter(measures.values()))
        if share < expected:
            notes.append(
                f"ONNX and torch agree for {share:.2f}% of {split}; {expected:g}% or more are usual at "
                f"{activation_bits}-bit activations"
            )
    steady = findings.steadiness
    for share, how in ((steady.alone, "alone"), (steady.padded, "with more padding")):
        if share < expected:
            notes.append(
                f"{share:.2f}% of {steady.examples} examples get the same prediction {how} as in a batch"
            )
    if not findings.census.integer:
        notes.append("no matmul runs on integers: this file is small, but not faster")
    return notes


def _first(by_split: Mapping[str, Mapping[str, float]]) -> float:
    return next(iter(next(iter(by_split.values())).values()))


def table_rows(validation: Validation) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows for people: models down, splits and agreements across."""
    accuracy, agreement = validation.accuracy, validation.findings.agreement
    compared = [name for name in (QUANTIZED, FULL_PRECISION) if name in agreement]
    measure = next(iter(next(iter(agreement[QUANTIZED].values()))))
    head = ["model"]
    rows = [[TITLES[name]] for name in MODELS]
    for split, scores in accuracy.splits.items():
        head.append(f"{accuracy.metric} {split}")
        for row, name in zip(rows, MODELS, strict=True):
            value = scores.score(name, accuracy.metric)
            row.append("—" if value is None else f"{value:.2f}")
        for other in compared:
            head.append(f"{measure} with {TITLES[other]}, %")
            for row, name in zip(rows, MODELS, strict=True):
                row.append(f"{agreement[other][split][measure]:.2f}" if name == ONNX else "")
    return tuple(head), [tuple(row) for row in rows]
