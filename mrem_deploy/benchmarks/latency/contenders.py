"""A model that is timed, and the process that holds it.

Every model runs in a separate process. So its memory can be measured, a runtime that crashes does not end the
others, and no library of this process (torch) adds threads or memory.
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
from typing import Any, cast

from mrem_deploy.base.processes import unheard_ctrl_c
from mrem_deploy.base.units import MIB
from mrem_deploy.benchmarks.latency.messages import (
    CrowdReply,
    FeedReply,
    LoadReply,
    LoadRequest,
    ProfileReply,
    RunReply,
    Sentences,
)
from mrem_deploy.deploy.providers import CPU

LAST_LINES = 3  # of what a dead process printed
# Some virtual machines announce AMX, which then faults; these use oneDNN's kernels.
ONEDNN_LIMIT = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
WITH_ONEDNN = ("openvino", "ctranslate2")


@dataclass(frozen=True)
class Contender:
    """A model file and how it is run. The name says everything in which it differs from the others."""

    name: str
    path: Path
    runtime: str = "onnxruntime"
    provider: str = CPU
    provider_options: Mapping[str, str] = field(default_factory=dict)
    disabled_optimizers: tuple[str, ...] = ()
    config: Mapping[str, str] = field(default_factory=dict)
    needed_config: Mapping[str, str] = field(default_factory=dict)  # what the provider needs; not tuning
    ours: bool = False
    beside: str | None = None  # the same weights in plain onnxruntime, for those in another runtime of ours

    @property
    def tuned(self) -> bool:
        """Whether it runs with other session options than the defaults: then the headline leaves it out."""
        return bool(self.disabled_optimizers or self.config)

    @property
    def file_mb(self) -> float:
        """The file, and the file of its weights if the format keeps them apart; all files of a folder."""
        if self.path.is_dir():
            return sum(file.stat().st_size for file in self.path.iterdir()) / MIB
        weights = (self.path.with_suffix(".bin"), self.path.with_name(self.path.name + ".data"))
        return sum(file.stat().st_size for file in (self.path, *weights) if file.is_file()) / MIB

    def to_dict(self) -> dict[str, Any]:
        """For the json file; where the model was stored does not matter."""
        return {
            "name": self.name,
            "ours": self.ours,
            "runtime": self.runtime,
            "beside": self.beside,
            "provider": self.provider,
            "provider_options": dict(self.provider_options),
            "disabled_optimizers": list(self.disabled_optimizers),
            "session_config": {**self.needed_config, **self.config},
        }


class ContenderFailed(Exception):
    """A model that its runtime cannot load or run."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        super().__init__(f"{name}: {reason}")


class Worker:
    """The process of one contender; `load` is what loading took. Leaving the block ends the process."""

    load: LoadReply

    def __init__(self, contender: Contender, threads: int, profile: Path | None = None) -> None:
        self.contender = contender
        self._request: LoadRequest = {
            "runtime": contender.runtime,
            "path": str(contender.path),
            "provider": contender.provider,
            "provider_options": dict(contender.provider_options),
            "disabled_optimizers": list(contender.disabled_optimizers),
            "config": {**contender.needed_config, **contender.config},
            "threads": threads,
            "profile": None if profile is None else str(profile),
        }

    def __enter__(self) -> Worker:
        limits = ONEDNN_LIMIT if self.contender.runtime in WITH_ONEDNN else {}
        # Into a file: nobody reads while the process runs, and a full pipe would block it.
        self._printed = tempfile.TemporaryFile()
        with unheard_ctrl_c():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mrem_deploy.benchmarks.latency.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed,
                env={**limits, **os.environ},
                encoding="utf-8",
            )
        try:
            self.load = cast(LoadReply, self._ask({"do": "load", **self._request}))
        except BaseException as error:
            self.close(at_once=isinstance(error, KeyboardInterrupt))
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(at_once=kind is not None and issubclass(kind, KeyboardInterrupt))

    def feed(self, batch: int, sequence: int, vocabulary: int, seed: int) -> FeedReply:
        """Give it a new input; returns the beginning of its outputs and the memory at that point."""
        request = {"batch": batch, "sequence": sequence, "vocabulary": vocabulary, "seed": seed}
        return cast(FeedReply, self._ask({"do": "feed", **request}))

    def run(self) -> float:
        """Seconds of one run, by the clock of that process."""
        return self._run()["seconds"]

    def node_times(self, runs: int) -> dict[str, float]:
        """Seconds per operator kind; needs a worker that was started with a folder for profiles."""
        return cast(ProfileReply, self._ask({"do": "profile", "runs": runs}))["nodes"]

    def memory(self) -> RunReply:
        """Its memory after one more run, and the peak since it was loaded."""
        return self._run()

    def serve(self, batches: list[Sentences]) -> None:
        """Give it the batches of a workload; none of them runs yet."""
        self._ask({"do": "serve", "batches": batches})

    def run_batch(self, number: int) -> float:
        """Seconds of one batch of the workload."""
        return cast(RunReply, self._ask({"do": "batch", "number": number}))["seconds"]

    def crowd(self, sessions: int, seconds: float) -> list[float]:
        """Runs per second of so many sessions of this model in one process, all at work for that long."""
        return cast(CrowdReply, self._ask({"do": "crowd", "sessions": sessions, "seconds": seconds}))[
            "runs_per_second"
        ]

    def _run(self) -> RunReply:
        return cast(RunReply, self._ask({"do": "run"}))

    def close(self, at_once: bool = False) -> None:
        """End of input ends the program; a process that hangs is killed, and one that is to end at once."""
        process = self._process
        if at_once:
            process.kill()
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
