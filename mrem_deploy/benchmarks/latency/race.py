"""The measurement itself: what each model weighs, then all of them in interleaved rounds.

Order of events: (1) each model alone in a fresh process: load time and memory; (2) all of them loaded, each
in its own process, the same input to each, outputs compared with full precision; (3) one run of each per
round. A model that fails in (1) or (2) is left out and its reason kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mrem_deploy.base.progress import bar, say
from mrem_deploy.benchmarks.latency.contenders import Contender, ContenderFailed, Worker
from mrem_deploy.benchmarks.timing import Comparison, geometric_mean, interleave, percentile

PROFILED_RUNS = 5
# onnxruntime's idle threads keep looking for work for some ten milliseconds after a run, at a neighbour's
# expense. A single thread does not: it is the caller's own.
REST_SECONDS = 0.06


@dataclass(frozen=True)
class Shape:
    """Sentences at once × tokens of each."""

    batch: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.sequence}"


@dataclass(frozen=True)
class Plan:
    """How the race is run; `vocabulary` and `seed` decide the tokens."""

    shapes: tuple[Shape, ...]
    threads: tuple[int, ...]
    rounds: int
    warmup: int
    loads: int
    vocabulary: int
    seed: int
    profile_nodes: bool = False


@dataclass
class Standing:
    """One contender and what was measured of it."""

    contender: Contender
    weight: dict[str, Any] = field(default_factory=dict)  # of the file, and of a process that loads it
    cells: list[dict[str, Any]] = field(default_factory=list)  # one for each number of threads and shape
    failed: str | None = None

    def as_dict(self) -> dict[str, Any]:
        means = {
            str(threads): geometric_mean([c["ratio"] for c in self.cells if c["threads"] == threads])
            for threads in dict.fromkeys(cell["threads"] for cell in self.cells)
        }
        return {
            **self.contender.describe(),
            **self.weight,
            "failed": self.failed,
            "geometric_mean_ratio_by_threads": means,
            "cells": self.cells,
        }


def race(contenders: Sequence[Contender], plan: Plan) -> list[Standing]:
    """Measure all; the first contender is the one that the others are compared with."""
    standings = [Standing(contender, {"file_mb": contender.file_mb}) for contender in contenders]
    with bar(len(standings) * plan.loads, "loading each alone", unit="model") as shown:
        for _ in range(plan.loads):
            for standing in running(standings):
                with _or_left_out(standing):
                    _weigh(standing, plan)
                shown.update()
    for threads in plan.threads:
        with ExitStack() as processes:
            workers = {}
            for standing in running(standings):
                with _or_left_out(standing):
                    worker = processes.enter_context(Worker(standing.contender, threads))
                    workers[standing.contender.name] = worker
            for shape in plan.shapes:
                _race_at(shape, threads, standings, workers, plan)
    if plan.profile_nodes:
        _profile(standings, plan)
    return standings


def running(standings: list[Standing]) -> list[Standing]:
    return [standing for standing in standings if standing.failed is None]


@contextmanager
def _or_left_out(standing: Standing) -> Iterator[None]:
    """A failure is noted with its reason, and the others go on."""
    try:
        yield
    except ContenderFailed as failure:
        standing.failed = failure.reason
        say(f"left out: {failure}")


def _weigh(standing: Standing, plan: Plan) -> None:
    """Load in a fresh process; the first time also run every shape, to see the memory that takes."""
    weight = standing.weight
    loads = weight.setdefault("loads", [])
    with Worker(standing.contender, plan.threads[0]) as worker:
        loads.append(worker.load["load_seconds"])
        weight["load_seconds"] = statistics.median(loads)
        if "resident_mb" not in weight:
            for shape in plan.shapes:
                worker.feed(shape.batch, shape.sequence, plan.vocabulary, plan.seed)
            weight["empty_mb"], weight["loaded_mb"] = worker.load["empty_mb"], worker.load["loaded_mb"]
            weight["resident_mb"] = worker.resident_mb()


def _race_at(
    shape: Shape, threads: int, standings: list[Standing], workers: dict[str, Worker], plan: Plan
) -> None:
    answers = {}
    for standing in running(standings):
        name = standing.contender.name
        with _or_left_out(standing):
            answers[name] = workers[name].feed(shape.batch, shape.sequence, plan.vocabulary, plan.seed)
    left = running(standings)
    if not left or left[0] is not standings[0]:
        return  # nothing to compare with: the caller sees it in `failed`
    base = left[0].contender.name
    differences = {name: difference(answers[base], answer) for name, answer in answers.items()}
    calls = {s.contender.name: _turn(workers[s.contender.name], threads) for s in left}
    total = len(calls) * (plan.rounds + plan.warmup)
    with bar(total, f"{shape}, {threads} thread{'s' if threads > 1 else ''}", unit="run") as shown:
        times = interleave(calls, plan.rounds, plan.warmup, after_call=shown.update)
    for standing in left:
        name = standing.contender.name
        standing.cells.append(
            {
                "threads": threads,
                "shape": str(shape),
                **cell(times[base], times[name], shape.batch),
                "difference": differences[name],
            }
        )


def _turn(worker: Worker, threads: int) -> Callable[[], float]:
    def run() -> float:
        if threads > 1:
            time.sleep(REST_SECONDS)
        return worker.run()

    return run


def cell(base: tuple[float, ...], own: tuple[float, ...], batch: int) -> dict[str, Any]:
    """The numbers of one contender at one shape; `ratio` says how many times faster than the base it is."""
    return {
        "p50_ms": 1e3 * percentile(own, 50),
        "p95_ms": 1e3 * percentile(own, 95),
        "sentences_per_second": batch * len(own) / sum(own),
        **Comparison(base=own, other=base).ratio_dict(),
        "rounds_ms": [1e3 * seconds for seconds in own],
    }


def difference(base: dict[str, Any], answer: dict[str, Any]) -> float:
    """Relative RMS difference of the outputs; NaN where a model answers NaN. Other shapes are a defect."""
    if base["shapes"] != answer["shapes"]:
        raise AssertionError(f"the models answer in other shapes: {base['shapes']} and {answer['shapes']}")
    reference, came = (np.concatenate(each["sample"]) for each in (base, answer))
    return float(np.linalg.norm(came - reference) / np.linalg.norm(reference))


def _profile(standings: list[Standing], plan: Plan) -> None:
    """Shares of time per operator kind, in sessions of their own: watching costs time."""
    threads = plan.threads[0]
    with TemporaryDirectory() as folder:
        for standing in running(standings):
            for shape in plan.shapes:
                with Worker(standing.contender, threads, profile=Path(folder)) as worker:
                    worker.feed(shape.batch, shape.sequence, plan.vocabulary, plan.seed)
                    nodes = shares(worker.node_times(PROFILED_RUNS))
                found = next(c for c in standing.cells if (c["threads"], c["shape"]) == (threads, str(shape)))
                found["node_shares"] = nodes


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Each part of the whole, the largest first."""
    whole = sum(seconds.values()) or 1.0
    return {kind: value / whole for kind, value in sorted(seconds.items(), key=lambda item: -item[1])}
