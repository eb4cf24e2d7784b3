"""MREM-P ends in the states that do best on held-out sentences, with the losses that MREM-S would measure."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    assert_same_state,
    differing,
    killed_at_call,
    state_of,
    tiny_encoded,
    tiny_pair,
    train_job,
)

from mrem_deploy.quant.spec import QuantSpec
from mrem_deploy.train.checkpoint import CheckpointStore
from mrem_deploy.train.heldout import final_losses
from mrem_deploy.train.job import TrainJob, TrainLog
from mrem_deploy.train.module import ModuleTrainer
from mrem_deploy.train.mrem_p import best_states
from mrem_deploy.train.mrem_p.best_states import Snapshots
from mrem_deploy.train.mrem_p.crew import Crew
from mrem_deploy.train.mrem_p.rank import train_mrem_p
from mrem_deploy.train.mrem_s import train_mrem_s

HELD = tiny_encoded(count=7, seed=5)
SPEC = QuantSpec(2, 2, 8)
EVERY_BLOCK = [0, 1, 2, 3]
LEVERS = {"embedding_rate": 0.1, "output_loss": "auto"}


def job_of(cuts: list[int], store: CheckpointStore | None = None, **changes: Any) -> TrainJob:
    teacher, student = tiny_pair(spec=SPEC)
    options = {"steps": 6, "checkpoint_steps": 2, "deterministic": True, **LEVERS} | changes
    return train_job(teacher, student, tiny_encoded(), cuts, store, holdout=HELD, **options)


def trained(cuts: list[int] = EVERY_BLOCK, **changes: Any) -> tuple[TrainJob, TrainLog]:
    job = job_of(cuts, **changes)
    return job, train_mrem_p(job)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("lr", [0.5, 1e-3], ids=["the start is best", "the end is best"])
def test_one_module_keeps_what_mrem_s_keeps(lr: float, deterministic: bool) -> None:
    job, log = trained([0, 3], lr=lr, deterministic=deterministic)
    same = job_of([0, 3], lr=lr, teacher_cache="never")
    expected = train_mrem_s(same)
    assert_same_state(state_of(job.student), state_of(same.student))
    assert log.heldout == expected.heldout
    assert log.curves == expected.curves


def test_a_rate_that_destroys_leaves_every_module_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    before = state_of(tiny_pair(spec=SPEC)[1])
    job, log = trained(lr=0.5, step_lr=0.5)
    assert_same_state(state_of(job.student), before)
    assert [curve[0][1] for curve in log.heldout.values()] == [
        min(loss for _, loss in curve) for curve in log.heldout.values()
    ]
    assert capsys.readouterr().err.count("least after step 0 of 6; that state is kept") == 3


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_losses_are_those_of_the_finished_model(deterministic: bool) -> None:
    job, log = trained(lr=1e-3, steps=12, deterministic=deterministic)
    assert differing(state_of(job.student), state_of(tiny_pair(spec=SPEC)[1]))
    measured = final_losses(job.teacher, job.student, HELD, job.recipe)
    assert measured == {name: min(loss for _, loss in curve) for name, curve in log.heldout.items()}
    assert [curve[-1][0] for curve in log.heldout.values()] == [12] * 3


def test_a_module_is_judged_on_what_the_chosen_states_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: the first module's state after step 2 is best; the others are then compared on its outputs."""
    monkeypatch.setattr(best_states, "looks", lambda *_: [0, 2, 6])
    states: dict[int, dict[str, torch.Tensor]] = {}
    take = Snapshots.take

    def note(self: Snapshots, step: int) -> None:
        if self._index == 0 and step == 2:
            states[2] = {name: value.clone() for name, value in self._view.state_dict().items()}
        take(self, step)

    monkeypatch.setattr(Snapshots, "take", note)
    real, losses = best_states.heldout_loss, iter([2.0, 1.0, 3.0])
    monkeypatch.setattr(best_states, "heldout_loss", lambda *args: next(losses, None) or real(*args))
    job, log = trained(lr=1e-3)
    assert log.heldout["module 1/3"] == [(0, 2.0), (2, 1.0), (6, 3.0)]
    kept = {name: value for name, value in state_of(job.student).items() if "layer.0." in name}
    assert kept
    for name, value in kept.items():
        assert torch.equal(value, states[2][name.removeprefix("bert.")]), name
    measured = final_losses(job.teacher, job.student, HELD, job.recipe)
    for name in ("module 2/3", "module 3/3"):
        assert measured[name] == min(loss for _, loss in log.heldout[name])


@pytest.mark.parametrize("lr", [0.5, 1e-3], ids=["the start is best", "the end is best"])
@pytest.mark.parametrize("call", [1, 8, 17])  # of 18 steps, a set of checkpoints every 6
def test_a_killed_run_keeps_the_same_states(lr: float, call: int, tmp_path: Path) -> None:
    expected, whole = trained(lr=lr)
    with killed_at_call(ModuleTrainer, "step", call):
        trained(lr=lr, store=CheckpointStore(tmp_path / "work", {}, resume=False))
    resumed, log = trained(lr=lr, store=CheckpointStore(tmp_path / "work", {}, resume=True))
    assert_same_state(state_of(resumed.student), state_of(expected.student))
    assert log.heldout == whole.heldout


def test_states_of_this_run_are_not_time_of_an_earlier_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "work", {}, resume=False)
    trained(store=store)
    assert store.earlier_seconds == 0.0


def test_a_state_that_is_missing_is_passed_over(tmp_path: Path) -> None:
    view = torch.nn.Linear(2, 2)
    kept = Snapshots(CheckpointStore(tmp_path / "work", {}, resume=False), 0, view, [0, 3, 5])
    for step in (0, 1, 3):  # 1 is not due, 5 was never reached
        kept.take(step)
    assert [step for step, _ in kept.states()] == [0, 3]


def test_without_held_out_sentences_nothing_is_set_aside(tmp_path: Path) -> None:
    teacher, student = tiny_pair(spec=SPEC)
    store = CheckpointStore(tmp_path / "work", {}, resume=False)
    log = train_mrem_p(train_job(teacher, student, tiny_encoded(), EVERY_BLOCK, store, steps=2))
    assert log.heldout == {}
    assert "choose states" not in log.seconds
    assert store.names("state-*") == []


def test_workers_hand_the_streams_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers in two threads find what one finds alone."""
    from mrem_deploy.train.mrem_p.worker import ModuleWorker

    alone, log = trained(lr=1e-3)

    meeting, mailbox = threading.Barrier(2, timeout=60), []

    class Pair(Crew):
        def exchange(self, label: str, value: Any = None, *_: Any, **__: Any) -> list[Any]:
            meeting.wait()
            return [value]

    def pass_on(crew: Crew, tensors: list[torch.Tensor], source: int, target: int) -> None:
        if crew.rank == source:
            mailbox.extend(tensor.clone() for tensor in tensors)
        meeting.wait()
        if crew.rank == target:
            for tensor, sent in zip(tensors, mailbox, strict=True):
                tensor.copy_(sent)

    monkeypatch.setattr(best_states, "pass_on", pass_on)
    found: dict[int, Any] = {}

    def work(rank: int) -> None:
        from dataclasses import replace

        from mrem_deploy.models.parts import carve

        job = replace(job_of(EVERY_BLOCK), crew=Pair(rank, world=2))
        job.student.load_state_dict(alone.student.state_dict())
        parts = carve(job.teacher, EVERY_BLOCK), carve(job.student, EVERY_BLOCK)
        owned = [(0, 1), (2,)][rank]
        workers = []
        for index in owned:
            worker = object.__new__(ModuleWorker)
            worker.index = index
            worker.trainer = ModuleTrainer(parts[0][index], parts[1][index], job.settings)
            worker.snapshots = Snapshots(None, index, parts[1][index].view, [])
            workers.append(worker)
        found.update(best_states.keep_best_states(job, workers, 3))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [min(loss for _, loss in curve) for curve in log.heldout.values()]
    assert [found[index][-1][1] for index in range(3)] == pytest.approx(expected)
