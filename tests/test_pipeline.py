"""The whole walk by the command line, on a tiny model: what is written, that it repeats, and resumes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_job import DEV, POSITIONS, save_model, sentences, workshop_in, write_jsonl
from tiny_job import job_in as job
from torch import nn

import mrem_deploy
from mrem_deploy import pipeline, quantize
from mrem_deploy.base import cli
from mrem_deploy.data import generated, sources, table_files
from mrem_deploy.data.task_data import TaskData, open_task
from mrem_deploy.evaluate import evaluation, predict
from mrem_deploy.models import loading
from mrem_deploy.quant import artifact
from mrem_deploy.quant.frozen import FrozenModel
from mrem_deploy.report import origin
from mrem_deploy.train import METHODS
from mrem_deploy.train.job import TrainJob, TrainLog
from mrem_deploy.walk import loading as walk_loading
from mrem_deploy.walk import publishing, training

TRIED = ("mrem-s", "rem", "ptq")
FILES = {
    *("mrem.json", "mrem.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"),
    *("recipe.yaml", "metrics.json", "report.md", "report.html", "README.md"),
}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop_in(tmp_path_factory.mktemp("workshop")) as root:
        yield root


@pytest.fixture(scope="module")
def results(workshop: Path) -> dict[str, tuple[Path, nn.Module]]:
    """By method: the result folder, and the quantized model as it was when it was scored."""
    made = {}
    for method in TRIED:
        scored: list[nn.Module] = []
        build = pipeline.build

        def watched(frozen: FrozenModel, build: Any = build, scored: Any = scored) -> Any:
            scored.append(build(frozen))
            return scored[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "build", watched)
            assert job(workshop, method, method=method).run() == 0
        made[method] = (workshop / method, scored[0])
    return made


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than training here; most tests look at the tensors only."""
    monkeypatch.setattr(publishing, "write_report", lambda *args: None)


def metrics_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


def answers(model: nn.Module, workshop: Path) -> np.ndarray:
    """Logits of the evaluation sentences."""
    _, tokenizer = loading.load_model(workshop / "model", "sequence-classification")
    texts = open_task("text-classification", str(workshop / "data")).evaluation()["dev"]
    encoded = walk_loading.encode(tokenizer, texts, POSITIONS)
    return np.stack(predict.predict(predict.torch_predictor(model), encoded, "test"))


# --- the result folder -------------------------------------------------------------------------


@pytest.mark.parametrize("method", TRIED)
def test_the_result_folder_is_complete(method: str, results: Any, workshop: Path) -> None:
    folder = results[method][0]
    assert {path.name for path in folder.iterdir() if path.is_file()} >= FILES
    assert (folder / "plots" / "layer_errors.png").stat().st_size > 0
    assert (folder / "plots" / "loss.png").exists() == (method != "ptq")
    assert not [path.name for path in workshop.iterdir() if path.name.startswith(".")]  # nothing temporary


@pytest.mark.parametrize("method", TRIED)
def test_the_metrics_have_every_key(method: str, results: Any, workshop: Path) -> None:
    found = metrics_of(results[method][0])
    assert (found["task"], found["method"], found["bits"]) == ("text-classification", method, "2-2-8")
    assert found["seed"] == 0
    accuracy, cost, size = found["accuracy"], found["cost"], found["size"]
    assert accuracy["metric"] == "accuracy"
    dev = accuracy["splits"]["dev"]
    assert dev["examples"] == DEV
    right = {name: accuracy[name] * DEV / 100 for name in ("full_precision", "quantized")}
    assert all(value == pytest.approx(round(value)) for value in right.values())
    assert right["quantized"] - right["full_precision"] == pytest.approx(dev["gained"] - dev["lost"])
    assert cost["calibration_samples"] == 32
    assert 0 < cost["train_seconds"] < cost["total_seconds"] < 600
    assert [worker["peak_memory_mb"] for worker in cost["workers"]] == [cost["peak_memory_mb"]]
    assert cost["peak_memory_mb"] > 0
    original = load_file(workshop / "model" / "model.safetensors")
    assert size["full_precision_mb"] == pytest.approx(sum(4 * w.numel() for w in original.values()) / 2**20)
    packed = results[method][0] / artifact.TENSORS
    assert size["quantized_mb"] == pytest.approx(packed.stat().st_size / 2**20)
    # 2-bit codes for the word embedding and the linears (2 blocks, pooler), 4 bytes for all the rest
    quantized = 21 * 16 + 2 * (4 * 16 * 16 + 2 * 16 * 32) + 16 * 16
    rest = sum(w.numel() for w in original.values()) - quantized
    hot = 16 * found["hot_rows"]  # and a byte for each number of the hot rows
    assert hot > 0
    assert size["formula_mb"] == pytest.approx((quantized / 4 + hot + 4 * rest) / 2**20)
    assert {"python", "torch", "transformers", "cpu", "date"} <= found["environment"].keys()


def test_the_report_has_every_module_and_layer(results: Any) -> None:
    told = (results["mrem-s"][0] / "report.md").read_text(encoding="utf-8")
    assert "module 1/2" in told
    assert "module 2/2" in told
    page = (results["mrem-s"][0] / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 3  # loss of the modules, error per layer, size
    card = (results["mrem-s"][0] / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "mrem_deploy"


def test_training_changes_the_model(results: Any) -> None:
    tensors = {method: (results[method][0] / artifact.TENSORS).read_bytes() for method in TRIED}
    assert len(set(tensors.values())) == 3


@pytest.mark.parametrize("method", TRIED)
def test_load_gives_the_model_that_was_scored(method: str, results: Any, workshop: Path) -> None:
    folder, scored = results[method]
    loaded = mrem_deploy.load(folder)
    assert not loaded.training
    logits = answers(loaded, workshop)
    np.testing.assert_array_equal(logits, answers(scored, workshop))
    labels = [row["label"] for row in sentences(DEV, seed=2)]
    expected = 100 * np.mean(logits.argmax(axis=1) == labels)
    assert metrics_of(folder)["accuracy"]["quantized"] == pytest.approx(expected)
    full, _ = loading.load_model(workshop / "model", "sequence-classification")
    expected = 100 * np.mean(answers(full, workshop).argmax(axis=1) == labels)
    assert metrics_of(folder)["accuracy"]["full_precision"] == pytest.approx(expected)


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("method", TRIED)
def test_the_written_recipe_gives_the_same_again(method: str, results: Any, workshop: Path) -> None:
    folder, again = results[method][0], workshop / f"{method}-again"
    arguments = ["--config", str(folder / "recipe.yaml"), "--out", str(again)]
    assert cli.run(quantize.main, arguments) == 0
    assert (again / artifact.TENSORS).read_bytes() == (folder / artifact.TENSORS).read_bytes()
    assert metrics_of(again)["accuracy"] == metrics_of(folder)["accuracy"]
    recipes = [yaml.safe_load((place / "recipe.yaml").read_text()) for place in (folder, again)]
    assert [recipe.pop("out") for recipe in recipes] == [str(folder), str(again)]
    assert recipes[0] == recipes[1]


@pytest.mark.usefixtures("no_report")
def test_another_seed_gives_another_model(results: Any, workshop: Path) -> None:
    """So that the test above cannot pass because nothing depends on anything."""
    assert job(workshop, "seeded", seed=1).run() == 0
    tensors = [place / artifact.TENSORS for place in (workshop / "seeded", results["mrem-s"][0])]
    assert tensors[0].read_bytes() != tensors[1].read_bytes()


@pytest.mark.usefixtures("no_report")
def test_a_better_result_takes_the_place_of_the_old(results: Any, workshop: Path) -> None:
    out = workshop / "twice"
    assert job(workshop, "twice", method="ptq").run() == 0
    (out / "stale.png").write_bytes(b"of the old result")
    assert job(workshop, "twice", method="ptq", bits="8-8-8").run() == 0
    assert metrics_of(out)["bits"] == "8-8-8"
    assert not (out / "stale.png").exists()


@pytest.mark.usefixtures("no_report")
def test_kept_predictions_belong_to_one_model(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights under another config.json are another model."""
    monkeypatch.setenv("MREM_CACHE", str(workshop / "other-cache"))
    model = shutil.copytree(workshop / "model", workshop / "other-model")
    for activation, kept in (("gelu", 1), ("gelu", 1), ("relu", 2)):
        settings = json.loads((model / "config.json").read_text()) | {"hidden_act": activation}
        (model / "config.json").write_text(json.dumps(settings))
        assert job(workshop, "kept", model=model, method="ptq").run() == 0
        assert len(list((workshop / "other-cache" / "predictions").iterdir())) == kept


# --- every kind of task ------------------------------------------------------------------------


@pytest.mark.usefixtures("no_report")
def test_feature_extraction(workshop: Path) -> None:
    save_model(workshop / "embedder", "BertModel")
    lines = workshop / "lines.txt"
    lines.write_text("".join(row["text"] + "\n" for row in sentences(60, seed=4)), encoding="utf-8")
    options = {"task": "feature-extraction", "model": workshop / "embedder", "data": lines, "bits": "8-8-8"}
    assert job(workshop, "embedded", **options).run() == 0
    accuracy = metrics_of(workshop / "embedded")["accuracy"]
    assert (accuracy["metric"], accuracy["full_precision"]) == ("cosine", 100.0)
    assert 95 < accuracy["quantized"] < 100
    split = accuracy["splits"]["dev"]["quantized"]
    assert split.keys() == {"cosine", "spearman"}
    loaded = mrem_deploy.load(workshop / "embedded")
    assert loaded(torch.tensor([[2, 7, 3]])).last_hidden_state.shape == (1, 3, 16)


@pytest.mark.usefixtures("no_report")
def test_regression(workshop: Path) -> None:
    save_model(workshop / "scorer", num_labels=1)
    rows = [
        {"sentence1": a["text"], "sentence2": b["text"], "score": i % 6}
        for i, (a, b) in enumerate(zip(sentences(40, seed=5), sentences(40, seed=6), strict=True))
    ]
    write_jsonl(workshop / "pairs" / "train.jsonl", rows[:20])
    write_jsonl(workshop / "pairs" / "dev.jsonl", rows[20:])
    options = {"task": "STS-B", "model": workshop / "scorer", "data": workshop / "pairs", "bits": "8-8-8"}
    assert job(workshop, "scored", **options).run() == 0
    accuracy = metrics_of(workshop / "scored")["accuracy"]
    assert accuracy["metric"] == "spearman"
    assert accuracy["splits"]["dev"]["quantized"].keys() == {"spearman", "pearson"}
    assert accuracy["quantized"] == pytest.approx(accuracy["full_precision"], abs=10)
    assert metrics_of(workshop / "scored")["task"] == "stsb"


@pytest.mark.parametrize(
    ("task", "architecture", "columns"),
    [
        ("token-classification", "BertForTokenClassification", ("text",)),
        ("question-answering", "BertForQuestionAnswering", ("question", "context")),
    ],
)
def test_tasks_that_answer_by_token(
    task: str, architecture: str, columns: tuple[str, ...], workshop: Path
) -> None:
    """Agreement with the original, counted again here from the two models' outputs."""
    save_model(workshop / task, architecture)
    texts = {name: [row["text"] for row in sentences(50, seed=7 + i)] for i, name in enumerate(columns)}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*texts.values(), strict=True)]
    data = workshop / f"{task}-data"
    write_jsonl(data / "train.jsonl", rows[:30])
    write_jsonl(data / "validation.jsonl", rows[30:])
    options = {"task": task, "model": workshop / task, "data": data, "bits": "4-4-8"}
    assert job(workshop, f"{task}-out", **options).run() == 0
    accuracy = metrics_of(workshop / f"{task}-out")["accuracy"]
    assert (accuracy["metric"], accuracy["full_precision"]) == ("agreement", 100.0)

    full, tokenizer = loading.load_model(workshop / task, task)
    quantized = mrem_deploy.load(workshop / f"{task}-out")
    same = []
    for row in rows[30:]:
        batch = tokenizer(*(row[name] for name in columns), return_tensors="pt")
        one, two = (model(**batch) for model in (full, quantized))
        if task == "token-classification":
            same += (one.logits.argmax(-1) == two.logits.argmax(-1)).flatten().tolist()
        else:
            pairs = ((one[side].argmax(), two[side].argmax()) for side in ("start_logits", "end_logits"))
            same.append(all(bool(a == b) for a, b in pairs))
    assert accuracy["quantized"] == pytest.approx(100 * np.mean(same))
    assert 0 < accuracy["quantized"] <= 100
    card = (workshop / f"{task}-out" / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(card.split("---")[1])["pipeline_tag"] == task


@pytest.mark.parametrize("task", ["text-classification", "reranking"])
def test_texts_without_labels(task: str, workshop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of text for a classifier, a csv without a column of labels for a reranker: agreement, counted
    again, with flips, KL and drift."""
    texts = [row["text"] for row in sentences(50, seed=9)]
    if task == "reranking":
        save_model(workshop / "pair-scorer", num_labels=1)
        data, model = workshop / "bare.csv", workshop / "pair-scorer"
        data.write_text("query,passage\n" + "".join(f"{a},{b}\n" for a, b in pairwise(texts)))
    else:
        data, model = workshop / "bare.txt", workshop / "model"
        data.write_text("".join(f"{text}\n" for text in texts))
    options = {"task": task, "model": model, "data": data, "method": "ptq", "steps": None, "lr": None}
    assert job(workshop, f"bare-{task}", **options).run() == 0
    assert f"note: no labels in {data}" in capsys.readouterr().err
    accuracy = metrics_of(workshop / f"bare-{task}")["accuracy"]
    assert (accuracy["metric"], accuracy["full_precision"]) == ("agreement", 100.0)
    found = accuracy["splits"]["dev"]["fidelity"]["quantized"]
    assert found["flips"] == pytest.approx(100 - accuracy["quantized"])
    assert found["kl"] > 0
    assert found["drift"]["mean"] > 0

    full, tokenizer = loading.load_model(model, "sequence-classification")
    quantized = mrem_deploy.load(workshop / f"bare-{task}")
    held = open_task(task, str(data)).evaluation()["dev"]
    rows = zip(held.first, held.second, strict=True) if held.second else ((text,) for text in held.first)
    same = []
    for row in rows:
        batch = tokenizer(*row, return_tensors="pt")
        one, two = (net(**batch).logits[0] for net in (full, quantized))
        same.append(bool(one.argmax() == two.argmax() if len(one) > 1 else (one > 0) == (two > 0)))
    assert accuracy["quantized"] == pytest.approx(100 * np.mean(same))
    assert "agreement" in (workshop / f"bare-{task}" / "report.md").read_text().lower()


@pytest.mark.parametrize("measured", [True, False])
def test_no_data_at_hand(
    workshop: Path, measured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a run says about its texts: beforehand, in the plan, at the end and in every page."""
    monkeypatch.setattr(generated, "TRAINING", 80)
    monkeypatch.setattr(generated, "EVALUATION", 20)
    out = workshop / f"none-{measured}"
    given = {"eval_data": workshop / "data" / "dev.jsonl"} if measured else {}
    options = {"data": "none", "method": "ptq", "steps": None, "lr": None, **given}
    assert job(workshop, out.name, **options).run() == 0
    printed, said = capsys.readouterr()
    assert "note: calibrating with generated text" in said
    assert ("give --eval-data" in said) == (not measured)
    assert "calibrated with generated text" in next(line for line in said.splitlines() if "plan:" in line)
    content = metrics_of(out)
    assert content["data"].startswith("generated text (--data none)")
    accuracy = content["accuracy"]
    assert accuracy["metric"] == ("accuracy" if measured else "agreement")
    assert list(accuracy["splits"]) == (["dev"] if measured else ["generated"])
    pages = [(out / name).read_text() for name in ("report.md", "README.md", "report.html")]
    for text in [printed, *map(unescape, pages)]:
        assert origin.CALIBRATED[1:] in text
        assert (origin.MEASURED[1:] in text) == (not measured)
    assert yaml.safe_load((out / "recipe.yaml").read_text())["data"] == "none"


# --- the evaluation split ----------------------------------------------------------------------


@pytest.mark.usefixtures("no_report")
def test_the_evaluation_split_is_read_once_and_after_training(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening looks at one row, to find a missing column; then the labels are checked, by their column alone.
    The texts stay unread until training is over."""
    events: list[str] = []
    read, method, score = table_files.read_files, METHODS["mrem-s"], TaskData.evaluation

    def watched_read(paths: Any, naming: Any, wanted: Any) -> Any:
        if wanted.rows is None:
            texts = "" if "text" in wanted else f" {' '.join(sorted(wanted.columns))}"
            events.append(f"read {paths[0].stem}{texts}")
        return read(paths, naming, wanted)

    def watched_train(job: TrainJob) -> TrainLog:
        log = method.train(job)
        events.append("trained")
        return log

    monkeypatch.setattr(sources, "read_files", watched_read)
    monkeypatch.setitem(METHODS, "mrem-s", replace(method, train=watched_train))
    monkeypatch.setattr(TaskData, "evaluation", lambda data: events.append("evaluation") or score(data))
    assert job(workshop, "spied").run() == 0
    assert events == ["read train", "read dev label labels", "trained", "evaluation", "read dev"]


@pytest.mark.usefixtures("no_report")
def test_calibration_needs_no_labels_and_takes_none_of_the_evaluation_texts(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    encode = walk_loading.encode

    def watched(tokenizer: Any, texts: Any, length: int) -> Any:
        seen.extend(texts.first)
        return encode(tokenizer, texts, length)

    monkeypatch.setattr(walk_loading, "encode", watched)
    monkeypatch.setattr(evaluation, "encode", watched)
    untrained = replace(METHODS["mrem-s"], train=lambda job: seen.clear() or TrainLog())
    monkeypatch.setitem(METHODS, "mrem-s", untrained)
    train = [{"text": row["text"]} for row in sentences(40, seed=1)]
    write_jsonl(workshop / "bare" / "train.jsonl", train)
    write_jsonl(workshop / "bare" / "dev.jsonl", sentences(10, seed=2))
    calibrated: list[str] = []
    student = training.make_student
    monkeypatch.setattr(training, "make_student", lambda *a: calibrated.extend(seen) or student(*a))
    assert job(workshop, "bare-out", data=workshop / "bare", calib_size=16).run() == 0
    assert len(calibrated) == 16 + 5  # with those held out, an eighth of 40
    assert set(calibrated) <= {row["text"] for row in train}
    assert seen == [row["text"] for row in sentences(10, seed=2)]
