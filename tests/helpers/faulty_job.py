"""`mrem quantize` whose workers meet with accidents, for tests: run as a script.

The variable FAULTS lists them as JSON, each with the rank, the attempt (0: the first start), the step
and the kind. A step of -1 is the report, which rank 0 writes before the result is put in its place, and -2
what it does after that. Workers are started by `spawn`, which imports the main script again: so what this
file does when imported happens in every worker.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path
from typing import Any

from open_ports import listening

from mrem_deploy import quantize
from mrem_deploy.base import cli, interrupt
from mrem_deploy.base.errors import UserError
from mrem_deploy.train.module import ModuleTrainer, StepResult
from mrem_deploy.train.mrem_p import crew
from mrem_deploy.walk import publishing
from mrem_deploy.walk.state import Run

FAULTS = {(f["rank"], f["attempt"], f["step"]): f["kind"] for f in json.loads(os.environ.get("FAULTS", "[]"))}
REPORT, FINISH = -1, -2
_step, _join = ModuleTrainer.step, crew.join
_report, _finish = publishing.write_report, Run.finish


def meet_fault(step: int) -> None:
    place = int(os.environ.get("RANK", "0")), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    kind = FAULTS.get((*place, step), "")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "raise":
        raise ZeroDivisionError("the accident of worker 1")
    if kind == "refuse":
        raise UserError("the mistake of a user", "mend it")
    if kind == "sleep":
        Path(os.environ["ASLEEP"]).touch()  # for a test that waits until training is under way
        time.sleep(300)
    if kind == "look":
        _look(Path(os.environ["PORTS"]))
    if kind.startswith("SIG"):
        _signal_the_launcher(signal.Signals[kind])


def _look(path: Path) -> None:
    """Write down where the launcher and this worker listen."""
    found = {"launcher": listening(os.getppid()), "worker": listening(os.getpid())}
    path.write_text(json.dumps(found), encoding="utf-8")


def _signal_the_launcher(number: signal.Signals) -> None:
    """Send it, and go on once the launcher has asked this worker to end."""
    os.kill(os.getppid(), number)
    for _ in range(6000):
        if interrupt.pending():
            return
        time.sleep(0.01)
    raise AssertionError("the launcher did not pass the signal on")


def faulty_step(trainer: ModuleTrainer, step: int, *args: Any, **options: Any) -> StepResult:
    meet_fault(step)
    return _step(trainer, step, *args, **options)


def faulty_report(*args: Any) -> None:
    meet_fault(REPORT)
    _report(*args)


def faulty_finish(run: Run) -> None:
    meet_fault(FINISH)
    _finish(run)


def join_without_pickle(timeout: float) -> crew.Crew:
    """From the moment that a worker meets others, it unpickles nothing."""

    def forbidden(*args: Any, **options: Any) -> None:
        raise AssertionError("something was unpickled")

    pickle.loads = pickle.load = pickle.Unpickler = forbidden  # type: ignore[assignment, misc]
    return _join(timeout)


ModuleTrainer.step = faulty_step  # type: ignore[method-assign]
publishing.write_report = faulty_report
Run.finish = faulty_finish  # type: ignore[method-assign]
crew.join = join_without_pickle

if __name__ == "__main__":
    raise SystemExit(cli.run(quantize.main, sys.argv[1:], resumes=True))
