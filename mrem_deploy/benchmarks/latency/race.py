"""The measurement: load time and memory of each model, then all of them in interleaved rounds.

In this order: (1) each model alone in a fresh process: load time, and memory by shape; (2) all models loaded,
each in its own process, the same input to each, outputs compared with full precision; (3) one run of each per
round; (4) on request, several sessions of each at the same time. A model that fails is left out, with the
reason. Sentences of mixed lengths are in serving.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from mrem_deploy.base import interrupt
from mrem_deploy.base.progress import bar
from mrem_deploy.base.scratch import scratch_folder
from mrem_deploy.benchmarks.latency.contenders import Contender, Worker
from mrem_deploy.benchmarks.latency.messages import FeedReply
from mrem_deploy.benchmarks.latency.resources import crowd, measure_memory
from mrem_deploy.benchmarks.latency.settings import RaceSettings, Shape
from mrem_deploy.benchmarks.latency.standings import (
    Cell,
    Memory,
    Standing,
    Weight,
    or_left_out,
    rest,
    running,
)
from mrem_deploy.benchmarks.timing import interleave

PROFILED_RUNS = 5


def race(contenders: Sequence[Contender], settings: RaceSettings) -> list[Standing]:
    """Measure all; the first contender is the one that the others are compared with."""
    standings = [Standing(contender, Weight(contender.file_mb)) for contender in contenders]
    with bar(len(standings) * settings.loads, "loading each alone", unit="model") as shown:
        for _ in range(settings.loads):
            for standing in interrupt.steps(running(standings)):
                with or_left_out(standing):
                    _weigh(standing, settings)
                shown.update()
    for threads in settings.threads:
        with ExitStack() as processes:
            workers = {}
            for standing in interrupt.steps(running(standings)):
                with or_left_out(standing):
                    worker = processes.enter_context(Worker(standing.contender, threads))
                    workers[standing.contender.name] = worker
            for shape in settings.shapes:
                _race_at(shape, threads, standings, workers, settings)
    if settings.profile_nodes:
        _profile(standings, settings)
    if settings.memory_shapes:
        measure_memory(standings, settings)
    if settings.together:
        crowd(standings, settings)
    return standings


def _weigh(standing: Standing, settings: RaceSettings) -> None:
    """Load in a fresh process; the first time also run every shape and measure the memory."""
    weight = standing.weight
    with Worker(standing.contender, settings.threads[0]) as worker:
        weight.loads.append(worker.load["load_seconds"])
        if weight.memory is None:
            for shape in settings.shapes:
                worker.feed(shape.batch, shape.sequence, settings.vocabulary, settings.seed)
            resident = worker.memory()["resident_mb"]
            weight.memory = Memory(worker.load["empty_mb"], worker.load["loaded_mb"], resident)


def _race_at(
    shape: Shape, threads: int, standings: list[Standing], workers: dict[str, Worker], settings: RaceSettings
) -> None:
    outputs = {}
    for standing in running(standings):
        name = standing.contender.name
        with or_left_out(standing):
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
        rest(threads)
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
