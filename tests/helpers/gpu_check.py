"""`make gpu-check`: nine checks of everything here that runs on GPUs, in ten minutes at most.

Each check is one or more tests marked `gpu`. It passes if one of them passed and none failed; the reason why
a test was skipped is printed. The exit code is 0 if all nine pass.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 600.0
GPU, KERNELS = "tests/test_gpu.py", "tests/kernels/test_kernels_gpu_device.py"
PACKAGES = ("torch", "triton", "transformers", "onnxruntime", "onnxruntime-gpu", "tensorrt", "mrem-deploy")
CHECKS = {
    "torch computes on every GPU": [f"{GPU}::test_torch_computes_on_every_gpu"],
    "a first Triton kernel compiles and runs": [f"{GPU}::test_a_first_kernel_runs_on_every_gpu"],
    "every op gives the reference's numbers": [f"{KERNELS}::test_every_op_agrees_with_the_reference"],
    "every tile gives the same product, and tiles are timed": [
        f"{KERNELS}::test_every_tile_gives_the_same_product",
        f"{KERNELS}::test_the_benchmark_runs",
    ],
    "mrem quantize and a training step on the GPU": [
        f"{GPU}::test_quantize_on_a_gpu_gives_what_the_cpu_gives",
        f"{GPU}::test_the_step_benchmark_runs_on_a_gpu",
    ],
    "a killed run continues": [f"{GPU}::test_a_killed_run_continues"],
    "tensors travel between processes, by NCCL and pinned memory": [
        f"{GPU}::test_parcels_travel_by_nccl",
        f"{GPU}::test_parcels_travel_through_pinned_memory",
    ],
    "mrem-p on two GPUs": [f"{GPU}::test_mrem_p_on_two_gpus"],
    "onnxruntime on CUDA and TensorRT": [
        f"{GPU}::test_an_exported_model_runs_on_cuda",
        f"{GPU}::test_an_exported_model_runs_in_tensorrt",
    ],
}


@dataclass(frozen=True)
class Outcome:
    """What the tests of one check did."""

    passed: int = 0
    failed: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def passes(self) -> bool:
        return self.passed > 0 and not self.failed

    def __str__(self) -> str:
        reasons = [*self.failed, *(f"not tried: {reason}" for reason in self.skipped)]
        return ("PASS" if self.passes else "FAIL") + ("" if not reasons else ": " + "; ".join(reasons))


def main() -> int:
    started = time.monotonic()
    print(*facts(), sep="\n", flush=True)
    failed = []
    for number, (title, tests) in enumerate(CHECKS.items(), 1):
        left = LIMIT_SECONDS - (time.monotonic() - started)
        outcome = run(tests, left)
        print(f"{number}. {title}: {outcome}", flush=True)
        if not outcome.passes:
            failed.append(str(number))
    words = f"{len(CHECKS) - len(failed)} of {len(CHECKS)} checks passed"
    missing = f"; failed: {', '.join(failed)}" if failed else ""
    print(f"gpu-check: {words} in {time.monotonic() - started:.0f} s{missing}")
    return int(bool(failed))


def run(tests: list[str], seconds: float) -> Outcome:
    """The tests in a process of their own, ended with all that it started when the time is over."""
    if seconds <= 0:
        return Outcome(failed=(f"no time was left of {LIMIT_SECONDS:.0f} s",))
    with tempfile.TemporaryDirectory(prefix="mrem-gpu-check-") as folder:
        report, log = Path(folder) / "report.xml", Path(folder) / "log"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
        with open(log, "w") as out:
            process = subprocess.Popen(
                [*command, f"--junitxml={report}", *tests],
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return Outcome(failed=(f"it did not end within the {seconds:.0f} s that were left",))
        if not report.is_file():
            return Outcome(failed=(f"pytest ended with {process.returncode}: {last_line(log)}",))
        return outcome_of(report)


def outcome_of(report: Path) -> Outcome:
    """Counted in the file that pytest writes for machines."""
    passed, failed, skipped = 0, [], []
    for case in ElementTree.parse(report).iter("testcase"):
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        left_out = case.find("skipped")
        if bad is not None:
            failed.append(f"{case.get('name')}: {first_line(bad.get('message', ''))}")
        elif left_out is not None:
            skipped.append(first_line(left_out.get("message", "")))
        else:
            passed += 1
    return Outcome(passed, tuple(failed), tuple(dict.fromkeys(skipped)))


def first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "no reason was given")


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


def facts() -> list[str]:
    """Versions, GPUs and how they are connected."""
    found = [f"Python {sys.version.split()[0]}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    compiler = shutil.which(os.environ.get("CC", "")) or shutil.which("gcc") or shutil.which("clang")
    lines = ["versions: " + ", ".join(found), f"C compiler: {compiler or 'none'}"]
    names = "index,name,compute_cap,memory.total,driver_version"
    lines.append("GPUs: " + asked("nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"))
    lines.append("topology: " + asked("nvidia-smi", "topo", "-m"))
    return lines


def asked(*command: str) -> str:
    """What a tool prints, on lines of their own."""
    if shutil.which(command[0]) is None:
        return f"unknown, there is no {command[0]}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown, {command[0]} failed: {error}"
    said = (done.stdout or done.stderr).rstrip()
    return "\n  " + said.replace("\n", "\n  ") if said else "unknown"


if __name__ == "__main__":
    raise SystemExit(main())
