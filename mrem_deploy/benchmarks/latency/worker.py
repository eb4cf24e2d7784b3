"""The program of a process that holds one model and nothing else.

`python -m mrem_deploy.benchmarks.latency.worker` reads one JSON request per line and replies to each with one
line; `contenders.Worker` is the other end, messages.py has the types. Note: anything imported here counts as
the model's memory. So torch and transformers stay out, and the runtime is imported before the memory is first
measured.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import psutil

from mrem_deploy.base.machine import PeakMemory
from mrem_deploy.base.units import MIB
from mrem_deploy.benchmarks.latency.messages import (
    CrowdReply,
    FeedReply,
    LoadReply,
    LoadRequest,
    ProfileReply,
    RunReply,
    Sentences,
    ServeReply,
)
from mrem_deploy.benchmarks.latency.runtimes import RUNTIMES, Runtime, random_sentences

SAMPLE = 256  # values of each output that are sent back to be compared
# Ours imports onnxruntime when it opens a session, and no model is to be charged with that.
IMPORTS = {"mrem_runtime": ("onnxruntime", "mrem_runtime")}
# CTranslate2 imports its converters, and these all that they convert from, if it is there.
LEFT_OUT = ("torch", "transformers", "huggingface_hub")


def resident_mb() -> float:
    return float(psutil.Process().memory_info().rss) / MIB


class Holder:
    """Serves the requests: `load` first, then `feed` or `serve`, then the others."""

    def __init__(self) -> None:
        self.model: LoadRequest
        self.runtime: Runtime
        self.more: list[Runtime] = []  # further sessions of the same model
        self.peak: PeakMemory
        self.inputs: Any
        self.batches: list[Any]

    def reply(self, request: dict[str, Any]) -> Mapping[str, Any]:
        what = request.pop("do")
        if what == "load":
            return self.load(cast(LoadRequest, request))
        handlers: dict[str, Callable[..., Mapping[str, Any]]] = {
            "feed": self.feed,
            "run": self.run,
            "profile": self.profile,
            "serve": self.serve,
            "batch": self.batch,
            "crowd": self.crowd,
        }
        return handlers[what](**request)

    def load(self, model: LoadRequest) -> LoadReply:
        if model["runtime"] == "ctranslate2":
            sys.modules.update(dict.fromkeys(LEFT_OUT, cast(Any, None)))  # they are not there
        for module in IMPORTS.get(model["runtime"], (model["runtime"],)):
            __import__(module)
        # NumPy loads its generators, and with them a library of ciphers, when the first numbers are drawn.
        random_sentences(batch=1, sequence=1, vocabulary=2, seed=0)
        self.model, empty = model, resident_mb()
        started = time.perf_counter()
        self.runtime = RUNTIMES[model["runtime"]](model)
        seconds = time.perf_counter() - started
        loaded = resident_mb()
        self.peak = PeakMemory("cpu").__enter__()
        return {"load_seconds": seconds, "empty_mb": empty, "loaded_mb": loaded}

    def feed(self, **shape: int) -> FeedReply:
        """Take a new input, run once, and return the beginning of every output."""
        self.inputs = self.runtime.prepare(random_sentences(**shape))
        outputs = self.runtime.run(self.inputs)
        return {
            "shapes": [list(output.shape) for output in outputs],
            "sample": [output.reshape(-1)[:SAMPLE].astype(float).tolist() for output in outputs],
            "resident_mb": resident_mb(),
        }

    def run(self) -> RunReply:
        return self._timed(self.inputs)

    def _timed(self, prepared: Any) -> RunReply:
        started = time.perf_counter()
        self.runtime.run(prepared)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "resident_mb": resident_mb(), "peak_mb": self.peak.host_mb}

    def profile(self, runs: int) -> ProfileReply:
        for _ in range(runs):
            self.runtime.run(self.inputs)
        return {"nodes": self.runtime.node_times(runs)}

    def serve(self, batches: list[Sentences]) -> ServeReply:
        self.batches = [self.runtime.prepare(batch) for batch in batches]
        return {"batches": len(self.batches)}

    def batch(self, number: int) -> RunReply:
        return self._timed(self.batches[number])

    def crowd(self, sessions: int, seconds: float) -> CrowdReply:
        """Each session in a thread of its own, with the input that was fed last; all begin together."""
        while len(self.more) < sessions - 1:
            self.more.append(RUNTIMES[self.model["runtime"]](self.model))
        at_work = [self.runtime, *self.more][:sessions]
        together = threading.Barrier(sessions)
        speeds = [0.0] * sessions
        failures: list[Exception] = []

        def work(number: int) -> None:
            try:
                at_work[number].run(self.inputs)
                together.wait()
                started = time.perf_counter()
                runs, passed = 0, 0.0
                while passed < seconds:
                    at_work[number].run(self.inputs)
                    runs, passed = runs + 1, time.perf_counter() - started
                speeds[number] = runs / passed
            except Exception as error:  # noqa: BLE001 - of any runtime; told by the caller's thread
                failures.append(error)
                together.abort()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(sessions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return {"runs_per_second": speeds}


def main() -> int:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not get between the replies
    holder = Holder()
    for line in sys.stdin:
        try:
            reply = holder.reply(json.loads(line))
        except Exception as error:  # noqa: BLE001 - a runtime's errors have no common class; all are reported
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
