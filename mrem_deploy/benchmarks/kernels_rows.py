"""A row of `benchmark kernels`: one implementation at one size."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from mrem_deploy.benchmarks.timing import Comparison

YARDSTICK = "copy + sum"


@dataclass(frozen=True)
class KernelRow:
    """One implementation at one size, round by round."""

    size: tuple[int, int]
    contender: str
    moved: int  # bytes
    rounds: tuple[float, ...]  # seconds
    yardstick: tuple[float, ...]
    ours: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return statistics.median(self.rounds)

    @property
    def gigabytes_per_second(self) -> float:
        return self.moved / self.seconds / 1e9

    @property
    def of_bandwidth(self) -> float:
        return Comparison(self.rounds, self.yardstick).ratio

    @property
    def times_ours(self) -> Comparison:
        return Comparison(self.ours, self.rounds)

    @property
    def shape(self) -> str:
        return "×".join(map(str, self.size))

    def to_dict(self) -> dict[str, Any]:
        return {
            "size": list(self.size),
            "contender": self.contender,
            "seconds": self.seconds,
            "gigabytes_per_second": self.gigabytes_per_second,
            "of_bandwidth": self.of_bandwidth,
            "times_ours": self.times_ours.ratio_dict(),
            "rounds": list(self.rounds),
        }
