"""Keeping large blocks: where glibc is, freed memory is used again without new pages."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from mrem_deploy.base import machine

COUNT_FAULTS = """
import resource, torch
from mrem_deploy.base.machine import keep_large_blocks
assert keep_large_blocks()
torch.set_num_threads(1)
for _ in range(20):  # until the heap has found its size
    torch.ones(12_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(12_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_kept_blocks_cost_no_new_pages() -> None:
    """48 MB, the gradient of a word embedding: by default each one is 11,719 new pages of 4 KiB."""
    run = subprocess.run([sys.executable, "-c", COUNT_FAULTS], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 1000


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: object())
    assert machine.keep_large_blocks() is False
    monkeypatch.setattr(sys, "platform", "darwin")
    assert machine.keep_large_blocks() is False
