"""Comparing costs on a machine that is never quite idle.

Times drift with whatever else runs. So all contenders take turns, one call of each per round, and each round
gives one ratio; the median of the ratios is reported with its quartiles. The order moves on by one from round
to round, so that nothing always follows the same neighbour.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mrem_deploy.base import interrupt


@dataclass(frozen=True)
class Comparison:
    """Seconds of both, round by round."""

    base: tuple[float, ...]
    other: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(other / base for base, other in zip(self.base, self.other, strict=True))

    @property
    def ratio(self) -> float:
        return percentile(self.ratios, 50)

    @property
    def ratio_quartiles(self) -> list[float]:
        low, _, high = quartiles(self.ratios)
        return [low, high]

    @property
    def ratio_range(self) -> list[float]:
        return [min(self.ratios), max(self.ratios)]

    @property
    def base_seconds(self) -> float:
        return statistics.median(self.base)

    @property
    def seconds(self) -> float:
        return statistics.median(self.other)

    def to_dict(self) -> dict[str, object]:
        return {
            "base_seconds": self.base_seconds,
            "seconds": self.seconds,
            **self.ratio_dict(),
            "rounds": [list(pair) for pair in zip(self.base, self.other, strict=True)],
        }

    def ratio_dict(self) -> dict[str, object]:
        return {
            "ratio": self.ratio,
            "ratio_quartiles": self.ratio_quartiles,
            "ratio_range": self.ratio_range,
        }


def timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """`call` as a call that returns its seconds."""

    def measure() -> float:
        started = clock()
        call()
        return clock() - started

    return measure


def interleave(
    calls: Mapping[str, Callable[[], float]],
    rounds: int,
    warmup: int,
    after_call: Callable[[], object] = lambda: None,
) -> dict[str, tuple[float, ...]]:
    """Seconds of every contender by round: `warmup` rounds are not counted, `rounds` are.

    A call returns its own seconds, because only it knows what is part of them (`timed` wraps a plain one);
    `after_call` is for a progress bar.
    """
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            interrupt.check()
            elapsed = calls[name]()
            if number >= warmup:
                seconds[name].append(elapsed)
            after_call()
    return {name: tuple(values) for name, values in seconds.items()}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile, interpolated between neighbours."""
    return percentile(values, 25), percentile(values, 50), percentile(values, 75)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of them lie, interpolated between neighbours."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def geometric_mean(ratios: Sequence[float]) -> float:
    """The mean for ratios: a gain of 2 and a loss of 2 cancel."""
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
