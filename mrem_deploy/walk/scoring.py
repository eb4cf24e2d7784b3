"""What a run is judged by: the exported model in onnxruntime, or the frozen model in torch.

torch computes a frozen model with fake quantization, slower than full precision; onnxruntime multiplies the
integers. So where an ONNX model is exported and validated, it predicts the entire evaluation split, and torch
only a sample of it, to show that both are the same model. If they differ clearly more than usual, torch
predicts the rest as well.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from mrem_deploy.base.files import write_json
from mrem_deploy.base.progress import say
from mrem_deploy.deploy import own_runtime, validation
from mrem_deploy.deploy.findings import clearly_differ
from mrem_deploy.deploy.providers import ON_CPU
from mrem_deploy.evaluate.accuracy import BY_ONNXRUNTIME, QUANTIZED
from mrem_deploy.evaluate.evaluation import Evaluation
from mrem_deploy.evaluate.predict import torch_predictor
from mrem_deploy.recipe import Recipe
from mrem_deploy.result import Onnx

TORCH_EXAMPLES = 512  # the standard error of an agreement of 99% is then 0.4 points
EXPECTED_NEXT_TO = 99.0  # percent of the predictions of mrem-runtime that are those of the validated file


def by_onnxruntime(recipe: Recipe, profiles: int) -> bool:
    """Whether the exported model gives the run's scores."""
    return profiles > 0 and recipe.validate and recipe.scored_by == BY_ONNXRUNTIME


def score(
    recipe: Recipe, evaluation: Evaluation, quantized: PreTrainedModel, model: Path | None
) -> Onnx | None:
    """Add the predictions of the quantized model, and validate the exported one, if there is one.

    Writes validation.json next to it, and returns what metrics.json holds of it.
    """
    evaluation.forget(QUANTIZED)  # what QAT chose by
    judges = by_onnxruntime(recipe, int(model is not None))
    if not judges:
        evaluation.add(QUANTIZED, torch_predictor(quantized))
    if model is None:
        return None
    if not recipe.validate:
        return Onnx.from_dict(validation.describe_file(model).to_dict())
    sample = TORCH_EXAMPLES if judges else None
    where = own_runtime.placed(ON_CPU, model)  # the file for the CPU runtime may be the only one
    found = validation.examine(model, evaluation, quantized, recipe.threads, where, sample)
    some = evaluation.sampled(TORCH_EXAMPLES)
    found = replace(found, both_ways=validation.both_ways(model, some, recipe.threads, where))
    if judges:
        evaluation.score_by_onnxruntime()
        if clearly_differ(found, recipe.spec.activation_bits):
            evaluation.complete(QUANTIZED, torch_predictor(quantized))
    checked = validation.validated(found, evaluation.accuracy(), recipe, evaluation.task.name)
    for note in checked.notes:
        say(f"note: {note}")
    write_json(model.parent / validation.RESULT, checked.to_dict())
    return Onnx.from_dict(checked.headline())


def score_fused(recipe: Recipe, evaluation: Evaluation, fused: Path | None) -> Onnx | None:
    """What metrics.json holds of the file for the CPU runtime, if it was exported besides: its predictions
    are compared with those of the file that `score` has validated."""
    if fused is None:
        return None
    described = Onnx.from_dict(validation.describe_file(fused).to_dict())
    if not recipe.validate:
        return described
    found = validation.next_to(fused, evaluation, recipe.threads, TORCH_EXAMPLES)
    if found is None:
        say(f"note: {fused.name} was not run: {own_runtime.problem()}")
        return described
    if found.agreement < EXPECTED_NEXT_TO:
        say(
            f"note: of {found.examples:,} examples {found.agreement:.2f}% get the same prediction from "
            f"{fused.name} in mrem-runtime; {EXPECTED_NEXT_TO:g}% or more are usual"
        )
    return replace(described, next_to=found)
