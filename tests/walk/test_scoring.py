"""What a run is judged by: onnxruntime on the entire split with a sample in torch, or torch alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_job import DEV, POSITIONS, save_model, write_reviews

from mrem_deploy.data.task_data import open_task
from mrem_deploy.deploy import validation
from mrem_deploy.deploy.census import Census
from mrem_deploy.deploy.findings import OnnxFile
from mrem_deploy.evaluate.accuracy import FULL_PRECISION, ONNX, QUANTIZED
from mrem_deploy.evaluate.evaluation import Evaluation
from mrem_deploy.evaluate.predict import torch_predictor
from mrem_deploy.models.loading import load_model
from mrem_deploy.recipe import Recipe
from mrem_deploy.walk import scoring

SAMPLE, STEADY = 16, 9
MODEL = "model.onnx"


class Runtime:
    """Stands in for the exported file and onnxruntime: the torch model, with its classes exchanged for some
    sentences. Counts what each runtime was asked for."""

    def __init__(self, model: Any, patch: pytest.MonkeyPatch) -> None:
        self.model, self.wrong = model, 0.0
        self.examples = {"torch": 0, "onnx": 0}
        ask = torch_predictor(model)

        def counted(name: str, batch: dict[str, torch.Tensor]) -> list[np.ndarray]:
            self.examples[name] += len(batch["input_ids"])
            return ask(batch)

        def onnx(batch: dict[str, torch.Tensor]) -> list[np.ndarray]:
            (logits,) = counted("onnx", batch)
            ids = batch["input_ids"].numpy()
            turned = (ids.sum(axis=1) % 100) < 100 * self.wrong  # the same for a sentence in every batch
            return [np.where(turned[:, None], logits[:, ::-1], logits)]

        for module in (scoring, validation):
            patch.setattr(module, "torch_predictor", lambda _: lambda batch: counted("torch", batch))
        patch.setattr(validation, "open_session", lambda *_: None)
        patch.setattr(validation, "onnx_predictor", lambda _: onnx)
        patch.setattr(validation, "census", lambda *_: Census({"QGemm": 1}, {}, [], {}))
        patch.setattr(validation, "onnx_layer_errors", lambda *_: {})
        patch.setattr(validation, "describe_file", lambda path: OnnxFile(path.name, "ort-cpu", None, 21, 1.0))
        patch.setattr(
            validation, "measure_steadiness", lambda *_: validation.Steadiness(STEADY, 100.0, 100.0)
        )
        patch.setattr(scoring, "TORCH_EXAMPLES", SAMPLE)


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[tuple[Runtime, Evaluation]]:
    save_model(tmp_path / "model")
    write_reviews(tmp_path / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MREM_CACHE", str(tmp_path / "cache"))
        model, tokenizer = load_model(tmp_path / "model", "sequence-classification")
        data = open_task("text-classification", str(tmp_path / "data"))
        evaluation = Evaluation(Recipe(max_length=POSITIONS), data, tokenizer, model.config)
        evaluation.add_full_precision(model)
        yield Runtime(model, patch), evaluation


def test_onnxruntime_predicts_everything_and_torch_a_sample(
    runtime: tuple[Runtime, Evaluation], tmp_path: Path
) -> None:
    fake, evaluation = runtime
    evaluation.add(QUANTIZED, lambda batch: [np.zeros((len(batch["input_ids"]), 2))])  # tried by QAT
    onnx = scoring.score(Recipe(), evaluation, fake.model, tmp_path / MODEL)
    assert fake.examples == {"torch": SAMPLE, "onnx": DEV}
    accuracy = evaluation.accuracy()
    assert accuracy.scored_by == "onnxruntime"
    assert accuracy.quoted.keys() == {FULL_PRECISION, QUANTIZED, ONNX}
    assert accuracy.quantized == accuracy.onnx == pytest.approx(accuracy.full_precision)
    assert onnx is not None
    assert onnx.check is not None
    assert (onnx.check.agreement, onnx.check.torch_examples) == (100.0, SAMPLE)
    assert (tmp_path / validation.RESULT).is_file()


def test_torch_predicts_the_rest_where_the_two_differ(
    runtime: tuple[Runtime, Evaluation], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, evaluation = runtime
    fake.wrong = 0.9
    onnx = scoring.score(Recipe(), evaluation, fake.model, tmp_path / MODEL)
    assert fake.examples == {"torch": SAMPLE + DEV, "onnx": DEV}
    accuracy = evaluation.accuracy()
    assert accuracy.scored_by == "onnxruntime"
    assert accuracy.quoted["torch"] == pytest.approx(accuracy.full_precision)
    assert accuracy.quantized == accuracy.onnx != accuracy.quoted["torch"]
    assert onnx is not None
    assert onnx.check is not None
    assert onnx.check.torch_examples == SAMPLE  # the agreement stays that of the sample
    assert onnx.check.agreement < 50
    told = capsys.readouterr()
    assert f"% of {SAMPLE} examples of dev; 99% or more are usual" in told.out + told.err


def test_a_small_split_is_predicted_by_both(
    runtime: tuple[Runtime, Evaluation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, evaluation = runtime
    monkeypatch.setattr(scoring, "TORCH_EXAMPLES", DEV)
    fake.wrong = 0.9
    scoring.score(Recipe(), evaluation, fake.model, tmp_path / MODEL)
    assert fake.examples == {"torch": DEV, "onnx": DEV}  # nothing is predicted twice
    assert "torch" in evaluation.accuracy().quoted


@pytest.mark.parametrize("options", [{"scored_by": "torch"}, {"validate": False}, {}])
def test_torch_is_the_judge_where_asked_or_alone(
    options: dict[str, Any], runtime: tuple[Runtime, Evaluation], tmp_path: Path
) -> None:
    fake, evaluation = runtime
    fake.wrong = 0.9
    model = tmp_path / MODEL if options else None  # without an export
    onnx = scoring.score(Recipe(**options), evaluation, fake.model, model)
    validated = options.get("scored_by") == "torch"
    assert fake.examples == {"torch": DEV, "onnx": DEV if validated else 0}
    accuracy = evaluation.accuracy()
    assert accuracy.scored_by == "torch"
    assert accuracy.quantized == pytest.approx(accuracy.full_precision)
    assert ("onnx" in accuracy.quoted) == validated
    if validated:
        assert onnx is not None
        assert onnx.check is not None
        assert onnx.check.torch_examples == DEV
        assert accuracy.onnx != accuracy.quantized
