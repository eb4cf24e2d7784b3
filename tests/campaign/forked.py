"""A command in a forked child: a process of its own that has everything imported already.

The child has its own session, output files, temporary folder, cache and limits. All processes that it starts
are found again after its end, because this process adopts orphans.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing.util
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
WALL_SECONDS = 400.0  # for a machine that is busy with other work
CPU_SECONDS = 90  # what no case of ours needs
DATA_BYTES = 8 * 2**30
GRACE_SECONDS = 25.0  # for processes that a killed one leaves, to notice it and end
POLL_SECONDS = 0.004


@dataclass(frozen=True)
class Place:
    """The folders of one case."""

    root: Path

    @property
    def work(self) -> Path:
        """Where the command runs and writes: nothing but results may be there at the end."""
        return self.root / "work"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    def make(self) -> Place:
        for folder in (self.work, self.tmp, self.cache):
            folder.mkdir(parents=True, exist_ok=True)
        return self


@dataclass(frozen=True)
class Ended:
    """How a command ended. code: negative for a signal, None if it had to be killed at its time limit."""

    code: int | None
    out: str
    err: str
    seconds: float
    left: tuple[str, ...]  # processes that were still there after the grace

    @property
    def text(self) -> str:
        return f"{self.out}\n{self.err}"


class Running:
    """A command under way, for those who disturb it."""

    def __init__(self, pid: int, place: Place) -> None:
        self.pid = pid
        self.place = place
        self.started = time.monotonic()
        self.disturbed_at: float | None = None
        self._ended: int | None = None

    def err(self) -> str:
        return _read(self.place.root / "stderr")

    def ended(self) -> bool:
        """Whether the first process is gone."""
        if self._ended is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._ended = os.waitstatus_to_exitcode(status)
        return self._ended is not None

    @property
    def code(self) -> int | None:
        return self._ended

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait until the condition holds; False if the command ended before."""
        while not self.ended():
            if condition():
                return True
            time.sleep(POLL_SECONDS)
        return False

    def send(self, number: int, pid: int | None = None, group: bool = False) -> None:
        self.disturbed_at = self.disturbed_at or time.monotonic()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group:
                os.killpg(self.pid, number)
            else:
                os.kill(pid or self.pid, number)

    def listens_to(self, number: int) -> bool:
        """Whether the process has a handler for a signal."""
        for line in _read(Path(f"/proc/{self.pid}/status")).splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
        return False

    def family(self) -> list[int]:
        """The process and all its descendants."""
        return [self.pid, *descendants(self.pid)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def adopt_orphans() -> None:
    """Let descendants whose parent dies become children of this process."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Let this process be killed when the one that forked it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def descendants(of: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError, ValueError):
                stat = Path(f"/proc/{entry}/stat").read_text()
                state, parent = stat.rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry)] = int(parent)
    found, ahead = [], [of]
    while ahead:
        parent = ahead.pop()
        below = [pid for pid, its in parents.items() if its == parent]
        found += below
        ahead += below
    return found


def run(
    call: Callable[[], int],
    place: Place,
    disturb: Callable[[Running], None] | None = None,
    wall: float = WALL_SECONDS,
    before: Callable[[], None] | None = None,
    argv: list[str] | None = None,
) -> Ended:
    """Run `call` in a child and wait for the end of it and of all that it started.

    before: called in the child, right before the command. argv: what sys.argv shall be there.
    """
    adopt_orphans()
    for name in ("stdout", "stderr"):
        (place.root / name).write_bytes(b"")
    sys.stdout.flush()
    sys.stderr.flush()
    usual = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # `listens_to` must not see a handler of ours
    pid = os.fork()
    if pid == 0:
        _be_the_command(call, place, before, argv)
    signal.signal(signal.SIGTERM, usual)
    running = Running(pid, place)
    if disturb is not None:
        disturb(running)
    deadline = running.started + wall
    running.wait_for(lambda: time.monotonic() > deadline)
    seconds = time.monotonic() - (running.disturbed_at or running.started)
    hung = not running.ended()
    if hung:
        running.send(signal.SIGKILL, group=True)
        while not running.ended():
            time.sleep(POLL_SECONDS)
    left = _await_rest()
    code = None if hung else running.code
    return Ended(code, _read(place.root / "stdout"), _read(place.root / "stderr"), seconds, left)


def _await_rest() -> tuple[str, ...]:
    """Wait for what the command started; end what does not end by itself, and name it."""
    deadline = time.monotonic() + GRACE_SECONDS * crowd()
    while (alive := descendants(os.getpid())) and time.monotonic() < deadline:
        _reap()
        time.sleep(0.02)
    names = []
    for pid in alive:
        names.append(_command_of(pid))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while descendants(os.getpid()):
        _reap()
        time.sleep(0.02)
    _reap()
    return tuple(names)


def crowd() -> float:
    """How many processes want each processor, at least 1: everything takes that many times longer."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _command_of(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()[:200] or f"process {pid}"


def _be_the_command(
    call: Callable[[], int], place: Place, before: Callable[[], None] | None, argv: list[str] | None
) -> None:
    code = 1
    try:
        end_with_parent()
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for stream, name in ((1, "stdout"), (2, "stderr")):
            file = os.open(place.root / name, os.O_WRONLY | os.O_APPEND)
            os.dup2(file, stream)
            os.close(file)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
        os.environ.update(TMPDIR=str(place.tmp), MREM_CACHE=str(place.cache))
        tempfile.tempdir = None
        os.chdir(place.work)
        sys.argv = argv or sys.argv
        if before is not None:
            before()
        code = call()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 (as the interpreter would)
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            multiprocessing.util._exit_function()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
