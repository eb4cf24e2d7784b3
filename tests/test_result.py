"""The result folder as a type: files keep their keys and order, older files are read, gaps are explained."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mrem_deploy.base.errors import UserError
from mrem_deploy.evaluate.accuracy import SplitScores
from mrem_deploy.quant.mixed import MixedBits
from mrem_deploy.recipe import Recipe
from mrem_deploy.result import (
    Accuracy,
    Cost,
    HeldOut,
    History,
    LayerErrors,
    Metrics,
    Onnx,
    OnnxCheck,
    Parallel,
    Qat,
    Result,
    Sizes,
    WorkerCost,
    open_result,
)
from mrem_deploy.train.job import ProcessCost, QatChoice, WorkerReport, WorkerSeconds

# Key by key what `mrem quantize` writes; other programs read this file.
WRITTEN: dict[str, Any] = {
    "format": 1,
    "task": "sst2",
    "data": "glue/SST-2",
    "model": "my-bert",
    "method": "mrem-p",
    "bits": "auto-8",
    "seed": 7,
    "accuracy": {
        "metric": "accuracy",
        "full_precision": 92.0,
        "quantized": 90.0,
        "onnx": 89.0,
        "splits": {
            "dev": {
                "examples": 100,
                "digest": "abc",
                "full_precision": {"accuracy": 92.0},
                "quantized": {"accuracy": 90.0},
                "onnx": {"accuracy": 89.0},
                "lost": 3,
                "gained": 1,
            }
        },
    },
    "cost": {
        "train_seconds": 10.0,
        "total_seconds": 20.0,
        "train_cpu_seconds": None,
        "peak_memory_mb": 512.0,
        "memory_kind": "peak resident memory",
        "workers": [
            {
                "name": "worker 0",
                "peak_memory_mb": 512.0,
                "cpu_seconds": 9.0,
                "modules": [1],
                "seconds": {"computing": 8.0, "receiving": 1.0, "waiting": 0.5, "whole": 10.0},
                "priming_seconds": 0.1,
                "serving_seconds": 0.2,
                "transfer_seconds": 0.3,
                "turns": {"0": 6},
                "queue_mb": 2.0,
                "dropped": 1,
                "training_seconds": {"0": 4.0},
            }
        ],
        "calibration_samples": 64,
        "stages": {"train": 10.0},
    },
    "environment": {"cpu": "A Processor", "gpu": None},
    "parallel": {"staleness": 4, "teacher_forcing_steps": 3.0, "ages": {"module 2/2": [[0, 5], [1, 2]]}},
    "mixed_precision": {
        "budget_mb": 12.0,
        "planned_mb": 11.5,
        "sensitivity": "output-kl",
        "layers": {"a": 2, "b": 8},
        "errors": {"a": {"2": 0.5, "4": 0.1, "8": 0.0}},
    },
    "qat": {
        "epochs": [3.0, 3.0],
        "training_samples": 32,
        "training_split": 64,
        "training_windows": 40,
        "chosen_on_the_evaluation_split": {"step": 4, "score": 90.0, "evaluations": [[2, 80.0], [4, 90.0]]},
    },
    "size": {"full_precision_mb": 400.0, "quantized_mb": 50.0, "formula_mb": 49.0, "onnx_mb": 60.0},
    "onnx": {
        "profile": "ort-cpu",
        "file": "model.onnx",
        "opset": 21,
        "size_mb": 60.0,
        "onnxruntime": "1.24.1",
        "metric": 89.0,
        "drop": 3.0,
        "agreement": 99.0,
        "agreement_full_precision": 98.0,
        "integer_products": 10,
        "float_products": 2,
        "providers": ["CPUExecutionProvider"],
    },
}
UNCHECKED = {"file": "m.onnx", "profile": "qdq", "recipe_digest": "ab", "opset": 21, "size_mb": 1.0}


def text(content: Any) -> str:
    """With the order of keys."""
    return json.dumps(content)


def test_metrics_have_the_keys_and_the_order_of_the_file(tmp_path: Path) -> None:
    metrics = Metrics.from_dict(WRITTEN)
    assert text(metrics.to_dict()) == text(WRITTEN)
    metrics.write(tmp_path)
    assert text(json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))) == text(WRITTEN)
    assert Metrics.read(tmp_path) == metrics


def test_metrics_from_types_equal_metrics_from_the_file() -> None:
    scores = {
        "full_precision": {"accuracy": 92.0},
        "quantized": {"accuracy": 90.0},
        "onnx": {"accuracy": 89.0},
    }
    built = Metrics(
        task="sst2",
        data="glue/SST-2",
        model="my-bert",
        method="mrem-p",
        bits="auto-8",
        seed=7,
        accuracy=Accuracy(
            "accuracy",
            {"dev": SplitScores(100, "abc", None, scores, lost=3, gained=1)},
            {"full_precision": 92.0, "quantized": 90.0, "onnx": 89.0},
        ),
        cost=Cost(
            train_seconds=10.0,
            total_seconds=20.0,
            peak_memory_mb=512.0,
            memory_kind="peak resident memory",
            workers=Metrics.from_dict(WRITTEN).cost.workers,
            calibration_samples=64,
            stages={"train": 10.0},
        ),
        environment={"cpu": "A Processor", "gpu": None},
        size=Sizes(400.0, 50.0, 49.0, 60.0),
        onnx=Onnx(
            "model.onnx", "ort-cpu", 21, 60.0,
            check=OnnxCheck("1.24.1", 89.0, 3.0, 99.0, 98.0, 10, 2, ("CPUExecutionProvider",)),
        ),
        parallel=Parallel(4, 3.0, {"module 2/2": sorted(Counter({1: 2, 0: 5}).items())}),
        mixed=MixedBits(12.0, 11.5, "output-kl", {"a": 2, "b": 8}, {"a": {2: 0.5, 4: 0.1, 8: 0.0}}),
        qat=Qat((3.0, 3.0), 32, 64, 40, QatChoice(4, 90.0, [(2, 80.0), (4, 90.0)])),
    )  # fmt: skip
    assert text(built.to_dict()) == text(WRITTEN)


REPORT = WorkerReport([1], WorkerSeconds(8.0, 1.0, 0.5, 10.0), 0.1, 0.2, 0.3, {0: 6}, 2.0, 1, {0: 4.0})


def test_workers_are_named_by_rank() -> None:
    cost = ProcessCost(peak_memory_mb=10.0, cpu_seconds=2.0)
    assert [row.to_dict() for row in WorkerCost.of_all([cost], [])] == [
        {"name": "main", "peak_memory_mb": 10.0}
    ]
    (alone,) = WorkerCost.of_all([cost], [REPORT])
    assert alone.to_dict() == {"name": "main", "peak_memory_mb": 10.0, **REPORT.to_dict()}
    both = WorkerCost.of_all([cost, cost], [REPORT, REPORT])
    assert [row.name for row in both] == ["worker 0", "worker 1"]
    assert list(both[0].to_dict())[:4] == ["name", "peak_memory_mb", "cpu_seconds", "modules"]
    assert WorkerCost.from_dict(both[1].to_dict()) == both[1]


def test_parts_of_another_version_are_left_out() -> None:
    content = {
        "cost": {"workers": [{"name": "main", "modules": [1]}]},
        "mixed_precision": {"layers": {"a": 2}},
    }
    metrics = Metrics.from_dict(content)
    assert metrics.cost.workers[0].name == "main"
    assert metrics.cost.workers[0].report is None
    assert metrics.mixed is None


def test_what_a_plain_run_does_not_have_is_not_written() -> None:
    plain = {
        key: value
        for key, value in WRITTEN.items()
        if key not in ("parallel", "mixed_precision", "qat", "onnx")
    }
    plain["size"] = {"full_precision_mb": 400.0, "quantized_mb": 50.0, "formula_mb": 49.0}
    plain["cost"] = WRITTEN["cost"] | {"workers": [{"name": "main", "peak_memory_mb": 512.0}]}
    metrics = Metrics.from_dict(plain)
    assert text(metrics.to_dict()) == text(plain)
    assert (metrics.onnx, metrics.parallel, metrics.mixed, metrics.qat) == (None, None, None, None)
    assert metrics.cost.workers == (WorkerCost("main", 512.0),)


def test_an_onnx_file_that_was_not_validated() -> None:
    metrics = Metrics.from_dict({"onnx": UNCHECKED})
    assert metrics.onnx is not None
    assert metrics.onnx.check is None
    assert text(metrics.to_dict()["onnx"]) == text(UNCHECKED)
    checked = Metrics.from_dict(WRITTEN).onnx
    assert checked is not None
    assert checked.check is not None
    assert checked.check.products == 12


@pytest.mark.parametrize(
    "content",
    [{}, {"accuracy": None, "cost": None, "size": None, "environment": None, "onnx": None, "qat": {}}],
)
def test_files_without_parts_are_read(content: dict[str, Any]) -> None:
    metrics = Metrics.from_dict(content)
    assert math.isnan(metrics.cost.total_seconds)
    assert math.isnan(metrics.size.quantized_mb)
    assert metrics.accuracy.quantized is None
    assert metrics.cost.workers == ()


def test_older_spellings_and_unknown_keys_are_read() -> None:
    old = {
        "bits": [2, 2, 8],
        "model": {"name": "x/y", "license": "mit"},
        "cost": {"peak_memory_mb": None},
        "new": 1,
    }
    metrics = Metrics.from_dict(old)
    assert (metrics.bits, metrics.model, metrics.license) == ("2-2-8", "x/y", "mit")
    assert math.isnan(metrics.cost.peak_memory_mb)
    assert metrics.to_dict()["model"] == {"name": "x/y", "license": "mit"}


def test_history_is_written_and_read(tmp_path: Path) -> None:
    errors = LayerErrors.between({"embeddings": 0.5, "output": 0.4}, {"embeddings": 0.2, "output": 0.1})
    history = History({"module 1/1": [(0, 2.0), (1, 1.0)]}, errors)
    history.write(tmp_path)
    content = json.loads((tmp_path / "history.json").read_text(encoding="utf-8"))
    assert text(content) == text(
        {
            "format": 1,
            "curves": {"module 1/1": [[0, 2.0], [1, 1.0]]},
            "layer_errors": {"layers": ["embeddings", "output"], "before": [0.5, 0.4], "after": [0.2, 0.1]},
        }
    )
    assert History.read(tmp_path).to_dict() == history.to_dict()


def test_held_out_losses_are_written_and_read(tmp_path: Path) -> None:
    """The first point is before training, the least the result; a method that looked once has that only."""
    looks = {"module 1/2": [(0, 4.0), (5, 1.0), (9, 2.0)], "module 2/2": [(9, 3.0)]}
    found = {name: HeldOut.of(curve) for name, curve in looks.items()}
    metrics = Metrics(heldout=found)
    content = metrics.to_dict()
    assert content["heldout"] == {
        "module 1/2": {"before": 4.0, "end": 2.0, "best": 1.0, "best_step": 5},
        "module 2/2": {"before": None, "end": 3.0, "best": 3.0, "best_step": None},
    }
    assert Metrics.from_dict(content).heldout == found
    assert "heldout" not in Metrics().to_dict()
    History(heldout=looks).write(tmp_path)
    assert History.read(tmp_path).heldout["module 1/2"] == [[0, 4.0], [5, 1.0], [9, 2.0]]


# -- the folder --------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mrem.json").write_text("{}")
    Metrics.from_dict(WRITTEN).write(tmp_path)
    (tmp_path / "recipe.yaml").write_text(Recipe(bits="2-2-8", steps=3).to_yaml(), encoding="utf-8")
    return tmp_path


def test_an_open_result_reads_what_is_asked_for(folder: Path) -> None:
    result = open_result(str(folder))
    assert result.folder == folder
    assert result.metrics.accuracy.quantized == 90.0
    assert result.metrics is result.metrics  # read once
    assert (result.recipe.bits, result.recipe.steps) == ("2-2-8", 3)
    with pytest.raises(UserError, match=r"has no history\.json"):
        _ = result.history


def test_metrics_that_are_known_are_not_read_again(tmp_path: Path) -> None:
    metrics = Metrics(task="sst2")
    assert Result(tmp_path, metrics).metrics is metrics


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a result folder: it has no mrem\.json"):
        open_result(tmp_path)
    with pytest.raises(UserError, match="there is no such folder"):
        open_result(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["{broken", "[]"])
def test_a_broken_file_is_explained(folder: Path, content: str) -> None:
    (folder / "metrics.json").write_text(content)
    with pytest.raises(UserError, match=r"metrics\.json"):
        _ = open_result(folder).metrics


def test_onnx_files_are_found_by_profile(folder: Path) -> None:
    with pytest.raises(UserError, match="it has no ONNX model"):
        open_result(folder).onnx()
    (folder / "model.onnx").write_bytes(b"")
    assert open_result(folder).onnx() == folder / "model.onnx"
    with pytest.raises(UserError, match=r"has no model_int8\.onnx.*it has model\.onnx \(ort-cpu\)"):
        open_result(folder).onnx("int8")
    with pytest.raises(UserError, match="no export profile"):
        open_result(folder).onnx("abacus")
