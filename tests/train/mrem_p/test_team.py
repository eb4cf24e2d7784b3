"""The workers of one machine: reports, restarts, signals, and that none outlives its launcher."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import team_jobs

from mrem_deploy.base import processes
from mrem_deploy.base.errors import UserError, WorkerFailed
from mrem_deploy.train.mrem_p import team
from mrem_deploy.train.mrem_p.meeting import FolderStore
from mrem_deploy.train.mrem_p.team import launch

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 600  # seconds
pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals"),
    pytest.mark.usefixtures("usual_signals"),
]


def test_all_start_again_when_one_dies(tmp_path: Path) -> None:
    assert launch(team_jobs.rank_and_attempt, (str(tmp_path),), workers=2, max_restarts=1) == [0, 1]
    assert {"0-1", "1-1"} <= {path.name for path in tmp_path.iterdir()}
    with pytest.raises(WorkerFailed, match="worker 1 failed: SIGKILL ended it from outside"):
        launch(team_jobs.rank_and_attempt, (str(tmp_path),), workers=2, max_restarts=0)


def test_a_refusal_does_not_wait_for_workers_that_never_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LEAVE_SECONDS", 0.5)
    with pytest.raises(UserError, match="the mistake"):
        launch(team_jobs.refuse_in_one, (), workers=2, max_restarts=3)


def test_a_worker_whose_launcher_is_dead_ends_without_a_traceback() -> None:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=team._serve, args=(sender, {}, os.getcwd, ()))
    worker.start()
    sender.close()
    receiver.close()  # as the end of the launcher closes it
    worker.join(PATIENCE)
    assert worker.exitcode == 0


# -- signals -------------------------------------------------------------------------------------------------


@pytest.fixture
def sleepers(tmp_path: Path) -> Iterator[Any]:
    """Starts a launcher with two workers that sleep by then; ends what is left of them."""
    started: list[subprocess.Popen[str]] = []
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    def start(kind: str = "hears") -> tuple[subprocess.Popen[str], list[psutil.Process]]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        launcher = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "helpers" / "sleepy_job.py"), str(tmp_path), kind],
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary)},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(launcher)
        deadline = time.monotonic() + PATIENCE
        while len(found := sorted(tmp_path.glob("*.pid"))) < 2:
            assert launcher.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return launcher, [psutil.Process(int(path.stem.partition("-")[2])) for path in found]

    yield start
    for launcher in started:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.communicate()


def assert_gone(workers: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE)
    for process in alive:
        process.kill()
    assert alive == []


@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_a_signal_to_the_launcher_ends_all(sleepers: Any, tmp_path: Path, number: int, to_all: bool) -> None:
    launcher, workers = sleepers()
    (os.killpg if to_all else os.kill)(launcher.pid, number)
    _, said = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 128 + number
    assert said == "\ninterrupted\n"
    assert not any(worker.is_running() for worker in workers)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_worker_that_is_hung_up_ends_the_rest(sleepers: Any) -> None:
    """Someone has asked a worker to end: nothing starts again."""
    launcher, workers = sleepers()
    workers[1].send_signal(signal.SIGHUP)
    _, said = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 128 + signal.SIGHUP
    assert said == "\ninterrupted\n"
    assert not any(worker.is_running() for worker in workers)


def test_a_second_signal_kills_workers_that_do_not_hear(sleepers: Any, tmp_path: Path) -> None:
    launcher, workers = sleepers("deaf")
    launcher.send_signal(signal.SIGTERM)
    time.sleep(1.0)  # two signals within a moment are one
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 143
    assert "Traceback" not in said
    assert_gone(workers)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_workers_do_not_outlive_a_killed_launcher(sleepers: Any) -> None:
    """Not even those that signals do not reach."""
    launcher, workers = sleepers("deaf")
    launcher.kill()
    launcher.communicate(timeout=PATIENCE)
    assert_gone(workers)


# -- the meeting place ---------------------------------------------------------------------------------------


def test_the_store_gives_back_what_was_set(tmp_path: Path) -> None:
    one, other = FolderStore(tmp_path), FolderStore(tmp_path)
    assert not one.check(["the start/1/0"])
    one.set("the start/1/0", '{"λ": 1}')
    one.set("the start/1/0", '{"λ": 2}')
    assert other.check(["the start/1/0"])
    assert not other.check(["the start/1/0", "the start/1/1"])
    assert other.get("the start/1/0").decode() == '{"λ": 2}'
    other.set("../outside", "")
    assert {path.parent for path in tmp_path.rglob("*")} == {tmp_path}
    assert not (tmp_path.parent / "outside").exists()
