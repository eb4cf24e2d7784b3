"""What models take and give beside latency: memory by shape, and several sessions at the same time."""

from __future__ import annotations

import statistics

from mrem_deploy.base import interrupt
from mrem_deploy.base.progress import bar
from mrem_deploy.benchmarks.latency.contenders import Contender, Worker
from mrem_deploy.benchmarks.latency.settings import RaceSettings, Shape
from mrem_deploy.benchmarks.latency.standings import Crowd, MemoryAt, Standing, or_left_out, untuned

CROWD_SECONDS = 1.0  # of each turn


def measure_memory(standings: list[Standing], settings: RaceSettings) -> None:
    taking_part = untuned(standings)
    with bar(len(taking_part) * len(settings.memory_shapes), "memory", unit="process") as shown:
        for standing in interrupt.steps(taking_part):
            for shape in interrupt.steps(settings.memory_shapes):
                with or_left_out(standing):
                    standing.weight.by_shape.append(_memory_at(standing.contender, shape, settings))
                shown.update()


def _memory_at(contender: Contender, shape: Shape, settings: RaceSettings) -> MemoryAt:
    with Worker(contender, settings.threads[0]) as worker:
        worker.feed(shape.batch, shape.sequence, settings.vocabulary, settings.seed)
        empty, last = worker.load["empty_mb"], worker.memory()
        return MemoryAt(
            shape, worker.load["loaded_mb"] - empty, last["peak_mb"] - empty, last["resident_mb"] - empty
        )


def crowd(standings: list[Standing], settings: RaceSettings) -> None:
    """Nothing else runs meanwhile, and the models are not interleaved: what counts is the gain of each over
    itself alone, which is measured right before and right after."""
    taking_part = untuned(standings)
    cases = [(threads, shape) for threads in settings.threads for shape in settings.shapes]
    with bar(len(taking_part) * len(cases), f"{settings.together} sessions at once", unit="case") as shown:
        for standing in interrupt.steps(taking_part):
            for threads, shape in interrupt.steps(cases):
                with or_left_out(standing):
                    standing.crowds.append(_crowd_at(standing.contender, threads, shape, settings))
                shown.update()


def _crowd_at(contender: Contender, threads: int, shape: Shape, settings: RaceSettings) -> Crowd:
    with Worker(contender, threads) as worker:
        worker.feed(shape.batch, shape.sequence, settings.vocabulary, settings.seed)
        turns: list[list[float]] = [
            worker.crowd(sessions, CROWD_SECONDS)
            for sessions in (1, settings.together, 1, settings.together, 1)
        ]
    alone = statistics.median(turn[0] for turn in turns[::2])
    together = [statistics.fmean(each) for each in zip(*turns[1::2], strict=True)]
    return Crowd(threads, shape, shape.batch * alone, tuple(shape.batch * speed for speed in together))
