"""How well a model does its task, in percent.

The main number of a task is `task.metric`, as in the paper: accuracy, Matthews' correlation for CoLA,
Spearman's for STS-B. What GLUE reports besides stands next to it. Tasks without labels are measured by
how well the quantized model agrees with the original: embeddings, classes of tokens, answer spans.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np

from mrem_deploy.base.errors import UserError
from mrem_deploy.data.tasks import Task

PAIRWISE_ROWS = 2000  # rows whose pairs are compared: two million pairs take a second


def score(
    task: Task, predictions: np.ndarray, labels: np.ndarray, order: np.ndarray | None = None
) -> dict[str, float]:
    """The task's metrics, the main one first.

    predictions: the model's outputs, (N, C) logits, or (N,) or (N, 1) scores of a regression.
    labels: as in the data; `order` (from `data.label_order`) gives each label's column in the logits.
    """
    truth, guess, positive = truth_and_guess(task, predictions, labels, order)
    return {name: 100.0 * METRICS[name](truth, guess, positive) for name in (task.metric, *task.also)}


def truth_and_guess(
    task: Task, predictions: np.ndarray, labels: np.ndarray, order: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    """One value per example, as every metric takes them: the classes (or scores) that are right, those that
    were given, and the class that F1 is about. The arguments are those of `score`."""
    predictions = np.asarray(predictions, dtype=np.float64)
    if len(predictions) != len(labels) or len(labels) == 0:
        raise ValueError(f"expected as many predictions as labels, got {len(predictions)} and {len(labels)}")
    if not np.isfinite(predictions).all():
        raise ValueError(f"{int((~np.isfinite(predictions)).sum())} predictions are not finite numbers")
    if task.kind == "regression":
        return np.asarray(labels, dtype=np.float64), predictions.reshape(len(labels)), 1
    order = np.arange(predictions.shape[1]) if order is None else order
    # F1 needs to know where the model keeps the last label of the data: "duplicate", "equivalent".
    return order[labels], predictions.argmax(axis=1), int(order[-1])


def agreement(
    reference: Sequence[np.ndarray] | np.ndarray, quantized: Sequence[np.ndarray] | np.ndarray, seed: int = 0
) -> dict[str, float]:
    """How alike two sets of embeddings (N, d) are.

    cosine: the mean over rows of cos(reference, quantized).
    spearman: whether the quantized model ranks the similarities of all pairs of rows as the original does.
    """
    reference, quantized = np.asarray(reference), np.asarray(quantized)
    if reference.shape != quantized.shape:
        raise ValueError(
            f"expected two arrays of the same shape, got {reference.shape} and {quantized.shape}"
        )
    if len(reference) < 3:
        raise UserError(
            f"Expected at least 3 sentences to compare similarities; got {len(reference)}.",
            "Give more sentences for evaluation.",
        )
    one, two = _unit_rows(reference), _unit_rows(quantized)
    cosine = float((one * two).sum(axis=1).mean())
    if len(one) > PAIRWISE_ROWS:
        rows = np.random.default_rng(seed).choice(len(one), size=PAIRWISE_ROWS, replace=False)
        one, two = one[rows], two[rows]
    pairs = np.triu_indices(len(one), k=1)
    spearman = _spearman((one @ one.T)[pairs], (two @ two.T)[pairs])
    return {"cosine": 100.0 * cosine, "spearman": 100.0 * spearman}


def class_agreement(reference: Sequence[np.ndarray], quantized: Sequence[np.ndarray]) -> dict[str, float]:
    """The share of texts that both models give the same class; one (C,) array of logits per text."""
    same = [int(a.argmax()) == int(b.argmax()) for a, b in _twins(reference, quantized)]
    return {"agreement": 100.0 * float(np.mean(same))}


def score_agreement(reference: Sequence[np.ndarray], quantized: Sequence[np.ndarray]) -> dict[str, float]:
    """How alike two regressions score: the correlations of their scores, one per text."""
    pairs = _twins(reference, quantized)
    one, two = (np.concatenate([np.ravel(pair[i]) for pair in pairs]).astype(np.float64) for i in (0, 1))
    return {"spearman": 100.0 * _spearman(one, two), "pearson": 100.0 * _pearson(one, two)}


def token_agreement(reference: Sequence[np.ndarray], quantized: Sequence[np.ndarray]) -> dict[str, float]:
    """The share of all tokens that both models give the same class; one (T, C) array of logits per text."""
    same = np.concatenate([a.argmax(axis=1) == b.argmax(axis=1) for a, b in _twins(reference, quantized)])
    return {"agreement": 100.0 * float(same.mean())}


def span_agreement(reference: Sequence[np.ndarray], quantized: Sequence[np.ndarray]) -> dict[str, float]:
    """The share of texts whose most likely start and end are both the same; start and end logits (T, 2)."""
    same = [bool((a.argmax(axis=0) == b.argmax(axis=0)).all()) for a, b in _twins(reference, quantized)]
    return {"agreement": 100.0 * float(np.mean(same))}


def _twins(
    reference: Sequence[np.ndarray], quantized: Sequence[np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Outputs of both models text by text, after checking that they belong together."""
    shapes, others = [a.shape for a in reference], [b.shape for b in quantized]
    if shapes != others or not shapes:
        raise ValueError(f"expected outputs of the same shapes, got {shapes} and {others}")
    if not all(np.isfinite(values).all() for values in (*reference, *quantized)):
        raise ValueError("some outputs are not finite numbers")
    return list(zip(reference, quantized, strict=True))


def _unit_rows(rows: np.ndarray) -> np.ndarray:
    rows = np.asarray(rows, dtype=np.float64)
    if not np.isfinite(rows).all():
        raise ValueError(f"{int((~np.isfinite(rows)).sum())} values of the embeddings are not finite numbers")
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms > 0, norms, 1.0)


def _accuracy(truth: np.ndarray, guess: np.ndarray, positive: int = 1) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(truth, guess))


def _f1(truth: np.ndarray, guess: np.ndarray, positive: int = 1) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(truth, guess, pos_label=positive, zero_division=0.0))


def _matthews(truth: np.ndarray, guess: np.ndarray, positive: int = 1) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(truth, guess))


def _spearman(truth: np.ndarray, guess: np.ndarray, positive: int = 1) -> float:
    from scipy.stats import spearmanr

    return _defined(spearmanr, truth, guess)


def _pearson(truth: np.ndarray, guess: np.ndarray, positive: int = 1) -> float:
    from scipy.stats import pearsonr

    return _defined(pearsonr, truth, guess)


def _defined(correlation: Callable, truth: np.ndarray, guess: np.ndarray) -> float:
    """A constant has no correlation; a model that always says the same scores 0, as with Matthews'."""
    if np.ptp(truth) == 0 or np.ptp(guess) == 0:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "nearly constant": the number is still the best there is
        return float(correlation(truth, guess).statistic)


METRICS: dict[str, Callable[[np.ndarray, np.ndarray, int], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews": _matthews,
    "spearman": _spearman,
    "pearson": _pearson,
}
