"""Metrics against values worked out by hand and against the formulas written out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import a_result
import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import BertConfig

from mrem_deploy.base.errors import UserError
from mrem_deploy.data.squad import Answer
from mrem_deploy.data.task_data import TASKS
from mrem_deploy.data.texts import Texts
from mrem_deploy.evaluate.accuracy import FULL_PRECISION, QUANTIZED, Accuracy, SplitScores
from mrem_deploy.evaluate.agreement import embedding_agreement as agreement
from mrem_deploy.evaluate.agreement import span_agreement, token_agreement
from mrem_deploy.evaluate.metrics import METRICS, Metric, score
from mrem_deploy.evaluate.rowwise import one_by_one
from mrem_deploy.evaluate.scorers import LabelScorer
from mrem_deploy.evaluate.squad import summary_v1, summary_v2
from mrem_deploy.evaluate.tags import score as tag_score


def logits(*guesses: int, classes: int = 2) -> np.ndarray:
    return np.eye(classes)[list(guesses)] * 3.0 - 1.0


# 3 true positives, 1 false positive, 2 false negatives, 4 true negatives
TRUTH = np.array([1, 1, 1, 0, 1, 1, 0, 0, 0, 0])
GUESS = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])


def test_accuracy_is_in_percent() -> None:
    assert score(TASKS["sst2"], logits(*GUESS), TRUTH) == {"accuracy": pytest.approx(70.0)}


def test_three_classes() -> None:
    found = score(TASKS["mnli"], logits(2, 1, 0, 0, classes=3), np.array([2, 1, 0, 1]))
    assert found == {"accuracy": pytest.approx(75.0)}


@pytest.mark.parametrize("task", ["mrpc", "qqp"])
def test_f1_stands_beside_accuracy(task: str) -> None:
    found = score(TASKS[task], logits(*GUESS), TRUTH)
    assert list(found) == ["accuracy", "f1"]
    assert found["f1"] == pytest.approx(100 * 2 * 3 / (2 * 3 + 1 + 2))  # 2TP / (2TP + FP + FN)


def test_matthews_leads_for_cola() -> None:
    found = score(TASKS["cola"], logits(*GUESS), TRUTH)
    assert list(found) == ["matthews", "accuracy"]
    # (TP·TN − FP·FN) / √((TP+FP)(TP+FN)(TN+FP)(TN+FN)) = 10 / √(4·5·5·6)
    assert found["matthews"] == pytest.approx(100 * 10 / np.sqrt(600))


def test_spearman_leads_for_stsb() -> None:
    labels = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)
    predictions = np.array([[0.1], [0.4], [0.2], [9.0]], dtype=np.float32)  # ranks 1 3 2 4
    found = score(TASKS["stsb"], predictions, labels)
    assert list(found) == ["spearman", "pearson"]
    assert found["spearman"] == pytest.approx(100 * (1 - 6 * 2 / (4 * 15)))  # 1 − 6Σd²/(n(n²−1))
    deviations = predictions[:, 0].astype(np.float64) - predictions[:, 0].astype(np.float64).mean()
    expected = (deviations * (labels - 2.5)).sum() / np.sqrt((deviations**2).sum() * 5.0)
    assert found["pearson"] == pytest.approx(100 * expected)
    assert score(TASKS["stsb"], predictions[:, 0], labels) == found  # (N,) and (N, 1) are one


def test_against_the_libraries_on_random_numbers() -> None:
    generator = np.random.default_rng(0)
    raw, truth = generator.normal(size=(500, 2)), generator.integers(0, 2, 500)
    guess = raw.argmax(axis=1)
    assert score(TASKS["mrpc"], raw, truth) == {
        "accuracy": pytest.approx(100 * accuracy_score(truth, guess)),
        "f1": pytest.approx(100 * f1_score(truth, guess)),
    }
    assert score(TASKS["cola"], raw, truth)["matthews"] == pytest.approx(
        100 * matthews_corrcoef(truth, guess)
    )
    graded = np.round(generator.uniform(0, 5, 500))  # many ties, as in STS-B
    assert score(TASKS["stsb"], raw[:, 0], graded) == {
        "spearman": pytest.approx(100 * spearmanr(raw[:, 0], graded).statistic),
        "pearson": pytest.approx(100 * pearsonr(raw[:, 0], graded).statistic),
    }


def test_order_of_labels_in_the_model_changes_nothing() -> None:
    """A model that keeps "equivalent" in column 0 must get the same F1, not that of the other class."""
    swapped = logits(*(1 - GUESS))
    expected = score(TASKS["mrpc"], logits(*GUESS), TRUTH)
    assert score(TASKS["mrpc"], swapped, TRUTH, order=np.array([1, 0])) == pytest.approx(expected)
    assert score(TASKS["mrpc"], swapped, TRUTH)["accuracy"] == pytest.approx(30.0)  # it was really swapped


def test_data_with_fewer_labels_than_the_model() -> None:
    """Labels 0 and 2 of three: a prediction of 1 is wrong, it is not left out of the choice."""
    found = score(
        TASKS["text-classification"], logits(0, 1, 2, 2, classes=3), np.array([0, 1, 1, 0]), np.array([0, 2])
    )
    assert found == {"accuracy": pytest.approx(50.0)}
    assert score(
        TASKS["text-classification"], logits(2, 2, 0, classes=3), np.array([0, 0, 0]), np.array([2])
    ) == {"accuracy": pytest.approx(200 / 3)}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("task", "predictions", "labels"),
    [
        ("stsb", np.full(4, 2.5), np.array([1.0, 2.0, 3.0, 4.0])),  # the model says one thing
        ("stsb", np.array([1.0, 2.0]), np.array([3.0, 3.0])),  # the data says one thing
        ("cola", logits(1, 1, 1, 1), np.array([0, 1, 1, 0])),
    ],
)
def test_a_constant_has_no_correlation(task: str, predictions: np.ndarray, labels: np.ndarray) -> None:
    found = score(TASKS[task], predictions, labels)
    assert found[TASKS[task].metric] == 0.0
    json.dumps(found, allow_nan=False)


def test_f1_without_any_positive_is_zero() -> None:
    assert score(TASKS["mrpc"], logits(0, 0), np.array([0, 0])) == {"accuracy": 100.0, "f1": 0.0}


def test_numbers_that_are_none_are_not_scored() -> None:
    """argmax takes NaN for the largest: a broken model would be scored as if it had chosen."""
    broken = logits(0, 1)
    broken[1, 0] = np.nan
    with pytest.raises(ValueError, match="1 predictions are not finite"):
        score(TASKS["sst2"], broken, np.array([0, 1]))
    with pytest.raises(ValueError, match="3 and 2"):
        score(TASKS["sst2"], logits(0, 1, 1), np.array([0, 1]))


def test_every_metric_of_the_tasks_has_a_row() -> None:
    """Tasks of whole texts need `score`; answers and tags are scored in evaluate/squad and evaluate/tags."""
    every = [task for row in TASKS.values() for task in (row, row.without_labels) if task]
    assert {name for task in every for name in (task.metric, *task.also)} <= set(METRICS)
    scored = [task for task in every if task.label_columns and task.head == "sequence-classification"]
    used = {name for task in scored for name in (task.metric, *task.also)}
    assert used == {name for name, metric in METRICS.items() if metric.score}
    assert used == {name for name, metric in METRICS.items() if metric.resample} - {"mean"}


def test_what_answers_and_tags_are_scored_by_has_rows() -> None:
    answers = [Answer("film", -1.0), Answer("", 1.0)]
    squad = summary_v2(answers, [["film"], []]) | summary_v1(answers, [["film"], ["good"]])
    tags = tag_score([["B-PER", "O"]], [["B-PER", "O"]])
    assert squad.keys() | tags.keys() <= METRICS.keys()
    assert {name for name in squad if not METRICS[name].shown} == {"best_f1_thresh", "best_exact_thresh"}


def test_a_new_metric_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CONTRIBUTING says: the row is enough for the score, its uncertainty, the report and the card."""

    def balanced(truth: np.ndarray, guess: np.ndarray, positive: int = 1) -> float:
        return float(np.mean([np.mean(guess[truth == c] == c) for c in np.unique(truth)]))

    row = Metric("balanced", "Balanced accuracy", balanced, one_by_one(balanced), hub_name="balanced_acc")
    monkeypatch.setitem(METRICS, row.name, row)
    task = replace(TASKS["sst2"], metric="balanced", also=("accuracy",))
    texts = Texts(["a"] * len(TRUTH), None, TRUTH, ("negative", "positive"))
    config = BertConfig(id2label={0: "negative", 1: "positive"})
    scorer = LabelScorer(task, texts, config)
    full, quantized = list(logits(*TRUTH)), list(logits(*GUESS))
    expected = 100 * (3 / 5 + 4 / 5) / 2
    assert scorer.score(quantized) == {"balanced": pytest.approx(expected), "accuracy": pytest.approx(70.0)}
    change = scorer.change(full, quantized)["balanced"]
    assert change["difference"] == pytest.approx(expected - 100)
    assert change["low"] < change["difference"] < change["high"]

    split = {FULL_PRECISION: {"balanced": 100.0}, QUANTIZED: scorer.score(quantized)}
    content = Accuracy("balanced", {"dev": SplitScores(len(TRUTH), scores=split)}, {QUANTIZED: expected})
    page = a_result.write(tmp_path, a_result.metrics(accuracy=content))
    assert "balanced accuracy 70.0%" in page.text
    entries = a_result.front_matter(tmp_path)["model-index"][0]["results"][0]["metrics"]
    assert {"type": "balanced_acc", "name": "Balanced accuracy", "value": 70.0} in entries


def test_a_metric_without_resample_has_no_uncertainty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "plain", Metric("plain", "Plain", METRICS["accuracy"].score))
    texts = Texts(["a"] * len(TRUTH), None, TRUTH, ("negative", "positive"))
    config = BertConfig(id2label={0: "negative", 1: "positive"})
    scorer = LabelScorer(replace(TASKS["sst2"], metric="plain", also=("accuracy",)), texts, config)
    assert list(scorer.change(list(logits(*TRUTH)), list(logits(*GUESS)))) == ["accuracy"]


# --- embeddings --------------------------------------------------------------------------------


def test_agreement_of_equal_embeddings_is_full() -> None:
    rows = np.random.default_rng(0).normal(size=(20, 8))
    found = agreement(rows, 3.0 * rows)  # a scale changes no direction
    assert found == {"cosine": pytest.approx(100.0), "spearman": pytest.approx(100.0)}
    assert found["spearman"] <= 100.0 + 1e-9


def test_agreement_by_hand() -> None:
    # Angles 0°, 10°, 50° against 0°, 45°, 50°: pairs 01, 02, 12 are 10, 50, 40 and 45, 50, 5 degrees apart.
    def at(*degrees: float) -> np.ndarray:
        return np.array([[np.cos(np.radians(d)), np.sin(np.radians(d))] for d in degrees])

    found = agreement(at(0, 10, 50), at(0, 45, 50))
    assert found["cosine"] == pytest.approx(100 * (1 + np.cos(np.radians(35)) + 1) / 3)
    # Similarities rank 3, 1, 2 and 2, 1, 3: Σd² = 2, 1 − 12/24.
    assert found["spearman"] == pytest.approx(50.0)


def test_agreement_of_many_rows_is_a_seeded_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    rows = generator.normal(size=(60, 4))
    noisy = rows + generator.normal(size=rows.shape)
    every = agreement(rows, noisy)
    monkeypatch.setattr("mrem_deploy.evaluate.agreement.PAIRWISE_ROWS", 30)
    part = agreement(rows, noisy)
    assert part["cosine"] == every["cosine"]  # over all rows in any case
    assert part["spearman"] != every["spearman"]
    assert part == agreement(rows, noisy, seed=0)
    assert part["spearman"] != agreement(rows, noisy, seed=1)["spearman"]


def test_a_zero_embedding_agrees_with_nothing() -> None:
    rows = np.eye(4)[:3]
    dead = rows.copy()
    dead[0] = 0.0
    assert agreement(rows, dead)["cosine"] == pytest.approx(200 / 3)


def test_agreement_refuses_what_it_cannot_compare() -> None:
    with pytest.raises(UserError, match="at least 3"):
        agreement(np.ones((2, 4)), np.ones((2, 4)))
    with pytest.raises(ValueError, match="same shape"):
        agreement(np.ones((4, 4)), np.ones((4, 5)))
    with pytest.raises(ValueError, match="not finite"):
        agreement(np.eye(4), np.full((4, 4), np.inf))


# --- answers by token --------------------------------------------------------------------------


def test_token_agreement_counts_tokens_not_texts() -> None:
    one = [logits(0, 1, 2, classes=3), logits(1, classes=3)]
    two = [logits(0, 1, 0, classes=3), 9.0 * logits(1, classes=3)]
    assert token_agreement(one, two) == {"agreement": pytest.approx(75.0)}  # 3 of 4; by text it were 5/6
    assert token_agreement(one, one) == {"agreement": 100.0}


def test_span_agreement_needs_both_ends() -> None:
    """Start and end are the positions of the largest logits in the first and the second column."""

    def span(start: int, end: int, length: int = 5) -> np.ndarray:
        return np.stack([logits(start, classes=length)[0], logits(end, classes=length)[0]], axis=1)

    one = [span(1, 2), span(0, 4), span(3, 3), span(2, 6, length=7)]
    two = [span(1, 2), span(0, 3), span(2, 3), span(2, 6, length=7) / 2]
    assert span_agreement(one, two) == {"agreement": pytest.approx(50.0)}


@pytest.mark.parametrize("measure", [token_agreement, span_agreement])
def test_answers_by_token_that_do_not_belong_together(measure: Callable) -> None:
    with pytest.raises(ValueError, match="same shapes"):
        measure([np.ones((3, 2))], [np.ones((4, 2))])
    with pytest.raises(ValueError, match="same shapes"):
        measure([], [])
    with pytest.raises(ValueError, match="not finite"):
        measure([np.ones((3, 2))], [np.full((3, 2), np.nan)])
