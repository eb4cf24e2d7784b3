"""Tiny models in the profile of the CPU runtime, and runs of them with its library and without."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from exported import BITS, CLASSIFIER, frozen_model, to_onnx  # noqa: E402
from tiny_models import BLOCKS, VOCABULARY  # noqa: E402

from mrem_deploy.quant.frozen import FrozenModel, with_hot_rows  # noqa: E402
from mrem_deploy.quant.hot_rows import HotRowQuantizer  # noqa: E402
from mrem_deploy.quant.spec import QuantSpec  # noqa: E402

RUNTIME = "mrem.runtime"
HIDDEN = [f"hidden.{i}" for i in range(BLOCKS + 1)]


def fused(frozen: FrozenModel) -> Any:
    return to_onnx(frozen, "mrem-cpu")


def fused_nodes(model: Any) -> dict[str, int]:
    """How many nodes of each operator there are."""
    return dict(Counter(node.op_type for node in model.graph.node if node.domain == RUNTIME))


def with_hidden(model: Any) -> Any:
    """The model with its hidden states among the outputs."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    taken = {output.name for output in copy.graph.output}
    there = {name for node in copy.graph.node for name in node.output}
    for name in HIDDEN:
        if name in there - taken:
            copy.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return copy


@cache
def mixed(kind: str) -> FrozenModel:
    """2 bits, with a block of 4, one of 8, and a query of other bits than its key."""
    names = frozen_model(kind, CLASSIFIER, BITS["2-2-8"]).weights
    own = {name: 4 for name in names if ".layer.1." in name} | {
        name: 8 for name in names if ".2.output" in name
    }
    own |= {name: 8 for name in names if name.endswith("0.attention.self.query")}
    spec = QuantSpec(2, 4, 8, per_channel=True, layer_bits=tuple(sorted(own.items())))
    return frozen_model(kind, CLASSIFIER, spec)


@cache
def with_hot(kind: str, hot: int = 5, bits: int = 2) -> FrozenModel:
    """2 bits, with some rows of the word embedding at 8."""
    frozen = frozen_model(kind, CLASSIFIER, QuantSpec(bits, bits, 8, per_channel=True))
    (name,) = (name for name in frozen.weights if "word" in name)
    generator = torch.Generator().manual_seed(hot)
    chosen = torch.randperm(VOCABULARY, generator=generator)[:hot].sort().values
    table = torch.randn(VOCABULARY, frozen.weights[name].codes.shape[1], generator=generator)
    weight = with_hot_rows(frozen.weights[name], HotRowQuantizer(chosen).freeze(table))
    return dataclasses.replace(frozen, weights=frozen.weights | {name: weight})


def _of(spec: QuantSpec) -> Callable[..., FrozenModel]:
    return lambda kind, head=None: frozen_model(kind, head, spec)


MODELS: dict[str, Callable[..., FrozenModel]] = {name: _of(spec) for name, spec in BITS.items()} | {
    "2-2-8 twn": _of(QuantSpec(2, 2, 8, weight_quantizer="twn", per_channel=True)),
    "8-8-8 per channel": _of(QuantSpec(8, 8, 8, per_channel=True)),
    "mixed": mixed,
    "hot rows": with_hot,
}


def session_with_library(model: Any, threads: int = 1, optimize: bool = True) -> Any:
    """A session in which the runtime's operators run; skips where the library is not installed."""
    runtime = pytest.importorskip("mrem_runtime", reason="mrem_runtime is not installed: make setup")
    options = runtime.options(threads)
    options.log_severity_level = 4  # errors come as exceptions
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def answers(opened: Any, batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """All outputs by name; the batch may have more than the model's inputs."""
    feed = {entry.name: np.asarray(batch[entry.name]) for entry in opened.get_inputs()}
    names = [entry.name for entry in opened.get_outputs()]
    return dict(zip(names, opened.run(names, feed), strict=True))
