"""The table of metrics: one row each, which scores, resamples and names it everywhere.

The main number of a task is `task.metric`, as in the paper: accuracy, Matthews' correlation for CoLA,
Spearman's for STS-B. `task.also` names the other metrics that GLUE reports. All are in percent in
metrics.json.

Note: a row without `score` is computed by the scorer of its task (SQuAD, tags) or by `agreement`. F1 has
one row with three meanings: of a class, of the words of an answer, of entities.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mrem_deploy.data.labels import SCORED
from mrem_deploy.data.tasks import Task
from mrem_deploy.evaluate import rowwise
from mrem_deploy.evaluate.rowwise import Rowwise, Score


@dataclass(frozen=True)
class Metric:
    """All that the project knows of a metric."""

    name: str  # in metrics.json
    title: str  # in reports
    score: Score | None = None  # of the classes or scores of whole texts, 0 to 1
    resample: Rowwise | None = None  # for the bootstrap; without it the change has no uncertainty
    percent: bool = True  # shown with %; a correlation times 100 is not a percentage of anything
    hub_name: str = ""  # in model cards, if the Hugging Face hub has another name
    shown: bool = True  # in reports and model cards

    def __post_init__(self) -> None:
        object.__setattr__(self, "hub_name", self.hub_name or self.name)


def metric_of(name: str) -> Metric:
    """The row of that name. A name that only a result file knows gets a plain row."""
    return METRICS.get(name) or Metric(name, name, percent=False)


def score(
    task: Task, predictions: np.ndarray, labels: np.ndarray, order: np.ndarray | None = None
) -> dict[str, float]:
    """The task's metrics, the main one first.

    predictions: the model's outputs, (N, C) logits, or (N,) or (N, 1) scores of a regression.
    labels: as in the data; `order` (from `labels.label_order`) gives each label's column in the logits.
    """
    truth, guess, positive = truth_and_guess(task, predictions, labels, order)
    found = {}
    for name in (task.metric, *task.also):
        own = METRICS[name].score
        assert own is not None, f"the metric {name} of {task.name} has no `score` in METRICS"
        found[name] = 100.0 * own(truth, guess, positive)
    return found


def truth_and_guess(
    task: Task, predictions: np.ndarray, labels: np.ndarray, order: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    """One value per example, as every metric takes them: the true classes (or scores), the predicted ones,
    and the class that F1 is about. The arguments are those of `score`."""
    predictions = np.asarray(predictions, dtype=np.float64)
    if len(predictions) != len(labels) or len(labels) == 0:
        raise ValueError(f"expected as many predictions as labels, got {len(predictions)} and {len(labels)}")
    if not np.isfinite(predictions).all():
        raise ValueError(f"{int((~np.isfinite(predictions)).sum())} predictions are not finite numbers")
    if task.kind in SCORED:
        return np.asarray(labels, dtype=np.float64), predictions.reshape(len(labels)), 1
    order = np.arange(predictions.shape[1]) if order is None else order
    # F1 needs to know where the model keeps the last label of the data: "duplicate", "equivalent".
    return order[labels], predictions.argmax(axis=1), int(order[-1])


def accuracy(truth: np.ndarray, guess: np.ndarray, positive: int = 1) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(truth, guess))


def f1(truth: np.ndarray, guess: np.ndarray, positive: int = 1) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(truth, guess, pos_label=positive, zero_division=0.0))


def matthews(truth: np.ndarray, guess: np.ndarray, positive: int = 1) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(truth, guess))


def spearman(truth: np.ndarray, guess: np.ndarray, positive: int = 1) -> float:
    from scipy.stats import spearmanr

    return _defined(spearmanr, truth, guess)


def pearson(truth: np.ndarray, guess: np.ndarray, positive: int = 1) -> float:
    from scipy.stats import pearsonr

    return _defined(pearsonr, truth, guess)


def average_precision(truth: np.ndarray, guess: np.ndarray, positive: int = 1) -> float:
    """Of pairs in the order of their scores: the mean of the precision at every relevant one.

    Labels of 0.5 and more are relevant. Without a relevant pair it is 0. Equal scores count as one step.
    """
    from sklearn.metrics import average_precision_score

    relevant = truth >= 0.5
    return float(average_precision_score(relevant, guess)) if relevant.any() else 0.0


def _defined(correlation: Callable, truth: np.ndarray, guess: np.ndarray) -> float:
    """A constant has no correlation; a model that always predicts the same scores 0, as with Matthews'."""
    if np.ptp(truth) == 0 or np.ptp(guess) == 0:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "nearly constant": the number is still the best there is
        return float(correlation(truth, guess).statistic)


MEAN = Metric("mean", "Mean", resample=rowwise.mean)  # of a score per example, such as an answer's F1
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", "Accuracy", accuracy, rowwise.accuracy),
        Metric("f1", "F1", f1, rowwise.f1),
        Metric(
            "matthews", "Matthews correlation", matthews, rowwise.matthews,
            percent=False, hub_name="matthews_correlation",
        ),
        Metric(
            "spearman", "Spearman correlation", spearman, rowwise.spearman,
            percent=False, hub_name="spearmanr",
        ),
        Metric(
            "pearson", "Pearson correlation", pearson, rowwise.pearson, percent=False, hub_name="pearsonr"
        ),
        MEAN,
        # rankings; of queries over a corpus computed by their scorer
        Metric(
            "average_precision", "Average precision", average_precision,
            rowwise.one_by_one(average_precision), percent=False,
        ),
        Metric("ndcg_at_10", "nDCG@10", percent=False),
        Metric("recall_at_100", "Recall@100"),
        Metric("mrr_at_10", "MRR@10", percent=False),
        Metric("overlap_at_10", "First ten as full precision"),
        # agreement with full precision
        Metric("cosine", "Mean cosine agreement"),
        Metric("agreement", "Agreement with full precision"),
        # entities
        Metric("precision", "Precision"),
        Metric("recall", "Recall"),
        Metric("sentences", "Sentences all right"),
        # SQuAD
        Metric("exact", "Exact match"),
        Metric("best_f1", "F1 at the best threshold"),
        Metric("best_exact", "Exact match at the best threshold"),
        Metric("best_f1_thresh", "Best threshold of F1", percent=False, shown=False),
        Metric("best_exact_thresh", "Best threshold of exact match", percent=False, shown=False),
        Metric("HasAns_f1", "F1, answerable questions"),
        Metric("HasAns_exact", "Exact match, answerable questions"),
        Metric("NoAns_f1", "F1, unanswerable questions"),
        Metric("NoAns_exact", "Exact match, unanswerable questions"),
    )
}  # fmt: skip
