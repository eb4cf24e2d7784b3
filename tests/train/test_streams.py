"""The streams of a module and its targets: what the teacher gives, kept for the sentences that are used."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    EVERY_MODEL,
    assert_same_state,
    state_of,
    tiny_encoded,
    tiny_pair,
    train_job,
)

from mrem_deploy.data.encoded import BatchSchedule, sorted_batches
from mrem_deploy.models.parts import Part, PartOutput, carve
from mrem_deploy.train.activation_cache import CacheSettings, NoSpace
from mrem_deploy.train.mrem_s import train_mrem_s
from mrem_deploy.train.streams import Streams, used_examples

CPU = torch.device("cpu")
IN_MEMORY, ON_DISK = CacheSettings(100.0), CacheSettings(0.0)
SIZE = 5  # of batches; the last of 12 sentences has 2


def tensors_of(output: PartOutput) -> list[torch.Tensor]:
    return [*([] if output.embedding is None else [output.embedding]), *output.hidden, *output.outputs]


# Files do not depend on the architecture: two are enough.
PLACES = [("memory", *model) for model in EVERY_MODEL]
PLACES += [("disk", *model) for model in EVERY_MODEL if model[0] in ("bert", "modernbert")]


@pytest.mark.parametrize(("place", "kind", "head"), PLACES)
@pytest.mark.parametrize("cuts", [[0, 2, 3], [0, 3]], ids=["two modules", "one module"])
def test_targets_are_what_the_teacher_gives(place: str, kind: str, head: str, cuts: list[int]) -> None:
    """Asked for in the batches in which they were kept, they are equal to the bit at every real token."""
    teacher, student = tiny_pair(kind, head)
    encoded = tiny_encoded(kind)
    streams = Streams(encoded, 16, IN_MEMORY if place == "memory" else ON_DISK, SIZE)
    for full, quantized in zip(carve(teacher, cuts), carve(student, cuts), strict=True):
        inputs = [streams._clean_input(indices, CPU) for indices in sorted_batches(encoded.lengths, SIZE)]
        streams.look_ahead(full)
        for indices, (tokens, clean) in zip(sorted_batches(encoded.lengths, SIZE), inputs, strict=True):
            with torch.no_grad():
                expected = full(clean, tokens)
            mask = tokens["attention_mask"].bool()
            came = streams.target(indices, mask.shape[1], CPU)
            assert came is not None
            assert (came.per_token, came.bare) == (expected.per_token, expected.bare)
            assert (came.embedding is None) == (not full.first)
            for one, two in zip(tensors_of(came), tensors_of(expected), strict=True):
                assert one.shape == two.shape
                real = mask if one.shape[:2] == mask.shape else torch.ones(len(one), dtype=torch.bool)
                assert torch.equal(one[real], two[real])
        if not full.last:
            streams.advance(full, quantized)
    streams.close()


def test_in_other_company_they_differ_by_rounding_only() -> None:
    teacher, _ = tiny_pair()
    (full,) = carve(teacher, [0, 3])
    encoded = tiny_encoded()
    streams = Streams(encoded, 16, IN_MEMORY, SIZE)
    streams.look_ahead(full)
    indices = np.array([0, 7, 3])
    tokens = encoded.batch(indices)
    came = streams.target(indices, tokens["input_ids"].shape[1], CPU)
    assert came is not None
    with torch.no_grad():
        expected = full(None, tokens)
    mask = tokens["attention_mask"].bool()
    for one, two in zip(came.hidden, expected.hidden, strict=True):
        torch.testing.assert_close(one[mask], two[mask], rtol=1e-4, atol=1e-5)


def test_after_looking_ahead_only_the_student_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student = tiny_pair()
    full, quantized = carve(teacher, [0, 1, 3])[0], carve(student, [0, 1, 3])[0]
    streams = Streams(tiny_encoded(), 16, IN_MEMORY, SIZE)
    streams.look_ahead(full)
    assert streams.is_ahead
    monkeypatch.setattr(full, "forward", None)
    _, clean, noisy = streams.batch(np.arange(3), CPU)
    assert clean is None  # the stream has left the module's entrance
    assert noisy is None
    streams.advance(full, quantized)
    assert not streams.is_ahead
    _, clean, noisy = streams.batch(np.arange(3), CPU)
    assert clean is not None
    assert noisy is not None
    assert streams.target(np.arange(3), 11, CPU) is None  # those of the module before are gone
    streams.close()


# -- which sentences ----------------------------------------------------------------------------------------


def test_a_short_training_uses_some_of_the_sentences() -> None:
    lengths = tiny_encoded().lengths
    schedule = BatchSchedule(lengths, 4, seed=3)
    two = used_examples(schedule, 2, 12)
    assert two.sum() == 8
    assert set(np.flatnonzero(two)) == {int(i) for step in (0, 1) for i in schedule.at(step)}
    assert used_examples(schedule, 3, 12).all()
    assert used_examples(schedule, 100, 12).all()


def test_the_teacher_reads_no_sentence_that_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of four sentences out of twelve: the last module needs eight of them, and no more."""
    read: dict[int, int] = {}
    forward = Part.forward
    teacher, student = tiny_pair()
    own = {id(p) for p in teacher.parameters()}

    def counted(self: Part, hidden: Any, batch: dict[str, torch.Tensor]) -> PartOutput:
        if id(next(self.parameters())) in own and len(batch["attention_mask"]) > 1:  # one is for the space
            read[self.start] = read.get(self.start, 0) + len(batch["attention_mask"])
        return forward(self, hidden, batch)

    monkeypatch.setattr(Part, "forward", counted)
    train_mrem_s(train_job(teacher, student, tiny_encoded(), [0, 1, 3], steps=2))
    schedules = [BatchSchedule(tiny_encoded().lengths, 4, seed) for seed in (1, 2)]
    first, last = (used_examples(schedule, 2, 12) for schedule in schedules)
    assert read == {0: (first | last).sum(), 1: last.sum()}
    assert last.sum() == 8


@pytest.mark.parametrize("steps", [2, 5])
def test_both_orders_of_work_train_alike(steps: int) -> None:
    """The teacher in every step, or its targets: the same curves, but for rounding.

    On some processors a matmul's last bits depend on the batch. In the second module, whose inputs are
    quantized, such a bit can move a code by one: its curve agrees less closely.
    """
    first, second = [], []
    for how in ("auto", "never"):
        teacher, student = tiny_pair()
        log = train_mrem_s(
            train_job(teacher, student, tiny_encoded(), [0, 1, 3], steps=steps, teacher_cache=how)
        )
        for losses, curve in zip((first, second), log.curves.values(), strict=True):
            losses.append([loss for _, loss in curve])
    assert first[0] == pytest.approx(first[1], rel=1e-3)
    assert second[0] == pytest.approx(second[1], rel=2e-2)


# -- space --------------------------------------------------------------------------------------------------


def test_targets_go_to_disk_when_only_the_streams_fit(tmp_path: Path) -> None:
    encoded = tiny_encoded()
    streams_mb = 2 * int(encoded.lengths.sum()) * 16 * 4 / 2**20
    streams = Streams(encoded, 16, CacheSettings(streams_mb, tmp_path), SIZE)
    streams.look_ahead(carve(tiny_pair()[0], [0, 2, 3])[0])
    assert streams.cache is not None
    assert not streams.cache.on_disk
    assert streams._targets is not None
    assert streams._targets.megabytes_on_disk == streams_mb  # the embedding's output and one hidden state
    streams.close()
    assert list(tmp_path.iterdir()) == []


def test_without_space_for_targets_the_teacher_runs_in_every_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    states = []
    usage = namedtuple("usage", "total used free")
    for how in ("never", "auto"):
        teacher, student = tiny_pair()
        if how == "auto":
            monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 100, 0))
        encoded = tiny_encoded()
        streams_mb = 2 * int(encoded.lengths.sum()) * 16 * 4 / 2**20
        options = {"teacher_cache": how, "max_memory": f"{streams_mb}MB", "cache_dir": str(tmp_path)}
        train_mrem_s(train_job(teacher, student, encoded, [0, 2, 3], **options))
        # The second module needs no space for targets and takes them from the cache.
        states.append(state_of(carve(student, [0, 2, 3])[0].view))
    assert_same_state(states[0], states[1])
    assert "runs in every step of module 1/2" in capsys.readouterr().err


def test_no_space_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    encoded = tiny_encoded()
    streams_mb = 2 * int(encoded.lengths.sum()) * 16 * 4 / 2**20
    streams = Streams(encoded, 16, CacheSettings(streams_mb, tmp_path), SIZE)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 100, 0))
    with pytest.raises(NoSpace):
        streams.look_ahead(carve(tiny_pair()[0], [0, 2, 3])[0])
    assert not streams.is_ahead
    assert streams.target(np.arange(2), 11, CPU) is None
    streams.close()
