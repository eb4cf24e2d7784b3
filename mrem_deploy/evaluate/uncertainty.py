"""How far a number may be trusted: the spread over evaluation examples, and over seeds.

Note: two models that predict the same examples are compared *paired*. Both get most examples right or both
get them wrong; only the rest tells them apart, so the error of the difference is far smaller than that of
either score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from mrem_deploy.base import interrupt
from mrem_deploy.evaluate.metrics import Metric

RESAMPLES = 2000  # the 2.5% quantile then rests on 50 of them
CONFIDENCE = 0.95
VALUES_AT_A_TIME = 1 << 22  # in a block of resamples: tens of MiB


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
    metric: Metric,
    a: np.ndarray,
    b: np.ndarray,
    labels: np.ndarray | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    positive: int = 1,
    confidence: float = CONFIDENCE,
) -> Difference:
    """How much better b is than a, by resampling the evaluation examples, the same ones for both.

    metric: one with `resample`. MEAN takes a score per example (such as F1 of an answer) in a and b,
    and no labels.
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
    if metric.resample is None:
        raise ValueError(f"expected a metric with `resample`, got {metric.name!r}, which has none")
    resample = metric.resample
    generator = np.random.default_rng(seed)
    rows = max(1, VALUES_AT_A_TIME // len(a))
    found = []
    for start in interrupt.steps(range(0, resamples, rows)):
        drawn = generator.integers(0, len(a), size=(min(rows, resamples - start), len(a)))
        better = resample(truth[drawn], b[drawn], positive) - resample(truth[drawn], a[drawn], positive)
        found.append(better)
    differences = np.concatenate(found)
    edge = (1 - confidence) / 2
    low, high = np.quantile(differences, [edge, 1 - edge])
    whole = resample(truth[None], b[None], positive) - resample(truth[None], a[None], positive)
    return Difference(
        float(whole[0]),
        float(differences.std(ddof=1)),
        float(low),
        float(high),
        confidence,
        resamples,
    )


def accuracy_error(score: float, examples: float) -> float:
    """Binomial standard error, in points, of an accuracy in percent: 100·sqrt(p(1 − p)/n)."""
    p = min(max(score / 100, 0.0), 1.0)
    return 100 * math.sqrt(p * (1 - p) / examples)


def paired_accuracy_error(lost: float, gained: float, examples: float) -> float:
    """Standard error, in points, of a change of accuracy by b predictions lost and c gained of n:
    100·sqrt(b + c − (b − c)²/n) / n. The closed form of the bootstrap's."""
    return 100 * math.sqrt(max(lost + gained - (lost - gained) ** 2 / examples, 0.0)) / examples


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of runs that differ in their seed; None for a single run."""

    mean: float
    std: float | None
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}"


def over_seeds(values: Sequence[float]) -> Spread:
    """Mean ± standard deviation (n − 1) over seeds, as in the tables of papers."""
    if not values:
        raise ValueError("expected the result of at least one run")
    array = np.asarray(values, dtype=np.float64)
    return Spread(float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else None, len(array))
