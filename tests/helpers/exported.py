"""Tiny models, exported in memory and run; one trace serves all tests of a process."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
ir = pytest.importorskip("onnx_ir")

from tiny_models import heads_of, quantized_twin, tiny_model  # noqa: E402

from mrem_deploy.export import write  # noqa: E402
from mrem_deploy.export.skeleton import Skeleton, trace  # noqa: E402
from mrem_deploy.models.architectures import model_outputs  # noqa: E402
from mrem_deploy.numerics import quantize  # noqa: E402
from mrem_deploy.quant.frozen import FixedScale, FrozenLinear, FrozenModel, build, freeze  # noqa: E402
from mrem_deploy.quant.layers import Matmul  # noqa: E402
from mrem_deploy.quant.spec import QuantSpec  # noqa: E402

CLASSIFIER = "sequence-classification"
BITS = {
    "8-8-8": QuantSpec(8, 8, 8),
    "4-4-8": QuantSpec(4, 4, 8),
    "2-2-8": QuantSpec(2, 2, 8),
    "2-2-4": QuantSpec(2, 2, 4),
    "2-2-8 midrise": QuantSpec(2, 2, 8, weight_quantizer="midrise"),
}
# The largest difference by the order of float sums, without any code falling on the other side.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def frozen_model(kind: str, head: str | None = None, spec: QuantSpec | None = None) -> FrozenModel:
    """Without a head: with the usual one of its kind."""
    return _frozen_model(kind, head or heads_of(kind)[0], spec or BITS["4-4-8"])


@cache
def _frozen_model(kind: str, head: str, spec: QuantSpec) -> FrozenModel:
    _, student = quantized_twin(tiny_model(kind, head), spec)
    return freeze(student, head)


@cache
def skeleton(kind: str, head: str) -> Skeleton:
    """Tracing takes seconds, and the skeleton depends on neither bits nor profile: one serves all tests."""
    return trace(frozen_model(kind, head))


def to_onnx(frozen: FrozenModel, profile: str = "ort-cpu") -> Any:
    """The exported model in memory."""
    stored = skeleton(frozen.config.model_type, frozen.head)
    return write.compact_proto(write.lowered(frozen, profile, skeleton=stored))


def session(model: Any, exact: bool = False) -> Any:
    """At default options; `exact` without optimizations, which runs the standard operators as written."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if exact:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options)


def run(model: Any, batch: dict[str, torch.Tensor], exact: bool = False) -> dict[str, np.ndarray]:
    opened = session(model, exact)
    feed = {entry.name: batch[entry.name].numpy() for entry in opened.get_inputs()}
    names = [entry.name for entry in opened.get_outputs()]
    return dict(zip(names, opened.run(names, feed), strict=True))


def torch_outputs(frozen: FrozenModel, batch: dict[str, torch.Tensor]) -> list[np.ndarray]:
    with torch.no_grad():
        return [value.numpy() for value in model_outputs(build(frozen)(**batch))]


def torch_codes(frozen: FrozenModel, batch: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The integers that every quantizer of the torch model gives."""
    model, codes = build(frozen), {}
    names = {part: name for name, part in model.named_modules() if isinstance(part, FixedScale)}

    def see(step: nn.Module, x: torch.Tensor) -> None:
        if isinstance(step, FixedScale):
            codes[names[step]] = quantize(x, step.scale, step.grid).numpy()

    for part in model.modules():
        if isinstance(part, FixedScale):  # of q, k and v: called as a module
            part.register_forward_pre_hook(lambda step, args: see(step, args[0]))
        if isinstance(part, FrozenLinear):
            part.register_forward_pre_hook(lambda linear, args: see(linear.input_quantizer, args[0]))
        if isinstance(part, Matmul):
            part.register_forward_pre_hook(lambda product, args: see(product.left, args[0]))
            part.register_forward_pre_hook(lambda product, args: see(product.right, args[1]))
    with torch.no_grad():
        model(**batch)
    return codes


def with_codes(model: Any, frozen: FrozenModel) -> tuple[Any, dict[str, str]]:
    """The model with every quantizer's integers, as its product reads them, among the outputs."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    values = {name for node in model.graph.node for name in node.output}
    types = {i.name: i.data_type for i in model.graph.initializer}
    asked = {}
    for step in frozen.scales:
        if f"{step}.codes" not in values:
            continue
        moved = sorted(name for name in values if name.startswith(f"{step}.moved."))
        asked[step] = moved[-1] if moved else f"{step}.codes"
        quantizer = next(node for node in model.graph.node if f"{step}.codes" in node.output)
        model.graph.output.append(
            onnx.helper.make_tensor_value_info(asked[step], types[quantizer.input[2]], None)
        )
    return model, asked
