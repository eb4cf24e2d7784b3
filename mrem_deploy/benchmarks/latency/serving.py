"""A workload, batch by batch: every model in turn at each batch, and what a whole pass takes.

So all models see the same state of the machine, and a pass of each is the sum of its batches. The first pass
warms up: runtimes that prepare themselves for every shape they meet have then met all. Padding is each
runtime's own matter (runtimes.py): onnxruntime and OpenVINO get sentences filled up to the longest of the
batch, CTranslate2 and llama.cpp get them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from mrem_deploy.base import interrupt
from mrem_deploy.base.progress import bar
from mrem_deploy.benchmarks.latency.contenders import Worker
from mrem_deploy.benchmarks.latency.standings import (
    ARRIVAL,
    SORTED,
    Served,
    Standing,
    case_name,
    or_left_out,
    rest,
    untuned,
)
from mrem_deploy.benchmarks.latency.workload import Workload


@dataclass(frozen=True)
class ServingSettings:
    """How a workload is timed."""

    workload: Workload
    batches: tuple[int, ...]
    passes: int  # counted; one more comes first
    threads: tuple[int, ...]

    @property
    def cases(self) -> list[tuple[int, str]]:
        """Batch size and order; one by one the order makes no difference."""
        orders = (ARRIVAL, SORTED)
        return [(size, order) for size in self.batches for order in orders[: 1 if size == 1 else 2]]


def serve_all(standings: list[Standing], settings: ServingSettings) -> None:
    """Measure all that still run and have the default options; the results go into each standing."""
    for threads in settings.threads:
        with ExitStack() as processes:
            workers: dict[str, Worker] = {}
            for standing in interrupt.steps(untuned(standings)):
                with or_left_out(standing):
                    worker = processes.enter_context(Worker(standing.contender, threads))
                    workers[standing.contender.name] = worker
            for batch, order in settings.cases:
                _serve_case(standings, workers, threads, (batch, order), settings)


def _serve_case(
    standings: list[Standing],
    workers: Mapping[str, Worker],
    threads: int,
    case: tuple[int, str],
    settings: ServingSettings,
) -> None:
    batches = list(settings.workload.batches(*case))
    for standing in untuned(standings):
        with or_left_out(standing):
            workers[standing.contender.name].serve(batches)
    times: dict[str, list[float]] = {}
    total = len(batches) * (settings.passes + 1)
    with bar(
        total, f"{case_name(*case)}, {threads} thread{'s' if threads > 1 else ''}", unit="batch"
    ) as shown:
        for number in range(settings.passes + 1):
            seconds = _one_pass(standings, workers, len(batches), number, shown.update, threads)
            if number:
                for name, value in seconds.items():
                    times.setdefault(name, []).append(value)
    left = untuned(standings)
    if not left or left[0] is not standings[0]:
        return  # nothing to compare with; the caller finds the reason in `failed`
    base = tuple(times[left[0].contender.name])
    for standing in left:
        beside = times.get(standing.contender.beside or "")
        standing.served.append(
            Served(
                threads,
                *case,
                len(settings.workload),
                settings.workload.tokens,
                tuple(times[standing.contender.name]),
                base,
                None if beside is None else tuple(beside),
            )
        )


def _one_pass(
    standings: list[Standing],
    workers: Mapping[str, Worker],
    batches: int,
    number: int,
    after_batch: Callable[[], object],
    threads: int,
) -> dict[str, float]:
    """Seconds of every model for all batches, the order of the models moving on from batch to batch."""
    spent: dict[str, float] = {}
    for batch in interrupt.steps(range(batches)):
        turn = untuned(standings)
        first = (number + batch) % max(len(turn), 1)
        for standing in turn[first:] + turn[:first]:
            with or_left_out(standing):
                rest(threads)
                name = standing.contender.name
                spent[name] = spent.get(name, 0.0) + workers[name].run_batch(batch)
        after_batch()
    return {standing.contender.name: spent[standing.contender.name] for standing in untuned(standings)}
