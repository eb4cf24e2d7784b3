"""Which output of a model belongs to which label of the data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from mrem_deploy.base.errors import UserError
from mrem_deploy.data.table_files import listing
from mrem_deploy.data.tasks import Task

MOST_DIGITS = 9  # of a label that is a number
CLASSES = ("classification", "token-classification")  # kinds whose labels have names
SCORED = ("regression", "reranking")  # kinds whose labels are numbers, and whose models have one output


def label_order(names: Sequence[str], model_config: Any, task: Task) -> np.ndarray:
    """For each label of the data, its index in the model's output.

    1. By name, if the model's configuration has real names (case and - or _ do not matter).
    2. Labels that are numbers: by their value.
    3. By position, if the model's names are LABEL_0, LABEL_1, … and the numbers of labels agree.

    A task whose labels come from the data may use fewer labels than the model has (1 and 2); any
    other difference is an error. A regression gives [0]; no labels give an empty array.
    """
    theirs = [str(model_config.id2label[i]) for i in range(len(model_config.id2label))]
    if task.kind in SCORED:
        if len(theirs) == 1:
            return np.zeros(1, dtype=np.int64)
        raise UserError(
            f"{task.name} gives scores and needs a model with 1 output; "
            f"this one has {len(theirs)} ({listing(theirs)}).",
            "Give a model fine-tuned on this task, or check --task.",
        )
    if task.kind not in CLASSES or not names:
        return np.zeros(0, dtype=np.int64)
    index = {spelling(name): i for i, name in enumerate(theirs)}
    fits = len(names) == len(theirs) or (len(names) < len(theirs) and not task.labels)
    if fits and all(spelling(name) in index for name in names):
        return np.array([index[spelling(name)] for name in names], dtype=np.int64)
    if fits and all(is_number(name) and int(name) < len(theirs) for name in names):
        return np.array([int(name) for name in names], dtype=np.int64)
    nameless = all(re.fullmatch(rf"(label_)?{i}", spelling(name)) for i, name in enumerate(theirs))
    if nameless and len(names) == len(theirs) and not any(name.isdecimal() for name in names):
        return np.arange(len(names), dtype=np.int64)
    raise UserError(
        f"The labels do not fit: the data has {len(names)} ({listing(names)}), "
        f"the model has {len(theirs)} ({listing(theirs)}).",
        "Give the model that was fine-tuned on this task, or, if only the names differ, "
        "write the data's names into id2label of the model's config.json.",
    )


def spelling(name: str) -> str:
    """Case, spaces, - and _ do not matter."""
    return re.sub(r"[\s_-]+", "_", name.strip().casefold())


def is_number(name: str) -> bool:
    """Whether a label is a number that can stand for an output of a model."""
    return name.isdecimal() and len(name) <= MOST_DIGITS
