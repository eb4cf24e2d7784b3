"""Questions and tags through fine-tuning, quantization, export and validation; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_bert import save_tiny_bert
from tiny_job import Job
from tiny_squad import CONTEXT, question, write_conll, write_reading, write_squad

from mrem_deploy import __main__
from mrem_deploy.base import cli
from mrem_deploy.deploy import validation
from mrem_deploy.finetune import main as finetune_main
from mrem_deploy.finetuning import FinetuneSettings, finetune
from mrem_deploy.recipe import Recipe

LENGTH = 24  # contexts of more words fill several windows
# task: its data, the passes over them that a tiny model needs
WALKS: dict[str, tuple[Callable[[Path], Path], float]] = {
    "squad": (write_reading, 40),
    "squad_v2": (lambda folder: write_reading(folder, "2.0"), 40),
    "token-classification": (write_conll, 15),
}

EXPORTED = ("squad", "token-classification")  # v2.0 has the head, and so the graph, of v1.1


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=WALKS)
def walked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """A folder with data, a model fine-tuned on it, and a result that was quantized and exported."""
    task, root = request.param, tmp_path_factory.mktemp(request.param)
    write, epochs = WALKS[task]
    base, data = save_tiny_bert(root / "base", "BertModel", initializer_range=0.2), write(root / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MREM_CACHE", str(root / "cache"))
        settings = FinetuneSettings(
            str(base),
            task,
            str(data),
            str(root / "model"),
            epochs=epochs,
            lr=5e-3,
            max_length=LENGTH,
            batch_size=16,
        )
        finetune(settings)
        job = Job(model=root / "model", task=task, data=data, out=root / "out", bits="4-4-8")
        job.set(max_length=LENGTH, calib_size=40, steps=20, export="auto" if task in EXPORTED else "none")
        assert job.run() == 0
        yield task, root


def test_fine_tuning_learns_the_task(walked: tuple[str, Path]) -> None:
    task, root = walked
    record = read(root / "model" / "finetune.json")
    assert record["metric"] == "f1"
    assert record["score"] > 80  # a third of v2.0's questions would be right by silence alone
    assert record["splits"]["dev"]["examples"] == 30
    if task == "token-classification":
        names = read(root / "model" / "config.json")["id2label"]
        assert sorted(names.values()) == ["B-NEG", "B-POS", "I-POS", "O"]
    else:
        assert record["examples"] > 60  # windows


def test_the_quantized_model_is_scored_by_the_tasks_metric(walked: tuple[str, Path]) -> None:
    task, root = walked
    metrics, finetuned = read(root / "out" / "metrics.json"), read(root / "model" / "finetune.json")
    accuracy, split = metrics["accuracy"], metrics["accuracy"]["splits"]["dev"]
    assert accuracy["metric"] == "f1"
    assert accuracy["full_precision"] == pytest.approx(finetuned["score"])
    assert split["examples"] == 30
    assert metrics["cost"]["calibration_samples"] == 40  # of windows, too
    paired = "sentences" if task == "token-classification" else "exact"
    assert split["paired"] == paired
    change = split["quantized"][paired] - split["full_precision"][paired]
    assert change == pytest.approx(100 * (split["gained"] - split["lost"]) / 30)
    if task == "token-classification":
        assert "windows" not in split
    else:
        assert split["windows"] > 30
    assert ("best_f1" in split["quantized"]) == (task == "squad_v2")
    fidelity = split["fidelity"]["quantized"]
    drift = fidelity.pop("drift")
    assert fidelity == {name: accuracy[name] for name in ("kl", "kl_error", "flips", "flips_error")}
    assert 0 < drift["median"] <= drift["p95"] <= drift["largest"]
    assert drift["error"] < drift["mean"] < drift["largest"]
    assert fidelity["kl"] > fidelity["kl_error"] > 0
    assert 0 <= fidelity["flips"] <= 100
    card = (root / "out" / "README.md").read_text(encoding="utf-8")
    kind = "token-classification" if task == "token-classification" else "question-answering"
    assert f"pipeline_tag: {kind}" in card
    assert "_thresh" not in card


@pytest.mark.parametrize("walked", EXPORTED, indirect=True)
def test_the_exported_model_is_validated_by_it(walked: tuple[str, Path]) -> None:
    _, root = walked
    assert __main__.main(["validate", str(root / "out"), "--max-drop", "100"]) == 0
    record = read(root / "out" / validation.RESULT)
    split = record["accuracy"]["splits"]["dev"]
    assert split["onnx"].keys() == split["torch"].keys()
    assert split["onnx"]["f1"] == pytest.approx(split["torch"]["f1"], abs=15)  # flips in a tiny model
    assert record["onnx"]["agreement"]["quantized"]["dev"]["agreement"] > 80
    assert list(record["onnx"]["layer_errors"]) == ["embeddings", "block 1", "block 2", "output"]


@pytest.mark.parametrize("walked", EXPORTED, indirect=True)
def test_the_evaluation_is_sampled_by_question(walked: tuple[str, Path]) -> None:
    _, root = walked
    assert __main__.main(["validate", str(root / "out"), "--max-drop", "100", "--eval-size", "7"]) == 0
    assert read(root / "out" / validation.RESULT)["accuracy"]["splits"]["dev"]["examples"] == 7


def test_defaults_follow_the_task() -> None:
    for task in ("squad", "SQuAD v2.0"):
        recipe = Recipe(task=task)
        assert recipe.max_length == 384
    for other in ("mnli", "question-answering", None, "no such task"):
        recipe = Recipe(task=other)
        assert recipe.max_length == 128
    assert Recipe(task="squad", max_length=128, steps=30).max_length == 128
    assert FinetuneSettings("m", "squad", "d", "o").max_length == 384
    assert FinetuneSettings("m", "sst2", "d", "o").max_length == 128


# --- what a user can get wrong -----------------------------------------------------------------

GOOD = question("1", "good")
IMPOSSIBLE = {"id": "2", "question": "q", "answers": [], "is_impossible": True}
SHIFTED = {**GOOD, "id": "s", "answers": [{"text": "good", "answer_start": 1}]}


def rows(*questions: dict[str, Any], context: str = CONTEXT) -> Callable[[Path], Path]:
    return lambda root: write_squad(root / "dev.json", list(questions), context)


def text(name: str, content: str) -> Callable[[Path], Path]:
    def write(root: Path) -> Path:
        (root / name).write_text(content, encoding="utf-8")
        return root / name

    return write


# case: the task, the evaluation file, what the message has in this order
MISTAKES: dict[str, tuple[str, Callable[[Path], Path], tuple[str, ...]]] = {
    "cut short": ("squad", text("a.json", '{"version": "1.1",\n "data": [{'), ("line 2, column", "→")),
    "other layout": ("squad", text("a.json", '{"rows": []}'), ("SQuAD's layout", "holds ['rows']", "→")),
    "no paragraphs": ("squad", text("a.json", '{"data": [{"title": "T"}]}'), ("data[0].paragraphs", "→")),
    "id no text": ("squad", rows({**GOOD, "id": 7}), ("data[0].paragraphs[0].qas[0].id", "7", "→")),
    "answers no list": ("squad", rows({**GOOD, "answers": "good"}), ("question '1' has 'good'", "→")),
    "no questions": ("squad", rows(), ("empty", "→")),
    "v2 for v1": ("squad", rows(GOOD, IMPOSSIBLE), ("1 of 2", "'2'", "→", "--task squad_v2")),
    "same id twice": ("squad", rows(GOOD, GOOD), ("1 ids occur more than once", "'1'", "→")),
    "empty context": ("squad", rows({**IMPOSSIBLE}, context=" "), ("empty one", "'2'", "→")),
    "no answers": ("squad", rows({"id": "1", "question": "q"}), ("1 have none", "'1'", "→")),
    "no columns": ("squad", text("a.jsonl", '{"q": "a"}\n'), ("'question'", "it has 'q'", "→")),
    "missing column": ("ner", text("a.conll", "EU B-ORG\nis\n"), ("line 2 has one column, 'is'", "→")),
    "more columns": ("ner", text("a.txt", "EU B-ORG\n\nis X O\n"), ("line 3 has 3 columns", "'is X O'", "→")),
    "tags unlike words": (
        "ner",
        text("a.jsonl", '{"tokens": ["EU", "is"], "tags": ["O"]}\n'),
        ("row 1 has 1 tags for 2 words", "→"),
    ),
    "words no list": ("ner", text("a.jsonl", '{"tokens": "EU", "tags": ["O"]}\n'), ("row 1 has 'EU'", "→")),
    "tag unknown": ("ner", text("a.txt", "EU B-GPE\nis O\n"), ("do not fit", "B-GPE", "the model has", "→")),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_explained_and_leaves_nothing(
    mistake: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    task, write, told = MISTAKES[mistake]
    kind = "BertForTokenClassification" if task == "ner" else "BertForQuestionAnswering"
    names = dict(enumerate(("B-NEG", "B-POS", "I-POS", "O")))
    labels = {"id2label": names, "label2id": {v: k for k, v in names.items()}} if task == "ner" else {}
    model = save_tiny_bert(tmp_path / "model", kind, **labels)
    data = (write_conll if task == "ner" else write_reading)(tmp_path / "data")
    job = Job(
        model=model, task=task, data=data, eval_data=write(tmp_path), out=tmp_path / "out", method="ptq"
    )
    job.set(max_length=LENGTH)
    assert job.run() == cli.EXIT_USER_ERROR
    message = capfd.readouterr().err
    assert "Traceback" not in message
    error, position = message[message.rindex("error: ") :], 0
    for part in told:
        position = error.find(part, position)
        assert position >= 0, f"{part!r} is missing, or comes too early, in: {error}"
    assert not (tmp_path / "out").exists()


def test_misplaced_answers_are_refused_in_training_and_told_in_calibration(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    write_squad(tmp_path / "data" / "train-v1.1.json", [GOOD, SHIFTED])
    write_squad(tmp_path / "data" / "dev-v1.1.json", [GOOD])
    model = save_tiny_bert(tmp_path / "model", "BertForQuestionAnswering")
    options = ["--model", str(model), "--task", "squad", "--data", str(tmp_path / "data")]
    short = ["--max-length", str(LENGTH), "--out", str(tmp_path / "out")]
    assert cli.run(finetune_main, [*options, *short]) == cli.EXIT_USER_ERROR
    assert "1 of 2 questions, the first is 's'" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
    assert Job(method="ptq", init_batches=1).run(*options, *short) == 0
    assert "of 1 questions, such as 's'" in capfd.readouterr().err


def test_questions_of_v1_may_be_scored_by_the_rules_of_v2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    data = write_squad(tmp_path / "a.json", [GOOD])
    model = save_tiny_bert(tmp_path / "model", "BertForQuestionAnswering")
    job = Job(model=model, task="squad_v2", data=data, eval_data=data, out=tmp_path / "out", method="ptq")
    assert job.run() == 0
    assert "every question of" in capfd.readouterr().err
    split = read(tmp_path / "out" / "metrics.json")["accuracy"]["splits"]["dev"]
    assert not any(name.startswith("NoAns") for name in split["quantized"])
    assert np.isfinite(list(split["quantized"].values())).all()
