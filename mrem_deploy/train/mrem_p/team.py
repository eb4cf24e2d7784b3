"""The worker processes of one machine: started together, watched, and ended together.

If a worker dies, all workers start again and continue from their checkpoints. A UserError is not retried: it
ends the run at once, and so does a signal.

A worker reports how it ended, as one JSON message through a pipe that only it and its launcher have. One that
dies without a report (killed, out of memory) closes the pipe by that.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from mrem_deploy.base import cli, interrupt, processes
from mrem_deploy.base.errors import UserError, WorkerFailed
from mrem_deploy.base.interrupt import Interrupted
from mrem_deploy.base.scratch import scratch_folder
from mrem_deploy.train.mrem_p.meeting import MEETING_PLACE


@dataclass(frozen=True)
class Done:
    """The work was finished; `value` is what it returned, plain data."""

    value: Any


@dataclass(frozen=True)
class Refusal:
    """A UserError: a restart would not fix it."""

    problem: str
    remedy: str


@dataclass(frozen=True)
class Stopped:
    """A signal asked the worker to end."""

    number: int


@dataclass(frozen=True)
class Failed:
    """Anything else."""

    message: str


Report = Done | Refusal | Stopped | Failed
_KINDS: dict[str, type[Report]] = {kind.__name__: kind for kind in (Done, Refusal, Stopped, Failed)}


def launch(work: Callable[..., Any], arguments: tuple[Any, ...], workers: int, max_restarts: int) -> Any:
    """Run `work(*arguments)` in `workers` new processes; returns what rank 0 returns, which is plain data.

    `work` must be a function at the top level of a module: new processes import it by its name. If a worker
    dies, all start again, at most `max_restarts` times.
    """
    with (
        interrupt.watched(),
        scratch_folder("workers") as folder,
        interrupt.farewell(lambda: shutil.rmtree(folder, ignore_errors=True)),
        _environment(_child_environment()),
    ):
        for attempt in range(max_restarts + 1):
            place = folder / f"attempt {attempt}"  # what dead workers left must not be found
            place.mkdir()
            with team(work, arguments, _places(workers, attempt, place)) as members:
                rank, report = outcome(members)
            if not isinstance(report, Failed):
                break
    if isinstance(report, Failed):
        raise WorkerFailed(f"worker {rank} failed: {report.message}")
    if isinstance(report, Refusal):
        raise UserError(report.problem, report.remedy)
    if isinstance(report, Stopped):
        raise Interrupted(report.number)
    return report.value


def _places(workers: int, attempt: int, meeting: Path) -> list[dict[str, str]]:
    """What the environment of every worker says: as under torchrun, but with a folder instead of a port."""
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(workers),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(workers),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            MEETING_PLACE: str(meeting),
        }
        for rank in range(workers)
    ]


def _child_environment() -> dict[str, str]:
    """What workers need before they import torch.

    All of them are on this machine, so whatever listens listens on the loopback interface alone, also if the
    user has named another one for other programs. That needs no name resolution either, which containers
    often lack. And threads that wait must not spin: the workers share the cores. The commands set that for
    themselves (`cli.set_environment`), but a caller of the Python API may not have. A value of the user's
    stays there.
    """
    changes = {}
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback is not None:
        changes = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    if not cli.PASSIVE_WAITING.keys() & os.environ.keys():
        changes |= cli.PASSIVE_WAITING
    return changes


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Variables that new processes inherit."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass(frozen=True)
class Member:
    """One worker process, as its launcher sees it."""

    rank: int
    process: Any
    receiver: Connection

    def report(self) -> Report:
        """How it ended; waits until it has."""
        try:
            kind, values = json.loads(self.receiver.recv_bytes())
        except (EOFError, OSError):  # OSError: killed while it sent the report
            self.process.join()
            return Failed(str(processes.failure(self.process.exitcode, "it")))
        return _KINDS[kind](**values)


@contextmanager
def team(
    work: Callable[..., Any], arguments: tuple[Any, ...], places: Sequence[Mapping[str, str]]
) -> Iterator[list[Member]]:
    """New processes that call `work(*arguments)`, one for each of `places`: what a worker's environment says
    of its place among the others. None of them is left after the block."""
    members: list[Member] = []
    context = multiprocessing.get_context("spawn")
    with interrupt.farewell(lambda: processes.kill(member.process for member in members)):
        try:
            for rank, place in enumerate(places):
                interrupt.check()
                with interrupt.held():
                    receiver, sender = context.Pipe(duplex=False)
                    process = context.Process(target=_serve, args=(sender, dict(place), work, arguments))
                    processes.start(process)
                    sender.close()
                    members.append(Member(rank, process, receiver))
            yield members
        finally:
            _end(members)


def _end(members: Sequence[Member]) -> None:
    processes.end(member.process for member in members)


def outcome(members: Sequence[Member]) -> tuple[int, Report]:
    """Wait until the run is over: the report that decides, and whose it is.

    The first worker that fails or is stopped decides, and the others need not go on. So does a refusal; the
    others notice it, and have a while to leave. Otherwise it is rank 0, which finishes the run.
    """
    waiting = list(members)
    decided: tuple[int, Report] | None = None
    deadline = float("inf")
    try:
        while waiting and time.monotonic() < deadline:
            interrupt.check()
            ready = wait([member.receiver for member in waiting], processes.POLL_SECONDS)
            for member in [member for member in waiting if member.receiver in ready]:
                waiting.remove(member)
                report = member.report()
                if decided is None and (member.rank == 0 or not isinstance(report, Done)):
                    decided = member.rank, report
                    if isinstance(report, Failed | Stopped):
                        return decided
                    deadline = time.monotonic() + processes.LEAVE_SECONDS
    except Interrupted:
        _end(members)
        leader = members[0]
        if decided is None and leader.receiver.poll():
            decided = 0, leader.report()
        if decided is None or not isinstance(decided[1], Done):
            raise  # the result was not written, and nobody is left who could write it
    assert decided is not None, "rank 0 was waited for"
    for member in members:  # those that have reported are about to end by themselves
        member.process.join(max(0.0, deadline - time.monotonic()))
    return decided


def _serve(
    sender: Connection, place: dict[str, str], work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """In the new process."""
    os.environ.update(place)
    with processes.obedient():
        report = _report_on(work, arguments)
        with interrupt.held(), suppress(BrokenPipeError):  # the launcher is dead: nobody wants the report
            sender.send_bytes(json.dumps([type(report).__name__, asdict(report)]).encode())
            sender.close()
    if isinstance(report, Failed | Stopped):
        # A thread may still be inside of a call to torch, which would abort the process at its normal end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _report_on(work: Callable[..., Any], arguments: tuple[Any, ...]) -> Report:
    try:
        return Done(work(*arguments))
    except UserError as error:
        return Refusal(error.problem, error.remedy)
    except Interrupted as stop:
        return Stopped(stop.number)
    except BaseException:  # noqa: BLE001 (the launcher reports it)
        # After a signal an error follows from the signal: a neighbour has left.
        return Stopped(signal.SIGTERM) if interrupt.pending() else Failed(traceback.format_exc())
