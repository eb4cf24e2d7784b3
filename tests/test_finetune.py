"""Fine-tuning: it learns, repeats itself to the bit, also after an interruption, and refuses clearly."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_bert import NEGATIVE, POSITIVE, save_tiny_bert

from mrem_deploy import finetune as verb
from mrem_deploy import finetuning
from mrem_deploy.__main__ import main as mrem
from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.place import hold
from mrem_deploy.base.resuming import continue_command
from mrem_deploy.finetuning import FinetuneSettings, finetune
from mrem_deploy.models.loading import load_model
from mrem_deploy.train import supervised
from mrem_deploy.train.supervised import LoopSettings, learning_rate, task_loss


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads on tensors this small only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def reviews() -> list[dict]:
    """48 sentences of different lengths whose label is the kind of the one adjective in them."""
    starts = ["the film was", "a plot", "the actor was very", "a very"]
    middles = ["", "and the film was"]
    return [
        {"text": f"{start} {word} {middle}".strip(), "label": label}
        for label, words in (("negative", NEGATIVE[:3]), ("positive", POSITIVE[:3]))
        for start, word, middle in itertools.product(starts, words, middles)
    ]


@pytest.fixture
def settings(tmp_path: Path) -> FinetuneSettings:
    """A tiny encoder without a head, and data it can learn by heart in seconds."""
    rows = reviews()
    write_rows(tmp_path / "data" / "train.jsonl", rows)
    write_rows(tmp_path / "data" / "dev.jsonl", rows[::3])
    model = save_tiny_bert(tmp_path / "encoder", "BertModel")
    return FinetuneSettings(
        model=str(model),
        task="text-classification",
        data=str(tmp_path / "data"),
        out=str(tmp_path / "out"),
        epochs=10,
        batch_size=8,
        lr=1e-2,
        max_length=16,
    )


def kill_at(stop: int | None, patched: pytest.MonkeyPatch) -> list[int]:
    """Interrupt the training before step `stop`; returns the list of steps that were begun."""
    step_seed, begun = supervised._step_seed, []

    def watched(seed: int, step: int) -> int:
        if step == stop:
            raise KeyboardInterrupt
        begun.append(step)
        return step_seed(seed, step)

    patched.setattr(supervised, "_step_seed", watched)
    return begun


def record_of(folder: Path) -> dict:
    return json.loads((folder / "finetune.json").read_text(encoding="utf-8"))


def test_it_learns_a_trivial_task_and_says_what_it_took(settings: FinetuneSettings) -> None:
    folder = finetune(settings)
    record = record_of(folder)
    assert record["metric"] == "accuracy"
    assert record["score"] == 100.0
    assert record["splits"]["dev"] == {"accuracy": 100.0, "examples": 16}
    assert record["steps"] == 60  # 48 sentences / 8 x 10 epochs
    losses = [loss for _, loss in record["curve"]]
    assert np.mean(losses[-6:]) < np.mean(losses[:6]) / 2  # dropout is on: single values vary
    assert record["train_seconds"] > 0
    assert record["peak_memory_mb"] > 10
    assert not list(folder.parent.glob(".*")), "no checkpoints are left behind"


def test_the_written_model_loads_and_knows_its_labels(settings: FinetuneSettings) -> None:
    model, tokenizer = load_model(finetune(settings), "sequence-classification")
    assert model.config.id2label == {0: "negative", 1: "positive"}
    batch = tokenizer(["the film was great", "the film was awful"], return_tensors="pt")
    names = [model.config.id2label[int(i)] for i in model(**batch).logits.argmax(1)]
    assert names == ["positive", "negative"]


def test_the_same_settings_give_the_same_bits_and_another_seed_does_not(settings: FinetuneSettings) -> None:
    short = replace(settings, epochs=1)
    weights = [
        load_file(finetune(replace(short, out=f"{settings.out}-{i}", seed=seed)) / "model.safetensors")
        for i, seed in enumerate((0, 0, 1))
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["classifier.weight"], weights[2]["classifier.weight"])


def test_resuming_gives_the_bits_of_an_uninterrupted_run(
    settings: FinetuneSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = finetune(replace(settings, epochs=2, out=f"{settings.out}-whole"))
    parts = replace(settings, epochs=2, checkpoint_steps=3)
    with monkeypatch.context() as patched:
        kill_at(8, patched)  # two steps after the second checkpoint
        with pytest.raises(KeyboardInterrupt):
            finetune(parts)
    assert not Path(parts.out).exists(), "nothing half-written"

    command = shlex.split(str(continue_command(Path(parts.out))))
    assert command[:2] == ["mrem", "finetune"]
    steps_done = kill_at(None, monkeypatch)
    with hold(Path(parts.out), "another run"):
        assert mrem(command[1:]) == cli.EXIT_USER_ERROR
    assert steps_done == []
    assert mrem(command[1:]) == 0
    resumed = Path(parts.out)
    assert steps_done == [6, 7, 8, 9, 10, 11]
    assert [path.name for path in resumed.parent.glob(".*")] == []
    one, two = load_file(whole / "model.safetensors"), load_file(resumed / "model.safetensors")
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name
    assert record_of(whole)["curve"] == record_of(resumed)["curve"]


def test_resuming_refuses_another_run(settings: FinetuneSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = replace(settings, checkpoint_steps=2)
    with monkeypatch.context() as patched:
        kill_at(4, patched)
        with pytest.raises(KeyboardInterrupt):
            finetune(parts)
    with pytest.raises(UserError, match=r"lr: was 0.01, is 0.001") as caught:
        finetune(replace(parts, lr=1e-3))
    assert parts.command() in caught.value.remedy
    rows = reviews()
    rows[0]["label"] = "positive"  # a label matters as much as a text
    write_rows(Path(settings.data) / "train.jsonl", rows)
    with pytest.raises(UserError, match="training data: was"):
        finetune(parts, resume=True)
    steps_done = kill_at(None, monkeypatch)
    finetune(replace(parts, lr=1e-3), fresh=True)
    assert steps_done[0] == 0


def test_resume_without_an_interrupted_run_starts_afresh(settings: FinetuneSettings) -> None:
    assert record_of(finetune(replace(settings, epochs=1), resume=True))["steps"] == 6


def test_regression(settings: FinetuneSettings, tmp_path: Path) -> None:
    """STS-B: scores between pairs, one output, squared error."""
    scores = {"great": 5.0, "fine": 4.0, "poor": 1.5, "awful": 0.0}
    rows = [
        {"sentence1": f"the {subject} was very {word}", "sentence2": word, "score": score}
        for word, score in scores.items()
        for subject in ("film", "plot", "actor", "film and plot")
    ]
    write_rows(tmp_path / "STS-B" / "train.jsonl", rows)
    write_rows(tmp_path / "STS-B" / "dev.jsonl", rows)
    # Weights that start larger: a score needs more distance from the start than a decision does.
    model = save_tiny_bert(tmp_path / "wide", "BertModel", initializer_range=0.2)
    folder = finetune(
        replace(settings, model=str(model), task="stsb", data=str(tmp_path / "STS-B"), epochs=60)
    )
    record = record_of(folder)
    assert record["metric"] == "spearman"
    assert record["score"] > 90
    assert record["loss"] < record["curve"][0][1] / 4
    written, _ = load_model(folder, "sequence-classification")
    assert written.config.num_labels == 1
    assert written.config.problem_type == "regression"


def test_a_trained_head_is_matched_by_the_names_of_its_labels(
    settings: FinetuneSettings, tmp_path: Path
) -> None:
    swapped = save_tiny_bert(tmp_path / "swapped", id2label={0: "POSITIVE", 1: "NEGATIVE"})
    folder = finetune(replace(settings, model=str(swapped)))
    model, tokenizer = load_model(folder, "sequence-classification")
    assert model.config.id2label == {0: "POSITIVE", 1: "NEGATIVE"}
    assert int(model(**tokenizer("the film was great", return_tensors="pt")).logits.argmax()) == 0
    assert record_of(folder)["score"] == 100.0


def test_eval_size_and_fractions_of_an_epoch(settings: FinetuneSettings) -> None:
    record = record_of(finetune(replace(settings, epochs=0.5, eval_size=5)))
    assert record["steps"] == 3
    assert record["splits"]["dev"]["examples"] == 5


def test_learning_rate_by_hand() -> None:
    plain = LoopSettings(steps=4, batch_size=1, lr=0.8, warmup=0.0, seed=0, checkpoint_steps=0)
    assert [learning_rate(i, plain) for i in range(4)] == pytest.approx([0.8, 0.6, 0.4, 0.2])
    warm = replace(plain, warmup=0.5)
    assert [learning_rate(i, warm) for i in range(4)] == pytest.approx([0.0, 0.4, 0.8, 0.4])


def test_loss_by_hand() -> None:
    # -log softmax([0, ln 3])[1] = -log(3/4)
    assert task_loss(torch.tensor([[0.0, np.log(3.0)]]), torch.tensor([1])).item() == pytest.approx(
        0.287682, abs=1e-6
    )
    assert task_loss(torch.tensor([[1.0], [4.0]]), torch.tensor([2.0, 2.0])).item() == pytest.approx(2.5)


def test_a_loss_that_is_not_a_number_stops_the_run(
    settings: FinetuneSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "task_loss", lambda logits, labels: logits.sum() * float("nan"))
    with pytest.raises(UserError, match="diverged") as caught:
        finetune(settings)
    assert "--lr" in caught.value.remedy
    assert not Path(settings.out).exists()


# -- refusals: (change of the settings, what the message must say) -------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data": "/nowhere/data"}, "/nowhere/data"),
        ({"model": "/nowhere/model"}, "no model folder /nowhere/model"),
        ({"task": "sst3"}, "sst3"),
        ({"task": "feature-extraction"}, "no labels to learn from"),
        ({"text_column": "review"}, "'review'"),
        ({"label_column": "stars"}, "'stars'"),
        ({"max_length": 33}, "at most 32 tokens"),
        ({"device": "abacus"}, "abacus"),
    ],
)
def test_a_wrong_setting_is_refused_before_training(
    settings: FinetuneSettings, change: dict, says: str
) -> None:
    with pytest.raises(UserError) as caught:
        finetune(replace(settings, **change))
    assert says in str(caught.value)
    assert caught.value.remedy
    assert not Path(settings.out).exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("epochs", 0), ("lr", 0.0), ("lr", 2.0), ("warmup", 1.0), ("batch_size", 0), ("max_length", 2),
     ("seed", -1), ("checkpoint_steps", -1), ("eval_size", 0)],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_on_construction(
    settings: FinetuneSettings, name: str, value: float
) -> None:
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} must be"):
        replace(settings, **{name: value})


def test_labels_that_do_not_fit_the_trained_head(settings: FinetuneSettings, tmp_path: Path) -> None:
    other = save_tiny_bert(tmp_path / "other", id2label={0: "spam", 1: "ham"})
    with pytest.raises(UserError, match="labels do not fit"):
        finetune(replace(settings, model=str(other)))


def test_a_label_that_only_the_evaluation_has_is_found_before_training(
    settings: FinetuneSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(Path(settings.data) / "dev.jsonl", [{"text": "a film", "label": "mixed"}])
    monkeypatch.setattr(finetuning, "train_on_labels", lambda *_: pytest.fail("trained"))
    with pytest.raises(UserError, match="mixed"):
        finetune(settings)


def test_one_label_only(settings: FinetuneSettings) -> None:
    write_rows(Path(settings.data) / "train.jsonl", [{"text": "a film", "label": "good"}] * 3)
    write_rows(Path(settings.data) / "dev.jsonl", [{"text": "a film", "label": "good"}])
    with pytest.raises(UserError, match="at least 2 different labels"):
        finetune(settings)


def test_a_pickle_only_checkpoint(settings: FinetuneSettings, capsys: pytest.CaptureFixture[str]) -> None:
    weights = Path(settings.model) / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    options = [
        "--model",
        settings.model,
        "--task",
        settings.task,
        "--data",
        settings.data,
        "--out",
        settings.out,
    ]
    assert cli.run(verb.main, options) == 2
    assert "pytorch_model.bin" in capsys.readouterr().err
    assert not Path(settings.out).exists()


def test_out_with_other_files_is_kept_unless_told(settings: FinetuneSettings) -> None:
    short, note = replace(settings, epochs=0.1), Path(settings.out) / "thesis.txt"
    note.parent.mkdir()
    note.write_text("years of work")
    with pytest.raises(UserError, match="not empty"):
        finetune(short)
    assert note.read_text() == "years of work"
    finetune(short, overwrite=True)
    assert not note.exists()
    finetune(short)  # a folder of ours is replaced without asking
    assert record_of(Path(settings.out))["steps"] == 1


def test_out_never_replaces_what_is_read(settings: FinetuneSettings, tmp_path: Path) -> None:
    for out in (settings.model, settings.data, str(tmp_path)):
        with pytest.raises(UserError, match="would be replaced"):
            finetune(replace(settings, out=out), overwrite=True)


def test_out_is_a_file(settings: FinetuneSettings) -> None:
    Path(settings.out).write_text("")
    with pytest.raises(UserError, match="is a file"):
        finetune(settings)


def test_a_checkpoint_that_cannot_be_written_says_so(
    settings: FinetuneSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from mrem_deploy.train import checkpoint

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(UserError, match="no space left"):
        finetune(replace(settings, checkpoint_steps=1))
    assert not Path(settings.out).exists()


def test_the_command_line(settings: FinetuneSettings) -> None:
    options = ["--model", settings.model, "--task", "text-classification", "--data", settings.data]
    options += [
        "--out",
        settings.out,
        "--epochs",
        "1",
        "--batch-size",
        "16",
        "--lr",
        "1e-3",
        "--max-length",
        "12",
    ]
    assert cli.run(verb.main, options) == 0
    chosen = record_of(Path(settings.out))["settings"]
    assert (chosen["batch_size"], chosen["lr"], chosen["max_length"], chosen["seed"]) == (16, 1e-3, 12, 0)
