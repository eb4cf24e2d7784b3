"""SQuAD's scores on cases worked out by hand from the official scripts."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mrem_deploy.data.squad import Answer
from mrem_deploy.evaluate.squad import (
    best_thresholds,
    exact_match,
    f1,
    normalize,
    score_v2,
    summary_v1,
    summary_v2,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Denver Broncos", "denver broncos"),
        ("a an the", ""),
        ("theatre, another", "theatre another"),  # articles are whole words
        ("U.S.A.", "usa"),
        ("don't", "dont"),
        ("the-end", "theend"),  # punctuation goes before articles do
        ("  two \t\n spaces ", "two spaces"),
        ("Zürich – “Ä”", "zürich – “ä”"),  # only ASCII's punctuation goes
        ("", ""),
    ],
)
def test_what_is_left_of_a_text(text: str, expected: str) -> None:
    assert normalize(text) == expected


@pytest.mark.parametrize(
    ("prediction", "truths", "exact", "overlap"),
    [
        ("the Broncos", ["Broncos!"], 1, 1),
        ("Denver Broncos", ["Broncos"], 0, 2 / 3),  # P 1/2, R 1
        ("Broncos", ["Carolina", "Denver Broncos"], 0, 2 / 3),  # the best of several
        ("Carolina", ["Denver Broncos", "carolina"], 1, 1),
        ("one one two", ["one two two"], 0, 2 / 3),  # words count as often as they occur in both
        ("", ["Broncos"], 0, 0),
        ("Panthers", ["Broncos"], 0, 0),
        ("ZÜRICH", ["zürich"], 1, 1),
        ("a", ["the"], 1, 0),  # v1.1's script: equal, but no word in common
    ],
)
def test_one_question(prediction: str, truths: list[str], exact: float, overlap: float) -> None:
    assert exact_match(prediction, truths) == exact
    assert f1(prediction, truths) == pytest.approx(overlap)


def test_summary_of_v1_is_in_percent_and_f1_leads() -> None:
    answers = [Answer("x y", 9.0), Answer("y", -9.0)]  # margins play no part
    found = summary_v1(answers, [["x"], ["y"]])
    assert list(found) == ["f1", "exact"]
    assert found == {"f1": pytest.approx(100 * (2 / 3 + 1) / 2), "exact": 50.0}


def test_silence_is_the_answer_where_there_is_none() -> None:
    answers = [Answer("x", 1.0), Answer("x", -1.0), Answer("x", 1.0), Answer("x", -1.0), Answer("", math.inf)]
    truths = [["x"], ["x"], [], [], []]
    scores = score_v2(answers, truths)
    assert scores["exact"].tolist() == scores["f1"].tolist() == [0, 1, 1, 0, 1]
    assert score_v2(answers, truths, threshold=2.0)["exact"].tolist() == [1, 1, 0, 0, 1]
    assert score_v2(answers, truths, threshold=1.0)["exact"].tolist() == [1, 1, 0, 0, 1]  # strictly above
    # An answer of which nothing is left is none, on either side.
    assert score_v2([Answer("the", -1.0)], [[]])["f1"].tolist() == [1]
    assert score_v2([Answer("a", -1.0)], [["the"]])["f1"].tolist() == [1]


def test_the_best_threshold_by_hand() -> None:
    """In the order of their margins: right, wrong of two, one that has no answer, right."""
    answers = [Answer("x", -3.0), Answer("x y", -1.0), Answer("x", 0.5), Answer("x", 2.0)]
    truths = [["x"], ["y"], [], ["x"]]
    # silence: 1 point; then exact 2, 2, 1, 2 and F1 2, 2.67, 1.67, 2.67
    found = best_thresholds(answers, truths)
    assert found["best_exact"] == pytest.approx(2 / 4)
    assert found["best_exact_thresh"] == -3.0
    assert found["best_f1"] == pytest.approx((2 + 2 / 3) / 4)
    assert found["best_f1_thresh"] == -1.0
    for name in ("f1", "exact"):  # the threshold gives what it promises
        at = score_v2(answers, truths, threshold=found[f"best_{name}_thresh"])[name]
        assert at.mean() == pytest.approx(found[f"best_{name}"])


def test_the_best_threshold_is_the_best_of_all() -> None:
    draw = np.random.default_rng(0)
    answers = [
        Answer(text, float(m))
        for text, m in zip(draw.choice(["x", "y"], 60), draw.normal(size=60), strict=True)
    ]
    truths = [[] if draw.random() < 0.5 else ["x"] for _ in range(60)]
    everywhere = [
        score_v2(answers, truths, t)["exact"].mean() for t in (-9, *(a.null_margin for a in answers))
    ]
    assert best_thresholds(answers, truths)["best_exact"] == pytest.approx(max(everywhere))


def test_summary_of_v2() -> None:
    found = summary_v2([Answer("x", -1.0), Answer("x", 1.0)], [["x"], []])
    assert list(found)[:2] == ["f1", "exact"]
    scores = {name: value for name, value in found.items() if not name.endswith("_thresh")}
    assert set(scores.values()) == {100.0}
    assert {"best_f1", "best_exact", "HasAns_f1", "NoAns_exact"} <= scores.keys()
    only_answers = summary_v2([Answer("x", -1.0)], [["x"]])
    assert "NoAns_f1" not in only_answers  # no mean over nothing
    nothing_found = summary_v2([Answer("", math.inf), Answer("", math.inf)], [["x"], []])
    json.dumps(nothing_found, allow_nan=False)
    assert nothing_found["best_exact"] == 50.0
