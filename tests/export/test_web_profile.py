"""Profile web: the integers of ort-cpu in plain bytes, under the names of transformers.js."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
ir = pytest.importorskip("onnx_ir")

from a_result import front_matter, metrics  # noqa: E402
from exported import BITS, CLASSIFIER, frozen_model, run, to_onnx  # noqa: E402
from tiny_bert import save_tiny_bert  # noqa: E402
from tiny_models import tiny_batch  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from mrem_deploy.base import cli  # noqa: E402
from mrem_deploy.base.errors import UserError  # noqa: E402
from mrem_deploy.export import __main__, bit_fields, export_all, transformers_js  # noqa: E402
from mrem_deploy.export.builder import Builder  # noqa: E402
from mrem_deploy.export.profiles import PROFILES, name_in_result  # noqa: E402
from mrem_deploy.models import packed  # noqa: E402
from mrem_deploy.quant.frozen import FrozenModel, FrozenWeight  # noqa: E402
from mrem_deploy.quant.spec import QuantSpec  # noqa: E402
from mrem_deploy.result import Result  # noqa: E402
from mrem_deploy.result.verification import verify  # noqa: E402

WEB = PROFILES["web"]
SPARE = QuantSpec(3, 4, 8)


@pytest.fixture
def result(tmp_path: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_bert(tmp_path / "source"))
    shutil.rmtree(tmp_path / "source")
    return frozen_model("bert").save(tmp_path / "result", tokenizer)


@pytest.mark.parametrize(
    ("bits", "name", "dtype"),
    [
        ({2}, "model_q2", "q2"),
        ({2, 4}, "model_q4", "q4"),
        ({3}, "model_q4", "q4"),
        ({4}, "model_q4", "q4"),
        ({4, 8}, "model_quantized", "q8"),
        ({8}, "model_quantized", "q8"),
        (set(), "model_quantized", "q8"),
    ],
)
def test_the_widest_weight_names_the_file(bits: set[int], name: str, dtype: str) -> None:
    assert WEB.file_for(bits) == f"onnx/{name}.onnx"
    assert transformers_js.dtype_of(WEB.file_for(bits)) == dtype


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        *((k, bits) for k in ("bert", "modernbert") for bits in (*BITS.values(), SPARE, QuantSpec(2, 2, 32))),
        *((kind, SPARE) for kind in ("gemma3_text", "t5")),
    ],
)
def test_its_outputs_are_those_of_ort_cpu_bit_for_bit(kind: str, bits: QuantSpec) -> None:
    """The same integers and scales, so every test of ort-cpu's numbers holds for this profile as well."""
    frozen = frozen_model(kind, None, dataclasses.replace(bits, per_channel=True))
    batch = tiny_batch(kind)
    models = {name: to_onnx(frozen, name) for name in ("ort-cpu", "web")}
    came = {name: next(iter(run(model, batch).values())) for name, model in models.items()}
    assert np.array_equal(came["ort-cpu"], came["web"])
    assert np.ptp(came["web"]) > 0


@pytest.mark.parametrize("bits", BITS)
def test_it_needs_no_type_that_a_browser_lacks(bits: str) -> None:
    model = to_onnx(frozen_model("bert", CLASSIFIER, BITS[bits]), "web")
    onnx.checker.check_model(model, full_check=True)
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == 21
    kinds = {onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in model.graph.initializer}
    assert kinds <= {"FLOAT", "INT64", "UINT8", "UINT16", "INT8", "INT32"}
    packed = [tensor for tensor in model.graph.initializer if tensor.name.endswith(".bytes")]
    layers = frozen_model("bert", CLASSIFIER, BITS[bits]).weights
    if bits == "8-8-8":
        assert packed == []
        return
    width = 2 if bits.startswith("2") else 4
    codes = sum(weight.codes.numel() for weight in layers.values())
    assert sum(len(tensor.raw_data) for tensor in packed) == codes * width // 8


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize(("bits", "spacing"), [(2, 1), (2, 2), (3, 1), (4, 1)])
def test_bytes_become_the_codes_again(bits: int, spacing: int, columns: int) -> None:
    grid = np.array([-3, -1, 1, 3]) if spacing == 2 else np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1))
    codes = np.random.default_rng(columns).choice(grid, size=(len(grid), columns)).astype(np.int8)
    codes[:, 0] = grid
    weight = FrozenWeight(torch.from_numpy(codes), torch.tensor(1.0), bits, spacing)
    a = ir.Value(name="a", type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape([None, None]))
    graph = ir.Graph([a], [], nodes=[], opset_imports={"": 21}, name="fields")
    graph.append(ir.Node("", "Identity", [a], outputs=[ir.Value(name="end")]))
    build = Builder(graph)
    build.anchor = graph[0]
    unpacked = bit_fields.unpack(build, a, columns, weight, "w")
    unpacked.type = ir.TensorType(ir.DataType.UINT8)
    graph.outputs.append(unpacked)
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    (came,) = ort.InferenceSession(model.SerializeToString()).run(
        None, {"a": bit_fields.pack_rows(codes, weight)}
    )
    assert np.array_equal(came.astype(np.int64) - bit_fields.middle(weight), codes)


@pytest.mark.usefixtures("traces")
def test_into_the_result(result: Path, capsys: Any) -> None:
    assert cli.run(__main__.main, [str(result), "--profile", "web"]) == 0
    path = result / "onnx" / "model_q4.onnx"
    assert str(path) in capsys.readouterr().out
    assert path == Result(result).onnx("web") == WEB.path_in(result)
    assert name_in_result(path) == "onnx/model_q4.onnx"
    check = next(check for check in verify(result) if check.what == "onnx/model_q4.onnx")
    assert check.findings == ()
    path.write_bytes(path.read_bytes()[:-1])
    assert any("onnx/model_q4.onnx" in finding for check in verify(result) for finding in check.findings)


def test_verify_follows_no_link_to_another_folder(result: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model_q4.onnx").write_bytes(b"")
    (result / "onnx").symlink_to(tmp_path / "elsewhere")
    findings = [finding for check in verify(result) for finding in check.findings]
    assert any("leads out of its folder" in finding for finding in findings)


@pytest.mark.usefixtures("traces")
def test_a_folder_for_transformers_js(result: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "models" / "mine"
    for _ in range(2):  # the second replaces the first
        assert cli.run(__main__.main, [str(result), "--profile", "web", "--out", str(out)]) == 0
    assert str(out / "onnx" / "model_q4.onnx") in capsys.readouterr().out
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    needed = {"onnx/model_q4.onnx", "config.json", "tokenizer.json", "tokenizer_config.json", "mrem-web.json"}
    assert needed <= files <= needed | {"special_tokens_map.json"}
    config = json.loads((out / "config.json").read_text())
    assert config.pop("transformers.js_config") == {"dtype": "q4"}
    assert config == packed.without_keys(json.loads((result / "config.json").read_text()))
    assert (out / "tokenizer.json").read_bytes() == (result / "tokenizer.json").read_bytes()
    told = json.loads((out / "mrem-web.json").read_text())
    assert told["result_digest"] == FrozenModel.read(result).digest
    ort.InferenceSession(out / "onnx" / "model_q4.onnx")


@pytest.mark.usefixtures("traces")
def test_the_card_of_a_folder_for_transformers_js(result: Path, tmp_path: Path) -> None:
    metrics(task="retrieval", base_model="someone/embedder").write(result)
    (result / "modules.json").write_text("[]")  # belongs to the result; the folder does not get it
    assert cli.run(__main__.main, [str(result), "--profile", "web", "--out", str(tmp_path / "mine")]) == 0
    front = front_matter(tmp_path / "mine")
    assert (front["library_name"], front["base_model"]) == ("transformers.js", "someone/embedder")
    assert front["base_model_relation"] == "quantized"
    assert {"onnx", "transformers.js", "4-4-8"} <= set(front["tags"])
    assert "sentence-transformers" not in front["tags"]
    (index,) = front["model-index"]
    assert index["results"][0]["metrics"] == [{"type": "accuracy", "name": "Accuracy", "value": 90.0}]
    text = (tmp_path / "mine" / "README.md").read_text(encoding="utf-8")
    assert 'pipeline("feature-extraction", "path/to/this/folder", { device: "wasm" })' in text
    assert "dtype `q4`" in text
    assert "somebody" not in text


def test_somebody_elses_folder_stays(result: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter-1.tex").write_text("years of work")
    assert cli.run(__main__.main, [str(result), "--profile", "web", "--out", str(out)]) == 2
    assert "were not written by this command" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["chapter-1.tex"]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_javascript_cannot_read(result: Path, tmp_path: Path, name: str) -> None:
    (result / name).unlink()
    with pytest.raises(UserError, match=f"has no {name}"):
        transformers_js.write_layout(frozen_model("bert"), result, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result"]


@pytest.mark.usefixtures("traces")
def test_a_full_disk_leaves_nothing(result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers_js.shutil, "copyfile", full)
    with pytest.raises(UserError, match="no space left"):
        transformers_js.write_layout(frozen_model("bert"), result, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result"]


@pytest.mark.usefixtures("traces")
def test_two_profiles_at_once(tmp_path: Path) -> None:
    frozen = frozen_model("bert", CLASSIFIER, QuantSpec(2, 2, 8))
    paths = export_all(frozen, tmp_path, ("web", "ort-cpu"))
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == ["onnx/model_q2.onnx", "model.onnx"]
