"""How far a number may be trusted: the spread over evaluation examples, and over seeds.

What a reader would get wrong: two models that answer the same examples are compared *paired*. Most
examples both get right or both get wrong; only the others tell them apart, so the error of the difference
is far smaller than that of either score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

RESAMPLES = 2000  # the 2.5% quantile then rests on 50 of them
CONFIDENCE = 0.95
VALUES_AT_A_TIME = 1 << 22  # of a block of resamples: tens of megabytes

# (labels, predictions), both (R, n), → (R,): one value for every resample.
Rowwise = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Difference:
    """metric(b) − metric(a) with its standard error and interval, in the units of the metric."""

    difference: float
    standard_error: float
    low: float
    high: float
    confidence: float
    resamples: int

    def in_points(self) -> dict[str, float]:
        """For metrics.json, where scores are percentages."""
        scaled = {name: 100 * getattr(self, name) for name in ("difference", "standard_error", "low", "high")}
        return asdict(self) | scaled


def paired_bootstrap(
    metric: str | Callable[[np.ndarray, np.ndarray], float],
    a: np.ndarray,
    b: np.ndarray,
    labels: np.ndarray | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    positive: int = 1,
    confidence: float = CONFIDENCE,
) -> Difference:
    """How much better b is than a, by drawing the evaluation examples anew, the same for both.

    metric: a name in ROWWISE, or a function metric(labels, predictions) → number. "mean" takes a score
    per example (such as F1 of an answer) in a and b, and no labels.
    a, b: one prediction per example: the class, or the score of a regression.
    positive: the class that F1 is about.
    The interval holds the middle `confidence` of the resampled differences (the percentile bootstrap).
    """
    a, b = np.asarray(a), np.asarray(b)
    truth = np.zeros(len(a)) if labels is None else np.asarray(labels)
    if not a.shape == b.shape == truth.shape or a.ndim != 1 or len(a) < 2:
        raise ValueError(
            f"expected two or more examples and as many predictions as labels, got {a.shape}, {b.shape} "
            f"and {truth.shape}"
        )
    rowwise = rowwise_metric(metric, positive)
    generator = np.random.default_rng(seed)
    rows = max(1, VALUES_AT_A_TIME // len(a))
    found = []
    for start in range(0, resamples, rows):
        drawn = generator.integers(0, len(a), size=(min(rows, resamples - start), len(a)))
        found.append(rowwise(truth[drawn], b[drawn]) - rowwise(truth[drawn], a[drawn]))
    differences = np.concatenate(found)
    edge = (1 - confidence) / 2
    low, high = np.quantile(differences, [edge, 1 - edge])
    whole = rowwise(truth[None], b[None]) - rowwise(truth[None], a[None])
    return Difference(
        float(whole[0]),
        float(differences.std(ddof=1)),
        float(low),
        float(high),
        confidence,
        resamples,
    )


def rowwise_metric(metric: str | Callable[[np.ndarray, np.ndarray], float], positive: int = 1) -> Rowwise:
    """A metric that takes many resamples at once; a plain function is called for each of them."""
    if callable(metric):
        plain = metric
        return lambda truth, guess: np.array([plain(t, g) for t, g in zip(truth, guess, strict=True)])
    if metric not in ROWWISE:
        raise ValueError(f"expected a metric of {', '.join(ROWWISE)}, got {metric!r}")
    if metric == "f1":
        return lambda truth, guess: _f1(truth == positive, guess == positive)
    return ROWWISE[metric]


def _accuracy(truth: np.ndarray, guess: np.ndarray) -> np.ndarray:
    return (truth == guess).mean(axis=1)


def _mean(truth: np.ndarray, guess: np.ndarray) -> np.ndarray:
    return guess.mean(axis=1)


def _f1(truth: np.ndarray, guess: np.ndarray) -> np.ndarray:
    """2·TP / (TP + FP + TP + FN); 0 where there is nothing positive at all."""
    hits, named = (truth & guess).sum(axis=1), truth.sum(axis=1) + guess.sum(axis=1)
    return np.divide(2.0 * hits, named, out=np.zeros(len(truth)), where=named > 0)


def _matthews(truth: np.ndarray, guess: np.ndarray) -> np.ndarray:
    """Gorodkin's correlation of any number of classes: the covariance over classes, normalised."""
    total = np.zeros((3, len(truth)))
    for label in np.union1d(truth, guess):
        t, g = truth == label, guess == label
        p, q = t.mean(axis=1), g.mean(axis=1)
        total += np.stack([(t & g).mean(axis=1) - p * q, p - p * p, q - q * q])
    both, own, theirs = total
    return _ratio(both, np.sqrt(np.maximum(own * theirs, 0.0)))


def _pearson(truth: np.ndarray, guess: np.ndarray) -> np.ndarray:
    x, y = (values - values.mean(axis=1, keepdims=True) for values in (truth, guess))
    return _ratio((x * y).sum(axis=1), np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1)))


def _spearman(truth: np.ndarray, guess: np.ndarray) -> np.ndarray:
    """A resample holds examples twice, so ties are the rule: equal values get their mean rank."""
    from scipy.stats import rankdata

    return _pearson(rankdata(truth, axis=1), rankdata(guess, axis=1))


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """0 where nothing varies, as in `metrics.py`."""
    tiny = np.finfo(np.float64).eps
    out = np.zeros(len(numerator))
    return np.divide(numerator, denominator, out=out, where=denominator > tiny)


ROWWISE: dict[str, Rowwise] = {
    "accuracy": _accuracy,
    "mean": _mean,
    "f1": lambda truth, guess: _f1(truth == 1, guess == 1),
    "matthews": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
}


def accuracy_error(score: float, examples: float) -> float:
    """Binomial standard error, in points, of an accuracy in percent: 100·sqrt(p(1 − p)/n)."""
    p = min(max(score / 100, 0.0), 1.0)
    return 100 * math.sqrt(p * (1 - p) / examples)


def paired_accuracy_error(lost: float, gained: float, examples: float) -> float:
    """Standard error, in points, of a change of accuracy by b answers lost and c gained of n:
    100·sqrt(b + c − (b − c)²/n) / n. The bootstrap's, in closed form."""
    return 100 * math.sqrt(max(lost + gained - (lost - gained) ** 2 / examples, 0.0)) / examples


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of runs that differ in their seed; None of a single run."""

    mean: float
    std: float | None
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}"


def over_seeds(values: Sequence[float]) -> Spread:
    """Mean ± standard deviation (n − 1) over seeds, as tables of papers have it."""
    if not values:
        raise ValueError("expected the result of at least one run")
    array = np.asarray(values, dtype=np.float64)
    return Spread(float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else None, len(array))
