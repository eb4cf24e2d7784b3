"""What a number was measured on: the machine, the versions, and the peak memory of a block.

Note: the operating system keeps one peak per process, so starting a measurement erases the peak of the one
around it. Every `PeakMemory` block therefore hands the peak to all open blocks before it resets it. Blocks
may be nested, overlap and end in any order. Fields that end in `mb` are in MiB, as in the paper's tables.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import threading
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from mrem_deploy.base.units import MIB

# The instruction sets that decide which integer kernels can run.
_CPU_FEATURES = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8", "asimddp", "i8mm", "sve")


def describe_machine() -> dict[str, Any]:
    """The machine and the versions, for `metrics.json` and the report; None where something is absent.

    Starts neither CUDA nor another accelerator, so it takes no GPU memory.
    """
    import torch

    total, usable = os.cpu_count() or 1, _usable_cpus()
    model, features = _cpu()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "cpu": model,
        "cpu_count": usable,
        "cpu_count_machine": total,
        "cpu_features": features,
        "ram_mb": _ram_mb(),
        "gpu": _gpu_name(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "mrem_deploy": _own_version(),
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        "onnxruntime": version("onnxruntime") or version("onnxruntime-gpu"),
    }


class PeakMemory:
    """The peak memory of this process while the block runs.

        with PeakMemory() as peak:
            train()
        print(peak.mb, peak.kind)

    `host_mb` is resident memory and includes what was resident before the block. `device_mb` is the most that
    torch held on any one CUDA device, None if CUDA was not used. `mb` is `device_mb` if there is one, else
    `host_mb`; with `device="cpu"` it is always `host_mb`. `kind` says which. All can also be read inside the
    block, and stay fixed after it.
    """

    def __init__(self, device: object = None) -> None:
        self._host_only = device is not None and str(device).partition(":")[0] == "cpu"
        self._host_bytes = 0
        self._device_bytes = 0
        self._host_kind = ""

    def __enter__(self) -> PeakMemory:
        with _lock:
            _hand_out_marks()
            self._host_kind = _reset_host_mark()
            _reset_device_marks()
            self._host_bytes = self._device_bytes = 0
            _open_blocks.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            _hand_out_marks()
            _open_blocks.remove(self)

    def _refresh(self) -> None:
        with _lock:
            if self in _open_blocks:
                _hand_out_marks()

    @property
    def host_mb(self) -> float:
        self._refresh()
        return self._host_bytes / MIB

    @property
    def device_mb(self) -> float | None:
        self._refresh()
        return self._device_bytes / MIB if self._device_bytes else None

    @property
    def mb(self) -> float:
        device = None if self._host_only else self.device_mb
        return self.host_mb if device is None else device

    @property
    def kind(self) -> str:
        if self._host_only or self.device_mb is None:
            return self._host_kind
        return "peak CUDA memory allocated by torch"


_lock = threading.RLock()
_open_blocks: list[PeakMemory] = []


def _hand_out_marks() -> None:
    """Let every open block keep the present peaks."""
    if not _open_blocks:
        return
    host, device = _host_mark(), _device_mark()
    for block in _open_blocks:
        block._host_bytes = max(block._host_bytes, host)
        block._device_bytes = max(block._device_bytes, device)


def _host_mark() -> int:
    """Peak resident memory in bytes, since the last reset or since the process started."""
    marks = _status_bytes()
    if "VmHWM" in marks:
        return marks["VmHWM"]
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return int(getattr(psutil.Process().memory_info(), "peak_wset", 0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _reset_host_mark() -> str:
    """Reset the peak to the present use where the system can; returns what will be measured."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass
    else:
        marks = _status_bytes()
        # Some sandboxes accept the write and do nothing. The slack covers what runs between the two reads.
        if "VmHWM" in marks and marks["VmHWM"] <= marks.get("VmRSS", 0) + 64 * MIB:
            return "peak resident memory within the block"
    return (
        "peak resident memory since the process started" if _host_mark() else "not measured on this platform"
    )


def _status_bytes() -> dict[str, int]:
    """VmHWM and VmRSS of this process in bytes; empty where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.startswith(("VmHWM:", "VmRSS:")))
    return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields}


def _initialized_cuda() -> Any:
    """torch.cuda if this process already uses CUDA, else None; never starts it."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _device_mark() -> int:
    cuda = _initialized_cuda()
    return max((cuda.max_memory_allocated(i) for i in range(cuda.device_count())), default=0) if cuda else 0


def _reset_device_marks() -> None:
    cuda = _initialized_cuda()
    if cuda:
        for index in range(cuda.device_count()):
            cuda.reset_peak_memory_stats(index)


def _usable_cpus() -> int:
    """The CPUs this process may run on; in a container fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> tuple[str, list[str]]:
    """The processor's name, and which of the instruction sets above it has."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    present = set((fields.get("flags") or fields.get("features") or "").split())
    name = fields.get("model name") or platform.processor() or platform.machine() or "unknown"
    return name, [feature for feature in _CPU_FEATURES if feature in present]


def _ram_mb() -> int | None:
    """Memory this process may use: that of the machine, or the limit of the container if that is lower."""
    try:
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, OSError, ValueError):
        limits = []
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(name).read_text()))
        except (OSError, ValueError):  # absent, or "max"
            continue
    return min(limits) // MIB if limits else None


def _gpu_name() -> str | None:
    cuda = _initialized_cuda()
    if cuda:
        return str(cuda.get_device_name())
    # torch would create a CUDA context of some hundred MiB; the driver's tool does not.
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        reply = subprocess.run(
            [tool, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = reply.stdout.strip().splitlines() if reply.returncode == 0 else []
    return names[0] if names else None


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _own_version() -> str | None:
    import mrem_deploy

    return getattr(mrem_deploy, "__version__", None) or version("mrem-deploy")


# -- how the C library allocates large blocks ---------------------------------------------------------------
# Training allocates the same large tensors in every step. By default glibc gets each block above a threshold
# from the kernel and returns it as soon as it is freed, so every step pays for new, zeroed pages.

# <malloc.h>
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

LARGEST_INT = 2**31 - 1
MMAP_THRESHOLDS = (2**30, 2**25)  # bytes; before glibc 2.35, 32 MiB is the most it accepts


def keep_large_blocks() -> bool:
    """Keep freed blocks for the next step instead of returning them to the system. False: not glibc.

    The process then stays at its peak resident size, which is what it needs in the next step anyway.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library, such as musl
        return False
    trimmed = mallopt(M_TRIM_THRESHOLD, LARGEST_INT)
    return bool(trimmed and any(mallopt(M_MMAP_THRESHOLD, size) for size in MMAP_THRESHOLDS))
