"""Comparing two costs on a machine that is never quite idle.

Times of one thing drift with whatever else runs. So the two are run in turn (A B A B …), each round
gives one ratio of neighbours in time, and the median of the ratios is reported with its quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """Seconds of both, round by round."""

    base: tuple[float, ...]
    other: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(other / base for base, other in zip(self.base, self.other, strict=True))

    def as_dict(self) -> dict[str, object]:
        low, middle, high = quartiles(self.ratios)
        return {
            "base_seconds": statistics.median(self.base),
            "seconds": statistics.median(self.other),
            "ratio": middle,
            "ratio_quartiles": [low, high],
            "ratio_range": [min(self.ratios), max(self.ratios)],
            "rounds": [list(pair) for pair in zip(self.base, self.other, strict=True)],
        }


def alternate(
    base: Callable[[], object],
    other: Callable[[], object],
    rounds: int,
    warmup: int,
    clock: Callable[[], float] = time.perf_counter,
    after_call: Callable[[], object] = lambda: None,
) -> Comparison:
    """Run both in turn, `warmup` rounds untimed and `rounds` timed; `after_call` is for a progress bar."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(warmup + rounds):
        for call, seconds in zip((base, other), times, strict=True):
            started = clock()
            call()
            elapsed = clock() - started
            if number >= warmup:
                seconds.append(elapsed)
            after_call()
    return Comparison(tuple(times[0]), tuple(times[1]))


def quartiles(values: tuple[float, ...]) -> tuple[float, float, float]:
    """First quartile, median, third quartile, interpolated between neighbours."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
