"""Workers that would sleep for minutes, for test_team.py: run as a script with a folder, and what they do."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from mrem_deploy.base import cli, processes
from mrem_deploy.train.mrem_p.team import launch


def sleep(folder: str, kind: str) -> None:
    """Leave the number of this process in the folder, then sleep; a deaf one does not hear SIGTERM."""
    if kind == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        processes.LEAVE_SECONDS = 1.0  # after its launcher is gone
    (Path(folder) / f"{os.environ['RANK']}-{os.getpid()}.pid").touch()
    for _ in range(3000):
        time.sleep(0.1)


def main(argv: list[str] | None) -> int:
    processes.LEAVE_SECONDS = 3600.0  # so that only a second signal ends deaf workers
    launch(sleep, (sys.argv[1], sys.argv[2]), workers=2, max_restarts=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
