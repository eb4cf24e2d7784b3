"""MREM-S: the same bits from the same seed, whether interrupted or not, in memory or on disk."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    ARCHITECTURES,
    Killed,
    assert_same_state,
    differing,
    killed_at_call,
    state_of,
    tiny_encoded,
    tiny_pair,
    train_job,
)

from mrem_deploy.data.encoded import sorted_batches
from mrem_deploy.models.parts import carve
from mrem_deploy.quant.spec import QuantSpec
from mrem_deploy.train import checkpoint, mrem_s
from mrem_deploy.train.activation_cache import ActivationCache, CacheSettings
from mrem_deploy.train.checkpoint import CheckpointStore
from mrem_deploy.train.module import ModuleTrainer
from mrem_deploy.train.mrem_s import train_mrem_s
from mrem_deploy.train.streams import Streams

ON_DISK = {"max_memory": "0MB"}
EVERY_BLOCK = [0, 1, 2, 3]
# LAQ and its curvature in the checkpoint; TWN; learned steps, of the embedding's rows too; a plain embedding.
SPECS = [QuantSpec(4, 4, 8, curvature="adam"), QuantSpec(2, 2, 4), QuantSpec(3, 8, 8), QuantSpec(8, 32, 32)]
STEPS = 6


@dataclass
class Run:
    state: dict[str, torch.Tensor]
    curves: dict[str, list[tuple[int, float]]]
    heldout: dict[str, list[tuple[int, float]]]
    stages: list[str]


def run(
    kind: str = "bert",
    cuts: list[int] = EVERY_BLOCK,
    spec: QuantSpec = SPECS[0],
    store: CheckpointStore | None = None,
    **changes: Any,
) -> Run:
    """A student made anew, as a new process would make it, and trained."""
    teacher, student = tiny_pair(kind, spec=spec)
    before = state_of(teacher)
    options = {"steps": STEPS, "holdout": tiny_encoded(kind, count=4, seed=7)} | changes
    log = train_mrem_s(train_job(teacher, student, tiny_encoded(kind), cuts, store, **options))
    assert_same_state(state_of(teacher), before)
    return Run(state_of(student), log.curves, log.heldout, list(log.seconds))


@pytest.fixture(scope="module")
def uninterrupted() -> Run:
    return run()


def assert_same_run(came: Run, expected: Run) -> None:
    assert_same_state(came.state, expected.state)
    assert came.curves == expected.curves
    assert came.heldout == expected.heldout


def test_a_run_repeats_itself_and_another_seed_does_not(uninterrupted: Run) -> None:
    assert_same_run(run(), uninterrupted)
    other = run(seed=1)
    assert differing(other.state, uninterrupted.state)
    assert other.curves != uninterrupted.curves


def test_the_log(uninterrupted: Run) -> None:
    assert list(uninterrupted.curves) == ["module 1/3", "module 2/3", "module 3/3"]
    for curve in uninterrupted.curves.values():
        assert [step for step, _ in curve] == list(range(STEPS))
    assert list(uninterrupted.heldout) == list(uninterrupted.curves)
    for curve in uninterrupted.heldout.values():
        assert [step for step, _ in curve] == [0, STEPS]
    stages = [
        "targets module 1/3",
        "train module 1/3",
        "cache module 1/3",
        "targets module 2/3",
        "train module 2/3",
        "cache module 2/3",
        "targets module 3/3",
        "train module 3/3",
    ]
    assert uninterrupted.stages == stages  # nothing is cached after the last
    assert run(teacher_cache="never").stages == [stage for stage in stages if "targets" not in stage]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_mapped_files_give_what_memory_gives(kind: str, tmp_path: Path) -> None:
    in_memory = run(kind, [0, 1, 3])
    on_disk = run(kind, [0, 1, 3], **ON_DISK, cache_dir=str(tmp_path / "cache"))
    assert_same_run(on_disk, in_memory)
    assert list((tmp_path / "cache").iterdir()) == []
    assert differing(in_memory.state, state_of(tiny_pair(kind, spec=SPECS[0])[1]))


def test_n_is_1_trains_the_whole_model_at_once(tmp_path: Path) -> None:
    options = {"cache_dir": str(tmp_path / "cache"), "teacher_cache": "never", "holdout": None}
    came = run(cuts=[0, 3], **ON_DISK, **options)
    assert not (tmp_path / "cache").exists()  # it needs no cache at all
    assert list(came.curves) == ["module 1/1"]
    assert came.curves["module 1/1"][-1][1] < came.curves["module 1/1"][0][1]


def test_explicit_cuts_are_taken_as_given() -> None:
    first, second = run(cuts=[0, 1, 3]), run(cuts=[0, 2, 3])
    assert len(first.curves) == len(second.curves) == 2
    assert differing(first.state, second.state)


@pytest.mark.parametrize("spec", SPECS[:3])  # 8-bit weights alone start with an error too small to lower
def test_training_lowers_the_loss_of_each_module(spec: QuantSpec) -> None:
    """One batch holds all the examples, so that one step's loss compares with another's."""
    teacher, student = tiny_pair(spec=spec)
    log = train_mrem_s(train_job(teacher, student, tiny_encoded(), EVERY_BLOCK, steps=15, batch_size=12))
    for name, curve in log.curves.items():
        assert curve[-1][1] < curve[0][1], name


# Where a run is killed. Three modules of 6 steps; checkpoints after 2 and 4 steps and at each end.
KILLS = [
    pytest.param(ModuleTrainer, "step", 1, id="before the first step"),
    pytest.param(ModuleTrainer, "step", 2, id="before the first checkpoint"),
    pytest.param(ModuleTrainer, "step", 4, id="inside a module, between checkpoints"),
    pytest.param(ModuleTrainer, "step", 5, id="inside a module, right after a checkpoint"),
    pytest.param(ModuleTrainer, "step", 7, id="at the first step of the second module"),
    pytest.param(ModuleTrainer, "step", 18, id="at the very last step"),
    pytest.param(mrem_s, "heldout_loss", 2, id="before the held-out loss at the end of a module"),
    pytest.param(Streams, "look_ahead", 2, id="before the first targets, those of held-out sentences done"),
    pytest.param(Streams, "look_ahead", 4, id="before the targets of the second module"),
    pytest.param(Streams, "advance", 1, id="between modules, before caching"),
    pytest.param(ActivationCache, "put", 9, id="while targets are kept"),
    pytest.param(ActivationCache, "put", 17, id="between modules, while the cache is overwritten"),
    pytest.param(checkpoint, "save_file", 2, id="while the second checkpoint is written"),
    pytest.param(checkpoint, "save_file", 3, id="while a module's last checkpoint is written"),
    pytest.param(checkpoint, "write_json", 1, id="after the first checkpoint, before the run is named"),
]


@pytest.mark.parametrize(("owner", "name", "call"), KILLS)
def test_a_killed_run_goes_on_to_the_same_bits(
    uninterrupted: Run, tmp_path: Path, owner: Any, name: str, call: int
) -> None:
    with killed_at_call(owner, name, call):
        run(store=CheckpointStore(tmp_path / "work", {}, resume=False), checkpoint_steps=2)
    resumed = run(store=CheckpointStore(tmp_path / "work", {}, resume=True), checkpoint_steps=2)
    assert_same_run(resumed, uninterrupted)


@pytest.mark.parametrize(("owner", "name", "call"), [KILLS[2], KILLS[4], KILLS[9]])
def test_so_does_a_run_whose_teacher_runs_in_every_step(
    tmp_path: Path, owner: Any, name: str, call: int
) -> None:
    off = {"teacher_cache": "never", "holdout": None}
    with killed_at_call(owner, name, min(call, 9)):
        run(store=CheckpointStore(tmp_path / "work", {}, resume=False), checkpoint_steps=2, **off)
    resumed = run(store=CheckpointStore(tmp_path / "work", {}, resume=True), checkpoint_steps=2, **off)
    assert_same_run(resumed, run(**off))


@pytest.mark.parametrize("spec", SPECS[1:])
def test_every_quantizer_survives_a_kill(tmp_path: Path, spec: QuantSpec) -> None:
    with killed_at_call(ModuleTrainer, "step", 10):
        run(spec=spec, store=CheckpointStore(tmp_path / "work", {}, resume=False), checkpoint_steps=2)
    resumed = run(spec=spec, store=CheckpointStore(tmp_path / "work", {}, resume=True), checkpoint_steps=2)
    assert_same_run(resumed, run(spec=spec))


def test_two_kills_in_a_row_and_other_checkpoint_intervals(uninterrupted: Run, tmp_path: Path) -> None:
    with killed_at_call(ModuleTrainer, "step", 6):
        run(store=CheckpointStore(tmp_path / "work", {}, resume=False), checkpoint_steps=2)
    with killed_at_call(ModuleTrainer, "step", 4):  # 2 left of the first module, so inside the second
        run(store=CheckpointStore(tmp_path / "work", {}, resume=True), checkpoint_steps=0)
    resumed = run(store=CheckpointStore(tmp_path / "work", {}, resume=True), checkpoint_steps=5)
    assert_same_run(resumed, uninterrupted)


def test_trained_modules_are_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with killed_at_call(Streams, "advance", 4):  # the first two modules are done
        run(store=CheckpointStore(tmp_path / "work", {}, resume=False))
    steps: list[int] = []
    original = ModuleTrainer.step
    monkeypatch.setattr(
        ModuleTrainer, "step", lambda self, n, *rest: steps.append(n) or original(self, n, *rest)
    )
    run(store=CheckpointStore(tmp_path / "work", {}, resume=True))
    assert steps == list(range(STEPS))


@pytest.mark.parametrize("call", [1, 4, 20])  # held-out sentences, targets, the second module
def test_an_interruption_leaves_no_cache_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with killed_at_call(ActivationCache, "put", call):
        run(**ON_DISK)
    assert list(tmp_path.iterdir()) == []


def test_the_streams_hold_what_the_parts_give() -> None:
    """After two advances the cache holds both models' second hidden states, whatever the batches were."""
    teacher, student = tiny_pair()
    encoded = tiny_encoded()
    streams = Streams(encoded, 16, CacheSettings(100.0), batch_size=5)  # the last batch has 2
    tokens, clean, noisy = streams.batch(np.array([0, 1]), torch.device("cpu"))
    assert clean is None
    assert noisy is None
    for full, quantized in list(zip(carve(teacher, EVERY_BLOCK), carve(student, EVERY_BLOCK), strict=True))[
        :2
    ]:
        streams.advance(full, quantized, "")
    whole_full, whole_quantized = carve(teacher, [0, 3])[0], carve(student, [0, 3])[0]
    for indices in sorted_batches(encoded.lengths, 5):  # the batches in which it was filled: equal to the bit
        tokens, clean, noisy = streams.batch(indices, torch.device("cpu"))
        mask = tokens["attention_mask"].bool()
        with torch.no_grad():
            expected = whole_full(None, tokens).hidden[1], whole_quantized(None, tokens).hidden[1]
        for came, truth in zip((clean, noisy), expected, strict=True):
            # The teacher is exact; a student fed zeros in place of padding may add up in another order.
            torch.testing.assert_close(came[mask], truth[mask], rtol=0, atol=1e-5)
            assert (came[~mask] == 0).all()
    assert not torch.allclose(clean, noisy)
    streams.close()


def test_killed_is_not_caught() -> None:
    """The tests above rest on it: a kill passes through every handler of the package."""
    assert not issubclass(Killed, Exception)
