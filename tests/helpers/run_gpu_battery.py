"""Runs tests/battery_kernels_gpu.py in a process of its own, where Triton is told before it is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

BATTERY = Path(__file__).with_name("battery_kernels_gpu.py")


def run(device: str, **environment: str) -> tuple[int, int, str]:
    """How many checks passed, how many did not, and what pytest said."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(BATTERY)],
        env={**os.environ, "MREM_TEST_DEVICE": device, **environment},
        cwd=BATTERY.parent.parent,
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", said)}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    return counts.get("passed", 0), max(failed, int(done.returncode != 0)), said
