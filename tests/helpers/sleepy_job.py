"""Workers that would sleep for minutes, for test_launch.py: run as a script with a folder."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from mrem_deploy.train.mrem_p.launch import launch


def sleep(folder: str) -> None:
    """Leave the number of this process in the folder, then sleep."""
    (Path(folder) / f"{os.getpid()}.pid").touch()
    for _ in range(3000):
        time.sleep(0.1)


if __name__ == "__main__":
    launch(sleep, (sys.argv[1],), workers=2, max_restarts=0)
