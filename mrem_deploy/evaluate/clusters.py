"""Means over predictions that come in groups: those of one example depend on each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Values = Sequence[np.ndarray] | np.ndarray  # of every example: one or more


def clustered_mean(values: Values) -> tuple[float | None, float | None]:
    """The mean over all values and its standard error; `values` are those of each example.

    With sums s and counts n of k examples: m = Σs / Σn, error = √(k/(k − 1) · Σ(s − m·n)²) / Σn.
    With one value each this is the usual standard error, and for flips the binomial one.
    """
    sums = np.array([np.sum(own, dtype=np.float64) for own in values])
    counts = np.array([np.size(own) for own in values])
    sums, counts = sums[counts > 0], counts[counts > 0]
    if len(counts) == 0:
        return None, None
    mean = float(sums.sum() / counts.sum())
    k = len(counts)
    if k == 1:
        return mean, None
    spread = np.square(sums - mean * counts).sum() * k / (k - 1)
    return mean, float(np.sqrt(spread) / counts.sum())


def in_percent(values: Values) -> tuple[float | None, float | None]:
    """The same of shares."""
    mean, error = clustered_mean(values)
    return None if mean is None else 100.0 * mean, None if error is None else 100.0 * error
