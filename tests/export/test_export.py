"""Exported graphs against the torch model: integers of the quantizers, outputs, types, sizes, bad input."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
ir = pytest.importorskip("onnx_ir")

from exported import (  # noqa: E402
    BITS,
    CLASSIFIER,
    CLOSE,
    frozen_model,
    run,
    session,
    skeleton,
    to_onnx,
    torch_codes,
    torch_outputs,
    with_codes,
)
from quant_specs import SPECS  # noqa: E402
from tiny_models import ENCODERS, POSITION_POINTS, TRACED, tiny_batch, tiny_encoded  # noqa: E402

from mrem_deploy.export import PROFILES, export_onnx, write  # noqa: E402
from mrem_deploy.export.origin import Origin, origin_of  # noqa: E402
from mrem_deploy.quant.frozen import FrozenModel  # noqa: E402
from mrem_deploy.quant.spec import QuantSpec  # noqa: E402

# `web` has the integers of `ort-cpu` in other bytes (test_web_profile.py compares them), `mrem-cpu` the graph
# of functions that are compared with it (test_mrem_cpu.py).
FORMS = tuple(name for name in PROFILES if name not in ("web", "mrem-cpu"))


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        *((kind, bits) for kind in ENCODERS for bits in BITS),
        *((kind, bits) for kind in TRACED if kind not in ENCODERS for bits in ("4-4-8", "2-2-8 midrise")),
    ],
)
@pytest.mark.parametrize("profile", FORMS)
def test_integers_and_outputs_are_those_of_torch(profile: str, kind: str, bits: str) -> None:
    frozen = frozen_model(kind, None, dataclasses.replace(BITS[bits], per_channel=True))
    batch = tiny_encoded(kind, count=32).batch(np.arange(32))  # enough integers for a share to mean something
    model = to_onnx(frozen, profile)
    onnx.checker.check_model(model, full_check=True)
    # INT8 products saturate where the processor has no VNNI: TensorRT's form is run as written.
    exact = not PROFILES[profile].zero_points
    asked, names = with_codes(model, frozen)
    came, expected = run(asked, batch, exact), torch_codes(frozen, batch)
    # Positions do not depend on the text: their integers are stored (see test_export_disentangled.py).
    in_graph = {step for step in frozen.scales if not step.endswith(POSITION_POINTS)}
    assert set(names) == in_graph, "every quantizer stands in the graph"
    first = [step for step in names if ".0." in step]
    assert len(first) >= 6
    # The pooler's input has an axis more in the graph than in torch.
    signed = {
        step: _signed(came[names[step]], frozen, step, profile).reshape(expected[step].shape)
        for step in names
    }
    off = np.concatenate([np.abs(signed[step] - expected[step]).ravel() for step in first])
    assert off.max() <= 1
    assert np.mean(off == 0) >= 0.999
    # Deeper, a tie that fell on the other side changes all that follows; without one nothing differs.
    same = all(np.array_equal(signed[step], expected[step]) for step in names)
    everywhere = np.concatenate([(signed[step] == expected[step]).ravel() for step in names])
    assert np.mean(everywhere) >= 0.97
    for name, reference in zip(_outputs(model), torch_outputs(frozen, batch), strict=True):
        np.testing.assert_allclose(came[name], reference, **(CLOSE if same else {"atol": 0.1}))


def _outputs(model: Any) -> list[str]:
    return [output.name for output in model.graph.output]


def _signed(codes: np.ndarray, frozen: FrozenModel, step: str, profile: str) -> np.ndarray:
    grid = frozen.scales[step].grid
    if PROFILES[profile].zero_points:
        return codes.astype(np.int64) - (128 if grid.signed else 0)
    return codes.astype(np.int64) + (0 if grid.signed else 2 ** (grid.bits - 1))


def weights_in(model: Any) -> dict[str, np.ndarray]:
    """The integers of every quantized weight, after the operators that onnxruntime folds when it loads."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    ending = ".weight.codes"
    found = {
        i.name: onnx.numpy_helper.to_array(i).astype(np.int8)
        for i in model.graph.initializer
        if i.name.endswith(ending) and i.data_type != onnx.TensorProto.INT2
    }
    made = [name for node in model.graph.node for name in node.output if name.endswith(f"{ending}.int8")]
    for name in made:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT8, None))
    came = run(model, tiny_batch("bert"), exact=True)
    found |= {name.removesuffix(".int8"): came[name] for name in made}
    return {name.removesuffix(ending): codes for name, codes in found.items()}


@pytest.mark.parametrize(
    ("profile", "opset"),
    [*((name, None) for name in FORMS), *((name, 24) for name in ("ort-cpu", "int8")), ("qdq", 25)],
)
def test_every_weight_has_the_codes_of_torch(profile: str, opset: int | None, tmp_path: Path) -> None:
    """Three grids in one model, saved and read again. INT2 cannot hold a 3: opset 25 has it, 24 has not."""
    first, second = (f"bert.encoder.layer.{i}.attention.self" for i in (0, 1))
    spec = QuantSpec(
        2, 2, 8, per_channel=True, weight_quantizer="midrise", layer_bits=((f"{first}.query", 4),)
    )
    frozen = frozen_model("bert", CLASSIFIER, spec)
    # k and v keep the other grid: without q they are one matrix.
    ternary = frozen_model("bert", CLASSIFIER, dataclasses.replace(spec, weight_quantizer="twn"))
    weights = frozen.weights | {f"{second}.query": ternary.weights[f"{second}.query"]}
    dataclasses.replace(frozen, weights=weights).save(tmp_path)
    read, batch = FrozenModel.read(tmp_path), tiny_batch("bert")
    model = write.compact_proto(write.lowered(read, profile, opset, skeleton("bert", CLASSIFIER)))
    onnx.checker.check_model(model, full_check=True)
    seen = set[str]()
    for name, codes in weights_in(model).items():
        owner, parts = name.removesuffix(".qkv"), ("query", "key", "value")
        merged = parts[1:] if owner in (first, second) else parts
        layers = [name] if owner == name else [f"{owner}.{part}" for part in merged]
        expected = np.concatenate([weights[layer].codes.numpy() for layer in layers])
        assert np.array_equal(codes, expected if "embeddings" in name else expected.T), name
        seen.update(layers)
    # At opset 25 qdq has the ternary weight in INT2, which numpy cannot read.
    assert seen == set(weights) - ({f"{second}.query"} if (profile, opset) == ("qdq", 25) else set())
    exact = profile == "tensorrt" or (profile, opset) == ("qdq", 25)
    came = run(model, batch, exact)["logits"]
    np.testing.assert_allclose(came, torch_outputs(read, batch)[0], **CLOSE)


@pytest.mark.parametrize("head", ["token-classification", "question-answering", "feature-extraction"])
def test_every_head_has_hugging_faces_names(head: str) -> None:
    frozen, batch = frozen_model("bert", head, QuantSpec(2, 2, 8)), tiny_batch("bert")
    came = run(to_onnx(frozen), batch)
    expected = {
        "token-classification": ["logits"],
        "question-answering": ["start_logits", "end_logits"],
        "feature-extraction": ["last_hidden_state"],
    }
    assert list(came) == expected[head]
    for output, reference in zip(came.values(), torch_outputs(frozen, batch), strict=True):
        np.testing.assert_allclose(output, reference, **CLOSE)


@pytest.mark.parametrize("profile", ["ort-cpu", "tensorrt"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_every_way_of_quantizing_exports(spec: QuantSpec, profile: str) -> None:
    frozen, batch = frozen_model("bert", CLASSIFIER, spec), tiny_batch("bert")
    came = run(to_onnx(frozen, profile), batch, exact=profile == "tensorrt")
    np.testing.assert_allclose(came["logits"], torch_outputs(frozen, batch)[0], **CLOSE)


@pytest.mark.parametrize("kind", ["bert", "modernbert", "mpnet"])
def test_batch_and_padding_do_not_change_an_answer(kind: str) -> None:
    opened = session(to_onnx(frozen_model(kind, None, QuantSpec(2, 2, 8))))
    batch = {name: value.numpy() for name, value in tiny_batch(kind).items()}
    feed = {entry.name: batch[entry.name] for entry in opened.get_inputs()}
    together = opened.run(None, feed)[0]
    padded = {name: np.pad(value, ((0, 0), (0, 5))) for name, value in feed.items()}
    padded["input_ids"][:, -5:] = frozen_model(kind).config.pad_token_id or 0
    np.testing.assert_allclose(opened.run(None, padded)[0], together, **CLOSE)
    for row, length in enumerate(batch["attention_mask"].sum(axis=1)):
        alone = {name: value[row : row + 1, :length] for name, value in feed.items()}
        np.testing.assert_allclose(opened.run(None, alone)[0], together[row : row + 1], **CLOSE)


@pytest.mark.parametrize("profile", ["ort-cpu", "mrem-cpu"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_neither_batch_nor_the_side_of_the_padding_change_a_hidden_state(kind: str, profile: str) -> None:
    """Tokenizers of these models pad on the left, this package pads on the right."""
    opened = session(to_onnx(frozen_model(kind, None, QuantSpec(2, 2, 8)), profile))
    ids, mask = (tiny_batch(kind)[name].numpy() for name in ("input_ids", "attention_mask"))
    (together,) = opened.run(None, {"input_ids": ids, "attention_mask": mask})
    lengths = mask.sum(axis=1)
    left = {"input_ids": np.zeros_like(ids), "attention_mask": np.zeros_like(mask)}
    for row, length in enumerate(lengths):
        left["input_ids"][row, -length:] = ids[row, :length]
        left["attention_mask"][row, -length:] = 1
    (padded_left,) = opened.run(None, left)
    for row, length in enumerate(lengths):
        alone = {"input_ids": ids[row : row + 1, :length], "attention_mask": mask[row : row + 1, :length]}
        (expected,) = opened.run(None, alone)
        np.testing.assert_allclose(together[row, :length], expected[0], **CLOSE)
        np.testing.assert_allclose(padded_left[row, -length:], expected[0], **CLOSE)


# -- what stands in the file ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "bits", "opset", "ir_version", "carrier"),
    [
        ("ort-cpu", "4-4-8", 21, 10, "INT4"),
        ("ort-cpu", "2-2-8", 25, 13, "INT2"),
        ("ort-cpu", "8-8-8", 21, 10, "UINT8"),
        ("qdq", "4-4-8", 21, 10, "INT4"),
        ("qdq", "2-2-8", 21, 10, "INT4"),
        ("ort-cpu", "2-2-8 midrise", 25, 13, "INT2"),
        ("qdq", "2-2-8 midrise", 21, 10, "INT4"),
        ("int8", "2-2-8 midrise", 18, 8, "INT8"),
        ("int8", "2-2-8", 18, 8, "INT8"),
        ("int8", "8-8-8", 18, 8, "UINT8"),
        ("tensorrt", "8-8-8", 18, 8, "INT8"),
    ],
)
def test_types_of_a_profile(profile: str, bits: str, opset: int, ir_version: int, carrier: str) -> None:
    frozen = frozen_model("bert", CLASSIFIER, BITS[bits])
    model = to_onnx(frozen, profile)
    assert model.ir_version == ir_version
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == opset
    matrices = [i for i in model.graph.initializer if i.name.endswith("dense.weight.codes")]
    assert len(matrices) == 3 * 3 + 1  # three in each block, and the pooler
    assert {onnx.TensorProto.DataType.Name(i.data_type) for i in matrices} == {carrier}
    width = {"INT2": 2, "INT4": 4}.get(carrier, 8)
    for matrix in matrices:
        assert len(matrix.raw_data) == -(-int(np.prod(matrix.dims)) * width // 8)
    floats = [
        i for i in model.graph.initializer if i.data_type == onnx.TensorProto.FLOAT and len(i.dims) == 2
    ]
    names = {i.name for i in floats if not i.name.endswith((".scale", ".bias"))}
    assert not any("dense" in name or "query" in name or "word" in name for name in names)
    domains = {node.domain for node in model.graph.node}
    assert domains == ({"", "com.microsoft"} if profile == "ort-cpu" else {""})


def optimized_by_onnxruntime(model: Any, path: Path) -> Any:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 3
    ort.InferenceSession(model.SerializeToString(), options)
    return onnx.load(path)


@pytest.mark.parametrize("bits", ["4-4-8", "2-2-8", "2-2-8 midrise"])
def test_the_default_profile_multiplies_integers_only(bits: str, tmp_path: Path) -> None:
    frozen = frozen_model("bert", CLASSIFIER, BITS[bits])
    optimized = optimized_by_onnxruntime(to_onnx(frozen), tmp_path / "optimized.onnx")
    kinds = Counter(node.op_type for node in optimized.graph.node)
    # qkv, two products of attention, and three dense layers in each block; the pooler.
    assert kinds["MatMulIntegerToFloat"] == 3 * (1 + 2 + 3) + 1
    assert kinds["MatMul"] == kinds["DequantizeLinear"] == kinds["FusedMatMul"] == 0
    assert kinds["Gemm"] == 1, "only the head stays in float"
    stored = {i.name: i.data_type for i in optimized.graph.initializer if i.name.endswith("codes.int8")}
    assert set(stored.values()) == {onnx.TensorProto.INT8}, "what follows a packed weight is folded"
    # qkv, three dense layers in each block, the pooler; and the embedding's table.
    assert len(stored) == 3 * (1 + 3) + 1 + 1
    assert not any(i.data_type == onnx.TensorProto.INT2 for i in optimized.graph.initializer)


def test_midrise_runs_the_operators_of_ternary_weights(tmp_path: Path) -> None:
    """For linears and for the embedding, with and without quantized activations."""
    for activations in (8, 32):
        kinds = []
        for quantizer in ("twn", "midrise"):
            frozen = frozen_model(
                "bert", CLASSIFIER, QuantSpec(2, 2, activations, weight_quantizer=quantizer)
            )
            optimized = optimized_by_onnxruntime(to_onnx(frozen), tmp_path / f"{quantizer}.onnx")
            kinds.append(Counter(node.op_type for node in optimized.graph.node))
        assert kinds[0] == kinds[1]


@pytest.mark.parametrize("profile", ["ort-cpu", "qdq", "int8"])
def test_codes_over_the_whole_range_do_not_saturate(profile: str) -> None:
    """16-bit sums of INT8 products overflow on processors without VNNI; these profiles avoid them."""
    frozen = frozen_model("bert", CLASSIFIER, QuantSpec(8, 8, 8))
    extreme = {
        name: dataclasses.replace(
            weight, codes=weight.codes.sign().mul(127).to(torch.int8), scale=weight.scale / 40
        )
        for name, weight in frozen.weights.items()
    }
    changed, batch = dataclasses.replace(frozen, weights=extreme), tiny_batch("bert")
    expected = torch_outputs(changed, batch)[0]
    np.testing.assert_allclose(run(to_onnx(changed, profile), batch)["logits"], expected, **CLOSE)


def test_metadata_names_the_recipe() -> None:
    frozen = dataclasses.replace(frozen_model("bert"), notes={"recipe_digest": "abc", "bits": "4-4-8"})
    properties = {entry.key: entry.value for entry in to_onnx(frozen, "qdq").metadata_props}
    assert properties["recipe_digest"] == "abc"
    assert properties["bits"] == "4-4-8"
    assert properties["profile"] == "qdq"
    assert properties["version"]


@pytest.mark.usefixtures("traces")
@pytest.mark.parametrize("largest", [write.LARGEST_FILE, 1000])  # also with its tensors in a separate file
def test_a_file_names_its_result_and_notices_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    frozen, path = frozen_model("bert"), tmp_path / "model.onnx"
    monkeypatch.setattr(write, "LARGEST_FILE", largest)
    export_onnx(frozen, path)
    entries = {entry.key: entry.value for entry in onnx.load(path, load_external_data=False).metadata_props}
    assert entries["result_digest"] == frozen.digest
    assert origin_of(path) == Origin(frozen.digest, changed=False)
    flip(path)
    assert origin_of(path).changed


@pytest.mark.usefixtures("traces")
def test_the_digest_does_not_cover_tensors_in_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "LARGEST_FILE", 1000)
    path = export_onnx(frozen_model("bert"), tmp_path / "model.onnx")
    (data,) = tmp_path.glob("*.data")
    flip(data)
    assert origin_of(path).changed is False


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.usefixtures("traces")
@pytest.mark.parametrize("profile", PROFILES)
def test_a_file_of_every_profile_has_its_digests(tmp_path: Path, profile: str) -> None:
    frozen = frozen_model("bert")
    path = export_onnx(frozen, tmp_path / "model.onnx", profile)
    assert origin_of(path) == Origin(frozen.digest, changed=False)
    flip(path)
    assert origin_of(path).changed


@pytest.mark.usefixtures("traces")
def test_large_models_put_their_tensors_beside_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, batch, path = frozen_model("bert"), tiny_batch("bert"), tmp_path / "model.onnx"
    monkeypatch.setattr(write, "LARGEST_FILE", 1000)
    for _ in range(2):  # the second time it replaces the first
        export_onnx(frozen, path)
        assert len(list(tmp_path.iterdir())) == 2
    options = ort.SessionOptions()
    opened = ort.InferenceSession(path, options)
    came = opened.run(None, {entry.name: batch[entry.name].numpy() for entry in opened.get_inputs()})[0]
    np.testing.assert_allclose(came, torch_outputs(frozen, batch)[0], **CLOSE)
    monkeypatch.undo()
