"""The quantized model beside the full-precision one, on the evaluation split of the task."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mrem_deploy import metrics
from mrem_deploy.batching import encode
from mrem_deploy.config import Recipe
from mrem_deploy.data import Task, TaskData, Texts, label_order, sample
from mrem_deploy.evaluate import pooling_of, predict, remember, torch_predictor

AGREEMENTS = {  # the measure of tasks that have no labels
    "embedding": metrics.agreement,
    "token-classification": metrics.token_agreement,
    "question-answering": metrics.span_agreement,
}
ONE_ROW_EACH = ("classification", "regression", "embedding")  # kinds whose predictions stack to (N, …)


def evaluate(
    recipe: Recipe,
    task_data: TaskData,
    tokenizer: PreTrainedTokenizerBase,
    teacher: PreTrainedModel,
    quantized: PreTrainedModel,
) -> dict[str, Any]:
    """Score both models on the evaluation split, which is read here for the first and only time."""
    task = task_data.task
    pooling = pooling_of(recipe.model or "") if task.kind == "embedding" else None
    splits: dict[str, Any] = {}
    for split, every in task_data.evaluation().items():
        texts = sample(every, recipe.eval_size, recipe.seed) if recipe.eval_size else every
        encoded = encode(tokenizer, texts, recipe.max_length)
        ask = partial(predict, encoded=encoded, pooling=pooling)

        def full_precision(ask: Any = ask, split: str = split) -> list[np.ndarray]:
            return ask(torch_predictor(teacher), label=f"evaluate {split} full precision")

        if task.kind in ONE_ROW_EACH:
            decides = (
                weights_digest(teacher),
                teacher.config.to_json_string(),  # an activation function is not among the weights
                encoded.digest(),
                pooling,
                torch.__version__,
                teacher.device,
            )
            reference = list(
                remember(str(decides), lambda run=full_precision: np.stack(run()))  # type: ignore[misc]
            )
        else:
            reference = full_precision()
        answers = ask(torch_predictor(quantized), label=f"evaluate {split} quantized")
        splits[split] = {"examples": len(encoded), **compare(task, texts, teacher, reference, answers)}
    first = next(iter(splits.values()))
    return {
        "metric": task.metric,
        "full_precision": first["full_precision"][task.metric],
        "quantized": first["quantized"][task.metric],
        "splits": splits,
    }


def compare(
    task: Task,
    texts: Texts,
    teacher: PreTrainedModel,
    reference: list[np.ndarray],
    quantized: list[np.ndarray],
) -> dict[str, Any]:
    """Metrics of both models; for classes also how many answers were lost and gained."""
    if task.kind in AGREEMENTS:
        agreed = AGREEMENTS[task.kind](reference, quantized)
        return {"full_precision": dict.fromkeys(agreed, 100.0), "quantized": agreed}
    assert texts.labels is not None  # evaluation() refuses unlabelled rows of such tasks
    order = label_order(texts.label_names, teacher.config, task) if task.kind == "classification" else None
    full, small = np.stack(reference), np.stack(quantized)
    result: dict[str, Any] = {
        "full_precision": metrics.score(task, full, texts.labels, order),
        "quantized": metrics.score(task, small, texts.labels, order),
    }
    if order is not None:
        was, now = (values.argmax(axis=1) == order[texts.labels] for values in (full, small))
        result["lost"], result["gained"] = int((was & ~now).sum()), int((~was & now).sum())
    return result


def weights_digest(model: PreTrainedModel) -> str:
    """Names the weights of a model."""
    hasher = hashlib.sha256()
    for name, value in model.state_dict().items():
        hasher.update(name.encode())
        hasher.update(value.detach().cpu().contiguous().numpy().data)
    return hasher.hexdigest()[:16]
