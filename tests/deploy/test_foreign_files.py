"""ONNX files that onnxruntime loads but no export of ours wrote: `mrem validate` says what does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tiny_job import job_in, workshop_in

from mrem_deploy import __main__

FILE = "model.onnx"
Edit = Callable[[Any], None]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop_in(tmp_path_factory.mktemp("workshop")) as root:
        assert job_in(root, "result", method="ptq", export="ort-cpu").run() == 0
        yield root / "result"


@pytest.fixture
def result(original: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(original, tmp_path / "result"))
    (folder / "validation.json").unlink()
    return folder


def another_input(model: Any) -> None:
    model.graph.input.append(onnx.helper.make_tensor_value_info("pixel_values", onnx.TensorProto.FLOAT, [1]))


def other_names(model: Any) -> None:
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name == "input_ids":
                node.input[place] = "tokens"
    next(entry for entry in model.graph.input if entry.name == "input_ids").name = "tokens"


def another_output(operation: str, more: Any = None, **attributes: Any) -> Edit:
    """What was the output goes through one more operation. more: its second input."""

    def edit(model: Any) -> None:
        graph = model.graph
        inputs = [graph.output[0].name]
        if more is not None:
            graph.initializer.append(onnx.numpy_helper.from_array(np.array(more), "more"))
            inputs.append("more")
        graph.node.append(onnx.helper.make_node(operation, inputs, ["other"], **attributes))
        kind = attributes.get("to", onnx.TensorProto.FLOAT)
        del graph.output[:]
        graph.output.append(onnx.helper.make_tensor_value_info("other", kind, None))

    return edit


def other_layers(model: Any) -> None:
    """The name of a layer's output belongs to something else, of another shape."""
    last = model.graph.output[0].name
    for node in model.graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == "hidden.1":
                    names[place] = "hidden"
    model.graph.node.append(onnx.helper.make_node("Identity", [last], ["hidden.1"]))


FOREIGN: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "one more input": (another_input, ("'pixel_values'", "no tokenizer gives", "mrem export wrote")),
    "other names": (other_names, ("'tokens'", "no tokenizer gives", "input_ids")),
    "one row for all examples": (
        another_output("ReduceMean", [0], keepdims=1),
        ("float32 [1, 2]", "no floats for each example or token", "mrem export wrote"),
    ),
    "one number": (another_output("ReduceSum", [0, 1], keepdims=0), ("float32 []", "no floats for each")),
    "whole numbers": (another_output("Cast", to=onnx.TensorProto.INT64), ("int64", "no floats for each")),
    "words": (another_output("Cast", to=onnx.TensorProto.STRING), ("no floats for each",)),
    "more classes": (
        another_output("Tile", [1, 3]),
        ("gives 6 numbers for an example", "gives 2", "export it again"),
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_does_not_fit_is_said(kind: str, result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit, told = FOREIGN[kind]
    rewrite(result, edit)
    assert __main__.main(["validate", str(result)]) == 2
    message = capsys.readouterr().err
    assert message.count("error:") == 1
    for part in told:
        assert part in message
    assert not (result / "validation.json").exists()


def test_a_layer_of_another_shape_is_left_out(result: Path) -> None:
    """The file has no digests either, and that is said."""
    rewrite(result, other_layers)
    assert __main__.main(["validate", str(result), "--max-drop", "100"]) == 0
    found = json.loads((result / "validation.json").read_text())
    assert list(found["onnx"]["layer_errors"]) == ["embeddings", "block 2", "output"]
    assert any("carries no SHA-256" in remark for remark in found["remarks"])


def rewrite(result: Path, edit: Edit) -> None:
    model = onnx.load(result / FILE)
    edit(model)
    kept = [entry for entry in model.metadata_props if not entry.key.endswith(("result_digest", "sha256"))]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    onnx.save(model, result / FILE)
