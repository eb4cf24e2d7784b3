"""Ctrl-C and other requests to end: one handler that sets a flag, and a check in every step of long loops.

An exception from a signal handler can appear anywhere, even in a destructor, which swallows it: the signal is
lost then. So the handler only notes the signal, and `check` raises `Interrupted` at a place that is meant for
it. Work without steps (an import, a download) gets the exception from the handler after GRACE_SECONDS. If a
destructor swallows that one, it comes again. A second signal does not wait for the end of the step, and one
that arrives while the program is already leaving ends the process at once.

Note: Python runs signal handlers in the main thread only, so all of this is about the main thread.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # Windows has no SIGHUP
GRACE_SECONDS = 1.0  # for the next `check`, before the handler raises the exception itself
AGAIN_SECONDS = 0.5  # until it is raised again, should it be lost
SAME_SECONDS = 0.3  # a shell and a terminal may both send the signal: the second one so soon is the same one
_KEPT = "_mrem_kept"  # attribute of the exception


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end; not an error."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"interrupted by {self.name}")

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    @property
    def exit_code(self) -> int:
        return exit_code(self.number)


def exit_code(number: int) -> int:
    """What a shell reports of a process that a signal ended: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + number


class _Watch:
    """The signals during one `watched` block."""

    def __init__(self, patient: bool) -> None:
        self.number = 0  # of the first signal; 0: none came
        self.noticed_at = 0.0
        self.leaving = False  # the exception has been raised
        self.holds = 0  # blocks that must not be broken off
        self.farewells: list[Callable[[], None]] = []
        self.over = False
        self._patient = patient
        self._reminding = False
        self._lock = threading.Lock()

    def handle(self, number: int, frame: FrameType | None) -> None:
        reminded, self._reminding = self._reminding, False
        if self.over:
            self.number = self.number or number
            return
        if not self.number:
            self.number, self.noticed_at = number, time.monotonic()
            # Not threading.Thread: its lock may be held by the very code that this handler interrupts.
            _thread.start_new_thread(self._remind, (threading.get_ident(),))
            return
        repeated = time.monotonic() - self.noticed_at < SAME_SECONDS
        if self.holds or repeated or (self._patient and not reminded):
            return
        if not self.leaving:
            self.stop()
        elif not reminded:
            self.leave_at_once()

    def stop(self) -> None:
        self.leaving = True
        raise Interrupted(self.number)

    def leave_at_once(self) -> None:
        for call in reversed(self.farewells):
            call()
        os._exit(exit_code(self.number))

    def _remind(self, main: int) -> None:
        """In another thread: make the main thread call the handler again for as long as nothing happens."""
        time.sleep(GRACE_SECONDS)
        while True:
            with self._lock:
                if self.over:
                    return
                if not self.leaving and not self.holds:
                    self._reminding = True
                    _signal_thread(main, self.number)
            time.sleep(AGAIN_SECONDS)

    def lost(self, unraisable: Any) -> bool:
        """Whether a destructor or the like has swallowed the exception; then it is raised again."""
        if not isinstance(unraisable.exc_value, Interrupted):
            return False
        self.leaving = False
        return True

    def close(self) -> None:
        self.over = True  # from here on the handler raises nothing
        with self._lock:  # no reminder is on its way
            pass


def _signal_thread(thread: int, number: int) -> None:
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(thread, number)  # also ends a system call that waits
    else:
        _thread.interrupt_main(signal.Signals(number))


_watch: _Watch | None = None


def pending() -> bool:
    """Whether a signal has asked to end."""
    return _watch is not None and _watch.number != 0


def check() -> None:
    """Raise `Interrupted` if a signal came. For every step of a loop that may take longer than a second."""
    if _watch is not None and _watch.number and not _watch.holds:
        _watch.stop()


def steps(items: Iterable[T]) -> Iterator[T]:
    """Iterate with a check before every item."""
    for item in items:
        check()
        yield item


@contextmanager
def held() -> Iterator[None]:
    """What is in the block happens as a whole: the first `check` after it notices a signal that came."""
    watch = _watch
    if watch is None:
        yield
        return
    watch.holds += 1
    try:
        yield
    finally:
        watch.holds -= 1


@contextmanager
def keeping(describe: Callable[[], str]) -> Iterator[None]:
    """If the block is interrupted, `describe` says what is kept and how to continue; the innermost counts."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if not kept_after(stop):
            setattr(stop, _KEPT, describe())
        raise


def kept_after(stop: KeyboardInterrupt) -> str:
    """What is kept of an interrupted run, and how to continue it; empty if nobody has said so."""
    return str(getattr(stop, _KEPT, ""))


@contextmanager
def farewell(call: Callable[[], None]) -> Iterator[None]:
    """Let `call` run before the process ends at once, on a second signal; it must be quick and not fail."""
    watch = _watch
    if watch is None:
        yield
        return
    watch.farewells.append(call)
    try:
        yield
    finally:
        watch.farewells.remove(call)


@contextmanager
def watched(*, hand_on: bool = True, patient: bool = False) -> Iterator[None]:
    """Obey signals by the flag inside of the block; afterwards the caller's handlers are back.

    Nothing changes in a thread that is not the main one, inside of another such block, and for signals that
    the caller ignores (as nohup does). `hand_on`: a signal that came too late to raise anything, and SIGTERM
    and SIGHUP always, then reach the caller's own handler, which may end the process. `patient`: more signals
    mean the same as the first.
    """
    global _watch
    if _watch is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    replaced = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    watch = _watch = _Watch(patient)
    report, completed = sys.unraisablehook, False
    sys.unraisablehook = lambda found: None if watch.lost(found) else report(found)
    try:
        for number in replaced:
            signal.signal(number, watch.handle)
        yield
        completed = True
    finally:
        watch.close()
        for number, old in replaced.items():
            signal.signal(number, old)
        sys.unraisablehook = report
        _watch = None
        if hand_on and watch.number and (completed or watch.number != signal.SIGINT):
            signal.raise_signal(watch.number)
