"""The held-out loss: what it is, when it is taken, and that the best state is the one that is kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import (
    EVERY_MODEL,
    assert_same_state,
    differing,
    killed_at_call,
    state_of,
    tiny_encoded,
    tiny_pair,
    train_job,
)

from mrem_deploy.models.parts import carve
from mrem_deploy.quant.spec import QuantSpec
from mrem_deploy.recipe import Recipe
from mrem_deploy.train import mrem_s
from mrem_deploy.train.activation_cache import CacheSettings
from mrem_deploy.train.checkpoint import CheckpointStore
from mrem_deploy.train.heldout import BestState, budgets, cuts_of, final_losses, heldout_loss, looks
from mrem_deploy.train.loss import reconstruction_terms
from mrem_deploy.train.module import ModuleTrainer
from mrem_deploy.train.mrem_s import train_mrem_s
from mrem_deploy.train.streams import Streams

HELD = tiny_encoded(count=7, seed=5)
SPEC = QuantSpec(2, 2, 8)


@pytest.mark.parametrize("output_loss", ["mse", "auto"])
@pytest.mark.parametrize(
    ("kind", "head"), [pair for pair in EVERY_MODEL if pair[0] in ("bert", "modernbert")]
)
def test_it_is_the_training_loss_of_all_sentences_together(kind: str, head: str, output_loss: str) -> None:
    """Whatever the batches are: here of three, three and one, against all seven in one."""
    teacher, student = tiny_pair(kind, head, SPEC)
    held = tiny_encoded(kind, count=7, seed=5)
    (full,), (quantized,) = carve(teacher, [0, 3]), carve(student, [0, 3])
    tokens = held.batch(np.arange(7))
    with torch.no_grad():
        terms = reconstruction_terms(
            quantized(None, tokens), full(None, tokens), tokens["attention_mask"], output_loss
        )
    for size in (3, 7):
        streams = Streams(held, 16, CacheSettings(100.0), size)
        streams.look_ahead(full)
        assert heldout_loss(quantized, streams, output_loss) == pytest.approx(float(sum(terms)), rel=1e-4)
        streams.close()


@pytest.mark.parametrize(
    ("steps", "batch_size", "sentences", "expected"),
    [
        (2000, 32, 256, [0, 400, 800, 1200, 1600, 2000]),  # it costs little: all looks
        (500, 16, 256, [0, 167, 333, 500]),
        (60, 16, 256, [0, 60]),  # a short training affords none in between
        (1, 1, 256, [0, 1]),
        (3, 1000, 1, [0, 1, 2, 3]),  # fewer steps than looks
    ],
)
def test_when_it_is_taken(steps: int, batch_size: int, sentences: int, expected: list[int]) -> None:
    assert looks(steps, batch_size, sentences) == expected


def test_the_best_state_is_that_of_the_least_loss() -> None:
    layer = torch.nn.Linear(2, 1)
    best, states = BestState(), []
    for step, loss in enumerate([3.0, 1.0, 2.0, 1.0]):
        with torch.no_grad():
            layer.weight.fill_(float(step))
        states.append(state_of(layer))
        best.add(step, loss, layer)
    assert best.step == 1  # the earliest of equals
    assert best.latest == 1.0
    best.restore(layer)
    assert_same_state(state_of(layer), states[1])


def trained(tmp: Path | None = None, resume: bool = False, **options: float) -> tuple[dict, dict, dict]:
    """(state before, state after, held-out curves) of MREM-S on a tiny pair."""
    teacher, student = tiny_pair(spec=SPEC)
    before = state_of(student)
    store = CheckpointStore(tmp / "work", {}, resume) if tmp else None
    values = {"steps": 8, "checkpoint_steps": 3} | options
    job = train_job(teacher, student, tiny_encoded(), [0, 1, 3], store, holdout=HELD, **values)
    log = train_mrem_s(job)
    return before, state_of(student), log.heldout


def test_a_rate_that_destroys_leaves_the_module_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    before, after, heldout = trained(lr=0.5, step_lr=0.5)
    for curve in heldout.values():
        assert curve[0][1] < min(loss for _, loss in curve[1:])
    assert_same_state(after, before)
    assert "least after step 0 of 8; that state is kept" in capsys.readouterr().err


def test_a_rate_that_helps_keeps_the_end() -> None:
    before, after, heldout = trained(lr=1e-3)
    assert differing(after, before)
    for curve in heldout.values():
        assert curve[-1][1] == min(loss for _, loss in curve)


@pytest.mark.parametrize("step", [2, 5, 8, 11, 14, 16])  # before, between and after checkpoints, both modules
@pytest.mark.parametrize("lr", [0.5, 1e-3], ids=["the start is best", "the end is best"])
def test_a_killed_run_keeps_the_same_state(step: int, lr: float, tmp_path: Path) -> None:
    _, expected, curves = trained(lr=lr)
    with killed_at_call(ModuleTrainer, "step", step):
        trained(tmp_path, lr=lr)
    _, came, heldout = trained(tmp_path, resume=True, lr=lr)
    assert_same_state(came, expected)
    assert heldout == curves


def test_a_state_between_start_and_end_survives_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses by hand: the best is after step 2, the checkpoint after step 3, the kill at step 5."""
    monkeypatch.setattr(mrem_s, "looks", lambda *_: [0, 2, 4, 8])

    def fall_and_rise() -> None:
        losses = iter([4.0, 1.0, 2.0, 3.0] * 2)
        monkeypatch.setattr(mrem_s, "heldout_loss", lambda *_: next(losses))

    fall_and_rise()
    _, expected, curves = trained()
    assert [step for step, _ in curves["module 1/2"]] == [0, 2, 4, 8]
    fall_and_rise()
    with killed_at_call(ModuleTrainer, "step", 5):
        trained(tmp_path)
    losses = iter([2.0, 3.0, 4.0, 1.0, 2.0, 3.0])  # those at steps 0 and 2 are in the checkpoint
    monkeypatch.setattr(mrem_s, "heldout_loss", lambda *_: next(losses))
    _, came, heldout = trained(tmp_path, resume=True)
    assert heldout == curves
    assert_same_state(came, expected)


def test_what_mrem_s_keeps_is_what_the_finished_model_is_measured_at() -> None:
    """One function for all methods: on the student of MREM-S it gives the losses that MREM-S chose by."""
    teacher, student = tiny_pair(spec=SPEC)
    job = train_job(teacher, student, tiny_encoded(), [0, 1, 3], holdout=HELD, lr=1e-3)
    log = train_mrem_s(job)
    measured = final_losses(teacher, student, HELD, job.recipe)
    assert measured == {name: min(loss for _, loss in curve) for name, curve in log.heldout.items()}


def test_cuts_of_methods_that_do_not_use_them_always_fit() -> None:
    model = tiny_pair()[0]
    assert cuts_of(model, Recipe(modules="2")) in ([0, 1, 3], [0, 2, 3])
    assert cuts_of(model, Recipe(modules="4")) == [0, 1, 2, 3]  # three blocks
    assert cuts_of(model, Recipe(modules="1,9")) == [0, 1, 3]


def test_the_memory_is_shared_by_tokens() -> None:
    data = tiny_encoded()
    recipe = Recipe(max_memory="1GB")
    own, none = budgets(recipe, (data, None))
    assert (own.max_memory_mb, none.max_memory_mb) == (1024, 0)
    own, others = budgets(recipe, (data, data))
    assert own.max_memory_mb == others.max_memory_mb == 512
