"""A call in a process of its own, whose memory is that of the call alone.

Where the system can, the process is a fork of a server that has imported the libraries and done nothing
else: as clean as a new interpreter, and there at once.
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
PRELOADED = ["mrem_deploy.pipeline"]
FAREWELL_SECONDS = 30  # for an interrupted call to leave by itself


def in_fresh_process(call: Callable[..., T], *arguments: Any) -> T:
    """What `call(*arguments)` returns; both are found by name in the new process.

    A `UserError` comes back as it is; any other failure was told with its traceback by the process itself.
    """
    forks = "forkserver" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, call, arguments))
    process.start()
    sender.close()
    try:
        refusal, value = receiver.recv()
    except EOFError:
        process.join()
        raise WorkerFailed(_explain(process.exitcode)) from None
    except BaseException:  # Ctrl-C above all: the process must not go on alone
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
    except KeyboardInterrupt:  # told once, by the process that waits for this one
        return
    sender.send(answer)


def _explain(code: int | None) -> str:
    if code is not None and code < 0:
        return f"{signal.Signals(-code).name} ended the run from outside; if that was not you, memory ran out"
    return "the run failed; its own message stands above"


def _end(process: Any) -> None:
    """Ctrl-C in a terminal reaches both; a signal to this process alone is passed on."""
    process.join(0.2)
    if process.is_alive():
        os.kill(process.pid, signal.SIGINT)
        process.join(FAREWELL_SECONDS)
    if process.is_alive():
        process.terminate()
        process.join()
