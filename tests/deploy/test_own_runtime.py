"""A run, its validation and its use with the CPU runtime, and where that is missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("mrem_runtime", reason="mrem_runtime is not installed: make setup")

from tiny_job import job_in, workshop_in

from mrem_deploy import __main__, doctor, open_result
from mrem_deploy.base.errors import UserError
from mrem_deploy.deploy import own_runtime, runtime, validation
from mrem_deploy.deploy.census import RUNTIME_PRODUCTS
from mrem_deploy.report.summary import next_to_words, terminal_summary

MREM, PLAIN = "model_mrem.onnx", "model.onnx"
MISSING = "mrem-runtime is not installed"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop_in(tmp_path_factory.mktemp("runtime")) as root:
        assert job_in(root, "result", method="ptq", bits="2-2-8", export="auto").run() == 0
        yield root


@pytest.fixture
def result(workshop: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(workshop / "result", tmp_path / "result"))


def validated(result: Path) -> dict[str, Any]:
    assert __main__.main(["validate", str(result), "--profile", "mrem-cpu", "--max-drop", "100"]) == 0
    return dict(json.loads((result / "validation.json").read_text()))


def test_a_run_exports_for_it_besides(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = json.loads((result / "metrics.json").read_text())
    assert metrics["onnx"]["file"] == PLAIN
    assert (metrics["runtime"]["file"], metrics["runtime"]["profile"]) == (MREM, "mrem-cpu")
    assert metrics["runtime"]["size_mb"] == (result / MREM).stat().st_size / 2**20
    found = metrics["runtime"]["next_to"]
    assert (found["runtime"], found["agreement"]) == (own_runtime.describe(), 100.0)
    assert found["examples"] == metrics["accuracy"]["splits"]["dev"]["examples"]
    assert found["metric"] == found["onnx_metric"] == metrics["onnx"]["metric"]
    read = open_result(result).metrics
    assert read.to_dict()["runtime"] == metrics["runtime"]
    words = next_to_words(read.runtime.next_to, "accuracy")
    assert words in terminal_summary(read, result)
    assert words in (result / "README.md").read_text()
    assert own_runtime.describe() in (result / "report.html").read_text()
    assert __main__.main(["verify", str(result)]) == 0
    data = bytearray((result / MREM).read_bytes())
    data[len(data) // 2] ^= 1
    (result / MREM).write_bytes(data)
    assert __main__.main(["verify", str(result)]) == 1
    (result / MREM).unlink()
    assert __main__.main(["verify", str(result)]) == 1
    told = capsys.readouterr().out
    assert f"{MREM} has changed since it was exported" in told
    assert f"{MREM} is missing" in told


def test_predictions_of_its_operators_are_counted_and_noted(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The comparison that a run reports sees operators that compute something else."""
    right = validation.onnx_predictor

    def wrong(session: Any) -> Any:
        predict = right(session)
        return (lambda batch: [-value for value in predict(batch)]) if is_fused(session) else predict

    monkeypatch.setattr(validation, "onnx_predictor", wrong)
    job = job_in(workshop, "wrong", method="ptq", bits="2-2-8", export="auto")
    assert job.run() == 0
    found = json.loads((workshop / "wrong" / "metrics.json").read_text())["runtime"]["next_to"]
    assert found["agreement"] < 50
    assert found["metric"] != found["onnx_metric"]
    assert f"get the same prediction from {MREM}" in "".join(capsys.readouterr())


def is_fused(session: Any) -> bool:
    return Path(session._model_path).name == MREM


def test_the_file_may_be_the_only_one(workshop: Path) -> None:
    """Then it is validated with its operators, and also without."""
    assert job_in(workshop, "only", method="ptq", bits="2-2-8", export="mrem-cpu").run() == 0
    metrics = json.loads((workshop / "only" / "metrics.json").read_text())
    assert (metrics["onnx"]["file"], "runtime" in metrics) == (MREM, False)
    found = json.loads((workshop / "only" / "validation.json").read_text())["onnx"]
    assert set(found["nodes"]["integer"]) == set(RUNTIME_PRODUCTS)
    (agreed,) = found["both_ways"]["agreement"].values()
    assert min(agreed.values()) == 100.0


def test_without_the_library_a_run_says_so(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own_runtime, "problem", lambda: MISSING)
    assert job_in(workshop, "lacks", method="ptq", bits="2-2-8", export="ort-cpu,mrem-cpu").run() == 0
    metrics = json.loads((workshop / "lacks" / "metrics.json").read_text())
    assert "next_to" not in metrics["runtime"]
    assert f"{MREM} was not run: {MISSING}" in "".join(capsys.readouterr())
    assert "mrem validate" in terminal_summary(open_result(workshop / "lacks").metrics, workshop / "lacks")


def test_validation_runs_both_ways(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = validated(result)["onnx"]
    both = found["both_ways"]
    assert both["runtime"] == own_runtime.describe()
    (scores,), (agreed,) = both["scores_without"].values(), both["agreement"].values()
    assert scores["accuracy"] == json.loads((result / "metrics.json").read_text())["onnx"]["metric"]
    assert min(agreed.values()) == 100.0
    assert set(found["nodes"]["integer"]) == set(RUNTIME_PRODUCTS)
    assert f"{own_runtime.describe()}; without it, dev: accuracy" in capsys.readouterr().out


def test_without_the_library_validation_says_so(result: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_runtime, "problem", lambda: MISSING)
    found = validated(result)
    assert "both_ways" not in found["onnx"]
    assert any(MISSING in note and "as ort-cpu does" in note for note in found["remarks"])
    assert set(found["onnx"]["nodes"]["integer"]) == {"MatMulIntegerToFloat"}


def test_a_result_opens_the_fastest_session(result: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.array([[5, 6, 7, 8]])
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    opened = []
    for way in ("library", "missing"):
        if way == "missing":
            monkeypatch.setattr(own_runtime, "problem", lambda: MISSING)
        session = open_result(result).session(threads=1)
        opened.append(Path(session._model_path).name)
        given = {entry.name: feed[entry.name] for entry in session.get_inputs()}
        assert np.isfinite(session.run(None, given)[0]).all()
    assert opened == [MREM, PLAIN]


def test_doctor_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_runtime.describe() in doctor.packages()
    monkeypatch.setattr(own_runtime, "problem", lambda: MISSING)
    assert any(line.startswith(MISSING) for line in doctor.packages())
    assert any("make wheel-runtime" in line for line in doctor.remedies())


def of_another_format(model: Any) -> None:
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "format":
                attribute.i = 2


def with_a_newer_operator(model: Any) -> None:
    next(node for node in model.graph.node if node.op_type == "FeedForwardBlock").op_type = "GatedBlock"


@pytest.mark.parametrize("newer", [of_another_format, with_a_newer_operator])
def test_a_file_for_a_newer_library_is_explained(result: Path, newer: Any) -> None:
    import onnx

    model = onnx.load(result / MREM)
    newer(model)
    onnx.save(model, result / MREM)
    where = runtime.placement("cpu", result / MREM, 1, 8)
    assert where.library is not None
    with pytest.raises(UserError, match=r"newer mrem-runtime") as caught:
        runtime.open_session(result / MREM, where=where)
    assert "make wheel-runtime" in caught.value.remedy
