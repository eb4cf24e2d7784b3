"""Every model's prediction for every evaluation example, kept in `examples.safetensors`.

A comparison of two runs is much sharper if it is paired, example by example. So a result keeps the
predictions and not only their score.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import PretrainedConfig

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import atomic_file
from mrem_deploy.data.labels import SCORED, label_order
from mrem_deploy.data.tasks import Task
from mrem_deploy.evaluate.accuracy import BY_TORCH
from mrem_deploy.evaluate.evaluation import Evaluation, Split
from mrem_deploy.evaluate.scorers import QuestionScorer
from mrem_deploy.evaluate.search_scorer import SearchScorer

EXAMPLES = "examples.safetensors"
TRUTH = "truth"


@dataclass(frozen=True)
class Examples:
    """One evaluation split: one number per example and model, and the truth they are compared with.

    metric: how these numbers become the task's main score. With "mean" they are scores of the examples
    already, and there is no truth.
    """

    metric: str
    truth: np.ndarray | None
    predictions: dict[str, np.ndarray]  # by the names in MODELS


def write_examples(folder: Path, evaluation: Evaluation, config: PretrainedConfig) -> None:
    """Write examples.safetensors; nothing for tasks whose predictions are not one number per example."""
    splits = {
        name: split_examples(evaluation.task, split, config, evaluation.scored_by)
        for name, split in evaluation.splits.items()
    }
    found = {name: examples for name, examples in splits.items() if examples is not None}
    if not found:
        return
    tensors = {
        f"{split}/{name}": np.ascontiguousarray(values)
        for split, examples in found.items()
        for name, values in {TRUTH: examples.truth, **examples.predictions}.items()
        if values is not None
    }
    metrics = {split: examples.metric for split, examples in found.items()}
    with atomic_file(folder / EXAMPLES) as temporary:
        save_file(tensors, temporary, metadata={"metrics": json.dumps(metrics)})


def split_examples(
    task: Task, split: Split, config: PretrainedConfig, scored_by: str = BY_TORCH
) -> Examples | None:
    """None for tasks whose predictions are not one number per example."""
    rows = split.models(scored_by)
    labels = split.texts.labels
    if task.kind == "classification" and labels is not None:
        order = label_order(split.texts.label_names, config, task)
        classes = {model: np.stack(values).argmax(axis=1) for model, values in rows.items()}
        return Examples(task.metric, order[labels], classes)
    if task.kind in SCORED and labels is not None:
        numbers = {model: np.stack(values).reshape(len(values)) for model, values in rows.items()}
        return Examples(task.metric, np.asarray(labels), numbers)
    if isinstance(split.scorer, SearchScorer):
        if task.label_free:
            return None
        ranked = {model: split.scorer.per_query(values)[task.metric] for model, values in rows.items()}
        return Examples("mean", None, ranked)
    if isinstance(split.scorer, QuestionScorer):
        scores = {model: split.scorer.per_question(values)[task.metric] for model, values in rows.items()}
        return Examples("mean", None, scores)
    return None


def read_examples(folder: Path) -> dict[str, Examples]:
    """By split; empty if the result has none."""
    path = folder / EXAMPLES
    if not path.exists():
        return {}
    try:
        with safe_open(path, framework="numpy") as file:
            metrics = dict(json.loads(file.metadata()["metrics"]))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}", "copy the result folder again") from error
    found = {}
    for split, metric in metrics.items():
        own = {k.rpartition("/")[2]: v for k, v in tensors.items() if k.rpartition("/")[0] == split}
        found[split] = Examples(metric, own.pop(TRUTH, None), own)
    return found
