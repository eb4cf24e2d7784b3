"""MREM-P as a user starts it: several processes, one result, and accidents in every one of them.

Each test starts real workers, which takes seconds: so one job shows as much as it can.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tiny_job import job_in as job
from tiny_job import save_model, workshop_in

from mrem_deploy.base import cli
from mrem_deploy.quant import artifact
from mrem_deploy.walk import publishing

pytestmark = [pytest.mark.jobs, pytest.mark.usefixtures("usual_signals")]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "helpers" / "faulty_job.py"
PATIENCE = 1800  # seconds; a job takes a few, on a crowded machine many minutes
MODULES = 3
STEPS = 12
REPORT, FINISH = -1, -2  # moments of rank 0, see faulty_job.py
OPTIONS: dict[str, Any] = {
    "method": "mrem-p",
    "modules": MODULES,
    "steps": STEPS,
    "checkpoint_steps": 3,
    "staleness": 3,
    "threads": 1,
    "worker_timeout": 300,
}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop_in(tmp_path_factory.mktemp("workshop")) as root:
        save_model(root / "model", num_hidden_layers=MODULES)
        yield root


def start(workshop: Path, out: str, faults: list[dict[str, Any]], *more: str, **options: Any) -> Any:
    """The job in a session of its own, by which its processes can be found again."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    places = {"ASLEEP": str(workshop / "asleep"), "PORTS": str(workshop / "ports.json")}
    environment = {"FAULTS": json.dumps(faults), "PYTHONPATH": path, **places}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *job(workshop, out, **OPTIONS | options).argv(*more)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: Any) -> tuple[int, str]:
    """Exit code and what was said; afterwards none of its processes is left."""
    try:
        _, said = process.communicate(timeout=PATIENCE)
    finally:
        left = wait_for_the_end(process.pid)
    assert left == []
    return process.returncode, said


def wait_for_the_end(session: int) -> list[psutil.Process]:
    """What still runs of a session; it is ended then, so that a failing test leaves nothing behind."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        left = [p for p in psutil.process_iter() if session_of(p) == session]
        if not left:
            return []
        time.sleep(0.1)
    for process in left:
        process.kill()
    return left


def session_of(process: psutil.Process) -> int | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    except (psutil.Error, OSError):
        return None


def fault(kind: str, rank: int, step: int, attempt: int = 0) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "step": step, "attempt": attempt}


def traces(workshop: Path, out: str) -> list[str]:
    """What a job has left beside its result, the result included."""
    return sorted(path.name for path in workshop.iterdir() if out in path.name)


def test_three_workers_give_one_result(workshop: Path) -> None:
    code, said = finish(start(workshop, "whole", [], workers=MODULES))
    assert code == 0, said
    assert traces(workshop, "whole") == ["whole"]
    result = json.loads((workshop / "whole" / "metrics.json").read_text())
    workers = result["cost"]["workers"]
    assert [worker["modules"] for worker in workers] == [[1], [2], [3]]
    assert all(worker["peak_memory_mb"] > 0 for worker in workers)
    assert result["cost"]["peak_memory_mb"] == max(worker["peak_memory_mb"] for worker in workers)
    assert [worker["queue_mb"] > 0 for worker in workers] == [False, True, True]
    ages = result["parallel"]["ages"]
    assert list(ages) == ["module 2/3", "module 3/3"]
    for counted in ages.values():
        assert sum(times for _, times in counted) >= STEPS  # every step, and passes served to successors
    for page in ("report.html", "report.md"):
        text = (workshop / "whole" / page).read_text(encoding="utf-8")
        assert "age" in text
        assert "module 3/3" in text


@pytest.fixture(scope="module")
def alone(workshop: Path) -> dict[str, torch.Tensor]:
    """What one process gives in lock-step."""
    threads = torch.get_num_threads()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(publishing, "write_report", lambda *args: None)
            assert job(workshop, "alone", **OPTIONS | {"workers": 1}).run("--deterministic") == 0
    finally:
        torch.set_num_threads(threads)
    return load_file(workshop / "alone" / artifact.TENSORS)


def assert_same_tensors(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    came = load_file(folder / artifact.TENSORS)
    assert came.keys() == expected.keys()
    assert [name for name in came if not torch.equal(came[name], expected[name])] == []


def test_every_worker_is_killed_once_and_the_result_is_the_same(
    workshop: Path, alone: dict[str, torch.Tensor]
) -> None:
    """In lock-step two workers give the bits of one, wherever they were killed on the way.

    The first kill is followed by a restart, the second, for want of more restarts, by `--resume`.
    """
    # Each attempt goes on from the last set of checkpoints, of which there is one every 3 steps.
    draw = random.Random(0)
    faults = [fault("kill", rank, draw.randint(4 * rank + 1, 4 * rank + 4), attempt=rank) for rank in (0, 1)]
    code, said = finish(start(workshop, "killed", faults, "--deterministic", workers=2, max_restarts=1))
    assert code == cli.EXIT_FAILED
    assert said.count("a worker died; all workers start again") == 1
    assert "error: worker 1 failed: SIGKILL ended it from outside" in said, said
    assert traces(workshop, "killed") == [".killed.work"]

    code, said = finish(start(workshop, "killed", [], "--deterministic", "--resume", workers=2))
    assert code == 0, said
    assert "continuing the interrupted run" in said
    assert_same_tensors(workshop / "killed", alone)
    losses = [
        json.loads((workshop / name / "metrics.json").read_text())["heldout"] for name in ("killed", "alone")
    ]
    assert losses[0] == losses[1]
    assert all(module["before"] > 0 for module in losses[0].values())
    assert traces(workshop, "killed") == ["killed"]


def test_signals_to_the_launcher_at_three_moments(workshop: Path, alone: dict[str, torch.Tensor]) -> None:
    """In a step, before the result is put in its place, and after: it is never written later."""
    options: dict[str, Any] = {"workers": 2, "max_restarts": 3}
    in_a_step = [fault("look", 1, 1), fault("SIGTERM", 1, 7)]
    code, said = finish(start(workshop, "signalled", in_a_step, "--deterministic", **options))
    assert code == 143, said
    assert said.count("interrupted") == 1
    assert "Traceback" not in said
    assert traces(workshop, "signalled") == [".signalled.work"]
    if sys.platform == "linux":
        ports = json.loads((workshop / "ports.json").read_text())
        assert ports["launcher"] == []  # no port at all
        assert set(ports["worker"]) == {"127.0.0.1"}  # gloo's, for tensors between neighbours

    publishing_it = [fault("SIGINT", 0, REPORT)]
    code, said = finish(start(workshop, "signalled", publishing_it, "--deterministic", "--resume", **options))
    assert code == cli.EXIT_INTERRUPTED, said
    assert traces(workshop, "signalled") == [".signalled.work"]

    too_late = [fault("SIGINT", 0, FINISH)]
    code, said = finish(start(workshop, "signalled", too_late, "--deterministic", "--resume", **options))
    assert code == 0, said
    assert "interrupted;" not in said
    assert traces(workshop, "signalled") == ["signalled"]
    assert_same_tensors(workshop / "signalled", alone)


def test_a_worker_that_raises_ends_the_job_with_its_own_error(workshop: Path) -> None:
    """Without restarts; the neighbours' broken connections are not what the user must read."""
    code, said = finish(start(workshop, "raised", [fault("raise", 1, 2)], workers=2, max_restarts=0))
    assert code == cli.EXIT_FAILED
    error = said[said.index("error:") :]
    assert error.startswith("error: worker 1 failed: Traceback")
    report, hint = error.strip().split("\n  → ")
    assert report.rstrip().endswith("ZeroDivisionError: the accident of worker 1")
    assert hint.startswith("to continue: mrem quantize --config ")
    assert "ConnectionLost" not in said
    assert not (workshop / "raised").exists()


def test_a_users_mistake_is_told_once_and_not_tried_again(workshop: Path) -> None:
    """Such as a diverging loss: all workers end, although restarts are allowed."""
    code, said = finish(start(workshop, "refused", [fault("refuse", 0, 2)], workers=2))
    assert code == cli.EXIT_USER_ERROR
    assert said.count("error: the mistake of a user\n  → mend it") == 1
    assert "Traceback" not in said
    assert "start again" not in said
    assert not (workshop / "refused").exists()


def test_ctrl_c_then_half_a_checkpoint(workshop: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (workshop / "asleep").unlink(missing_ok=True)
    process = start(workshop, "stopped", [fault("sleep", 1, 7)], workers=2)
    deadline = time.monotonic() + PATIENCE
    while not (workshop / "asleep").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert job(workshop, "stopped", **OPTIONS).run() == cli.EXIT_USER_ERROR  # a second run meanwhile
    assert f"another run is writing to --out {workshop / 'stopped'}: process {process.pid} on" in (
        capfd.readouterr().err
    )
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    code, said = finish(process)
    assert code == cli.EXIT_INTERRUPTED
    recipe = workshop / ".stopped.work" / "recipe.yaml"
    assert f"to continue: mrem quantize --config {recipe}\n" in said
    assert "Traceback" not in said
    assert "leaked semaphore" not in said
    assert traces(workshop, "stopped") == [".stopped.work"]

    checkpoint = workshop / ".stopped.work" / "module-2.safetensors"  # worker 1 owns it
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[: len(whole) // 2])
    code, said = finish(start(workshop, "stopped", [], "--resume", workers=2))
    assert code == cli.EXIT_USER_ERROR
    assert said.count("module-2.safetensors cannot be used") == 1
    assert "Traceback" not in said
    assert traces(workshop, "stopped") == [".stopped.work"]
