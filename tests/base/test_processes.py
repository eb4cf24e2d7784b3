"""Processes that we start: they obey their parent, and do not outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from mrem_deploy.base import processes
from mrem_deploy.base.errors import UserError, WorkerFailed, WorkerKilled

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "tests" / "helpers" / "family_job.py"
PATIENCE = 300  # seconds
pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals"),
    pytest.mark.usefixtures("usual_signals"),
]


def start(folder: Path, how: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """The process and the one that it waits for, which sleeps by now."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    parent = subprocess.Popen(
        [sys.executable, str(JOB), str(folder), how],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + PATIENCE
    while not (found := list(folder.glob("*.pid"))):
        assert parent.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return parent, psutil.Process(int(found[0].stem))


def assert_gone(process: psutil.Process) -> None:
    _, alive = psutil.wait_procs([process], timeout=PATIENCE)
    for one in alive:
        one.kill()
    assert alive == []


@pytest.mark.parametrize("how", ["forks", "spawns"])
@pytest.mark.parametrize(
    ("number", "to_all", "code"),
    [(signal.SIGTERM, False, 143), (signal.SIGINT, True, 130)],
)
def test_a_signal_ends_both(how: str, number: int, to_all: bool, code: int, tmp_path: Path) -> None:
    """SIGTERM reaches one process, Ctrl-C in a terminal reaches all."""
    parent, child = start(tmp_path, how)
    (os.killpg if to_all else os.kill)(parent.pid, number)
    _, said = parent.communicate(timeout=PATIENCE)
    assert parent.returncode == code
    assert said == "\ninterrupted\n"
    assert not child.is_running()
    assert (tmp_path / "left").exists()  # it was not killed, it left


@pytest.mark.parametrize("how", ["forks", "spawns"])
def test_the_child_of_a_killed_process_leaves(how: str, tmp_path: Path) -> None:
    parent, child = start(tmp_path, how)
    parent.kill()
    parent.communicate(timeout=PATIENCE)
    assert_gone(child)
    assert (tmp_path / "left").exists()


def refuse() -> None:
    raise UserError("no", "never")


def fail() -> None:
    raise ZeroDivisionError("an accident")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (refuse, UserError, "no\n  → never"),
        (fail, WorkerFailed, "the run failed with exit code 1"),
        (die, WorkerKilled, "SIGKILL ended the run from outside"),
    ],
)
def test_failures_come_back(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        processes.in_fresh_process(call, forks=False)


def test_a_process_that_does_not_leave_is_killed() -> None:
    code = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint(1, flush=True)\ntime.sleep(600)"
    deaf = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert deaf.stdout is not None
    assert deaf.stdout.readline() == "1\n"

    class Deaf:
        """As multiprocessing has them."""

        terminate, kill = deaf.terminate, deaf.kill
        is_alive = staticmethod(lambda: deaf.poll() is None)

        @staticmethod
        def join(timeout: float | None = None) -> None:
            try:
                deaf.wait(timeout)
            except subprocess.TimeoutExpired:
                assert timeout is not None

    processes.end([Deaf()], patience=0.1)
    assert deaf.returncode == -signal.SIGKILL
    deaf.stdout.close()
