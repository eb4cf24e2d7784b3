"""Numbers of one variant over its seeds, and how sure their differences are.

Note where the uncertainty of a difference comes from. With several seeds it is the spread of the difference
from seed to seed (Student's t over the runs). With one seed it is what another sample of evaluation examples
would change (paired bootstrap), which says nothing about another calibration set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import numpy as np

from mrem_deploy.evaluate.accuracy import FULL_PRECISION, QUANTIZED
from mrem_deploy.evaluate.metrics import metric_of
from mrem_deploy.evaluate.uncertainty import CONFIDENCE, Spread, over_seeds, paired_bootstrap
from mrem_deploy.recipe import Recipe
from mrem_deploy.reproduce.cells import CellResult

NORMAL_95 = 1.959964  # the quantile of the normal distribution at (1 + CONFIDENCE) / 2


@dataclass(frozen=True)
class Gap:
    """A difference of two scores in points, its standard error and 95% interval; NaN if unknown."""

    value: float
    error: float
    low: float
    high: float
    how: str  # where the uncertainty comes from

    def __str__(self) -> str:
        sign = f"{self.value:+.2f}".replace("-", "−")
        return f"{sign} ± {self.error:.2f}" if math.isfinite(self.error) else sign

    def minus(self, other: Gap) -> Gap:
        """A difference of differences, treated as independent."""
        value, error = self.value - other.value, math.hypot(self.error, other.error)
        return Gap(value, error, value - NORMAL_95 * error, value + NORMAL_95 * error, self.how)


class Measured:
    """One variant: its runs by seed."""

    def __init__(self, runs: Sequence[CellResult]) -> None:
        self.runs = list(runs)

    @property
    def splits(self) -> list[str]:
        return list(self.runs[0].metrics.accuracy.splits)

    @property
    def metric(self) -> str:
        return self.runs[0].metrics.accuracy.metric

    def values(
        self, split: str | None = None, model: str = QUANTIZED, metric: str | None = None
    ) -> list[float]:
        """The score of every run in percent, on the first split unless one is named."""
        split, metric = split or self.splits[0], metric or self.metric
        return [float(run.metrics.accuracy.splits[split].scores[model][metric]) for run in self.runs]

    def score(self, split: str | None = None, model: str = QUANTIZED, metric: str | None = None) -> Spread:
        return over_seeds(self.values(split, model, metric))

    def fidelity(self, measure: str, split: str | None = None) -> tuple[float, float] | None:
        """Mean over the runs of "kl" or "flips" against full precision, with its standard error: over the
        seeds, or over the examples of a single run. None if a run has none."""
        own = [
            run.metrics.accuracy.splits[split or self.splits[0]].fidelity.get(QUANTIZED) for run in self.runs
        ]
        values = [getattr(each, measure) for each in own if each is not None]
        if len(values) < len(self.runs) or None in values:
            return None
        if len(values) == 1:
            error = getattr(own[0], f"{measure}_error")
            return values[0], math.nan if error is None else error
        return fmean(values), stdev(values) / math.sqrt(len(values))

    @property
    def minutes(self) -> float:
        return fmean(run.metrics.cost.train_seconds for run in self.runs) / 60

    @property
    def cpu_minutes(self) -> float | None:
        """Processor time of training; None where a run was interrupted and lost count of it."""
        seconds = [run.metrics.cost.train_cpu_seconds for run in self.runs]
        known = [each for each in seconds if each is not None]
        return fmean(known) / 60 if len(known) == len(seconds) else None

    def heldout(self) -> list[Spread]:
        """The held-out loss of every module in the state that is the result; empty if a run has none."""
        each = [[module.best for module in run.metrics.heldout.values()] for run in self.runs]
        return [over_seeds(list(losses)) for losses in zip(*each, strict=True)]

    @property
    def gigabytes(self) -> float:
        """Peak memory in GiB, of the largest worker if there are several."""
        return fmean(run.metrics.cost.peak_memory_mb for run in self.runs) / 1024

    @property
    def examples(self) -> int:
        """Examples it was trained on: the training set for QAT, else the calibration set."""
        first = self.runs[0].metrics
        trained = first.qat.training_samples if first.qat else None
        return trained or first.cost.calibration_samples or 0

    def layer_errors(self) -> tuple[list[str], np.ndarray]:
        """Names of the layers, and their errors after training, (runs, layers)."""
        errors = [run.history.layer_errors for run in self.runs]
        return list(errors[0].layers), np.array([own.after for own in errors])


def gap(
    a: Measured, b: Measured, split: str | None = None, model_a: str = QUANTIZED, model_b: str = QUANTIZED
) -> Gap:
    """score(b) − score(a), run by run."""
    split = split or a.splits[0]
    differences = [y - x for x, y in zip(a.values(split, model_a), b.values(split, model_b), strict=True)]
    if len(differences) > 1:
        return _over_runs(differences)
    return _over_examples(a.runs[0], b.runs[0], split, model_a, model_b, differences[0])


def drop(measured: Measured, split: str | None = None) -> Gap:
    """Quantized − full precision, on the same examples."""
    return gap(measured, measured, split, FULL_PRECISION, QUANTIZED)


def _over_runs(differences: list[float]) -> Gap:
    from scipy.stats import t

    mean, count = fmean(differences), len(differences)
    error = stdev(differences) / math.sqrt(count)
    reach = float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
    return Gap(mean, error, mean - reach, mean + reach, f"spread over {count} seeds")


def _over_examples(
    one: CellResult, other: CellResult, split: str, model_a: str, model_b: str, difference: float
) -> Gap:
    first, second = one.examples.get(split), other.examples.get(split)
    unknown = Gap(difference, math.nan, math.nan, math.nan, "one seed, predictions not comparable one by one")
    if first is None or second is None:
        return unknown
    a, b = first.predictions[model_a], second.predictions[model_b]
    same = first.truth is None or (second.truth is not None and np.array_equal(first.truth, second.truth))
    metric = metric_of(first.metric)
    if a.shape != b.shape or not same or len(a) < 2 or metric.resample is None:
        return unknown
    found = paired_bootstrap(metric, a, b, first.truth)
    scale = 100.0
    how = f"paired bootstrap over {len(a):,} examples, one seed"
    return Gap(difference, scale * found.standard_error, scale * found.low, scale * found.high, how)


class Results:
    """All runs, by recipe."""

    def __init__(self, runs: Mapping[Recipe, CellResult], seeds: int) -> None:
        self._runs, self._seeds = runs, seeds

    def __getitem__(self, recipe: Recipe) -> Measured:
        cells = [replace(recipe, seed=recipe.seed + seed) for seed in range(self._seeds)]
        return Measured([self._runs[cell] for cell in cells])
