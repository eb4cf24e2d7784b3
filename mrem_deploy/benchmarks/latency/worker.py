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
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import psutil

from mrem_deploy.base.units import MIB
from mrem_deploy.benchmarks.latency.messages import (
    FeedReply,
    LoadReply,
    LoadRequest,
    ProfileReply,
    RunReply,
)
from mrem_deploy.deploy import providers

SAMPLE = 256  # values of each output that are sent back to be compared

Feed = dict[str, np.ndarray]


class Runtime(Protocol):
    """A loaded model."""

    inputs: list[str]

    def run(self, feed: Feed) -> list[np.ndarray]: ...

    def node_times(self, runs: int) -> dict[str, float]:
        """Seconds of one run per operator kind, from the last `runs` runs; the model was loaded with
        `profile`."""
        ...


class OnnxRuntime:
    """At its default options, except for the number of threads and what the contender sets."""

    def __init__(self, model: LoadRequest) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = model["threads"]
        for key, value in model["config"].items():
            options.add_session_config_entry(key, value)
        if model["profile"]:
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(model["profile"]) / "nodes")
        provider = model["provider"]
        providers.preload(onnxruntime, provider)
        self.session = onnxruntime.InferenceSession(
            model["path"],
            options,
            providers=[(provider, model["provider_options"]), *providers.behind(provider)],
            disabled_optimizers=model["disabled_optimizers"],
        )
        providers.started(self.session, provider)  # the time would be that of another device
        self.inputs = [value.name for value in self.session.get_inputs()]

    def run(self, feed: Feed) -> list[np.ndarray]:
        outputs: list[np.ndarray] = self.session.run(None, feed)
        return outputs

    def node_times(self, runs: int) -> dict[str, float]:
        path = Path(self.session.end_profiling())
        events = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        kernels = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
        # Nodes may have no names, but every run takes them in the same order. The run before the counted
        # ones is left out, and each node counts with its median: one interruption can take longer than the
        # entire graph.
        nodes = len(kernels) // (runs + 1)
        durations = np.array([event["dur"] for event in kernels]).reshape(runs + 1, nodes)[1:]
        kinds = [event["args"]["op_name"] for event in kernels[:nodes]]
        return _totals(list(zip(kinds, (np.median(durations, axis=0) / 1e6).tolist(), strict=True)))


class OpenVino:
    """Its CPU plugin, tuned for latency as its guide says."""

    def __init__(self, model: LoadRequest) -> None:
        import openvino

        settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": model["threads"]}
        if model["profile"]:
            settings["PERF_COUNT"] = True
        compiled = openvino.Core().compile_model(model["path"], "CPU", settings)
        self.request = compiled.create_infer_request()
        self.inputs = [value.any_name for value in compiled.inputs]
        self.outputs = compiled.outputs

    def run(self, feed: Feed) -> list[np.ndarray]:
        results = self.request.infer(feed)
        return [np.array(results[output]) for output in self.outputs]

    def node_times(self, runs: int) -> dict[str, float]:
        """Of the last run only: OpenVINO keeps no others."""
        profile = self.request.profiling_info
        return _totals([(node.node_type, node.real_time.total_seconds()) for node in profile])


RUNTIMES: dict[str, Callable[[LoadRequest], Runtime]] = {
    "onnxruntime": OnnxRuntime,
    "openvino": OpenVino,
}


def _totals(times: list[tuple[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for kind, seconds in times:
        totals[kind] = totals.get(kind, 0.0) + seconds
    return totals


def random_feed(inputs: list[str], batch: int, sequence: int, vocabulary: int, seed: int) -> Feed:
    """Sentences of exactly `sequence` random tokens: there is no padding that a model could skip."""
    shape = (batch, sequence)
    known = {
        "input_ids": np.random.default_rng(seed).integers(0, vocabulary, size=shape, dtype=np.int64),
        "attention_mask": np.ones(shape, dtype=np.int64),
        "token_type_ids": np.zeros(shape, dtype=np.int64),
    }
    return {name: known[name] for name in inputs}


def resident_mb() -> float:
    return float(psutil.Process().memory_info().rss) / MIB


class Holder:
    """Serves the requests: `load` first, then `feed`, then `run` or `profile`."""

    def __init__(self) -> None:
        self.runtime: Runtime
        self.inputs: Feed

    def reply(self, request: dict[str, Any]) -> Mapping[str, Any]:
        what = request.pop("do")
        if what == "load":
            return self.load(cast(LoadRequest, request))
        handlers: dict[str, Callable[..., Mapping[str, Any]]] = {
            "feed": self.feed,
            "run": self.run,
            "profile": self.profile,
        }
        return handlers[what](**request)

    def load(self, model: LoadRequest) -> LoadReply:
        __import__(model["runtime"])
        empty = resident_mb()
        started = time.perf_counter()
        self.runtime = RUNTIMES[model["runtime"]](model)
        seconds = time.perf_counter() - started
        return {"load_seconds": seconds, "empty_mb": empty, "loaded_mb": resident_mb()}

    def feed(self, **shape: int) -> FeedReply:
        """Take a new input, run once, and return the beginning of every output."""
        self.inputs = random_feed(self.runtime.inputs, **shape)
        outputs = self.runtime.run(self.inputs)
        return {
            "shapes": [list(output.shape) for output in outputs],
            "sample": [output.reshape(-1)[:SAMPLE].astype(float).tolist() for output in outputs],
            "resident_mb": resident_mb(),
        }

    def run(self) -> RunReply:
        started = time.perf_counter()
        self.runtime.run(self.inputs)
        return {"seconds": time.perf_counter() - started, "resident_mb": resident_mb()}

    def profile(self, runs: int) -> ProfileReply:
        for _ in range(runs):
            self.runtime.run(self.inputs)
        return {"nodes": self.runtime.node_times(runs)}


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
