"""The measurement: load time and memory of each model, then all of them in interleaved rounds.

In this order: (1) each model alone in a fresh process: load time and memory; (2) all models loaded, each in
its own process, the same input to each, outputs compared with full precision; (3) one run of each per round.
A model that fails in (1) or (2) is left out, with the reason.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from mrem_deploy.base import interrupt
from mrem_deploy.base.progress import bar, say
from mrem_deploy.base.scratch import scratch_folder
from mrem_deploy.benchmarks.latency.contenders import Contender, ContenderFailed, Worker
from mrem_deploy.benchmarks.latency.messages import FeedReply
from mrem_deploy.benchmarks.latency.settings import RaceSettings, Shape
from mrem_deploy.benchmarks.timing import Comparison, geometric_mean, interleave, percentile

PROFILED_RUNS = 5
# onnxruntime's idle threads look for work for some ten milliseconds after a run and slow down the next model.
# A single thread does not: it is the caller's own.
REST_SECONDS = 0.06


@dataclass(frozen=True)
class Memory:
    """Resident MiB of a process that holds one model."""

    empty_mb: float  # with the runtime alone
    loaded_mb: float
    resident_mb: float  # after runs at every shape


@dataclass
class Weight:
    """The file, and what loading it takes."""

    file_mb: float
    loads: list[float] = field(default_factory=list)  # seconds, each in a fresh process
    memory: Memory | None = None  # of the first of them

    @property
    def load_seconds(self) -> float:
        return statistics.median(self.loads)

    def to_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {"file_mb": self.file_mb, "loads": self.loads}
        if self.loads:
            row["load_seconds"] = self.load_seconds
        return row | (asdict(self.memory) if self.memory else {})


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


@dataclass
class Standing:
    """One contender and what was measured of it."""

    contender: Contender
    weight: Weight
    cells: list[Cell] = field(default_factory=list)  # one for each number of threads and shape
    failed: str | None = None

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
        }


def race(contenders: Sequence[Contender], settings: RaceSettings) -> list[Standing]:
    """Measure all; the first contender is the one that the others are compared with."""
    standings = [Standing(contender, Weight(contender.file_mb)) for contender in contenders]
    with bar(len(standings) * settings.loads, "loading each alone", unit="model") as shown:
        for _ in range(settings.loads):
            for standing in interrupt.steps(running(standings)):
                with _or_left_out(standing):
                    _weigh(standing, settings)
                shown.update()
    for threads in settings.threads:
        with ExitStack() as processes:
            workers = {}
            for standing in interrupt.steps(running(standings)):
                with _or_left_out(standing):
                    worker = processes.enter_context(Worker(standing.contender, threads))
                    workers[standing.contender.name] = worker
            for shape in settings.shapes:
                _race_at(shape, threads, standings, workers, settings)
    if settings.profile_nodes:
        _profile(standings, settings)
    return standings


def running(standings: list[Standing]) -> list[Standing]:
    return [standing for standing in standings if standing.failed is None]


@contextmanager
def _or_left_out(standing: Standing) -> Iterator[None]:
    """Note a failure and its reason, and let the others go on."""
    try:
        yield
    except ContenderFailed as failure:
        standing.failed = failure.reason
        say(f"left out: {failure}")


def _weigh(standing: Standing, settings: RaceSettings) -> None:
    """Load in a fresh process; the first time also run every shape and measure the memory."""
    weight = standing.weight
    with Worker(standing.contender, settings.threads[0]) as worker:
        weight.loads.append(worker.load["load_seconds"])
        if weight.memory is None:
            for shape in settings.shapes:
                worker.feed(shape.batch, shape.sequence, settings.vocabulary, settings.seed)
            weight.memory = Memory(worker.load["empty_mb"], worker.load["loaded_mb"], worker.resident_mb())


def _race_at(
    shape: Shape, threads: int, standings: list[Standing], workers: dict[str, Worker], settings: RaceSettings
) -> None:
    outputs = {}
    for standing in running(standings):
        name = standing.contender.name
        with _or_left_out(standing):
            outputs[name] = workers[name].feed(
                shape.batch, shape.sequence, settings.vocabulary, settings.seed
            )
    left = running(standings)
    if not left or left[0] is not standings[0]:
        return  # nothing to compare with; the caller finds the reason in `failed`
    base = left[0].contender.name
    differences = {name: difference(outputs[base], output) for name, output in outputs.items()}
    calls = {s.contender.name: _turn(workers[s.contender.name], threads) for s in left}
    total = len(calls) * (settings.rounds + settings.warmup)
    with bar(total, f"{shape}, {threads} thread{'s' if threads > 1 else ''}", unit="run") as shown:
        times = interleave(calls, settings.rounds, settings.warmup, after_call=shown.update)
    for standing in left:
        name = standing.contender.name
        standing.cells.append(Cell(threads, shape, times[name], times[base], differences[name]))


def _turn(worker: Worker, threads: int) -> Callable[[], float]:
    def run() -> float:
        if threads > 1:
            time.sleep(REST_SECONDS)
        return worker.run()

    return run


def difference(base: FeedReply, other: FeedReply) -> float:
    """Relative RMS difference of the outputs; NaN if a model gives NaN. Other shapes are a defect."""
    if base["shapes"] != other["shapes"]:
        raise AssertionError(f"the models give outputs of other shapes: {base['shapes']}, {other['shapes']}")
    expected, got = (np.concatenate(each["sample"]) for each in (base, other))
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def _profile(standings: list[Standing], settings: RaceSettings) -> None:
    """Shares of time per operator kind, in separate sessions, because profiling costs time."""
    threads = settings.threads[0]
    with scratch_folder("race") as folder:
        for standing in running(standings):
            for shape in interrupt.steps(settings.shapes):
                with Worker(standing.contender, threads, profile=folder) as worker:
                    worker.feed(shape.batch, shape.sequence, settings.vocabulary, settings.seed)
                    nodes = shares(worker.node_times(PROFILED_RUNS))
                standing.cells = [
                    replace(cell, node_shares=nodes)
                    if (cell.threads, cell.shape) == (threads, shape)
                    else cell
                    for cell in standing.cells
                ]


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """The share of each kind, the largest first."""
    whole = sum(seconds.values()) or 1.0
    return {kind: value / whole for kind, value in sorted(seconds.items(), key=lambda item: -item[1])}
