"""An ONNX classifier made by hand: a table of embeddings, one product in QDQ form, a float head.

Small enough to be computed again with numpy, and made in milliseconds: tracing a torch model takes seconds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WORDS, WIDTH, CLASSES = 40, 8, 3
STEP, ZERO_POINT, WEIGHT_STEP = 0.05, 128, 0.02


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "table": draw.normal(size=(WORDS, WIDTH)).astype(np.float32),
        "types": draw.normal(size=(2, WIDTH)).astype(np.float32),
        "weight": draw.integers(-7, 8, size=(WIDTH, WIDTH)).astype(np.int8),
        "head": draw.normal(size=(WIDTH, CLASSES)).astype(np.float32),
    }


def save_tiny_onnx(path: Path, integers: bool = True, opset: int = 21, ir_version: int = 10) -> Path:
    """Inputs as Hugging Face names them, values `hidden.0` and `hidden.1`, the output `logits`."""
    numbers = tensors() | {
        "step": np.float32(STEP),
        "zero": np.uint8(ZERO_POINT),
        "weight_step": np.float32(WEIGHT_STEP),
        "weight_zero": np.int8(0),
        "first": np.int64(0),
    }
    quantized = [
        helper.make_node("QuantizeLinear", ["hidden.0", "step", "zero"], ["codes"]),
        helper.make_node("DequantizeLinear", ["codes", "step", "zero"], ["rounded"]),
    ]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["words"], name="words"),
        helper.make_node("Gather", ["types", "token_type_ids"], ["kinds"], name="kinds"),
        helper.make_node("Add", ["words", "kinds"], ["hidden.0"], name="add"),
        *(quantized if integers else []),
        helper.make_node("DequantizeLinear", ["weight", "weight_step", "weight_zero"], ["weights"]),
        helper.make_node(
            "MatMul", ["rounded" if integers else "hidden.0", "weights"], ["hidden.1"], name="mix"
        ),
        helper.make_node("Gather", ["hidden.1", "first"], ["sentence"], axis=1, name="pool"),
        helper.make_node("MatMul", ["sentence", "head"], ["logits"], name="head"),
    ]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"])
        for name in ("input_ids", "token_type_ids")
    ]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])]
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in numbers.items()]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


def expected(input_ids: np.ndarray, token_type_ids: np.ndarray) -> dict[str, np.ndarray]:
    """The same by numpy; the rounding of QuantizeLinear is half to even, as numpy's."""
    t = tensors()
    hidden = t["table"][input_ids] + t["types"][token_type_ids]
    codes = np.clip(np.round(hidden / np.float32(STEP)) + ZERO_POINT, 0, 255)
    mixed = ((codes - ZERO_POINT) * STEP) @ (t["weight"] * WEIGHT_STEP)
    return {"hidden.0": hidden, "hidden.1": mixed, "logits": mixed[:, 0] @ t["head"]}
