"""What a run leaves for other programs: loss curves, error per layer, and the answer to every example.

Reports show these as pictures; whoever compares several runs needs the numbers. A comparison of two models
is much sharper when it is paired, example by example, so the answers are kept and not only their score.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import PretrainedConfig

from mrem_deploy.base.files import atomic_file, write_json
from mrem_deploy.data.labels import label_order
from mrem_deploy.data.tasks import Task
from mrem_deploy.evaluate.accuracy import MODELS
from mrem_deploy.evaluate.evaluation import Evaluation, Split
from mrem_deploy.evaluate.scorers import QuestionScorer

HISTORY, EXAMPLES = "history.json", "examples.safetensors"
FORMAT = 1


@dataclass(frozen=True)
class Answers:
    """One evaluation split: an answer per example of each model, and what they are compared with.

    metric: the name in `uncertainty.ROWWISE` that turns answers into the task's main score; "mean" says
    that the answers are scores of their own already, and then there is no truth.
    """

    metric: str
    truth: np.ndarray | None
    answers: dict[str, np.ndarray]  # by the names in accuracy.MODELS


def write_history(
    folder: Path,
    curves: Mapping[str, Sequence[Sequence[float]]],
    layer_errors: Mapping[str, Any],
    evaluation: Evaluation,
    config: PretrainedConfig,
) -> None:
    """history.json and, where answers can be compared one by one, examples.safetensors."""
    write_json(folder / HISTORY, {"format": FORMAT, "curves": curves, "layer_errors": layer_errors})
    known = {name: answers_of(evaluation.task, split, config) for name, split in evaluation.splits.items()}
    found = {name: answers for name, answers in known.items() if answers is not None}
    if not found:
        return
    tensors = {
        f"{split}/{name}": np.ascontiguousarray(values)
        for split, answers in found.items()
        for name, values in {"truth": answers.truth, **answers.answers}.items()
        if values is not None
    }
    names = {split: answers.metric for split, answers in found.items()}
    with atomic_file(folder / EXAMPLES) as temporary:
        save_file(tensors, temporary, metadata={"metrics": json.dumps(names)})


def answers_of(task: Task, split: Split, config: PretrainedConfig) -> Answers | None:
    """None for tasks whose answers are not one number per example."""
    rows = {model: split.predictions[model] for model in MODELS if model in split.predictions}
    labels = split.texts.labels
    if task.kind == "classification" and labels is not None:
        order = label_order(split.texts.label_names, config, task)
        classes = {model: np.stack(values).argmax(axis=1) for model, values in rows.items()}
        return Answers(task.metric, order[labels], classes)
    if task.kind == "regression" and labels is not None:
        scores = {model: np.stack(values).reshape(len(values)) for model, values in rows.items()}
        return Answers(task.metric, np.asarray(labels), scores)
    if isinstance(split.scorer, QuestionScorer):
        worth = {model: split.scorer.per_question(values)[task.metric] for model, values in rows.items()}
        return Answers("mean", None, worth)
    return None


def read_answers(folder: Path) -> dict[str, Answers]:
    """By split; empty where the task has none."""
    path = folder / EXAMPLES
    if not path.exists():
        return {}
    with safe_open(path, framework="numpy") as file:
        metrics = json.loads(file.metadata()["metrics"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    found = {}
    for split, metric in metrics.items():
        own = {k.rpartition("/")[2]: v for k, v in tensors.items() if k.rpartition("/")[0] == split}
        found[split] = Answers(metric, own.pop("truth", None), own)
    return found


def read_history(folder: Path) -> dict[str, Any]:
    """Curves and layer errors as they were written."""
    return json.loads((folder / HISTORY).read_text(encoding="utf-8"))
