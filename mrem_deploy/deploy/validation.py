"""An ONNX model beside the torch models it came from: what `validate` and the end of `quantize` share.

What a reader would get wrong: the ONNX model is not expected to equal the torch model number for number.
Both multiply the same integers, but softmax, GELU and LayerNorm differ in their last bits, which moves a few
activations across a boundary, and such flips grow with depth. So the error is told per layer, and what counts
are the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from mrem_deploy.base import machine
from mrem_deploy.base.errors import UserError
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
TOLD = {FULL_PRECISION: "full precision", QUANTIZED: "torch quantized", ONNX: "ONNX"}
RESULT = "validation.json"
MEBIBYTE = 2**20
MAX_DROP = 1.0  # points, where nothing else is said
ERROR_BATCHES = 4  # batches over which the error per layer is measured, from the longest to the shortest
# What to expect of ONNX against torch, by bits of the activations: fewer steps make each flip larger.
EXPECTED_AGREEMENT = {4: 97.0}
EXPECTED_AGREEMENT_ELSE = 99.0
STEADY_EXAMPLES = 64  # asked once more alone, and once more behind padding
PADDING = 16  # tokens
ROUNDING = 1e-9  # points: 88.5 − 87.5 must not exceed 1.0 by the last bit


def check_finite(model: Path, evaluation: Evaluation) -> None:
    """Refuse what answers with NaN or Inf; no metric can be told of it."""
    rows = (row for split in evaluation.splits.values() for row in split.predictions[ONNX])
    broken = sum(not bool(np.isfinite(row).all()) for row in rows)
    if broken:
        raise UserError(
            f"{model} gives NaN or Inf for {broken} of the examples",
            "the model or the runtime is at fault: export it anew, and try another version of onnxruntime",
        )


def examine(
    model: Path,
    evaluation: Evaluation,
    quantized: PreTrainedModel,
    threads: int = 0,
    providers: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Let the ONNX model answer the evaluation beside the others, and look into it."""
    predictor = onnx_predictor(open_session(model, threads, providers))
    evaluation.add(ONNX, predictor)
    check_finite(model, evaluation)
    first = next(iter(evaluation.splits.values()))
    batches = _spread(sorted_batches(first.encoded.lengths, BATCH_SIZE))
    asked = [name for name in (QUANTIZED, FULL_PRECISION) if name in first.predictions]
    runs = census(model, first.encoded.batch(batches[-1]), threads, providers)
    return {
        **describe(model),
        "agreement": {name: evaluation.agreement(ONNX, name) for name in asked},
        "steady": steadiness(evaluation, predictor, longest_input(quantized)),
        "layer_errors": onnx_layer_errors(model, quantized, first.encoded, batches, threads, providers),
        "nodes": runs.as_dict(),
        "onnxruntime": _version(),
        "threads": threads or "chosen by onnxruntime",
    }


def steadiness(evaluation: Evaluation, predictor: Predictor, longest: int | None) -> dict[str, float]:
    """How many examples get the answer that they got in a batch also alone, and behind more padding.

    A user's batches are not ours: an answer that depends on its neighbours would be a defect.
    """
    split = next(iter(evaluation.splits.values()))
    encoded = split.encoded
    count = min(STEADY_EXAMPLES, len(encoded))
    indices = np.linspace(0, len(encoded) - 1, count).round().astype(int)
    some = encoded.take(indices)
    room = PADDING if longest is None else max(0, longest - int(some.lengths.max()))
    in_batch = [split.predictions[ONNX][i] for i in indices]
    found: dict[str, float] = {"examples": count}
    for name, ask in (("alone", predictor), ("padded", _behind_padding(predictor, some, min(PADDING, room)))):
        answers = predict(ask, some, f"evaluate ONNX {name}", 1, evaluation.pooling)
        found[name] = next(iter(AGREEMENTS[evaluation.task.kind](in_batch, answers).values()))
    return found


def _behind_padding(predictor: Predictor, encoded: Encoded, tokens: int) -> Predictor:
    """The same predictor, asked with so many more tokens of padding; what it says of those is cut off."""

    def ask(batch: dict[str, torch.Tensor]) -> list[np.ndarray]:
        width = batch["input_ids"].shape[1]
        longer = {
            name: torch.nn.functional.pad(value, (0, tokens), value=encoded.pad.get(name, 0))
            for name, value in batch.items()
        }
        outputs = predictor(longer)
        per_token = len(outputs) > 1 or outputs[0].ndim == 3
        return [value[:, :width] for value in outputs] if per_token else outputs

    return ask


def describe(model: Path) -> dict[str, Any]:
    """What the file says about itself."""
    require("onnx")
    import onnx

    graph = onnx.load(model, load_external_data=False)
    notes = {entry.key: entry.value for entry in graph.metadata_props}
    beside = {  # files of weights, where they exceed 2 GB
        entry.value
        for tensor in graph.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    size = sum((model.parent / name).stat().st_size for name in (model.name, *beside))
    opset = next((entry.version for entry in graph.opset_import if entry.domain in ("", "ai.onnx")), None)
    return {
        "file": model.name,
        "profile": notes.get("profile"),
        "recipe_digest": notes.get("recipe_digest"),
        "opset": opset,
        "size_mb": size / MEBIBYTE,
    }


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
    does not have is left out.
    """
    count = quantized.config.num_hidden_layers
    values = {"embeddings": "hidden.0", **{f"block {i}": f"hidden.{i}" for i in range(1, count + 1)}}
    copy, options = with_outputs(model, list(values.values()))
    session = open_session(copy, threads, providers, options, told=str(model))
    names = [entry.name for entry in session.get_outputs()]
    whole = carve(quantized, [0, count])[0]
    device = next(quantized.parameters()).device
    errors = RelativeErrors()
    for indices in batches:
        batch = encoded.batch(indices)
        answers = session.run(None, feed(session, batch))
        came = {name: torch.from_numpy(value) for name, value in zip(names, answers, strict=True)}
        result = whole(None, {name: value.to(device) for name, value in batch.items()})
        mask = batch["attention_mask"].bool()
        layers = {layer: came[name][mask] for layer, name in values.items() if name in came}
        outputs = [value for name, value in came.items() if name not in values.values()]
        masked = [value[mask] if result.per_token else value for value in outputs]
        layers["output"] = torch.cat([value.flatten() for value in masked])
        for layer, reference in layers_of(result, {"attention_mask": mask.to(device)}).items():
            if layer in layers:
                errors.add(layer, layers[layer], reference.cpu())
    return errors.result()


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


def judge(accuracy: Accuracy, max_drop: float) -> Verdict:
    """Every split counts: the one that lost most decides."""
    metric = accuracy.metric
    drops = {
        name: split.scores[FULL_PRECISION][metric] - split.scores[ONNX][metric]
        for name, split in accuracy.splits.items()
    }
    worst = max(drops, key=lambda name: drops[name])
    return Verdict(drops[worst] <= max_drop + ROUNDING, drops[worst], worst, max_drop)


def remarks(found: Mapping[str, Any], activation_bits: int) -> list[str]:
    """What a careful reader should be told besides the verdict."""
    told = []
    expected = EXPECTED_AGREEMENT.get(activation_bits, EXPECTED_AGREEMENT_ELSE)
    for split, measures in found["agreement"].get(QUANTIZED, {}).items():
        share = next(iter(measures.values()))
        if share < expected:
            told.append(
                f"ONNX and torch agree for {share:.2f}% of {split}; {expected:g}% or more are usual at "
                f"{activation_bits}-bit activations"
            )
    steady = found["steady"]
    for name, told_as in (("alone", "alone"), ("padded", "behind more padding")):
        if steady[name] < expected:
            told.append(
                f"{steady[name]:.2f}% of {steady['examples']} examples give {told_as} the answer that they "
                "give in a batch"
            )
    runs = Census(**found["nodes"])
    if not runs.integer:
        told.append("no matrix product runs on integers: this file is small, but not faster")
    return told


def headline(found: Mapping[str, Any], accuracy: Accuracy, verdict: Verdict) -> dict[str, Any]:
    """The few numbers that metrics.json and the report quote."""
    runs = Census(**found["nodes"])
    agreement = found["agreement"]
    return {
        **{key: found[key] for key in ("profile", "file", "opset", "size_mb", "onnxruntime")},
        "metric": accuracy.onnx,
        "drop": verdict.drop,
        "agreement": _first(agreement[QUANTIZED]),
        "agreement_full_precision": _first(agreement[FULL_PRECISION]),
        "integer_products": runs.integer_count,
        "float_products": runs.floating_count,
        "providers": list(runs.providers),
    }


def _first(by_split: Mapping[str, Mapping[str, float]]) -> float:
    return next(iter(next(iter(by_split.values())).values()))


def full_record(
    found: Mapping[str, Any],
    accuracy: Accuracy,
    verdict: Verdict,
    noted: Sequence[str],
    recipe: Recipe,
    task: str,
    full_precision_from: str,
) -> dict[str, Any]:
    """The content of validation.json."""
    return {
        "format": FORMAT,
        "passed": verdict.passed,
        "verdict": verdict.sentence,
        "remarks": list(noted),
        "max_drop": verdict.max_drop,
        "drop": verdict.drop,
        "model": recipe.model,
        "bits": recipe.bits,
        "task": task,
        "full_precision_from": full_precision_from,
        "accuracy": accuracy.to_dict(),
        "onnx": dict(found),
        "environment": machine.describe(),
    }


def table_rows(record: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows for people: models down, splits and agreements across."""
    accuracy, agreement = record["accuracy"], record["onnx"]["agreement"]
    metric, splits = accuracy["metric"], accuracy["splits"]
    compared = [name for name in (QUANTIZED, FULL_PRECISION) if name in agreement]
    measure = next(iter(next(iter(agreement[QUANTIZED].values()))))
    head = ["model"]
    rows = [[TOLD[name]] for name in MODELS]
    for split, content in splits.items():
        head.append(f"{metric} {split}")
        for row, name in zip(rows, MODELS, strict=True):
            value = content.get(name, {}).get(metric)
            row.append("—" if value is None else f"{value:.2f}")
        for other in compared:
            head.append(f"{measure} with {TOLD[other]}, %")
            for row, name in zip(rows, MODELS, strict=True):
                row.append(f"{agreement[other][split][measure]:.2f}" if name == ONNX else "")
    return tuple(head), [tuple(row) for row in rows]
