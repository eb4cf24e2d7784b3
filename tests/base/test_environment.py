"""Peak memory is checked against blocks of known size; the description against the running system."""

from __future__ import annotations

import json
import mmap
import os
import platform
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from mrem_deploy.base import machine
from mrem_deploy.base.machine import PeakMemory, describe_machine
from mrem_deploy.base.units import MIB

SLACK_MB = 24  # what the interpreter, other threads and the kernel's batched counters may add meanwhile

needs_reset = pytest.mark.skipif(
    machine._reset_host_mark() != "peak resident memory within the block",
    reason="this system cannot reset the high-water mark of resident memory",
)


def touch(megabytes: int) -> None:
    """Memory that is really resident (every page is written) and really given back.

    Straight from the kernel: an allocator may keep what was freed (`memory.keep_large_blocks` asks it
    to, and another test of the same process may have), and would then need no new pages here.
    """
    with mmap.mmap(-1, megabytes * MIB) as block:
        page = mmap.PAGESIZE
        for start in range(0, len(block), page):
            block[start] = 1


@needs_reset
def test_peak_counts_memory_already_released() -> None:
    with PeakMemory() as idle:
        pass
    with PeakMemory() as peak:
        touch(200)
    assert peak.mb == peak.host_mb
    assert 200 - SLACK_MB <= peak.mb - idle.mb <= 200 + SLACK_MB
    assert peak.kind == "peak resident memory within the block"
    assert peak.device_mb is None


@needs_reset
def test_peak_before_the_block_is_not_counted() -> None:
    with PeakMemory() as before:
        touch(200)
    with PeakMemory() as after:
        pass
    assert after.mb <= before.mb - 200 + SLACK_MB


@needs_reset
def test_nested_blocks_do_not_lose_the_outer_peak() -> None:
    with PeakMemory() as outer:
        touch(300)  # the outer's peak, before the inner resets the mark
        with PeakMemory() as inner:
            touch(100)
        assert inner.mb <= outer.mb - 200 + SLACK_MB
    assert outer.mb >= inner.mb + 200 - SLACK_MB


@needs_reset
def test_the_outer_block_sees_the_inner_peak() -> None:
    with PeakMemory() as outer, PeakMemory() as inner:
        touch(200)
    assert outer.mb >= inner.mb


@needs_reset
def test_blocks_may_overlap_and_close_in_any_order() -> None:
    first, second = PeakMemory(), PeakMemory()
    first.__enter__()
    second.__enter__()
    touch(200)
    first.__exit__(None, None, None)
    fixed = first.mb
    touch(400)  # only the second is still open
    second.__exit__(None, None, None)
    assert first.mb == fixed
    assert second.mb >= first.mb + 200 - SLACK_MB


@needs_reset
def test_readable_inside_the_block_and_after_an_exception() -> None:
    peak = PeakMemory()

    def fail() -> None:
        with peak:
            before.append(peak.mb)
            touch(200)
            inside.append(peak.mb)
            raise RuntimeError

    before: list[float] = []
    inside: list[float] = []
    with pytest.raises(RuntimeError):
        fail()
    assert inside[0] - before[0] >= 200 - SLACK_MB
    assert peak.mb >= inside[0]
    assert machine._open_blocks == []


def test_without_a_reset_the_lifetime_peak_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, text: str) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    with PeakMemory() as peak:
        pass
    assert peak.kind == "peak resident memory since the process started"
    assert peak.mb > 1


def test_without_proc_the_lifetime_peak_of_getrusage_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(machine, "_status_bytes", dict)
    with PeakMemory() as peak:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    lifetime = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB
    assert peak.mb == pytest.approx(lifetime, abs=SLACK_MB)
    assert peak.kind == "peak resident memory since the process started"


class FakeCuda:
    """Two devices whose high-water marks behave as torch's do."""

    def __init__(self) -> None:
        self.now, self.peak = [0, 0], [0, 0]

    def use(self, device: int, megabytes: int) -> None:
        self.peak[device] = max(self.peak[device], self.now[device] + megabytes * MIB)

    def device_count(self) -> int:
        return 2

    def max_memory_allocated(self, device: int) -> int:
        return self.peak[device]

    def reset_peak_memory_stats(self, device: int) -> None:
        self.peak[device] = self.now[device]


def test_device_memory_is_the_fullest_device_and_nests(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(machine, "_initialized_cuda", lambda: cuda)
    cuda.use(0, 900)  # before any block
    with PeakMemory() as outer, PeakMemory("cpu") as host:
        cuda.use(1, 300)
        with PeakMemory("cuda:0") as inner:
            cuda.use(0, 100)
    assert (outer.mb, inner.mb) == (300.0, 100.0)
    assert outer.kind == "peak CUDA memory allocated by torch"
    assert host.mb == host.host_mb != 300.0
    assert "resident" in host.kind


def test_describe_is_json_and_true() -> None:
    import torch
    import transformers

    told = json.loads(json.dumps(describe_machine(), allow_nan=False))
    assert told["python"] == platform.python_version()
    assert told["torch"] == torch.__version__
    assert told["transformers"] == transformers.__version__
    assert told["torch_threads"] == torch.get_num_threads()
    assert 1 <= told["cpu_count"] <= told["cpu_count_machine"] == os.cpu_count()
    assert told["cpu"]
    assert told["ram_mb"] is None or told["ram_mb"] > 100
    assert abs((datetime.now().astimezone() - datetime.fromisoformat(told["date"])).total_seconds()) < 60
    assert {"platform", "gpu", "onnxruntime", "mrem_deploy", "cpu_features"} <= told.keys()


def test_the_gpu_is_named_by_the_driver_without_starting_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Imaginary GPU 80GB'\necho second\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert machine._gpu_name() == "Imaginary GPU 80GB"
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert machine._gpu_name() is None


def test_importing_environment_imports_no_torch() -> None:
    code = "import sys; import mrem_deploy.base.machine; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
