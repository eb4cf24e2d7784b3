"""MREM-P in one process: the same numbers as MREM-S for one module, and exact lock-step for several."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
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

from mrem_deploy.models.parts import carve
from mrem_deploy.train.checkpoint import CheckpointStore
from mrem_deploy.train.job import TrainLog
from mrem_deploy.train.module import ModuleTrainer
from mrem_deploy.train.mrem_p import shards
from mrem_deploy.train.mrem_p.crew import Crew, modules_of, owner_of
from mrem_deploy.train.mrem_p.rank import train_mrem_p
from mrem_deploy.train.mrem_p.shards import HeldParts
from mrem_deploy.train.mrem_s import train_mrem_s

EVERY_BLOCK = [0, 1, 2, 3]
STEPS = 6


@dataclass
class Run:
    state: dict[str, torch.Tensor]
    log: TrainLog


def run(
    cuts: list[int] = EVERY_BLOCK,
    kind: str = "bert",
    store: CheckpointStore | None = None,
    steps: int = STEPS,
    **changes: Any,
) -> Run:
    teacher, student = tiny_pair(kind)
    options = {"steps": steps, "staleness": 3, "checkpoint_steps": 2} | changes
    log = train_mrem_p(train_job(teacher, student, tiny_encoded(kind), cuts, store, **options))
    return Run(state_of(student), log)


@pytest.fixture(scope="module")
def lock_step() -> Run:
    """A run that nothing disturbed."""
    return run(deterministic=True)


@pytest.fixture
def forcings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool, float]]:
    """(step, whether it is the first module, λ) of every training step."""
    seen: list[tuple[int, bool, float]] = []
    step = ModuleTrainer.step

    def spy(self: ModuleTrainer, number: int, *args: Any) -> Any:
        seen.append((number, self.student.first, args[-1]))
        return step(self, number, *args)

    monkeypatch.setattr(ModuleTrainer, "step", spy)
    return seen


@pytest.mark.parametrize("kind", ["bert", "mpnet", "modernbert"])
@pytest.mark.parametrize("lockstep", [False, True])
def test_one_module_gives_the_numbers_of_mrem_s(kind: str, lockstep: bool) -> None:
    came = run([0, 3], kind, deterministic=lockstep)
    teacher, student = tiny_pair(kind)
    # In mrem-p the teacher runs in every step. Targets from another batch would differ in their last bits.
    log = train_mrem_s(train_job(teacher, student, tiny_encoded(kind), [0, 3], teacher_cache="never"))
    assert_same_state(came.state, state_of(student))
    assert came.log.curves == log.curves


def test_lock_step_runs_agree_exactly_and_use_every_output_once(lock_step: Run) -> None:
    again = run(deterministic=True)
    assert_same_state(again.state, lock_step.state)
    assert again.log.curves == lock_step.log.curves
    assert again.log.ages == {f"module {n}/3": Counter({0: STEPS}) for n in (2, 3)}


def test_every_module_is_trained_at_the_same_time() -> None:
    came = run(steps=30)
    untouched = state_of(tiny_pair()[1])
    assert {name.split("layer.")[1][0] for name in differing(came.state, untouched) if "layer." in name} == {
        "0", "1", "2",
    }  # fmt: skip
    for name, curve in came.log.curves.items():
        assert [step for step, _ in curve] == list(range(30))
        assert sum(loss for _, loss in curve[-5:]) < sum(loss for _, loss in curve[:5]), name
    # Modules in turn: the entry of the queue that is not used yet is the newest, but for the primed ones.
    assert came.log.ages == {"module 2/3": {0: 30}, "module 3/3": {0: 27, 1: 2, 2: 1}}


def test_teacher_forcing_fades_and_spares_the_first_module(forcings: list[Any]) -> None:
    run(steps=10, teacher_forcing=0.4)
    expected = [max(1 - step / 4, 0.0) for step in range(10)]
    for first in (True, False):
        lambdas = {step: value for step, is_first, value in forcings if is_first == first}
        assert [lambdas[step] for step in range(10)] == expected


def test_without_teacher_forcing_the_quantized_input_is_used_alone(forcings: list[Any]) -> None:
    run(teacher_forcing=0.0)
    assert {value for *_, value in forcings} == {0.0}


def test_the_first_module_ignores_teacher_forcing() -> None:
    with_forcing, without = run(teacher_forcing=0.4), run(teacher_forcing=0.0)
    assert with_forcing.log.curves["module 1/3"] == without.log.curves["module 1/3"]
    assert with_forcing.log.curves["module 2/3"] != without.log.curves["module 2/3"]


@pytest.mark.parametrize("call", [1, 8, 9, 17])  # of 18 steps; modules in turn, a set of checkpoints every 6
def test_lock_step_goes_on_exactly_after_a_kill(lock_step: Run, tmp_path: Path, call: int) -> None:
    with killed_at_call(ModuleTrainer, "step", call):
        run(deterministic=True, store=CheckpointStore(tmp_path / "work", {}, resume=False))
    resumed = run(deterministic=True, store=CheckpointStore(tmp_path / "work", {}, resume=True))
    assert_same_state(resumed.state, lock_step.state)
    assert resumed.log.curves == lock_step.log.curves
    assert resumed.log.ages == lock_step.log.ages


def test_at_its_own_pace_every_module_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_at_call(ModuleTrainer, "step", 14):  # modules in turn: two were at step 5, checkpoints at 4
        run(store=CheckpointStore(tmp_path / "work", {}, resume=False))
    steps: list[int] = []
    step = ModuleTrainer.step
    monkeypatch.setattr(ModuleTrainer, "step", lambda *a, **k: steps.append(a[1]) or step(*a, **k))
    resumed = run(store=CheckpointStore(tmp_path / "work", {}, resume=True))
    assert sorted(steps) == [4, 4, 4, 5, 5, 5]
    assert all([s for s, _ in curve] == list(range(STEPS)) for curve in resumed.log.curves.values())
    assert all(counted.total() == STEPS for counted in resumed.log.ages.values())  # also those before


def test_a_finished_run_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(store=CheckpointStore(tmp_path / "work", {}, resume=False))
    monkeypatch.setattr(ModuleTrainer, "step", None)
    again = run(store=CheckpointStore(tmp_path / "work", {}, resume=True))
    assert_same_state(again.state, whole.state)
    assert again.log.curves == whole.log.curves
    assert again.log.ages == whole.log.ages  # of which the report has a plot


def test_a_finished_module_serves_those_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart the first module is done, the others are not: it hands on forward passes."""
    run(store=CheckpointStore(tmp_path / "work", {}, resume=False))
    for name in ("module-1", "module-2"):
        (tmp_path / "work" / f"{name}.safetensors").unlink()
    passes: list[bool] = []
    outputs = ModuleTrainer.outputs
    monkeypatch.setattr(
        ModuleTrainer,
        "outputs",
        lambda self, *a, **k: passes.append(self.student.first) or outputs(self, *a, **k),
    )
    resumed = run(store=CheckpointStore(tmp_path / "work", {}, resume=True))
    assert sum(passes) >= 3 + STEPS - 1  # to fill the queue, and about one per step of the second module
    assert len(resumed.log.curves["module 3/3"]) == STEPS


@pytest.mark.parametrize(("world", "modules"), [(1, 3), (2, 3), (3, 3), (2, 4), (3, 8)])
def test_modules_are_shared_out_in_order(world: int, modules: int) -> None:
    shares = [modules_of(rank, world, modules) for rank in range(world)]
    assert [index for share in shares for index in share] == list(range(modules))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for index in range(modules):
        assert index in shares[owner_of(index, world, modules)]


@pytest.mark.parametrize("kind", ["bert", "mpnet"])  # MPNet has a bias that all blocks read
def test_a_worker_holds_only_its_part_and_rank_0_gets_all_back(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three workers in one process: what one sends is what rank 0 receives."""
    pairs = [tiny_pair(kind) for _ in range(3)]
    for rank, (_, student) in enumerate(pairs):  # as if each had trained its own part
        own = carve(student, EVERY_BLOCK)[rank]
        with torch.no_grad():
            for parameter in own.view.parameters():
                if id(parameter) not in own.shared_parameters:
                    parameter.add_(rank + 1.0)
    whole = [[state_of(model) for model in pair] for pair in pairs]
    crews = [Crew(rank, world=3) for rank in range(3)]
    parts = [[carve(model, EVERY_BLOCK) for model in pair] for pair in pairs]
    helds = [HeldParts(crew, models) for crew, models in zip(crews, parts, strict=True)]
    for one in helds:
        one.release()
    sizes = [[sum(p.numel() for p in model.parameters()) for model in pair] for pair in pairs]
    full = sum(value.numel() for name, value in whole[0][0].items() if "position_ids" not in name)
    assert all(size < full for pair in sizes for size in pair)
    assert sum(teacher for teacher, _ in sizes) < 1.5 * full  # each once, and what they share

    sent: list[torch.Tensor] = []

    def gather(crew: Crew, tensors: list[torch.Tensor], owner: int) -> None:
        if owner == 0:
            return
        if crew.rank == owner:
            sent.extend(tensor.detach().clone() for tensor in tensors)
        elif crew.leads:
            for tensor in tensors:
                tensor.data.copy_(sent.pop(0))

    monkeypatch.setattr(shards, "gather", gather)
    for models in zip(*parts, strict=True):  # teachers, then students, as the workers send them
        for index in (1, 2):
            gather(crews[index], list(shards._tensors(models[index][index])), index)
    helds[0].collect()
    assert sent == []
    assert_same_state(state_of(pairs[0][0]), whole[0][0])
    for name, value in state_of(pairs[0][1]).items():
        owners = {rank for rank in range(3) if torch.equal(value, whole[rank][1][name])}
        assert owners, name
    assert torch.equal(
        carve(pairs[0][1], EVERY_BLOCK)[2].view.state_dict()[_some_weight(parts[2][1][2])],
        parts[2][1][2].view.state_dict()[_some_weight(parts[2][1][2])],
    )


def _some_weight(part: Any) -> str:
    """A weight matrix inside a part's block."""
    return next(
        name for name, value in part.view.state_dict().items() if value.dim() == 2 and "layer" in name
    )
