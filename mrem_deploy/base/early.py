"""Signals while a command starts and while its process ends: before and after `interrupt` watches.

Imported by the package itself, as the first of its modules, if Python was started for one of its commands. In
a program that only uses the package nothing is touched. When a command starts there is nothing to keep yet,
so the process ends at once; when the command is over, its exit code is known and stays.

Note: before Python imports this package no code of ours can obey. SIGTERM then ends the process as it ends
any program, and Ctrl-C may print Python's own traceback.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from contextlib import suppress
from itertools import pairwise
from types import FrameType

_USUAL = (signal.SIG_DFL, signal.default_int_handler)
_code: int | None = None  # of the command that is over


def is_command(package: str) -> bool:
    """Whether this process was started for a command of the package: by `-m`, or by its script."""
    started = (getattr(sys, "argv", None) or [""])[0]
    if started == "-m":  # Python is looking for the module; later the path of its file is there
        words = sys.orig_argv
        after = [word for before, word in pairwise(words) if before == "-m"]
        joined = [word[2:] for word in words if word.startswith(f"-m{package}")]
        return any(f"{word}.".startswith(f"{package}.") for word in [*after[:1], *joined[:1]])
    name = os.path.basename(started).lower()
    return name.removesuffix(".exe").removesuffix("-script.py") == "mrem"


def listen() -> None:
    """Obey signals from now on, except those that the caller has let us ignore (as nohup does)."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) in _USUAL:
            signal.signal(number, _leave)
    atexit.register(_deaf)  # the first to be registered, so the last to be called


def _deaf() -> None:
    """While Python takes itself apart it puts the system's own handlers back, which would end the process
    with another exit code. What is ignored stays ignored."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is _leave:
            signal.signal(number, signal.SIG_IGN)


def finished(code: int) -> int:
    """The command is over: a signal that comes now ends the process with the command's own exit code."""
    global _code
    _code = code
    return code


def _leave(number: int, frame: FrameType | None) -> None:
    if _code is None:
        if os.environ.get("RANK", "0") == "0":  # only the first of several workers prints
            os.write(2, b"\ninterrupted\n")
        os._exit(128 + number)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, full or being written already: nothing else can be done
            stream.flush()
    os._exit(_code)
