"""Profile web: the graph of ort-cpu under the names of transformers.js, alone or in a folder of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
ir = pytest.importorskip("onnx_ir")

from exported import CLASSIFIER, frozen_model, skeleton  # noqa: E402
from tiny_bert import save_tiny_bert  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from mrem_deploy.base import cli  # noqa: E402
from mrem_deploy.base.errors import UserError  # noqa: E402
from mrem_deploy.export import __main__, export_all, transformers_js, write  # noqa: E402
from mrem_deploy.export.profiles import PROFILES, name_in_result  # noqa: E402
from mrem_deploy.quant.frozen import FrozenModel  # noqa: E402
from mrem_deploy.quant.spec import QuantSpec  # noqa: E402
from mrem_deploy.result import Result  # noqa: E402
from mrem_deploy.result.verification import verify  # noqa: E402

WEB = PROFILES["web"]


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


@pytest.mark.parametrize("bits", [QuantSpec(2, 2, 8), QuantSpec(8, 8, 8)])
def test_what_runs_is_what_ort_cpu_runs(bits: QuantSpec) -> None:
    """So every test of ort-cpu's numbers holds for this profile as well."""
    frozen = frozen_model("bert", CLASSIFIER, bits)
    graphs = []
    for name in ("ort-cpu", "web"):
        model = write.compact_proto(write.lowered(frozen, name, skeleton=skeleton("bert", CLASSIFIER)))
        assert {entry.key: entry.value for entry in model.metadata_props}["profile"] == name
        graphs.append(model.graph.SerializeToString())
    assert graphs[0] == graphs[1]


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
    assert config == json.loads((result / "config.json").read_text())
    assert (out / "tokenizer.json").read_bytes() == (result / "tokenizer.json").read_bytes()
    told = json.loads((out / "mrem-web.json").read_text())
    assert told["result_digest"] == FrozenModel.read(result).digest
    ort.InferenceSession(out / "onnx" / "model_q4.onnx")


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
