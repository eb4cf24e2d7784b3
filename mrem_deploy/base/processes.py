"""A call in a separate process, so that its peak memory is that of the call alone.

Where the system can, the process is forked from a server that has only imported the libraries: as clean as a
new interpreter, but quicker to start.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from mrem_deploy.base.errors import UserError, WorkerFailed

T = TypeVar("T")
INTERRUPT_SECONDS = 30  # an interrupted call has this long to end by itself
_preloaded: list[str] = []


def preload(module: str) -> None:
    """Let the server import this module. Only calls before the first `in_fresh_process` have an effect."""
    if module not in _preloaded:
        _preloaded.append(module)


def in_fresh_process(call: Callable[..., T], *arguments: Any) -> T:
    """Returns what `call(*arguments)` returns. `call` must be importable by its name.

    A `UserError` is raised here again. For any other failure the process prints the traceback itself.
    """
    forks = "forkserver" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(_preloaded)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, call, arguments))
    process.start()
    sender.close()
    try:
        refusal, value = receiver.recv()
    except EOFError:
        process.join()
        raise WorkerFailed(_explain(process.exitcode)) from None
    except BaseException:  # mostly Ctrl-C: the process must not go on alone
        _end(process)
        raise
    process.join()
    if refusal is not None:
        raise UserError(*refusal)
    return value


def _answer(sender: Connection, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        answer: tuple[Any, Any] = (None, call(*arguments))
    except UserError as error:
        answer = ([error.problem, error.remedy], None)
    except KeyboardInterrupt:  # reported by the process that waits for this one
        return
    sender.send(answer)


def _explain(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"{name} ended the run from outside; if that was not you, the machine ran out of memory"
    return "the run failed; its message is above"


def _end(process: Any) -> None:
    """Ctrl-C in a terminal reaches both processes; a signal to this one alone is passed on."""
    process.join(0.2)
    if process.is_alive():
        os.kill(process.pid, signal.SIGINT)
        process.join(INTERRUPT_SECONDS)
    if process.is_alive():
        process.terminate()
        process.join()
