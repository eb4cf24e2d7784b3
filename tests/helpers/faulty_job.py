"""`mrem quantize` whose workers meet with accidents, for tests: run as a script.

The variable FAULTS lists them as JSON, each with the rank, the attempt (0: the first start), the step
and the kind. Workers are started by `spawn`, which imports the main script again: so what this file
does when imported happens in every worker.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from mrem_deploy import quantize
from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError
from mrem_deploy.train.module import ModuleTrainer, StepResult

FAULTS = {(f["rank"], f["attempt"], f["step"]): f["kind"] for f in json.loads(os.environ.get("FAULTS", "[]"))}
_step = ModuleTrainer.step


def faulty_step(trainer: ModuleTrainer, step: int, *args: Any, **options: Any) -> StepResult:
    place = int(os.environ.get("RANK", "0")), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    kind = FAULTS.get((*place, step))
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "raise":
        raise ZeroDivisionError("the accident of worker 1")
    if kind == "refuse":
        raise UserError("the mistake of a user", "mend it")
    if kind == "sleep":
        Path(os.environ["ASLEEP"]).touch()  # for a test that waits until training is under way
        time.sleep(300)
    return _step(trainer, step, *args, **options)


ModuleTrainer.step = faulty_step  # type: ignore[method-assign]

if __name__ == "__main__":
    raise SystemExit(cli.run(quantize.main, sys.argv[1:], resumes=True))
