"""Several models on one evaluation split: their metrics, how they agree, and the verdict, kind by kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_job import DEV, POSITIONS, save_model, sentences, write_jsonl

from mrem_deploy.base.errors import UserError
from mrem_deploy.data.task_data import open_task
from mrem_deploy.deploy import findings, validation
from mrem_deploy.deploy.census import Census
from mrem_deploy.evaluate import evaluation as scoring
from mrem_deploy.evaluate import scorers
from mrem_deploy.evaluate.accuracy import FULL_PRECISION, ONNX, QUANTIZED, Accuracy, SplitScores
from mrem_deploy.evaluate.evaluation import Evaluation
from mrem_deploy.evaluate.fidelity import Fidelity
from mrem_deploy.evaluate.predict import Predictor, torch_predictor
from mrem_deploy.evaluate.uncertainty import paired_accuracy_error
from mrem_deploy.models import loading
from mrem_deploy.recipe import Recipe

# task: its head, its metric, the measure of agreement
KINDS = {
    "text-classification": ("sequence-classification", "accuracy", "agreement"),
    "stsb": ("sequence-classification", "spearman", "spearman"),
    "feature-extraction": ("feature-extraction", "cosine", "cosine"),
    "token-classification": ("token-classification", "agreement", "agreement"),
    "question-answering": ("question-answering", "agreement", "agreement"),
}
ARCHITECTURE = {
    "sequence-classification": "BertForSequenceClassification",
    "feature-extraction": "BertModel",
    "token-classification": "BertForTokenClassification",
    "question-answering": "BertForQuestionAnswering",
}


def rows(count: int) -> list[dict[str, Any]]:
    """Rows that serve every task."""
    one, two = sentences(count, seed=1), sentences(count, seed=2)
    return [
        {**a, "question": a["text"], "context": b["text"], "sentence1": a["text"], "sentence2": b["text"]}
        | {"score": i % 6}
        for i, (a, b) in enumerate(zip(one, two, strict=True))
    ]


def evaluation_of(task: str, folder: Path) -> tuple[Evaluation, Any]:
    head = KINDS[task][0]
    save_model(folder / "model", ARCHITECTURE[head], num_labels=1 if task == "stsb" else 2)
    write_jsonl(folder / "data" / "train.jsonl", rows(8))
    write_jsonl(folder / "data" / "dev.jsonl", rows(DEV))
    model, tokenizer = loading.load_model(folder / "model", head)
    recipe = Recipe(model=str(folder / "model"), max_length=POSITIONS)
    return Evaluation(recipe, open_task(task, str(folder / "data")), tokenizer, model.config), model


def with_noise(predictor: Predictor, size: float) -> Predictor:
    draw = np.random.default_rng(0)

    def predict(batch: dict[str, torch.Tensor]) -> list[np.ndarray]:
        answers = predictor(batch)
        return [a + size * a.std() * draw.normal(size=a.shape).astype(a.dtype) for a in answers]

    return predict


@pytest.mark.parametrize("task", KINDS)
def test_every_kind_of_task(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third model is the second one with noise: it agrees with neither wholly, with itself it does."""
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    evaluation, model = evaluation_of(task, tmp_path)
    _, metric, measure = KINDS[task]
    evaluation.add_full_precision(model)
    evaluation.add(QUANTIZED, torch_predictor(model))
    evaluation.add(ONNX, with_noise(torch_predictor(model), 1.0))
    accuracy = evaluation.accuracy()
    assert accuracy.metric == metric
    assert accuracy.full_precision == pytest.approx(accuracy.quantized)
    dev = accuracy.splits["dev"]
    assert dev.scores[ONNX].keys() == dev.scores[QUANTIZED].keys()
    assert Accuracy.from_dict(json.loads(json.dumps(accuracy.to_dict()))) == accuracy
    if task in ("text-classification", "stsb"):
        change = dev.change[metric]
        assert change["difference"] == pytest.approx(accuracy.change, abs=1e-9)
        assert change["low"] <= change["difference"] <= change["high"]
    same = evaluation.agreement(QUANTIZED, FULL_PRECISION)["dev"]
    other = evaluation.agreement(ONNX, QUANTIZED)["dev"]
    assert next(iter(same)) == measure
    assert same[measure] == pytest.approx(100)
    assert 0 < other[measure] < 99
    if task in ("feature-extraction", "token-classification", "question-answering"):
        assert accuracy.onnx == pytest.approx(other[measure])  # agreement is their metric
    exact, noisy = accuracy.fidelity, dev.fidelity.get(ONNX)
    assert (exact.drift.largest, exact.drift.crossed) == (pytest.approx(0, abs=1e-6), None)
    assert noisy.drift.mean > 1e-3
    if task == "feature-extraction":
        assert (exact.cosine, exact.overlap) == (pytest.approx(100), pytest.approx(100))
        assert noisy.cosine == pytest.approx(evaluation.agreement(FULL_PRECISION, ONNX)["dev"]["cosine"])
    elif task == "stsb":
        assert exact.difference == pytest.approx(0, abs=1e-6)
        assert noisy.difference > 0.01
    else:
        plain = {name: value for name, value in exact.to_dict().items() if name != "drift"}
        assert plain == pytest.approx({"kl": 0, "kl_error": 0, "flips": 0, "flips_error": 0})
        assert noisy.flips == pytest.approx(
            100 - evaluation.agreement(FULL_PRECISION, ONNX)["dev"]["agreement"]
        )
        assert evaluation.fidelity(FULL_PRECISION, ONNX) == {"dev": noisy}
        assert (noisy.kl > 0.01, noisy.kl_error > 0, noisy.flips_error > 0) == (True, True, True)


@pytest.mark.parametrize("task", ["text-classification", "token-classification", "question-answering"])
def test_full_precision_predicts_once(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of tokens differ in length and are kept joined: they must come back apart."""
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    evaluation, model = evaluation_of(task, tmp_path)
    evaluation.add_full_precision(model)
    first = evaluation.splits["dev"].predictions[FULL_PRECISION]
    evaluation.add(QUANTIZED, torch_predictor(model))
    assert all(map(np.array_equal, first, evaluation.splits["dev"].predictions[QUANTIZED]))
    monkeypatch.setattr(scoring, "torch_predictor", lambda _: pytest.fail("asked again"))
    evaluation.add_full_precision(model)
    again = evaluation.splits["dev"].predictions[FULL_PRECISION]
    assert len(again) == DEV
    assert all(map(np.array_equal, first, again))


def test_answers_of_a_class_counted_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    evaluation, model = evaluation_of("text-classification", tmp_path)
    evaluation.add(QUANTIZED, torch_predictor(model))
    evaluation.add(ONNX, with_noise(torch_predictor(model), 1.0))
    answers = {name: np.stack(rows).argmax(1) for name, rows in evaluation.splits["dev"].predictions.items()}
    labels = [row["label"] for row in rows(DEV)]
    accuracy = evaluation.accuracy()
    assert accuracy.onnx == pytest.approx(100 * np.mean(answers[ONNX] == labels))
    expected = 100 * np.mean(answers[ONNX] == answers[QUANTIZED])
    assert evaluation.agreement(ONNX, QUANTIZED) == {"dev": {"agreement": pytest.approx(expected)}}
    assert FULL_PRECISION not in accuracy.to_dict()  # it was not added
    assert accuracy.full_precision is None


def test_how_sure_a_change_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resampled error of an accuracy is what the answers lost and gained say; it is worked out once."""
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    evaluation, model = evaluation_of("text-classification", tmp_path)
    evaluation.add_full_precision(model)
    evaluation.add(QUANTIZED, with_noise(torch_predictor(model), 2.0))
    accuracy = evaluation.accuracy()
    dev = accuracy.splits["dev"]
    assert dev.lost is not None
    assert dev.gained is not None
    assert dev.lost + dev.gained > 0
    expected = paired_accuracy_error(dev.lost, dev.gained, DEV)
    # 2,000 resamples know a standard deviation to 1.6%
    assert dev.change["accuracy"]["standard_error"] == pytest.approx(expected, rel=0.08)
    monkeypatch.setattr(scorers, "paired_bootstrap", lambda *args, **options: pytest.fail("once more"))
    assert evaluation.accuracy() is accuracy


def test_another_model_makes_new_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are kept only until the predictions change, also those of a model that is there already."""
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    evaluation, model = evaluation_of("text-classification", tmp_path)
    evaluation.add(QUANTIZED, torch_predictor(model))
    exact = evaluation.accuracy()
    evaluation.add_full_precision(model)
    assert (exact.full_precision, evaluation.accuracy().full_precision) == (None, exact.quantized)
    evaluation.add(QUANTIZED, with_noise(torch_predictor(model), 2.0))
    assert evaluation.accuracy().quantized != exact.quantized


@pytest.mark.parametrize("task", ["text-classification", "token-classification", "question-answering"])
def test_a_sample_keeps_what_was_predicted(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its predictions are those that the same texts had; a model added to it predicts no others."""
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    evaluation, model = evaluation_of(task, tmp_path)
    evaluation.add(ONNX, torch_predictor(model))
    some = evaluation.sampled(12)
    split, whole = some.splits["dev"], evaluation.splits["dev"]
    assert (len(split.texts), len(split.encoded), len(whole.texts)) == (12, 12, DEV)
    assert len(set(split.texts.first) - set(whole.texts.first)) == 0
    some.add(QUANTIZED, torch_predictor(model))
    for one, other in zip(split.predictions[QUANTIZED], split.predictions[ONNX], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)  # batches are padded to other lengths
    assert some.agreement(ONNX, QUANTIZED)["dev"]["agreement"] == 100
    assert QUANTIZED not in whole.predictions
    evaluation.adopt(QUANTIZED, some)
    assert QUANTIZED not in whole.predictions  # a sample is not all of it
    again = evaluation.sampled(12)
    assert again.splits["dev"].texts.first == split.texts.first  # drawn by the seed
    entire = evaluation.sampled(DEV)
    entire.add(QUANTIZED, torch_predictor(model))
    assert QUANTIZED not in whole.predictions
    evaluation.adopt(QUANTIZED, entire)
    assert len(whole.predictions[QUANTIZED]) == DEV


def test_the_runtime_that_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By onnxruntime "quantized" is the ONNX model, and torch has a name of its own, if it predicted all."""
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    evaluation, model = evaluation_of("text-classification", tmp_path)
    evaluation.add_full_precision(model)
    evaluation.add(ONNX, with_noise(torch_predictor(model), 2.0))
    evaluation.score_by_onnxruntime()
    alone = evaluation.accuracy()
    assert alone.scored_by == "onnxruntime"
    assert alone.quantized == alone.onnx != alone.full_precision
    assert "torch" not in alone.quoted
    assert alone.splits["dev"].fidelity.keys() == {QUANTIZED, ONNX}
    evaluation.complete(QUANTIZED, torch_predictor(model))
    both = evaluation.accuracy()
    assert both.quoted == alone.quoted | {"torch": alone.full_precision}
    assert both.change == alone.change
    assert both.fidelity.flips > 0 == both.splits["dev"].fidelity["torch"].flips
    evaluation.complete(QUANTIZED, lambda batch: pytest.fail("it has them all"))
    written = both.to_dict()
    assert list(written) == [
        "metric", "full_precision", "quantized", "torch", "onnx",
        "kl", "kl_error", "flips", "flips_error", "drift", "scored_by", "splits",
    ]  # fmt: skip
    assert (written["flips"], written["kl"]) == (both.fidelity.flips, both.fidelity.kl)
    assert Accuracy.from_dict(json.loads(json.dumps(written))) == both
    evaluation.forget(QUANTIZED)
    assert evaluation.accuracy() == alone


def test_predictions_that_another_format_kept_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    evaluation, model = evaluation_of("text-classification", tmp_path)
    evaluation.add_full_precision(model)
    asked, ask = [], scoring.torch_predictor
    monkeypatch.setattr(scoring, "torch_predictor", lambda m: asked.append(m) or ask(m))
    evaluation.add_full_precision(model)
    assert asked == []
    monkeypatch.setattr(scoring, "KEPT_FORMAT", "another")
    evaluation.add_full_precision(model)
    assert asked == [model]


def test_weights_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    evaluation, model = evaluation_of("text-classification", tmp_path)
    evaluation.splits["again"] = evaluation.splits["dev"]
    hashed, digest = [], scoring.weights_digest
    monkeypatch.setattr(scoring, "weights_digest", lambda m: hashed.append(m) or digest(m))
    evaluation.add_full_precision(model)
    assert len(hashed) == 1  # for two splits
    evaluation.add_full_precision(model, digest(model))
    assert len(hashed) == 1


# --- the verdict -------------------------------------------------------------------------------


def two_splits(first: float, second: float) -> Accuracy:
    drops = {"matched": first, "mismatched": second}
    scores = {
        name: {FULL_PRECISION: {"accuracy": 90.0}, ONNX: {"accuracy": 90.0 - drop}}
        for name, drop in drops.items()
    }
    return Accuracy("accuracy", {name: SplitScores(9, scores=own) for name, own in scores.items()})


@pytest.mark.parametrize(
    ("drops", "allowed", "passed", "worst"),
    [
        ((0.5, 0.2), 1.0, True, "matched"),
        ((0.5, 1.2), 1.0, False, "mismatched"),  # every split counts
        ((1.0, 0.0), 1.0, True, "matched"),  # "more than" it
        ((0.01, 0.0), 0.0, False, "matched"),
        ((-2.0, -3.0), 0.0, True, "matched"),  # a gain is no drop
    ],
)
def test_the_verdict(drops: tuple[float, float], allowed: float, passed: bool, worst: str) -> None:
    verdict = findings.verdict_on(two_splits(*drops), allowed)
    assert (verdict.passed, verdict.split) == (passed, worst)
    assert verdict.drop == pytest.approx(max(drops))
    assert verdict.sentence.startswith("passed" if passed else "FAILED")
    assert ("above" in verdict.sentence) == (max(drops) < 0)


@pytest.mark.parametrize(
    ("share", "bits", "noted"),
    [(99.0, 8, False), (98.9, 8, True), (97.0, 4, False), (96.0, 4, True)],
)
def test_notes_on_disagreement(share: float, bits: int, noted: bool) -> None:
    found = findings.Findings(
        findings.OnnxFile("model.onnx", "ort-cpu", None, 17, 1.0),
        {QUANTIZED: {"dev": {"agreement": share}}},
        findings.Steadiness(9, 100.0, 100.0),
        {},
        Census({"QGemm": 1}, {}, [], {}),
        "1.0",
        0,
    )
    assert bool(findings.notes_on(found, bits)) == noted
    (note,) = findings.notes_on(replace(found, torch_examples={"dev": 512}), bits) or [""]
    assert ("of 512 examples of dev" in note) == noted
    idle = replace(found, census=Census({}, {"MatMul": 1}, [], {}))
    assert "no matmul runs on integers" in findings.notes_on(idle, bits)[-1]


@pytest.mark.parametrize(
    ("share", "error", "bits", "apart"),
    [
        (98.0, 0.6, 8, False),  # less than usual, but a sample of that size says no more
        (98.0, 0.4, 8, True),
        (97.9, None, 8, True),  # a measure without an error, such as a cosine
        (97.9, 0.1, 4, False),
    ],
)
def test_torch_is_asked_for_more_only_where_the_sample_is_clear(
    share: float, error: float | None, bits: int, apart: bool
) -> None:
    found = findings.Findings(
        findings.OnnxFile("model.onnx", "ort-cpu", None, 17, 1.0),
        {QUANTIZED: {"dev": {"agreement": share}}},
        findings.Steadiness(9, 100.0, 100.0),
        {},
        Census({"QGemm": 1}, {}, [], {}),
        "1.0",
        0,
        {QUANTIZED: {"dev": Fidelity(flips=100 - share, flips_error=error)}},
        {"dev": 512},
    )
    assert findings.clearly_differ(found, bits) == apart


def test_outputs_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    evaluation, model = evaluation_of("text-classification", tmp_path)
    evaluation.add(ONNX, with_noise(torch_predictor(model), float("nan")))
    with pytest.raises(UserError, match="NaN or Inf for 40"):
        validation.check_finite(tmp_path / "model.onnx", evaluation)
