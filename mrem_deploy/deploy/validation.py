"""An ONNX model compared with the torch models it was made from, for `validate` and the end of `quantize`.

Note: the ONNX model does not equal the torch model number for number. Both multiply the same integers, but
softmax, GELU and LayerNorm differ in their last bits. That moves a few activations across a boundary, and
such flips grow with depth. So the error is measured per layer, and the predictions decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from mrem_deploy.base import interrupt
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.units import MIB
from mrem_deploy.data.encoded import Encoded, sorted_batches
from mrem_deploy.deploy import own_runtime
from mrem_deploy.deploy.census import census
from mrem_deploy.deploy.findings import Findings, OnnxFile, Steadiness, Validation, notes_on, verdict_on
from mrem_deploy.deploy.own_runtime import BothWays, NextTo
from mrem_deploy.deploy.providers import CPU, ON_CPU, Placement
from mrem_deploy.deploy.runtime import (
    check_alike,
    onnx_predictor,
    open_session,
    require,
    run_batch,
    with_outputs,
)
from mrem_deploy.evaluate.accuracy import FULL_PRECISION, ONNX, QUANTIZED, Accuracy
from mrem_deploy.evaluate.agreement import AGREEMENTS
from mrem_deploy.evaluate.evaluation import BATCH_SIZE, Evaluation
from mrem_deploy.evaluate.layer_error import RelativeErrors, layers_of
from mrem_deploy.evaluate.predict import Predictor, predict, torch_predictor
from mrem_deploy.export.origin import origin_of
from mrem_deploy.export.profiles import name_in_result
from mrem_deploy.models.loading import longest_input
from mrem_deploy.models.parts import carve
from mrem_deploy.recipe import Recipe

RESULT = "validation.json"
# Names of predictions, by a file for the CPU runtime:
FUSED = "onnx_fused"  # with its operators, next to another file
FUNCTIONS = "onnx_functions"  # without them
MAX_DROP = 1.0  # points, unless the user gives another limit
ERROR_BATCHES = 4  # batches over which the error per layer is measured, from the longest to the shortest
ERROR_EXAMPLES = 64  # in these batches together: torch computes every layer of them
STEADY_EXAMPLES = 64  # predicted once more alone, and once more with padding
PADDING = 16  # tokens


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
    where: Placement = ON_CPU,
    torch_examples: int | None = None,
) -> Findings:
    """Predict the evaluation split with the ONNX model, and compare it with the other models.

    `torch_examples`: how many examples of every split to predict in torch for this; None: torch has predicted
    all of them before.
    """
    predictor = onnx_predictor(open_session(model, threads, where))
    evaluation.add(ONNX, predictor)
    check_finite(model, evaluation)
    first = next(iter(evaluation.splits.values()))
    batches = _spread(sorted_batches(first.encoded.lengths, BATCH_SIZE))
    compared = {QUANTIZED: evaluation}
    if torch_examples is not None:
        compared[QUANTIZED] = some = evaluation.sampled(torch_examples)
        some.add(QUANTIZED, torch_predictor(quantized))
        evaluation.adopt(QUANTIZED, some)
    if FULL_PRECISION in first.predictions:
        compared[FULL_PRECISION] = evaluation
    for reference, predicted in compared.items():
        for split in predicted.splits.values():
            check_alike(str(model), split.predictions[ONNX], split.predictions[reference])
    counted = census(model, first.encoded.batch(batches[-1]), threads, where)
    return Findings(
        file=describe_file(model),
        agreement={name: where.agreement(ONNX, name) for name, where in compared.items()},
        fidelity={name: where.fidelity(name, ONNX) for name, where in compared.items()},
        torch_examples={name: len(split.texts) for name, split in compared[QUANTIZED].splits.items()},
        steadiness=measure_steadiness(evaluation, predictor, longest_input(quantized)),
        layer_errors=onnx_layer_errors(model, quantized, first.encoded, batches, threads, where),
        census=counted,
        onnxruntime=_version(),
        threads=threads,
    )


def both_ways(model: Path, evaluation: Evaluation, threads: int, where: Placement) -> BothWays | None:
    """The predictions that ONNX gave with the CPU runtime next to those without; None if it gave none."""
    if where.library is None:
        return None
    evaluation.add(FUNCTIONS, onnx_predictor(open_session(model, threads, replace(where, library=None))))
    scores = {name: _scores(evaluation, name, FUNCTIONS) for name in evaluation.splits}
    result = BothWays(own_runtime.describe(), evaluation.agreement(ONNX, FUNCTIONS), scores)
    evaluation.forget(FUNCTIONS)
    return result


def next_to(fused: Path, evaluation: Evaluation, threads: int, examples: int) -> NextTo | None:
    """The file for the CPU runtime on some examples that the validated file (ONNX) has predicted; None where
    its operators cannot run."""
    where = own_runtime.placed(ON_CPU, fused)
    if where.library is None:
        return None
    some = evaluation.first_split().sampled(examples)
    some.add(FUSED, onnx_predictor(open_session(fused, threads, where)))
    check_finite(fused, some, FUSED)
    ((name, split),) = some.splits.items()
    check_alike(str(fused), split.predictions[FUSED], split.predictions[ONNX])
    metric, onnx_metric = (_scores(some, name, model)[evaluation.task.metric] for model in (FUSED, ONNX))
    (agreed,) = some.agreement(ONNX, FUSED).values()
    agreement = next(iter(agreed.values()))
    return NextTo(own_runtime.describe(), len(split.texts), metric, onnx_metric, agreement)


def _scores(evaluation: Evaluation, name: str, model: str) -> dict[str, float]:
    """The metrics of one split; without labels the agreement with full precision."""
    split = evaluation.splits[name]
    rows = split.predictions[model]
    if evaluation.task.label_free:
        return split.scorer.agreement(split.predictions[FULL_PRECISION], rows)
    return split.scorer.score(rows)


def runtime_notes(model: Path, where: Placement) -> list[str]:
    """What a reader should know of a file for the CPU runtime that ran without it."""
    if where.library is not None or where.first != CPU or not own_runtime.has_operators(model):
        return []
    return [
        f"{own_runtime.problem()}: {model.name} ran as ort-cpu does, without the operators that it is for "
        f"({own_runtime.INSTALL})"
    ]


def check_finite(model: Path, evaluation: Evaluation, name: str = ONNX) -> None:
    """Refuse a model that predicts NaN or Inf; it has no metric."""
    rows = (row for split in evaluation.splits.values() for row in split.predictions[name])
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
    origin = origin_of(model)
    recipe, profile = notes.get("recipe_digest"), notes.get("profile")
    return OnnxFile(name_in_result(model), profile, recipe, opset, size / MIB, origin.result, origin.changed)


def _version() -> str:
    import onnxruntime

    return str(onnxruntime.__version__)


def _spread(batches: list[np.ndarray]) -> list[np.ndarray]:
    """A few batches, evenly over all of them, and a share of the examples of each."""
    chosen = np.linspace(0, len(batches) - 1, min(ERROR_BATCHES, len(batches))).round().astype(int)
    return [batches[i][: ERROR_EXAMPLES // len(chosen)] for i in chosen]


@torch.no_grad()
def onnx_layer_errors(
    model: Path,
    quantized: PreTrainedModel,
    encoded: Encoded,
    batches: list[np.ndarray],
    threads: int = 0,
    where: Placement = ON_CPU,
) -> dict[str, float]:
    """‖onnx − torch‖ / ‖torch‖ of the embedding output, every block and the output, over real tokens.

    The layers are read from a copy of the graph in which they are outputs; a layer whose name the graph
    lacks is left out.
    """
    count = quantized.config.num_hidden_layers
    values = {"embeddings": "hidden.0", **{f"block {i}": f"hidden.{i}" for i in range(1, count + 1)}}
    copy, options = with_outputs(model, list(values.values()))
    session = open_session(copy, threads, where, options, title=str(model))
    names = [entry.name for entry in session.get_outputs()]
    whole = carve(quantized, [0, count])[0]
    device = next(quantized.parameters()).device
    errors = RelativeErrors()
    for indices in interrupt.steps(batches):
        batch = encoded.batch(indices)
        outputs = run_batch(session, batch)
        found = {name: torch.from_numpy(value) for name, value in zip(names, outputs, strict=True)}
        result = whole(None, {name: value.to(device) for name, value in batch.items()})
        mask = batch["attention_mask"].bool()
        layers = {
            layer: whole.unshifted(found[name], block)[mask]
            for block, (layer, name) in enumerate(values.items())
            if name in found and found[name].shape == (*mask.shape, quantized.config.hidden_size)
        }
        last = [value for name, value in found.items() if name not in values.values()]
        masked = [value[mask] if result.per_token else value for value in last]
        layers["output"] = torch.cat([value.flatten() for value in masked])
        for layer, reference in layers_of(result, {"attention_mask": mask.to(device)}).items():
            if layer in layers:
                errors.add(layer, layers[layer], reference.cpu())
    return errors.result()
