"""Metrics of many resamples at once, for the bootstrap: truth and guess (R, n) → (R,), from 0 to 1.

Note: these are the same metrics as in `metrics.py`, written for speed; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# (truth, guess, the class that F1 is about) → a value for every resample
Rowwise = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
# The same of one set of examples → a value
Score = Callable[[np.ndarray, np.ndarray, int], float]


def one_by_one(score: Score) -> Rowwise:
    """Any metric, called for each resample. Slow, but enough to start with."""

    def rowwise(truth: np.ndarray, guess: np.ndarray, positive: int = 1) -> np.ndarray:
        return np.array([score(t, g, positive) for t, g in zip(truth, guess, strict=True)])

    return rowwise


def accuracy(truth: np.ndarray, guess: np.ndarray, positive: int = 1) -> np.ndarray:
    return (truth == guess).mean(axis=1)


def mean(truth: np.ndarray, guess: np.ndarray, positive: int = 1) -> np.ndarray:
    """Of scores per example, which need no truth."""
    return guess.mean(axis=1)


def f1(truth: np.ndarray, guess: np.ndarray, positive: int = 1) -> np.ndarray:
    """2·TP / (TP + FP + TP + FN); 0 if nothing is positive."""
    truth, guess = truth == positive, guess == positive
    hits, named = (truth & guess).sum(axis=1), truth.sum(axis=1) + guess.sum(axis=1)
    return np.divide(2.0 * hits, named, out=np.zeros(len(truth)), where=named > 0)


def matthews(truth: np.ndarray, guess: np.ndarray, positive: int = 1) -> np.ndarray:
    """Gorodkin's correlation of any number of classes: the covariance over classes, normalised."""
    total = np.zeros((3, len(truth)))
    for label in np.union1d(truth, guess):
        t, g = truth == label, guess == label
        p, q = t.mean(axis=1), g.mean(axis=1)
        total += np.stack([(t & g).mean(axis=1) - p * q, p - p * p, q - q * q])
    both, own, theirs = total
    return _ratio(both, np.sqrt(np.maximum(own * theirs, 0.0)))


def pearson(truth: np.ndarray, guess: np.ndarray, positive: int = 1) -> np.ndarray:
    x, y = (values - values.mean(axis=1, keepdims=True) for values in (truth, guess))
    return _ratio((x * y).sum(axis=1), np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1)))


def spearman(truth: np.ndarray, guess: np.ndarray, positive: int = 1) -> np.ndarray:
    """A resample holds examples twice, so there are many ties: equal values get their mean rank."""
    from scipy.stats import rankdata

    return pearson(rankdata(truth, axis=1), rankdata(guess, axis=1))


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """0 if nothing varies, as in `metrics.py`."""
    tiny = np.finfo(np.float64).eps
    out = np.zeros(len(numerator))
    return np.divide(numerator, denominator, out=out, where=denominator > tiny)
