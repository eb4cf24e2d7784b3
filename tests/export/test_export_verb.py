"""`mrem export`: the files it writes, from one trace, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
ir = pytest.importorskip("onnx_ir")

from exported import (  # noqa: E402
    CLASSIFIER,
    frozen_model,
    skeleton,
)

from mrem_deploy.base import cli  # noqa: E402
from mrem_deploy.export import PROFILES, __main__, export_all, export_onnx  # noqa: E402
from mrem_deploy.quant import artifact  # noqa: E402
from mrem_deploy.quant.frozen import FrozenModel  # noqa: E402
from mrem_deploy.quant.spec import QuantSpec  # noqa: E402


@pytest.fixture(scope="module")
def result_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("result")
    frozen_model("bert").save(folder)
    return folder


@pytest.mark.usefixtures("traces")
def test_the_verb_writes_the_profiles_file(result_folder: Path, tmp_path: Path, capsys: Any) -> None:
    assert (
        cli.run(__main__.main, [str(result_folder), "--profile", "int8", "--out", str(tmp_path / "a.onnx")])
        == 0
    )
    assert onnx.load(tmp_path / "a.onnx").producer_name == "mrem_deploy"
    assert "a.onnx" in capsys.readouterr().out
    assert cli.run(__main__.main, [str(result_folder)]) == 0
    assert (result_folder / "model.onnx").is_file()


def test_one_trace_serves_every_profile(tmp_path: Path, traces: list[FrozenModel]) -> None:
    frozen = frozen_model("bert", CLASSIFIER, QuantSpec(2, 2, 8))
    stored = skeleton("bert", CLASSIFIER)
    before = ir.to_proto(stored.model).SerializeToString()
    paths = export_all(frozen, tmp_path, tuple(PROFILES))
    assert len(traces) == 1
    names = [path.relative_to(tmp_path).as_posix() for path in paths]
    assert names == [profile.file_for({2}) for profile in PROFILES.values()]
    assert ir.to_proto(stored.model).SerializeToString() == before, "lowering works on a copy"


def test_a_shared_trace_writes_the_same_bytes_as_one_for_each_file(tmp_path: Path) -> None:
    frozen = frozen_model("bert", "question-answering", QuantSpec(4, 4, 8))
    names = ("int8", "ort-cpu")
    for path, name in zip(export_all(frozen, tmp_path, names), names, strict=True):
        alone = export_onnx(frozen, tmp_path / "alone.onnx", name)
        assert path.read_bytes() == alone.read_bytes(), name


def test_the_verb_writes_several_profiles(
    result_folder: Path, traces: list[FrozenModel], capsys: Any
) -> None:
    assert cli.run(__main__.main, [str(result_folder), "--profile", "int8, qdq,int8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        str(result_folder / PROFILES[name].file) for name in ("int8", "qdq")
    ]
    assert len(traces) == 1


def test_help_loads_neither_torch_nor_onnx() -> None:
    code = (
        "import sys; from mrem_deploy.export.__main__ import build_parser; build_parser().format_help(); "
        "print({'torch', 'onnx', 'onnx_ir', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def _truncate(folder: Path) -> None:
    path = folder / artifact.TENSORS
    path.write_bytes(path.read_bytes()[:-100])


def _newer(folder: Path) -> None:
    path = folder / artifact.MANIFEST
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 99'))


BAD = {
    "unknown profile": (lambda folder: None, ["--profile", "tpu"], "no export profile 'tpu'"),
    "one file for two profiles": (
        lambda folder: None,
        ["--profile", "qdq,int8", "--out", "a.onnx"],
        "--out names one file",
    ),
    "opset too old for the second": (
        lambda folder: None,
        ["--profile", "int8,qdq", "--opset", "18"],
        "profile qdq cannot be written at opset 18",
    ),
    "opset too old": (lambda folder: None, ["--opset", "13"], "cannot be written at opset 13"),
    "opset from the future": (lambda folder: None, ["--opset", "99"], "cannot be written at opset 99"),
    "truncated tensors": (_truncate, [], "cannot be read"),
    "newer format": (_newer, [], "version 99"),
    "not ours": (lambda folder: (folder / artifact.MANIFEST).unlink(), [], "is not a quantized model"),
}


@pytest.mark.parametrize(("damage", "more", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_leaves_no_file(
    damage: Any, more: list[str], message: str, tmp_path: Path, capsys: Any
) -> None:
    frozen_model("bert").save(tmp_path)
    damage(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert cli.run(__main__.main, [str(tmp_path), *more]) == cli.EXIT_USER_ERROR
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_attention_is_chosen_for_the_operators_that_have_it(result_folder: Path, capsys: Any) -> None:
    assert cli.run(__main__.main, [str(result_folder), "--profile", "int8", "--attention", "float"]) == 2
    assert "--profile mrem-cpu" in capsys.readouterr().err
