"""The runtimes that the worker's process can hold a model in, each used as its documentation says.

Note: anything imported here counts as the model's memory, so every runtime is imported where it is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mrem_deploy.benchmarks.latency.messages import LoadRequest, Sentences
from mrem_deploy.deploy import providers


class Runtime(Protocol):
    """A loaded model."""

    def prepare(self, sentences: Sentences) -> Any:
        """A batch in the form that this runtime reads; no part of the time."""
        ...

    def run(self, prepared: Any) -> list[np.ndarray]: ...

    def node_times(self, runs: int) -> dict[str, float]:
        """Seconds of one run per operator kind, from the last `runs` runs; the model was loaded with
        `profile`. Empty for a runtime that does not tell."""
        ...


class OnnxRuntime:
    """At its default options, except for the number of threads and what the contender sets."""

    def __init__(self, model: LoadRequest) -> None:
        self.session = self.open(model)
        self.inputs = [value.name for value in self.session.get_inputs()]

    def open(self, model: LoadRequest) -> Any:
        import onnxruntime

        provider = model["provider"]
        providers.preload(onnxruntime, provider)
        session = onnxruntime.InferenceSession(
            model["path"],
            session_options(model),
            providers=[(provider, model["provider_options"]), *providers.behind(provider)],
            disabled_optimizers=model["disabled_optimizers"],
        )
        providers.started(session, provider)  # the time would be that of another device
        return session

    def prepare(self, sentences: Sentences) -> dict[str, np.ndarray]:
        return padded(self.inputs, sentences)

    def run(self, prepared: dict[str, np.ndarray]) -> list[np.ndarray]:
        outputs: list[np.ndarray] = self.session.run(None, prepared)
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
        return totals(list(zip(kinds, (np.median(durations, axis=0) / 1e6).tolist(), strict=True)))


def session_options(model: LoadRequest) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = model["threads"]
    for key, value in model["config"].items():
        options.add_session_config_entry(key, value)
    if model["profile"]:
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(model["profile"]) / "nodes")
    return options


class MremRuntime(OnnxRuntime):
    """onnxruntime with our operators, opened as a user of the package opens it."""

    def open(self, model: LoadRequest) -> Any:
        import mrem_runtime

        return mrem_runtime.session(model["path"], model["threads"], options=session_options(model))


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

    def prepare(self, sentences: Sentences) -> dict[str, np.ndarray]:
        return padded(self.inputs, sentences)

    def run(self, prepared: dict[str, np.ndarray]) -> list[np.ndarray]:
        results = self.request.infer(prepared)
        return [np.array(results[output]) for output in self.outputs]

    def node_times(self, runs: int) -> dict[str, float]:
        """Of the last run only: OpenVINO keeps no others."""
        profile = self.request.profiling_info
        return totals([(node.node_type, node.real_time.total_seconds()) for node in profile])


class CTranslate2:
    """Its encoder with int8 weights, which takes sentences without padding; the classifier in numpy."""

    def __init__(self, model: LoadRequest) -> None:
        import ctranslate2

        from mrem_deploy.benchmarks.latency.heads import read_head

        self.encoder = ctranslate2.Encoder(
            model["path"], device="cpu", compute_type="int8", inter_threads=1, intra_threads=model["threads"]
        )
        self.head = read_head(Path(model["path"]))

    def prepare(self, sentences: Sentences) -> Sentences:
        return sentences

    def run(self, prepared: Sentences) -> list[np.ndarray]:
        found = self.encoder.forward_batch(prepared["ids"], token_type_ids=prepared["types"])
        return [self.head.of_pooled(np.array(found.pooler_output))]

    def node_times(self, runs: int) -> dict[str, float]:
        return {}


def _llama(model: LoadRequest) -> Runtime:
    from mrem_deploy.benchmarks.latency.llama import LlamaCpp

    return LlamaCpp(model)


RUNTIMES: dict[str, Callable[[LoadRequest], Runtime]] = {
    "onnxruntime": OnnxRuntime,
    "mrem_runtime": MremRuntime,
    "openvino": OpenVino,
    "ctranslate2": CTranslate2,
    "llama_cpp": _llama,
}


def totals(times: list[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind, seconds in times:
        found[kind] = found.get(kind, 0.0) + seconds
    return found


def padded(inputs: list[str], sentences: Sentences) -> dict[str, np.ndarray]:
    """Filled up on the right to the longest sentence, with the mask that says so."""
    rows = sentences["ids"]
    shape = len(rows), max(map(len, rows), default=0)
    known: Mapping[str, np.ndarray] = {
        name: np.zeros(shape, dtype=np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")
    }
    known["input_ids"][:] = sentences["pad"]
    for line, (ids, types) in enumerate(zip(rows, sentences["types"], strict=True)):
        known["input_ids"][line, : len(ids)] = ids
        known["attention_mask"][line, : len(ids)] = 1
        known["token_type_ids"][line, : len(ids)] = types
    return {name: known[name] for name in inputs}


def random_sentences(batch: int, sequence: int, vocabulary: int, seed: int) -> Sentences:
    """Sentences of exactly `sequence` random tokens: there is no padding that a model could skip."""
    ids = np.random.default_rng(seed).integers(0, vocabulary, size=(batch, sequence), dtype=np.int64)
    return {"ids": ids.tolist(), "types": np.zeros_like(ids).tolist(), "pad": 0}
