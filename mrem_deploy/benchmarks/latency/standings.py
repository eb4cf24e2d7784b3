"""One contender of the comparison and what was measured of it: the types that all measurements fill."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from mrem_deploy.base.progress import say
from mrem_deploy.benchmarks.latency.contenders import Contender, ContenderFailed
from mrem_deploy.benchmarks.latency.settings import Shape
from mrem_deploy.benchmarks.timing import Comparison, geometric_mean, percentile

# onnxruntime's idle threads look for work for some ten milliseconds after a run and slow down the next model.
# A single thread does not: it is the caller's own.
REST_SECONDS = 0.06
ARRIVAL, SORTED = "arrival", "sorted"  # the orders of a workload


@dataclass(frozen=True)
class Memory:
    """Resident MiB of a process that holds one model."""

    empty_mb: float  # with the runtime alone
    loaded_mb: float
    resident_mb: float  # after runs at every shape


@dataclass(frozen=True)
class MemoryAt:
    """Resident MiB over those of the same process before it loaded the model; one process per shape."""

    shape: Shape
    loaded_mb: float
    peak_mb: float  # while it ran
    after_mb: float


@dataclass
class Weight:
    """The file, and what loading it takes."""

    file_mb: float
    loads: list[float] = field(default_factory=list)  # seconds, each in a fresh process
    memory: Memory | None = None  # of the first of them
    by_shape: list[MemoryAt] = field(default_factory=list)

    @property
    def load_seconds(self) -> float:
        return statistics.median(self.loads)

    def to_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {"file_mb": self.file_mb, "loads": self.loads}
        if self.loads:
            row["load_seconds"] = self.load_seconds
        by_shape = [{**asdict(memory), "shape": str(memory.shape)} for memory in self.by_shape]
        return row | (asdict(self.memory) if self.memory else {}) | {"memory_over_bare_process": by_shape}


@dataclass(frozen=True)
class Cell:
    """The times of one contender at one number of threads and one shape, round by round."""

    threads: int
    shape: Shape
    seconds: tuple[float, ...]
    base: tuple[float, ...]  # of the contender that all are compared with
    difference: float = 0.0  # of the outputs, see `difference`
    node_shares: dict[str, float] | None = None

    @property
    def p50_ms(self) -> float:
        return 1e3 * percentile(self.seconds, 50)

    @property
    def p95_ms(self) -> float:
        return 1e3 * percentile(self.seconds, 95)

    @property
    def sentences_per_second(self) -> float:
        return self.shape.batch * len(self.seconds) / sum(self.seconds)

    @property
    def faster(self) -> Comparison:
        """How many times faster than the base."""
        return Comparison(base=self.seconds, other=self.base)

    @property
    def rounds_ms(self) -> list[float]:
        return [1e3 * seconds for seconds in self.seconds]

    def to_dict(self) -> dict[str, Any]:
        row = {
            "threads": self.threads,
            "shape": str(self.shape),
            "p50_ms": self.p50_ms,
            "p95_ms": self.p95_ms,
            "sentences_per_second": self.sentences_per_second,
            **self.faster.ratio_dict(),
            "rounds_ms": self.rounds_ms,
            "difference": self.difference,
        }
        return row if self.node_shares is None else {**row, "node_shares": self.node_shares}


@dataclass(frozen=True)
class Crowd:
    """Sentences per second of one session alone, and of several at work in one process."""

    threads: int  # of each session
    shape: Shape
    alone: float
    together: tuple[float, ...]  # each session

    @property
    def gain(self) -> float:
        """All together, as many times what one alone does."""
        return sum(self.together) / self.alone

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "shape": str(self.shape), "together": list(self.together), "gain": self.gain}


@dataclass(frozen=True)
class Served:
    """Seconds of every pass of one model, at one number of threads, batch size and order."""

    threads: int
    batch: int
    order: str
    sentences: int
    tokens: int  # real ones: padding does not count
    seconds: tuple[float, ...]
    base: tuple[float, ...]  # of the contender that all are compared with
    beside: tuple[float, ...] | None = None  # of the same weights in plain onnxruntime

    @property
    def case(self) -> str:
        return case_name(self.batch, self.order)

    @property
    def sentences_per_second(self) -> float:
        return self.sentences / statistics.median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / statistics.median(self.seconds)

    @property
    def faster(self) -> Comparison:
        return Comparison(base=self.seconds, other=self.base)

    @property
    def faster_than_beside(self) -> Comparison | None:
        return None if self.beside is None else Comparison(base=self.seconds, other=self.beside)

    def to_dict(self) -> dict[str, Any]:
        beside = self.faster_than_beside
        return {
            "threads": self.threads,
            "batch": self.batch,
            "order": self.order,
            "sentences": self.sentences,
            "tokens": self.tokens,
            "sentences_per_second": self.sentences_per_second,
            "tokens_per_second": self.tokens_per_second,
            **self.faster.ratio_dict(),
            "ratio_to_same_weights_in_onnxruntime": None if beside is None else beside.ratio,
            "passes_s": list(self.seconds),
        }


def case_name(batch: int, order: str) -> str:
    return "batch 1" if batch == 1 else f"batch {batch}, {order}"


@dataclass
class Standing:
    """One contender and what was measured of it."""

    contender: Contender
    weight: Weight
    cells: list[Cell] = field(default_factory=list)  # one for each number of threads and shape
    failed: str | None = None
    crowds: list[Crowd] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)  # one for each number of threads, batch and order

    def to_dict(self) -> dict[str, Any]:
        means = {
            str(threads): geometric_mean([c.faster.ratio for c in self.cells if c.threads == threads])
            for threads in dict.fromkeys(cell.threads for cell in self.cells)
        }
        return {
            **self.contender.to_dict(),
            **self.weight.to_dict(),
            "failed": self.failed,
            "geometric_mean_ratio_by_threads": means,
            "cells": [cell.to_dict() for cell in self.cells],
            "together": [crowd.to_dict() for crowd in self.crowds],
            "workload": [served.to_dict() for served in self.served],
        }


def running(standings: list[Standing]) -> list[Standing]:
    return [standing for standing in standings if standing.failed is None]


@contextmanager
def or_left_out(standing: Standing) -> Iterator[None]:
    """Note a failure and its reason, and let the others go on."""
    try:
        yield
    except ContenderFailed as failure:
        standing.failed = failure.reason
        say(f"left out: {failure}")


def untuned(standings: list[Standing]) -> list[Standing]:
    """Those that the slower measurements are about."""
    return [standing for standing in running(standings) if not standing.contender.tuned]


def rest(threads: int) -> None:
    """Before a run: let the threads of the model before it fall asleep."""
    if threads > 1:
        time.sleep(REST_SECONDS)
