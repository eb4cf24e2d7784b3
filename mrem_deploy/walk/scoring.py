"""What a run is judged by: the exported model in onnxruntime, or the frozen model in torch.

torch computes a frozen model with fake quantization, slower than full precision; onnxruntime multiplies the
integers. So where an ONNX model is exported and validated, it predicts the entire evaluation split, and torch
only a sample of it, to show that both are the same model. If they differ clearly more than usual, torch
predicts the rest as well.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from mrem_deploy.base.files import write_json
from mrem_deploy.base.progress import say
from mrem_deploy.deploy import validation
from mrem_deploy.deploy.findings import clearly_differ
from mrem_deploy.evaluate.accuracy import BY_ONNXRUNTIME, QUANTIZED
from mrem_deploy.evaluate.evaluation import Evaluation
from mrem_deploy.evaluate.predict import torch_predictor
from mrem_deploy.recipe import Recipe
from mrem_deploy.result import Onnx

TORCH_EXAMPLES = 512  # the standard error of an agreement of 99% is then 0.4 points


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
    found = validation.examine(model, evaluation, quantized, recipe.threads, torch_examples=sample)
    if judges:
        evaluation.score_by_onnxruntime()
        if clearly_differ(found, recipe.spec.activation_bits):
            evaluation.complete(QUANTIZED, torch_predictor(quantized))
    checked = validation.validated(found, evaluation.accuracy(), recipe, evaluation.task.name)
    for note in checked.notes:
        say(f"note: {note}")
    write_json(model.parent / validation.RESULT, checked.to_dict())
    return Onnx.from_dict(checked.headline())
