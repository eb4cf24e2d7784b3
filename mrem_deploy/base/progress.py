"""Progress bars with the remaining time, the same look for every stage."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from tqdm import tqdm

from mrem_deploy.base import interrupt

T = TypeVar("T")
# tqdm's own lock is a semaphore between processes. A killed process leaks it, and Python then warns about it
# at the end of the run. Our processes share no bars, so a lock between threads is enough.
tqdm.set_lock(threading.RLock())
_silent = False  # for the entire process: only one of several workers prints


def silence(yes: bool) -> None:
    """Print nothing from now on; for all workers but the one that reports."""
    global _silent
    _silent = yes


def bar(total: int | None, label: str, unit: str = "step", initial: int = 0) -> tqdm:
    """A bar that the caller advances; in a log file it prints a line now and then instead."""
    interactive = sys.stderr.isatty()
    return tqdm(
        total=total,
        desc=f"{label:<28}",
        unit=unit,
        initial=initial,
        dynamic_ncols=interactive,
        mininterval=0.2 if interactive else 15.0,
        ascii=not interactive,
        smoothing=0.1,
        file=sys.stderr,
        disable=_silent,
    )


def track(items: Iterable[T], label: str, total: int | None = None, unit: str = "batch") -> Iterator[T]:
    """Iterate with a bar, and look before every item whether a signal has come."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with bar(total, label, unit) as shown:
        for item in interrupt.steps(items):
            yield item
            shown.update()


def say(message: str) -> None:
    """Print one line, above any bar that is being drawn."""
    if not _silent:
        tqdm.write(message, file=sys.stderr)
