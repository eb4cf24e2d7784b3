"""Other processes of ours: how they start, obey signals and end; and a call in a separate process.

Ctrl-C in a terminal reaches all of its processes. Only the first one obeys it, and asks the others to end by
SIGTERM. They end by themselves if the process that started them is gone.

A call in a separate process has a peak memory of its own. Where the system can, that process is forked from a
server that has only imported the libraries: as clean as a new interpreter, but quicker to start.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from mrem_deploy.base import interrupt
from mrem_deploy.base.errors import UserError, WorkerFailed, WorkerKilled
from mrem_deploy.base.scratch import settle_temporary_folder

T = TypeVar("T")
POLL_SECONDS = 0.1
LEAVE_SECONDS = 10.0  # for a process to end by itself after SIGTERM, before it is killed
_preloaded: list[str] = []


@contextmanager
def unheard_ctrl_c() -> Iterator[None]:
    """Ctrl-C has no effect on processes that the block starts: they inherit that it is blocked."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)


def start(process: Any) -> None:
    """Start a process of multiprocessing in which Ctrl-C has no effect, not even before `obedient` runs."""
    resource_tracker.ensure_running()  # it would unblock the signal
    with unheard_ctrl_c():
        process.start()


@contextmanager
def obedient() -> Iterator[None]:
    """In a process that `start` has started: SIGTERM and the end of the parent interrupt the block."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settle_temporary_folder()
    with interrupt.watched(hand_on=False, patient=True):
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
        yield


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a process of multiprocessing calls this"
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LEAVE_SECONDS)
    os._exit(interrupt.exit_code(signal.SIGTERM))  # the main thread is somewhere in foreign code


def end(processes: Iterable[Any], patience: float | None = None) -> None:
    """Ask the processes to end, and kill those that do not. None is left afterwards."""
    running = [process for process in processes if process.is_alive()]
    try:
        for process in running:
            process.terminate()
        deadline = time.monotonic() + (LEAVE_SECONDS if patience is None else patience)
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        kill(running)
        for process in running:
            process.join()


def kill(processes: Iterable[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()


def failure(code: int | None, what: str) -> WorkerFailed:
    """Why a process is gone that has not said so itself."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return WorkerKilled(f"{name} ended {what} from outside; if that was not you, memory ran out")
    return WorkerFailed(f"{what} failed with exit code {code}; its message is above")


def preload(module: str) -> None:
    """Let the server import this module. Only calls before the first `in_fresh_process` have an effect."""
    if module not in _preloaded:
        _preloaded.append(module)


def in_fresh_process(call: Callable[..., T], *arguments: Any, forks: bool = True) -> T:
    """Returns what `call(*arguments)` returns. `call` must be importable by its name.

    A `UserError` is raised here again. For any other failure the process prints the traceback itself.
    Without `forks` it is a new interpreter, into which nothing was loaded before.
    """
    forks &= "forkserver" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(_preloaded)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, call, arguments))
    start(process)
    sender.close()
    try:
        with interrupt.farewell(lambda: kill([process])):
            while not receiver.poll(POLL_SECONDS):
                interrupt.check()
            refusal, value = receiver.recv()
            process.join(LEAVE_SECONDS)
    except EOFError:
        process.join()
        raise failure(process.exitcode, "the run") from None
    finally:
        end([process])  # it has ended by itself, unless this one was interrupted
    if refusal is not None:
        raise UserError(*refusal)
    return value


def _answer(sender: Connection, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    with obedient():
        try:
            answer: tuple[Any, Any] = (None, call(*arguments))
        except UserError as error:
            answer = ([error.problem, error.remedy], None)
        except KeyboardInterrupt:  # reported by the process that waits for this one
            return
        sender.send(answer)
