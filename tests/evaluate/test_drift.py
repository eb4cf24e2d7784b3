"""How far scores move, and how many cross a threshold: by hand, for every kind of task."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mrem_deploy.base.errors import UserError
from mrem_deploy.data.tasks import TASKS
from mrem_deploy.evaluate.drift import (
    RANGES,
    SCORES,
    Drift,
    check_range,
    check_scores,
    class_scores,
    drift_of,
    sigmoid,
    span_scores,
)
from mrem_deploy.evaluate.fidelity import FIDELITIES, Fidelity


def test_by_hand() -> None:
    one, two = np.array([0.1, 0.45, 0.9, 0.5]), np.array([0.2, 0.55, 0.9, 0.4])
    drift = drift_of(list(one), list(two), threshold=0.5)
    assert drift is not None
    assert drift.mean == pytest.approx(0.075)
    assert drift.error == pytest.approx(np.std([0.1, 0.1, 0.0, 0.1], ddof=1) / 2)
    assert (drift.median, drift.largest) == (pytest.approx(0.1), pytest.approx(0.1))
    assert drift.crossed == pytest.approx(50.0)  # 0.45 → 0.55 and 0.5 → 0.4: 0.5 itself is above
    assert drift_of(list(one), list(two)).crossed is None  # type: ignore[union-attr]
    assert drift_of([], []) is None
    assert Drift.from_dict(drift.to_dict()) == drift
    assert "50.00% ± 28.87 cross 0.5" in str(drift)


def test_predictions_of_one_example_are_one_cluster() -> None:
    """The error counts sentences, not tokens: twice as many tokens of the same kind leave it as it is."""
    one, two = [np.zeros(2), np.zeros(2)], [np.array([0.1, 0.1]), np.array([0.3, 0.3])]
    twice = drift_of([np.zeros(4)] * 2, [np.repeat(0.1, 4), np.repeat(0.3, 4)])
    assert drift_of(one, two).error == pytest.approx(twice.error)  # type: ignore[union-attr]


def test_the_scores_of_classes() -> None:
    logits = [np.array([0.0, math.log(3)]), np.array([math.log(4), 0.0])]
    assert class_scores(logits) == pytest.approx([0.75, 0.2])
    assert class_scores(logits, positive=0) == pytest.approx([0.25, 0.8])
    assert class_scores([np.array([0.0, math.log(2), 0.0])]) == pytest.approx([0.5])  # the likeliest of three


def test_the_scores_of_answers() -> None:
    """Start and end logits (T, 2): the likeliest start and the likeliest end."""
    logits = np.array([[0.0, 0.0], [math.log(3), 0.0]])
    assert span_scores([logits])[0] == pytest.approx([0.75 * 0.5])


def test_the_sigmoid_of_large_numbers() -> None:
    assert sigmoid(np.array([-1000.0, 0.0, 1000.0])).tolist() == [0.0, 0.5, 1.0]


def test_every_kind_has_scores_and_fidelity() -> None:
    kinds = {task.kind for task in TASKS.values()}
    assert kinds <= SCORES.keys()
    assert kinds <= FIDELITIES.keys()
    assert kinds - RANGES.keys() == {"regression"}


@pytest.mark.parametrize(
    ("threshold", "kind", "said"),
    [
        (0.0, "classification", "between 0 and 1"),
        (1.0, "reranking", "between 0 and 1"),
        (-1.0, "embedding", "between -1 and 1"),
        (math.nan, "classification", "nan"),
        (math.inf, "regression", "a number"),
    ],
)
def test_a_threshold_that_no_score_can_have(threshold: float, kind: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_range(threshold, kind)
    check_range(None, kind)
    check_range(0.3, kind)


def test_a_threshold_outside_of_the_scores() -> None:
    scores = [np.array(value) for value in (0.2, 0.5, 0.9)]
    for outside in (0.1, 0.2, 0.95):
        with pytest.raises(UserError, match=r"0\.2 to 0\.9"):
            check_scores(outside, scores)
    for inside in (0.21, 0.9):
        check_scores(inside, scores)


def test_embeddings_have_their_neighbours() -> None:
    one = [np.array(row, dtype=np.float64) for row in ([1, 0], [0.9, 0.1], [0, 1], [0.1, 0.9])]
    found = FIDELITIES["embedding"](one, one)
    assert (found.cosine, found.overlap) == (pytest.approx(100.0), pytest.approx(100.0))
    other = FIDELITIES["embedding"](one, [row * 3 for row in one])
    assert other.cosine == pytest.approx(100.0)  # the length does not matter
    assert Fidelity.from_dict(found.to_dict()) == found
    assert "of the first ten the same" in str(found)
