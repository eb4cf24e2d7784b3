"""Who takes part in the race, and the process that holds one of them.

Every model runs in a process of its own: its memory is then its own, a runtime that crashes takes nobody
with it, and no library in this process (torch) lends it threads or memory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from mrem_deploy.base.machine import MB

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
LAST_LINES = 3  # of what a dead process printed
# Some virtual machines announce AMX, which then faults; OpenVINO's kernels are oneDNN's.
ONEDNN_LIMIT = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}


@dataclass(frozen=True)
class Contender:
    """A model file, and how it is run. The name says all that tells it from the others."""

    name: str
    path: Path
    runtime: str = "onnxruntime"
    provider: str = CPU
    provider_options: Mapping[str, str] = field(default_factory=dict)
    disabled_optimizers: tuple[str, ...] = ()
    config: Mapping[str, str] = field(default_factory=dict)
    ours: bool = False

    @property
    def tuned(self) -> bool:
        """Whether it runs with session options other than the default ones: no part of the headline."""
        return bool(self.disabled_optimizers or self.config)

    @property
    def file_mb(self) -> float:
        """The file, and the weights beside it where the format keeps them apart."""
        beside = (self.path.with_suffix(".bin"), self.path.with_name(self.path.name + ".data"))
        return sum(file.stat().st_size for file in (self.path, *beside) if file.is_file()) / MB

    def describe(self) -> dict[str, Any]:
        """What the json file says of it; where the file lay does not matter."""
        return {
            "name": self.name,
            "ours": self.ours,
            "runtime": self.runtime,
            "provider": self.provider,
            "provider_options": dict(self.provider_options),
            "disabled_optimizers": list(self.disabled_optimizers),
            "session_config": dict(self.config),
        }


class ContenderFailed(Exception):
    """A model that its runtime cannot load or run."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        super().__init__(f"{name}: {reason}")


class Worker:
    """The process of one contender; `load` tells what loading took. Leaving the block ends the process."""

    def __init__(self, contender: Contender, threads: int, profile: Path | None = None) -> None:
        self.contender = contender
        self._request = {
            "do": "load",
            "runtime": contender.runtime,
            "path": str(contender.path),
            "provider": contender.provider,
            "provider_options": dict(contender.provider_options),
            "disabled_optimizers": list(contender.disabled_optimizers),
            "config": dict(contender.config),
            "threads": threads,
            "profile": None if profile is None else str(profile),
        }
        self.load: dict[str, Any] = {}

    def __enter__(self) -> Worker:
        limits = ONEDNN_LIMIT if self.contender.runtime == "openvino" else {}
        # To a file: nobody reads it while the process runs, and a full pipe would stop it.
        self._printed = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mrem_deploy.benchmarks.latency.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            env={**limits, **os.environ},
            encoding="utf-8",
        )
        try:
            self.load = self._ask(self._request)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def feed(self, batch: int, sequence: int, vocabulary: int, seed: int) -> dict[str, Any]:
        """Give it a new input; returns the beginning of its outputs and the memory then."""
        return self._ask(
            {"do": "feed", "batch": batch, "sequence": sequence, "vocabulary": vocabulary, "seed": seed}
        )

    def run(self) -> float:
        """Seconds of one run, by the clock of that process."""
        return float(self._ask({"do": "run"})["seconds"])

    def node_times(self, runs: int) -> dict[str, float]:
        """Seconds per operator kind; the worker must have been given a folder for profiles."""
        times: dict[str, float] = self._ask({"do": "profile", "runs": runs})["nodes"]
        return times

    def resident_mb(self) -> float:
        """Its memory after one more run."""
        return float(self._ask({"do": "run"})["resident_mb"])

    def close(self) -> None:
        """End of input ends the program; a process that hangs is killed."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):  # it may be dead already
            process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        self._printed.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # a pipe whose other end is gone
            line = ""
        if not line:
            raise ContenderFailed(self.contender.name, self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ContenderFailed(self.contender.name, answer["error"])
        return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        self._printed.seek(0)
        lines = self._printed.read().decode("utf-8", "replace").strip().splitlines()
        how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        return f"its process ended {how}" + "".join(f"\n    {line}" for line in lines[-LAST_LINES:])
