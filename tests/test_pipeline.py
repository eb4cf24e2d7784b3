"""The whole walk by the command line, on a tiny model: what is written, that it can be repeated, and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_job import DEV, POSITIONS, Job, save_model, sentences, write_jsonl, write_reviews
from torch import nn

import mrem_deploy
from mrem_deploy import artifact, cli, evaluate, loading, pipeline, quantize, sources
from mrem_deploy.data import TaskData, open_task
from mrem_deploy.train import checkpoint, sequential
from mrem_deploy.train.mrem import ModuleTrainer

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("mrem-s", "rem", "ptq")
FILES = {
    *("mrem.json", "mrem.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"),
    *("recipe.yaml", "metrics.json", "report.md", "report.html", "README.md"),
}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model and data; predictions are kept in a cache of its own."""
    root = tmp_path_factory.mktemp("workshop")
    save_model(root / "model")
    write_reviews(root / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MREM_CACHE", str(root / "cache"))
        yield root


def job(workshop: Path, out: str, **options: Any) -> Job:
    return Job(**{"model": workshop / "model", "data": workshop / "data", "out": workshop / out} | options)


@pytest.fixture(scope="module")
def results(workshop: Path) -> dict[str, tuple[Path, nn.Module]]:
    """By method: the result folder, and the quantized model as it was when it was scored."""
    made = {}
    for method in METHODS:
        scored: list[nn.Module] = []
        whole = pipeline.evaluate

        def watched(*args: Any, whole: Any = whole, scored: Any = scored) -> Any:
            scored.append(args[-1])
            return whole(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "evaluate", watched)
            assert job(workshop, method, method=method).run() == 0
        made[method] = (workshop / method, scored[0])
    return made


def metrics_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


def answers(model: nn.Module, workshop: Path) -> np.ndarray:
    """Logits of the evaluation sentences."""
    _, tokenizer = loading.load_model(workshop / "model", "sequence-classification")
    texts = open_task("text-classification", str(workshop / "data")).evaluation()["dev"]
    encoded = pipeline.encode(tokenizer, texts, POSITIONS)
    return np.stack(evaluate.predict(evaluate.torch_predictor(model), encoded, "test"))


# --- the result folder -------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_result_folder_is_complete(method: str, results: Any, workshop: Path) -> None:
    folder = results[method][0]
    assert {path.name for path in folder.iterdir() if path.is_file()} >= FILES
    assert (folder / "plots" / "layer_errors.png").stat().st_size > 0
    assert (folder / "plots" / "loss.png").exists() == (method != "ptq")
    assert not [path.name for path in workshop.iterdir() if path.name.startswith(".")]  # nothing temporary


@pytest.mark.parametrize("method", METHODS)
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
    assert size["formula_mb"] == pytest.approx((quantized / 4 + 4 * rest) / 2**20)
    assert {"python", "torch", "transformers", "cpu", "date"} <= found["environment"].keys()


def test_the_report_has_every_module_and_layer(results: Any) -> None:
    told = (results["mrem-s"][0] / "report.md").read_text(encoding="utf-8")
    assert "module 1/2" in told
    assert "module 2/2" in told
    page = (results["mrem-s"][0] / "report.html").read_text(encoding="utf-8")
    assert "block 2" in page
    card = (results["mrem-s"][0] / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "mrem_deploy"


def test_training_changes_the_model(results: Any) -> None:
    tensors = {method: (results[method][0] / artifact.TENSORS).read_bytes() for method in METHODS}
    assert len(set(tensors.values())) == 3


@pytest.mark.parametrize("method", METHODS)
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


@pytest.mark.parametrize("method", METHODS)
def test_the_written_recipe_gives_the_same_again(method: str, results: Any, workshop: Path) -> None:
    folder, again = results[method][0], workshop / f"{method}-again"
    arguments = ["--config", str(folder / "recipe.yaml"), "--out", str(again)]
    assert cli.run(quantize.main, arguments) == 0
    assert (again / artifact.TENSORS).read_bytes() == (folder / artifact.TENSORS).read_bytes()
    assert metrics_of(again)["accuracy"] == metrics_of(folder)["accuracy"]
    recipes = [yaml.safe_load((place / "recipe.yaml").read_text()) for place in (folder, again)]
    assert [recipe.pop("out") for recipe in recipes] == [str(folder), str(again)]
    assert recipes[0] == recipes[1]


def test_another_seed_gives_another_model(results: Any, workshop: Path) -> None:
    """So that the test above cannot pass because nothing depends on anything."""
    assert job(workshop, "seeded", seed=1).run() == 0
    tensors = [place / artifact.TENSORS for place in (workshop / "seeded", results["mrem-s"][0])]
    assert tensors[0].read_bytes() != tensors[1].read_bytes()


def test_a_better_result_takes_the_place_of_the_old(results: Any, workshop: Path) -> None:
    out = workshop / "twice"
    assert job(workshop, "twice", method="ptq").run() == 0
    (out / "plots" / "stale.png").write_bytes(b"of the old result")
    assert job(workshop, "twice", method="ptq", bits="8-8-8").run() == 0
    assert metrics_of(out)["bits"] == "8-8-8"
    assert not (out / "plots" / "stale.png").exists()


# --- every kind of task ------------------------------------------------------------------------


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
    same = []
    for row in rows[30:]:
        batch = tokenizer(*(row[name] for name in columns), return_tensors="pt")
        one, two = (model(**batch) for model in (full, mrem_deploy.load(workshop / f"{task}-out")))
        if task == "token-classification":
            same += (one.logits.argmax(-1) == two.logits.argmax(-1)).flatten().tolist()
        else:
            pairs = ((one[side].argmax(), two[side].argmax()) for side in ("start_logits", "end_logits"))
            same.append(all(bool(a == b) for a, b in pairs))
    assert accuracy["quantized"] == pytest.approx(100 * np.mean(same))
    assert 0 < accuracy["quantized"] <= 100
    card = (workshop / f"{task}-out" / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(card.split("---")[1])["pipeline_tag"] == task


# --- the evaluation split ----------------------------------------------------------------------


def test_the_evaluation_split_is_read_once_and_after_training(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening looks at one row, to find a missing column; the rest stays unread until training is over."""
    events: list[str] = []
    read, train, score = sources.read_files, pipeline.train, TaskData.evaluation

    def watched_read(paths: Any, naming: Any, wanted: Any) -> Any:
        if wanted.rows is None:
            events.append(f"read {paths[0].stem}")
        return read(paths, naming, wanted)

    def watched_train(*args: Any, **options: Any) -> Any:
        log = train(*args, **options)
        events.append("trained")
        return log

    monkeypatch.setattr(sources, "read_files", watched_read)
    monkeypatch.setattr(pipeline, "train", watched_train)
    monkeypatch.setattr(TaskData, "evaluation", lambda data: events.append("evaluation") or score(data))
    assert job(workshop, "spied").run() == 0
    assert events == ["read train", "trained", "evaluation", "read dev"]


def test_calibration_needs_no_labels_and_takes_none_of_the_evaluation_texts(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    encode = pipeline.encode
    monkeypatch.setattr(pipeline, "encode", lambda t, texts, m: seen.extend(texts.first) or encode(t, texts, m))
    monkeypatch.setattr(pipeline, "train", lambda *args, **options: seen.clear() or sequential.TrainLog())
    train = [{"text": row["text"]} for row in sentences(40, seed=1)]
    write_jsonl(workshop / "bare" / "train.jsonl", train)
    write_jsonl(workshop / "bare" / "dev.jsonl", sentences(10, seed=2))
    calibrated: list[str] = []
    student = pipeline.make_student
    monkeypatch.setattr(pipeline, "make_student", lambda *a: calibrated.extend(seen) or student(*a))
    assert job(workshop, "bare-out", data=workshop / "bare", calib_size=16).run() == 0
    assert len(calibrated) == 16
    assert set(calibrated) <= {row["text"] for row in train}
    assert seen == [row["text"] for row in sentences(10, seed=2)]


# --- interruptions -----------------------------------------------------------------------------

STEPS = 10  # per module, with checkpoints after 4 and 8
LONG = {"steps": STEPS, "checkpoint_steps": 4}


@pytest.fixture(scope="module")
def uninterrupted(workshop: Path) -> dict[str, bytes]:
    """The tensors of runs that nothing stopped."""
    for method in ("mrem-s", "rem"):
        steps = LONG if method == "mrem-s" else {"steps": 3}
        assert job(workshop, f"whole-{method}", method=method, **steps).run() == 0
    return {m: (workshop / f"whole-{m}" / artifact.TENSORS).read_bytes() for m in ("mrem-s", "rem")}


def at_call(number: int, whole: Callable[..., Any], spoil: Callable[..., None] = lambda *a: None) -> Any:
    """The function, until its call `number` (from 1), which is interrupted."""
    calls = iter(range(1, 10_000))

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) == number:
            spoil(*args)
            raise KeyboardInterrupt
        return whole(*args, **options)

    return call


def half_a_file(tensors: Any, path: Any, *rest: Any) -> None:
    Path(path).write_bytes(b"half a file")


# moment -> where, name, call, and how many steps are trained after resuming, of 20
MOMENTS: dict[str, tuple[Any, str, int, int]] = {
    "first step": (ModuleTrainer, "step", 1, 20),
    "before any checkpoint": (ModuleTrainer, "step", 4, 20),
    "between checkpoints": (ModuleTrainer, "step", 7, 16),
    "half of a checkpoint": (checkpoint, "save_file", 2, 16),
    "between modules": (sequential.Streams, "advance", 1, 10),
    "second module": (ModuleTrainer, "step", 19, 2),
    "before the evaluation": (pipeline, "evaluate", 1, 0),
    "half of the result": (artifact, "save_file", 1, 0),
    "before the report": (pipeline, "write_report", 1, 0),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupted_run_ends_with_the_same_bits(
    moment: str, workshop: Path, uninterrupted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, number, left = MOMENTS[moment]
    out = workshop / "stopped"
    with pytest.MonkeyPatch.context() as patch:
        spoil = half_a_file if name == "save_file" else lambda *args: None
        patch.setattr(owner, name, at_call(number, getattr(owner, name), spoil))
        assert job(workshop, "stopped", **LONG).run() == cli.EXIT_INTERRUPTED
    assert not out.exists()
    steps: list[int] = []
    step = ModuleTrainer.step
    monkeypatch.setattr(ModuleTrainer, "step", lambda *a, **k: steps.append(a[1]) or step(*a, **k))
    assert job(workshop, "stopped", **LONG).run("--resume") == 0
    assert len(steps) == left
    assert (out / artifact.TENSORS).read_bytes() == uninterrupted["mrem-s"]
    assert len(json.loads((out / "metrics.json").read_text())["cost"]["stages"]) >= 3
    assert [path.name for path in workshop.iterdir() if "stopped" in path.name] == ["stopped"]
    __import__("shutil").rmtree(out)


def test_rem_resumes_at_a_block(
    workshop: Path, uninterrupted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mrem_deploy.train import rem

    units: list[str] = []
    whole = rem._train_unit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rem, "_train_unit", at_call(10, whole))  # in the second block: the first has 7 units
        assert job(workshop, "stopped-rem", method="rem", steps=3).run() == cli.EXIT_INTERRUPTED
    monkeypatch.setattr(rem, "_train_unit", lambda unit, *a: units.append(unit.name) or whole(unit, *a))
    assert job(workshop, "stopped-rem", method="rem", steps=3).run("--resume") == 0
    assert units
    assert not any("embeddings" in name for name in units)  # of the first block, which was kept
    assert (workshop / "stopped-rem" / artifact.TENSORS).read_bytes() == uninterrupted["rem"]


KILLED = """
import os, signal, sys
from mrem_deploy import cli, quantize
from mrem_deploy.train.mrem import ModuleTrainer
step, calls = ModuleTrainer.step, iter(range(1, 100))
def deadly(*args, **options):
    if next(calls) == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*args, **options)
ModuleTrainer.step = deadly
cli.run(quantize.main, sys.argv[1:])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_killed_process_is_continued_by_another(workshop: Path, uninterrupted: dict[str, bytes]) -> None:
    """A kill leaves no chance to clean up; the old result stays until the new one is whole."""
    out = workshop / "killed"
    assert job(workshop, "killed", method="ptq").run() == 0
    old = (out / artifact.TENSORS).read_bytes()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-c", KILLED, *job(workshop, "killed", **LONG).argv()]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert (out / artifact.TENSORS).read_bytes() == old
    assert sorted(path.name for path in (workshop / ".killed.work").iterdir()) == [
        "module-0.safetensors",
        "module-1.safetensors",
        "run.json",
    ]
    assert job(workshop, "killed", **LONG).run("--resume") == 0
    assert (out / artifact.TENSORS).read_bytes() == uninterrupted["mrem-s"]
    assert [path.name for path in workshop.iterdir() if "killed" in path.name] == ["killed"]


def test_without_resume_a_run_starts_afresh(
    workshop: Path, uninterrupted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleTrainer, "step", at_call(15, ModuleTrainer.step))
        assert job(workshop, "afresh", **LONG).run() == cli.EXIT_INTERRUPTED
    steps: list[int] = []
    step = ModuleTrainer.step
    monkeypatch.setattr(ModuleTrainer, "step", lambda *a, **k: steps.append(a[1]) or step(*a, **k))
    assert job(workshop, "afresh", **LONG).run() == 0
    assert steps == [*range(STEPS), *range(STEPS)]
    assert (workshop / "afresh" / artifact.TENSORS).read_bytes() == uninterrupted["mrem-s"]


def test_a_cache_on_disk_gives_the_same_bits_and_is_removed(
    workshop: Path, uninterrupted: dict[str, bytes]
) -> None:
    cache = {"max_memory": "0MB", "cache_dir": workshop / "scratch"}
    assert job(workshop, "on-disk", **LONG, **cache).run() == 0
    assert (workshop / "on-disk" / artifact.TENSORS).read_bytes() == uninterrupted["mrem-s"]
    assert list((workshop / "scratch").iterdir()) == []
