"""Damage to ONNX files that can still be parsed. Each change returns in words what it did."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any


def change_graph(path: Path, draw: random.Random) -> str:
    """A file that can still be parsed. In half of the cases its digests are gone, as if it never had any."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    changes = [_tensor, _tensor, _place, _node, _value, _about]
    if model.functions:  # a file for the CPU runtime
        changes += [_attribute, _attribute, _function, _function]
    change = draw.choice(changes)
    done = change(model, draw)
    if draw.random() < 0.5:
        kept = [entry for entry in model.metadata_props if not entry.key.endswith(("digest", "sha256"))]
        del model.metadata_props[:]
        model.metadata_props.extend(kept)
        done += ", without digests"
    path.write_bytes(model.SerializeToString())
    return done


def _tensor(model: Any, draw: random.Random) -> str:
    import numpy as np
    from onnx import numpy_helper

    tensor = draw.choice(list(model.graph.initializer))
    values = np.array(numpy_helper.to_array(tensor))
    flat = values.reshape(-1)
    if flat.size:
        place, kind = draw.randrange(flat.size), str(flat.dtype)
        value = draw.choice((0, 1, -1, 127, float("nan"), float("inf")) if "float" in kind else (0, 1, 3, 7))
        flat[place] = value if flat[place] != value else flat[place] + 1
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return f"a value of {tensor.name}"


def _place(model: Any, draw: random.Random) -> str:
    """A tensor that is in another file."""
    from onnx import TensorProto

    tensor = draw.choice([tensor for tensor in model.graph.initializer if tensor.raw_data])
    length, location = len(tensor.raw_data), draw.choice(("../../x", "/etc/passwd", "mrem.safetensors", ""))
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", str(length))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return f"{tensor.name} is in {location!r}"


def _node(model: Any, draw: random.Random) -> str:
    node = draw.choice(list(model.graph.node))
    how = draw.choice(("dropped", "kind", "domain", "input", "twice"))
    if how == "dropped":
        model.graph.node.remove(node)
    elif how == "kind":
        node.op_type = draw.choice(("Identity", "Add", "Relu", "Loop", "PyOp", "x" * 5000))
    elif how == "domain":
        node.domain = draw.choice(("com.microsoft", "evil.ops", "ai.onnx.contrib"))
    elif how == "input" and node.input:
        node.input[0] = draw.choice(("", "input_ids", "nowhere"))
    else:
        model.graph.node.append(node)
    return f"the node {node.name!r}: {how}"


def _attribute(model: Any, draw: random.Random) -> str:
    """What an operator of the CPU runtime is told: bits, scales, zero points, sizes, the format."""
    node = draw.choice([node for node in model.graph.node if node.domain and node.attribute])
    attribute = draw.choice(list(node.attribute))
    if draw.random() < 0.2:
        node.attribute.remove(attribute)
        return f"{node.op_type} has no {attribute.name}"
    if attribute.type == 1:
        attribute.f = draw.choice((0.0, -1.0, float("nan"), float("inf"), 1e-40, 1e38, attribute.f * 2))
    elif attribute.type == 2:
        attribute.i = draw.choice((0, -1, 1, 3, 7, 255, 2**31, -(2**63), attribute.i + 1))
    else:
        attribute.type, attribute.i = 2, 1
    return f"{node.op_type} has another {attribute.name}"


def _function(model: Any, draw: random.Random) -> str:
    """What stands for an operator of the CPU runtime where that is not installed."""
    function = draw.choice(list(model.functions))
    how = draw.choice(("dropped", "no node", "kind", "input", "overload", "output", "opset", "itself"))
    if how == "dropped":
        model.functions.remove(function)
    elif how == "no node":
        function.node.remove(draw.choice(list(function.node)))
    elif how == "kind":
        draw.choice(list(function.node)).op_type = draw.choice(("Identity", "Relu", "Loop", "x" * 5000))
    elif how == "input":
        node = draw.choice([node for node in function.node if node.input])
        node.input[0] = draw.choice(("", "nowhere", *function.input))
    elif how == "overload":
        function.overload = draw.choice(("x", "0", function.name))
    elif how == "output":
        function.output[0] = draw.choice(("nowhere", *function.input))
    elif how == "opset":
        del function.opset_import[:]
    else:
        node = draw.choice(list(function.node))
        node.op_type, node.domain = function.name, function.domain
    return f"the function {function.name}: {how}"


def _value(model: Any, draw: random.Random) -> str:
    """Inputs and outputs of the whole."""
    graph = model.graph
    how = draw.choice(("more inputs", "another name", "another type", "no output", "wider output", "inner"))
    name = graph.output[0].name
    if how == "more inputs":
        graph.input.add().CopyFrom(graph.input[0])
        graph.input[-1].name = "pixel_values"
    elif how == "another name":
        graph.output[0].name = draw.choice(("", "x" * 5000, "\u202e", graph.node[0].output[0]))
    elif how == "another type":
        draw.choice([*graph.input, *graph.output]).type.tensor_type.elem_type = draw.choice((1, 7, 8, 10))
    elif how == "no output":
        del graph.output[:]
    elif how == "wider output":
        graph.node.add(op_type="Concat", input=[name, name], output=["wider"])
        graph.node[-1].attribute.add(name="axis", type=2, i=draw.choice((0, -1)))
        graph.output[0].name = "wider"
    else:
        graph.output.add().CopyFrom(graph.output[0])
        graph.output[-1].name = draw.choice([node.output[0] for node in graph.node])
    return f"the graph has {how}"


def _about(model: Any, draw: random.Random) -> str:
    how = draw.choice(("opset", "version", "text", "metadata"))
    if how == "opset":
        model.opset_import[0].version = draw.choice((0, 1, 999, -1))
    elif how == "version":
        model.ir_version = draw.choice((0, 99, 2**62))
    elif how == "text":
        model.doc_string = draw.choice(("", "\u202e", "x" * 10**6)) + "x"
    else:
        entry = draw.choice(list(model.metadata_props))
        entry.value = draw.choice(("", "0" * 64, "x" * 10**5, "\x1b[1m"))
    return f"another {how}"
