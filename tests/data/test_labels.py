"""The labels of the data and those of the model: which output stands for which label."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mrem_deploy.base.errors import UserError
from mrem_deploy.data.task_data import TASKS, label_order


def model(*names: str) -> SimpleNamespace:
    return SimpleNamespace(id2label=dict(enumerate(names)))


@pytest.mark.parametrize(
    ("task", "names", "theirs", "order"),
    [
        ("sst2", ("negative", "positive"), ("NEGATIVE", "POSITIVE"), [0, 1]),
        ("mnli", TASKS["mnli"].labels, ("CONTRADICTION", "NEUTRAL", "ENTAILMENT"), [2, 1, 0]),
        ("qqp", TASKS["qqp"].labels, ("not duplicate", "Duplicate"), [0, 1]),
        ("rte", TASKS["rte"].labels, ("not-entailment", "entailment"), [1, 0]),
        ("mnli", TASKS["mnli"].labels, ("LABEL_0", "LABEL_1", "LABEL_2"), [0, 1, 2]),
        ("sst2", ("negative", "positive"), ("0", "1"), [0, 1]),
        ("text-classification", ("a", "b"), ("LABEL_0", "LABEL_1"), [0, 1]),
        ("text-classification", ("0", "2"), ("x", "y", "z"), [0, 2]),  # numbers go by their value
        ("text-classification", ("0", "2"), ("LABEL_0", "LABEL_1", "LABEL_2"), [0, 2]),
        ("text-classification", ("1", "2"), ("2", "1"), [1, 0]),  # unless the model has them as names
        ("text-classification", ("b",), ("a", "b", "c"), [1]),  # an evaluation file may lack a class
        ("stsb", (), ("LABEL_0",), [0]),
        ("text-classification", (), ("a", "b"), []),
        ("feature-extraction", (), ("LABEL_0", "LABEL_1"), []),
    ],
)
def test_label_order(task: str, names: tuple[str, ...], theirs: tuple[str, ...], order: list[int]) -> None:
    found = label_order(names, model(*theirs), TASKS[task])
    assert found.dtype == np.int64
    assert found.tolist() == order


@pytest.mark.parametrize(
    ("task", "names", "theirs"),
    [
        ("sst2", ("negative", "positive"), ("entailment", "neutral", "contradiction")),
        ("sst2", ("negative", "positive"), ("negative", "neutral", "positive")),  # would choose among three
        ("sst2", ("negative", "positive"), ("bad", "good")),  # which is which is not ours to guess
        ("mnli", TASKS["mnli"].labels, ("LABEL_0", "LABEL_1")),
        ("text-classification", ("a", "b"), ("LABEL_0", "LABEL_1", "LABEL_2")),  # positions are unknown
        ("text-classification", ("a", "d"), ("a", "b", "c")),
        ("text-classification", ("1", "2", "3"), ("LABEL_0", "LABEL_1", "LABEL_2")),  # counted from 1
        ("text-classification", ("a", "b", "c"), ("a", "b")),
    ],
)
def test_labels_that_do_not_fit(task: str, names: tuple[str, ...], theirs: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        label_order(names, model(*theirs), TASKS[task])
    assert ", ".join(names) in caught.value.problem
    assert ", ".join(theirs) in caught.value.problem
    assert "id2label" in caught.value.remedy


def test_a_classifier_cannot_do_a_regression() -> None:
    with pytest.raises(UserError, match="1 output; this one has 2"):
        label_order((), model("LABEL_0", "LABEL_1"), TASKS["stsb"])
