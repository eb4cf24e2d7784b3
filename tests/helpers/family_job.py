"""A process that waits for another one, for test_processes.py: run as a script with a folder."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from mrem_deploy.base import cli
from mrem_deploy.base.processes import in_fresh_process


def sleep(folder: str) -> None:
    """Leave the number of this process in the folder, then sleep."""
    (Path(folder) / f"{os.getpid()}.pid").touch()
    try:
        time.sleep(600)
    finally:
        (Path(folder) / "left").touch()


def main(argv: list[str] | None) -> int:
    in_fresh_process(sleep, sys.argv[1], forks=sys.argv[2] == "forks")
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
