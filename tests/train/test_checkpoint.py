"""Checkpoints: whole or not there, of this run or refused."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_bert import WORDS
from tiny_models import Killed, killed_at_call, save_tiny_classifier
from torch import nn

from mrem_deploy import pipeline
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.resuming import continue_command
from mrem_deploy.quant import artifact
from mrem_deploy.recipe import Recipe
from mrem_deploy.train import checkpoint
from mrem_deploy.train.checkpoint import CheckpointStore, flatten_optimizers, open_store, restore_optimizers
from mrem_deploy.train.module import ModuleTrainer
from mrem_deploy.walk import publishing

IDENTITY = {"bits": "4-4-8", "lr": 1e-4, "keep_fp": [], "data": None, "calibration data": "abc"}


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "matrix": torch.arange(6.0).reshape(2, 3) * value,
        "turned": torch.arange(6.0).reshape(2, 3).t() * value,  # not contiguous
        "scalar": torch.tensor(0.1 * value),
        "double": torch.tensor([1 / 3], dtype=torch.float64),
        "integer": torch.tensor([2**40]),
    }


def assert_equal(came: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert came.keys() == expected.keys()
    for name, value in expected.items():
        assert came[name].dtype == value.dtype
        assert torch.equal(came[name], value)


def test_saved_is_loaded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "work", IDENTITY, resume=False)
    notes = {"step": 3, "curve": [[0, 0.1], [1, 1e-30]], "numbers": {"a/b": 7}}
    store.save("module-0", tensors(), notes)
    came, came_notes = store.load("module-0")
    assert_equal(came, tensors())
    assert notes.items() <= came_notes.items()
    assert store.load("module-1") is None
    again = CheckpointStore(tmp_path / "work", IDENTITY, resume=True)
    assert again.resumed
    assert_equal(again.load("module-0")[0], tensors())


def test_a_fresh_run_forgets_the_old_one(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "work", IDENTITY, resume=False).save("module-0", tensors(), {})
    fresh = CheckpointStore(tmp_path / "work", IDENTITY, resume=False)
    assert not fresh.resumed
    assert fresh.load("module-0") is None


def test_resuming_without_anything_starts_afresh(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "work", IDENTITY, resume=True)
    assert not store.resumed
    assert store.load("module-0") is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"bits": "2-2-8"}, ["bits", "4-4-8", "2-2-8"]),
        ({"lr": 2e-4}, ["lr", "0.0001", "0.0002"]),
        ({"keep_fp": ["*.pooler"]}, ["keep_fp", "*.pooler"]),
        ({"calibration data": "xyz"}, ["calibration data", "abc", "xyz"]),
        ({"new option": 1}, ["new option", "None", "1"]),  # a later release knows more
        ({"data": "here", "bits": "8-8-8"}, ["data", "here", "bits", "8-8-8"]),  # two at once: both are named
    ],
)
def test_another_run_is_refused_and_the_difference_named(
    tmp_path: Path, change: dict[str, Any], named: list[str]
) -> None:
    CheckpointStore(tmp_path / "work", IDENTITY, resume=False).save("module-0", tensors(), {})
    with pytest.raises(UserError) as caught:
        CheckpointStore(tmp_path / "work", {**IDENTITY, **change}, resume=True)
    for word in named:
        assert word in caught.value.problem
    unchanged = IDENTITY.keys() - change.keys()
    assert not any(f"    {name}: was" in caught.value.problem for name in unchanged)
    assert "--fresh" in caught.value.remedy
    # Refused is not lost: the old run can still go on.
    assert CheckpointStore(tmp_path / "work", IDENTITY, resume=True).load("module-0") is not None


def test_a_checkpoint_of_another_run_is_never_read(tmp_path: Path) -> None:
    """However it came there: another process, a copy, a folder that was put together by hand."""
    other = CheckpointStore(tmp_path / "other", {**IDENTITY, "bits": "2-2-8"}, resume=False)
    other.save("module-0", tensors(), {"step": 3})
    store = CheckpointStore(tmp_path / "work", IDENTITY, resume=False)
    store.save("module-0", tensors(), {})
    shutil.copy(tmp_path / "other" / "module-0.safetensors", tmp_path / "work")
    for read in (store.load, store.notes):
        with pytest.raises(UserError, match=r"module-0\.safetensors was written by another run") as caught:
            read("module-0")
        assert "nothing was restored" in caught.value.problem
        assert "--fresh" in caught.value.remedy
    assert store.earlier_seconds == 0.0


def test_equal_identities_are_one_however_they_are_written(tmp_path: Path) -> None:
    """Python has 2 == 2.0, and a command line reads what Python was given as 2 as 2.0."""
    CheckpointStore(tmp_path / "work", {"epochs": 2}, resume=False).save("a", tensors(1.0), {})
    for number in range(2):
        store = CheckpointStore(tmp_path / "work", {"epochs": 2.0}, resume=True)
        assert store.load("a") is not None, number
        store.save("a", tensors(2.0), {})


def test_a_checkpoint_that_names_no_run_is_never_read(tmp_path: Path) -> None:
    """As earlier versions wrote them."""
    store = CheckpointStore(tmp_path / "work", IDENTITY, resume=False)
    for about in ({"notes": json.dumps({"step": 1, "elapsed": 0.0})}, None):
        store.save("module-0", tensors(), {})
        save_file({"matrix": tensors()["matrix"]}, tmp_path / "work" / "module-0.safetensors", metadata=about)
        with pytest.raises(UserError, match="does not say which run wrote it"):
            store.load("module-0")


def test_checkpoints_without_the_identity_of_their_run_are_kept(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "work", IDENTITY, resume=False).save("module-0", tensors(), {})
    (tmp_path / "work" / "run.json").unlink()
    with pytest.raises(UserError, match=r"run\.json cannot be read"):
        CheckpointStore(tmp_path / "work", IDENTITY, resume=True)
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["module-0.safetensors"]


@pytest.mark.parametrize("text", ["[]", "{", "3", "\ud800"])
def test_an_identity_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    CheckpointStore(tmp_path / "work", IDENTITY, resume=False).save("module-0", tensors(), {})
    (tmp_path / "work" / "run.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=r"run\.json cannot be read"):
        CheckpointStore(tmp_path / "work", IDENTITY, resume=True)


def test_a_kill_before_the_first_checkpoint_leaves_nothing_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who the checkpoints belong to is written first: none is ever there without it."""

    def look(*_: Any, **__: Any) -> None:
        assert [path.name for path in (tmp_path / "work").glob("[!.]*")] == ["run.json"]
        raise KeyboardInterrupt

    store = CheckpointStore(tmp_path / "work", IDENTITY, resume=False)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", look)
        with pytest.raises(KeyboardInterrupt):
            store.save("module-0", tensors(), {})
    assert list(tmp_path.iterdir()) == []  # an interruption leaves nothing; a kill would leave this:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "run.json").write_text(json.dumps(IDENTITY))
    other = CheckpointStore(tmp_path / "work", {**IDENTITY, "bits": "2-2-8"}, resume=True)
    assert not other.resumed
    assert not (tmp_path / "work").exists()


def test_what_is_found_and_what_becomes_of_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, beside = tmp_path / "result", {"command.txt": "mrem quantize --config x\n"}

    def opened(identity: dict[str, Any] = IDENTITY, **options: bool) -> str:
        store = open_store(out, identity, beside, **options)
        store.save("module-0", tensors(), {})
        return capsys.readouterr().err

    assert opened() == ""
    shutil.rmtree(tmp_path / ".result.work")
    assert "found no interrupted run" in opened(resume=True)
    assert "continuing the interrupted run" in opened()
    assert "--fresh" in opened(resume=True)
    with pytest.raises(UserError, match=r"bits: was '4-4-8', is '2-2-8'") as caught:
        opened({**IDENTITY, "bits": "2-2-8"})
    assert "to continue that run: mrem quantize --config x" in caught.value.remedy
    assert "removed the checkpoints" in opened({**IDENTITY, "bits": "2-2-8"}, fresh=True)
    assert continue_command(out) == "mrem quantize --config x"


def test_a_kill_while_writing_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "work", IDENTITY, resume=False)
    store.save("module-0", tensors(1.0), {"step": 1})

    def half(values: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"half of")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", half)
        with pytest.raises(Killed):
            store.save("module-0", tensors(2.0), {"step": 2})
    came, notes = CheckpointStore(tmp_path / "work", IDENTITY, resume=True).load("module-0")
    assert notes["step"] == 1
    assert_equal(came, tensors(1.0))
    assert sorted(file.name for file in (tmp_path / "work").iterdir()) == ["module-0.safetensors", "run.json"]


def test_a_full_disk_is_explained_and_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "work", IDENTITY, resume=False)
    store.save("module-0", tensors(1.0), {})

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(UserError, match="no space"):
            store.save("module-0", tensors(2.0), {})
    assert_equal(store.load("module-0")[0], tensors(1.0))


def test_a_broken_checkpoint_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "work", IDENTITY, resume=False)
    store.save("module-0", tensors(), {})
    path = tmp_path / "work" / "module-0.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="module-0"):
        store.load("module-0")
    (tmp_path / "work" / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json"):
        CheckpointStore(tmp_path / "work", IDENTITY, resume=True)


def test_nothing_is_left_when_the_result_is_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "work", IDENTITY, resume=False)
    store.save("module-0", tensors(), {})
    store.remove()
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_go_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill while they are removed must not leave some of them: they would be taken for an earlier state."""

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    store = CheckpointStore(tmp_path / "work", IDENTITY, resume=False)
    store.save("module-0", tensors(), {})
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(Killed):
            store.remove()
    assert not (tmp_path / "work").exists()


def make_optimizers() -> tuple[list[nn.Parameter], list[torch.optim.Optimizer]]:
    dense, rows = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, 2))
    return [dense, rows], [
        torch.optim.AdamW([dense], lr=0.1, fused=True),
        torch.optim.SparseAdam([rows], lr=0.1),
    ]


def update(parameters: list[nn.Parameter], optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parameters[0].grad = torch.randn(3, generator=generator)
    ids = torch.randint(4, (1, 2), generator=generator)
    values = torch.randn(2, 2, generator=generator)
    parameters[1].grad = torch.sparse_coo_tensor(ids, values, (4, 2), check_invariants=True)
    for optimizer in optimizers:
        optimizer.step()


def test_the_time_of_earlier_runs_counts_once(tmp_path: Path) -> None:
    """What this run itself saved is part of its own time."""
    first = CheckpointStore(tmp_path / "work", {}, resume=False)
    first.save("a", {}, {})
    assert first.load("a") is not None
    assert first.earlier_seconds == 0.0
    second = CheckpointStore(tmp_path / "work", {}, resume=True)
    part = second.within("part")
    assert second.load("a") is not None
    assert part.earlier_seconds == second.earlier_seconds > 0.0


def test_parts_of_a_run_have_names_of_their_own(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "work", {}, resume=False)
    one, other = store.within("one"), store.within("other")
    for value, each in enumerate((store, one, other)):
        each.save("module-0", tensors(float(value)), {"step": value})
    for value, each in enumerate((store, one, other)):
        assert each.notes("module-0")["step"] == value
        assert each.names("module-*") == ["module-0"]
        assert_equal(each.load("module-0")[0], tensors(float(value)))
    one.discard("module-0")
    assert (one.names("*"), other.names("*")) == ([], ["module-0"])
    assert store.load("module-0") is not None


def test_optimizers_go_on_where_they_were(tmp_path: Path) -> None:
    """Both kinds through a file: the next updates are the same to the bit."""
    parameters, optimizers = make_optimizers()
    for seed in range(3):
        update(parameters, optimizers, seed)
    state, numbers = flatten_optimizers([optimizer.state_dict() for optimizer in optimizers])
    store = CheckpointStore(tmp_path / "work", {}, resume=False)
    store.save("x", {**state, "0": parameters[0], "1": parameters[1]}, {"numbers": numbers})
    loaded, notes = store.load("x")
    others, fresh = make_optimizers()
    with torch.no_grad():
        for number, parameter in enumerate(others):
            parameter.copy_(loaded[str(number)])
    restored = restore_optimizers([optimizer.state_dict() for optimizer in fresh], loaded, notes["numbers"])
    for optimizer, values in zip(fresh, restored, strict=True):
        optimizer.load_state_dict(values)
    for seed in range(3, 6):
        update(parameters, optimizers, seed)
        update(others, fresh, seed)
    for came, expected in zip(others, parameters, strict=True):
        assert torch.equal(came, expected)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    # The report's plots take longer than all the rest.
    monkeypatch.setattr(publishing, "write_report", lambda *_: None)
    rows = [{"text": " ".join(WORDS[i % 7 : i % 7 + 2 + i % 9]), "label": i % 2} for i in range(24)]
    for split in ("train", "dev"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Recipe(
        model=str(save_tiny_classifier(tmp_path / "model")),
        task="text-classification",
        data=str(tmp_path),
        out=str(tmp_path / "out"),
        modules="2",
        steps=4,
        checkpoint_steps=2,
        calib_size=16,
        batch_size=4,
        max_length=16,
        init_batches=1,
        lr=1e-3,
    )


def test_a_killed_run_resumes_to_the_same_result_and_refuses_changes(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole walk: uninterrupted; killed in the second module; refused; resumed."""
    whole = replace(recipe, out=str(tmp_path / "whole"))
    pipeline.run(whole)
    with killed_at_call(ModuleTrainer, "step", 4 + 4):  # the last step of module 2, after a checkpoint
        pipeline.run(recipe)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"lr: was 0\.001, is 0\.002"):
        pipeline.run(replace(recipe, lr=2e-3))
    text = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(text.replace("film", "actor", 1))
    with pytest.raises(UserError, match="calibration data: was"):
        pipeline.run(recipe)
    (tmp_path / "train.jsonl").write_text(text)
    weights = tmp_path / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-4] + b"\x00\x00\x80\x3f")  # one weight becomes 1.0
    with pytest.raises(UserError, match="model weights: was"):
        pipeline.run(recipe)
    weights.write_bytes(content)
    taken: list[int] = []
    step = ModuleTrainer.step
    monkeypatch.setattr(
        ModuleTrainer, "step", lambda self, n, *inputs: taken.append(n) or step(self, n, *inputs)
    )
    pipeline.run(recipe, resume=True)
    assert taken == [2, 3]  # what the checkpoint lacked of the second module
    for name in (artifact.TENSORS, "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list(tmp_path.glob(".out*"))  # neither checkpoints nor temporaries
