"""QAT: both losses, the two stages, choosing the best state, micro-batches, and resuming to the bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_job import DEV, TRAIN, workshop_in
from tiny_job import job_in as job
from tiny_models import (
    ARCHITECTURES,
    EVERY_MODEL,
    assert_same_state,
    differing,
    killed_at_call,
    state_of,
    tiny_batch,
    tiny_encoded,
    tiny_pair,
    train_job,
)
from torch import nn
from torch.nn import functional as F

from mrem_deploy.base import cli
from mrem_deploy.models.architectures import anatomy
from mrem_deploy.models.parts import PartOutput, carve
from mrem_deploy.quant import artifact
from mrem_deploy.quant.spec import QuantSpec
from mrem_deploy.train import qat
from mrem_deploy.train.checkpoint import CheckpointStore
from mrem_deploy.train.distillation import (
    Amount,
    Powers,
    Seen,
    imitation_loss,
    prediction_loss,
    target_powers,
    watch,
)
from mrem_deploy.train.job import TrainJob, TrainLog
from mrem_deploy.train.qat import STAGES, evaluation_steps, train_qat
from mrem_deploy.walk import publishing

WHOLE = Amount(1.0, 1.0, 1.0)
SENTENCES = 24


def quick(teacher: nn.Module, student: nn.Module, score: Any, store: Any = None, **changes: Any) -> TrainJob:
    """Six batches per epoch, two epochs of each stage."""
    options = {"method": "qat", "qat_epochs": "2+2", "qat_evals": 2} | changes
    return train_job(teacher, student, tiny_encoded(count=SENTENCES), None, store, score, **options)


def score_by_call(scores: list[float]) -> Any:
    """A judge with its mind made up: the scores it gives, one after another."""
    given = iter(scores)
    return lambda model: next(given)


def run(
    scores: list[float] | None = None, store: Any = None, head: str = "", **changes: Any
) -> tuple[nn.Module, TrainLog]:
    teacher, student = tiny_pair("bert", head or "sequence-classification")
    judge = score_by_call(scores) if scores else lambda model: 1.0
    return student, train_qat(quick(teacher, student, judge, store, **changes))


# --- the losses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_scores_are_recorded_in_every_block_and_the_model_is_left_as_it_was(kind: str) -> None:
    teacher, _ = tiny_pair(kind)
    part, batch = carve(teacher, [0, 3])[0], tiny_batch(kind)
    with torch.no_grad():
        seen = watch(part, batch)
    rows, tokens = batch["input_ids"].shape
    heads = teacher.config.num_attention_heads
    assert [tuple(score.shape) for score in seen.scores] == [(rows, heads, tokens, tokens)] * 3
    assert not any(module._forward_hooks for module in teacher.modules())


def test_scores_are_what_the_softmax_reads() -> None:
    """On a sentence without padding the softmax of the scores must be the model's own probabilities."""
    teacher, _ = tiny_pair("bert")
    batch = {name: value[:1] for name, value in tiny_batch().items()}
    assert bool(batch["attention_mask"].all())
    probabilities: list[torch.Tensor] = []
    for name in anatomy(teacher).attentions:
        context = teacher.get_submodule(name).context
        context.register_forward_pre_hook(lambda _, args: probabilities.append(args[0]))
    with torch.no_grad():
        seen = watch(carve(teacher, [0, 3])[0], batch)
    for score, expected in zip(seen.scores, probabilities, strict=True):
        torch.testing.assert_close(score.softmax(dim=-1), expected)


def test_the_imitation_loss_ignores_padding() -> None:
    """Whatever stands at padding, in queries or keys, has neither a say nor a gradient."""
    teacher, student = tiny_pair("bert")
    batch, mask = tiny_batch(), tiny_batch()["attention_mask"]
    with torch.no_grad():
        target, came = (watch(carve(model, [0, 3])[0], batch) for model in (teacher, student))
    expected = imitation_loss(came, target, mask, WHOLE)
    assert expected > 0
    real = mask.bool()
    pairs = real[:, None, :, None] & real[:, None, None, :]
    assert not bool(pairs.all())
    spoilt = [torch.where(pairs, score, torch.tensor(1e6)).requires_grad_(True) for score in came.scores]
    hidden = [torch.where(real[:, :, None], h, torch.tensor(-1e6)) for h in came.output.hidden]
    output = PartOutput(came.output.embedding, hidden, came.output.outputs)
    loss = imitation_loss(Seen(output, spoilt), target, mask, WHOLE)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(bool((score.grad[~pairs.expand_as(score)] == 0).all()) for score in spoilt)  # type: ignore[index]


def test_the_imitation_loss_by_hand() -> None:
    """Two tokens of three are real: 4 of the 9 scores count."""
    mask = torch.tensor([[1, 1, 0]])
    zero, one = torch.zeros(1, 3, 2), torch.ones(1, 3, 2)
    scores = torch.arange(9.0).reshape(1, 1, 3, 3)
    student = Seen(PartOutput(one, [zero, 2 * one], []), [scores])
    teacher = Seen(PartOutput(zero, [zero, zero], []), [torch.zeros(1, 1, 3, 3)])
    hidden, attention = 1.0 + 0.0 + 4.0, (0 + 1 + 9 + 16) / 4
    assert imitation_loss(student, teacher, mask, WHOLE).item() == pytest.approx(hidden + attention)
    half = imitation_loss(student, teacher, mask, Amount(1.0, 0.5, 0.25))
    assert half.item() == pytest.approx(hidden / 2 + attention / 4)
    powers = Powers((2.0, 5.0, 8.0), (13.0,))
    relative = imitation_loss(student, teacher, mask, WHOLE, powers)
    assert relative.item() == pytest.approx(1 / 2 + 0 / 5 + 4 / 8 + attention / 13)


def test_powers_are_mean_squares_over_real_tokens_however_batches_are_split() -> None:
    teacher, _ = tiny_pair("bert")
    (part,) = carve(teacher, [0, 3])
    encoded = tiny_encoded()
    whole = target_powers(part, [encoded.batch(np.arange(12))])
    parts = target_powers(part, [encoded.batch(rows) for rows in np.array_split(np.arange(12), 5)])
    assert parts.hidden == pytest.approx(whole.hidden, rel=1e-4)
    assert parts.scores == pytest.approx(whole.scores, rel=1e-4)
    with torch.no_grad():
        alone = [watch(part, encoded.batch(np.array([i]))) for i in range(12)]  # no padding
    states = [seen.output.hidden[1] for seen in alone]
    expected = sum(float(state.square().sum()) for state in states) / sum(s.numel() for s in states)
    assert whole.hidden[2] == pytest.approx(expected, rel=1e-4)
    scores = [seen.scores[0] for seen in alone]
    expected = sum(float(score.square().sum()) for score in scores) / sum(s.numel() for s in scores)
    assert whole.scores[0] == pytest.approx(expected, rel=1e-4)


def test_relative_terms_of_a_model_are_of_one_size() -> None:
    """Scores of the tiny model made ten times larger: they would be most of the plain loss."""
    teacher, student = tiny_pair("bert", spec=QuantSpec(2, 2, 8))
    for model in (teacher, student):
        for block in model.bert.encoder.layer:
            block.attention.self.query.weight.data.mul_(10.0)
    batch, mask = tiny_batch(), tiny_batch()["attention_mask"]
    full, quantized = (carve(model, [0, 3])[0] for model in (teacher, student))
    with torch.no_grad():
        target, came = watch(full, batch), watch(quantized, batch)
    powers = target_powers(full, [batch])
    silent = Seen(came.output, target.scores)  # without any error of the scores
    plain, hidden = (imitation_loss(seen, target, mask, WHOLE) for seen in (came, silent))
    assert hidden < 0.1 * plain
    plain, hidden = (imitation_loss(seen, target, mask, WHOLE, powers) for seen in (came, silent))
    assert 0.2 * plain < hidden < 0.8 * plain


def test_the_options_of_the_first_stage_change_it() -> None:
    def states(**options: Any) -> dict[str, torch.Tensor]:
        teacher, student = tiny_pair("bert")
        train_qat(quick(teacher, student, lambda model: 1.0, qat_epochs="1+0", **options))
        return state_of(student)

    plain = {"qat_warmup": 0.0, "qat_relative": False}
    before = states(**plain)
    assert differing(states(**plain | {"qat_warmup": 0.5}), before)
    assert differing(states(**plain | {"qat_relative": True}), before)


@pytest.mark.parametrize(
    ("kind", "head"), [pair for pair in EVERY_MODEL if pair[0] in ("bert", "modernbert")]
)
def test_the_prediction_loss_is_least_at_the_teacher(kind: str, head: str) -> None:
    teacher, student = tiny_pair(kind, head)
    batch = tiny_batch(kind)
    with torch.no_grad():
        target, came = (carve(model, [0, 3])[0](None, batch) for model in (teacher, student))
    mask = batch["attention_mask"]
    best = prediction_loss(target, target, mask, WHOLE)
    loss = prediction_loss(came, target, mask, WHOLE)
    assert bool(torch.isfinite(loss))
    assert loss > best
    assert target.bare == (head == "feature-extraction")
    assert not target.bare or best == 0


def test_the_prediction_loss_of_classes_is_the_soft_cross_entropy() -> None:
    one, two = (PartOutput(None, [], [torch.tensor(rows)]) for rows in ([[0.0, 0.0]], [[2.0, 0.0]]))
    mask = torch.ones(1, 1)
    p = torch.tensor([2.0, 0.0]).softmax(0)
    assert prediction_loss(one, two, mask, WHOLE).item() == pytest.approx(np.log(2))
    assert prediction_loss(two, two, mask, WHOLE).item() == pytest.approx(-(p * p.log()).sum().item())


def test_a_regression_has_squared_error() -> None:
    one, two = (PartOutput(None, [], [torch.tensor(rows)]) for rows in ([[1.0], [2.0]], [[3.0], [2.0]]))
    assert prediction_loss(one, two, torch.ones(2, 1), WHOLE).item() == 2.0


def test_an_answer_is_sought_among_real_tokens_only() -> None:
    mask = torch.tensor([[1, 1, 0]])
    start = torch.tensor([[1.0, 2.0, 50.0]], requires_grad=True)
    target = torch.tensor([[2.0, 1.0, -7.0]])
    one, two = (PartOutput(None, [], [x, x], True) for x in (start, target))
    loss = prediction_loss(one, two, mask, WHOLE)
    expected = 2 * F.cross_entropy(start[:, :2], target[:, :2].softmax(-1))
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert start.grad is not None
    assert start.grad[0, 2] == 0


# --- the loop -----------------------------------------------------------------------------------


def test_the_loss_falls_in_both_stages() -> None:
    _, log = run()
    assert list(log.curves) == list(STAGES)
    for curve in log.curves.values():
        assert [step for step, _ in curve] == list(range(12))
        first, last = (np.mean([loss for _, loss in part]) for part in (curve[:4], curve[-4:]))
        assert last < first
    imitation = [loss for _, loss in log.curves[STAGES[0]]]
    assert np.mean(imitation[-3:]) < 0.9 * np.mean(imitation[:3])


@pytest.mark.parametrize("head", ["token-classification", "question-answering", "feature-extraction"])
def test_every_head_is_trained(head: str) -> None:
    before = state_of(tiny_pair("bert", head)[1])
    student, log = run(head=head)
    assert all(len(curve) == 12 for curve in log.curves.values())
    assert not torch.equal(student.state_dict()[next(iter(before))], before[next(iter(before))])


def test_micro_batches_give_the_update_of_the_batch() -> None:
    """In double precision the sums differ by rounding alone; the rates are those of training."""

    def trained(accumulate: int, stage: int) -> tuple[nn.Module, Any]:
        teacher, student = tiny_pair("bert", dtype=torch.float64)
        epochs = "1+0" if stage == 0 else "0+1"
        options = {"qat_epochs": epochs, "accumulate": accumulate}
        return student, train_qat(quick(teacher, student, lambda model: 1.0, **options))

    for stage in (0, 1):
        whole, log = trained(1, stage)
        for accumulate in (3, 100):  # unequal parts; one sentence each
            parts, other = trained(accumulate, stage)
            for name, value in whole.state_dict().items():
                torch.testing.assert_close(parts.state_dict()[name], value, rtol=1e-6, atol=1e-9, msg=name)
            losses, others = ([y for _, y in found.curves[STAGES[stage]]] for found in (log, other))
            assert others == pytest.approx(losses, rel=1e-9)


def test_the_best_state_is_the_result() -> None:
    """Four evaluations, at 3, 6, 9 and 12 steps of stage 2; the second is the best, later equals lose."""
    seen: list[dict[str, torch.Tensor]] = []
    teacher, student = tiny_pair("bert")
    scores = iter([50.0, 80.0, 70.0, 80.0])

    def judge(model: nn.Module) -> float:
        seen.append(state_of(model))
        return next(scores)

    log = train_qat(quick(teacher, student, judge))
    assert log.choice is not None
    assert log.choice.to_dict() == {
        "step": 6,
        "score": 80.0,
        "evaluations": [(3, 50.0), (6, 80.0), (9, 70.0), (12, 80.0)],
    }
    assert_same_state(state_of(student), seen[1])


def test_without_a_second_stage_nothing_is_chosen() -> None:
    def never(model: nn.Module) -> float:
        raise AssertionError("the development set must not be read")

    teacher, student = tiny_pair("bert")
    log = train_qat(quick(teacher, student, never, qat_epochs="1+0"))
    assert list(log.curves) == [STAGES[0]]
    assert log.choice is None


def test_when_the_model_is_scored() -> None:
    assert evaluation_steps(12, 2.0, 2) == [3, 6, 9, 12]
    assert evaluation_steps(10, 3.0, 1) == [3, 7, 10]
    assert evaluation_steps(2, 3.0, 5) == [1, 2]  # never twice at a step
    assert evaluation_steps(7, 0.2, 1) == [7]
    assert evaluation_steps(0, 0.0, 1) == []


SCORES = [60.0, 90.0, 70.0, 65.0]
OFTEN = {"checkpoint_steps": 2, "accumulate": 2}


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[dict[str, torch.Tensor], Any]:
    student, log = run(SCORES, **OFTEN)
    return state_of(student), log


@pytest.mark.parametrize("call", [2, 9, 13, 20, 24])  # of 24 steps: early, late, first of stage 2, …, last
def test_an_interrupted_run_ends_with_the_same_bits(call: int, uninterrupted: Any, tmp_path: Path) -> None:
    whole, log = uninterrupted
    identity = {"run": "this one"}
    with killed_at_call(qat._Run, "_step", call):
        run(SCORES, CheckpointStore(tmp_path / "work", identity, resume=False), **OFTEN)
    store = CheckpointStore(tmp_path / "work", identity, resume=True)
    found = store.notes(qat.CHECKPOINT)
    done = len(found["evaluations"]) if found else 0
    resumed, other = run(SCORES[done:], store, **OFTEN)
    assert_same_state(state_of(resumed), whole)
    assert (other.curves, other.choice) == (log.curves, log.choice)


def test_a_finished_training_is_not_repeated(tmp_path: Path) -> None:
    identity = {"run": "this one"}
    whole, log = run(store=CheckpointStore(tmp_path / "work", identity, resume=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qat._Run, "_step", lambda *args: pytest.fail("a step too many"))
        again, other = run(store=CheckpointStore(tmp_path / "work", identity, resume=True))
    assert_same_state(state_of(again), state_of(whole))
    assert other.choice == log.choice


# --- by the command line ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop_in(tmp_path_factory.mktemp("workshop")) as root:
        yield root


QAT = {"method": "qat", "lr": None, "holdout": 0, "qat_epochs": "1+1", "qat_evals": 2, "checkpoint_steps": 3}


def test_the_whole_walk(workshop: Path) -> None:
    assert job(workshop, "qat", **QAT).run() == 0
    found = json.loads((workshop / "qat" / "metrics.json").read_text())
    choice = found["qat"]["chosen_on_the_evaluation_split"]
    assert (found["qat"]["training_samples"], found["qat"]["training_split"]) == (TRAIN, TRAIN)
    assert found["cost"]["calibration_samples"] == 32  # the step sizes begin from these
    assert [step for step, _ in choice["evaluations"]] == [4, 8]
    # The model that was chosen is the one that is saved, in integers: its score is the same number.
    assert found["accuracy"]["quantized"] == choice["score"] == max(s for _, s in choice["evaluations"])
    assert found["accuracy"]["splits"]["dev"]["examples"] == DEV
    assert {*STAGES, "of it choosing on the development set"} == found["cost"]["stages"].keys()
    told = (workshop / "qat" / "report.md").read_text(encoding="utf-8")
    assert "60, all of the training split" in told
    assert "the best of 2; this choice flatters the score above" in told


def test_a_reduced_training_set_is_called_one(workshop: Path) -> None:
    assert job(workshop, "reduced", **QAT, train_size=20, accumulate=2).run() == 0
    found = json.loads((workshop / "reduced" / "metrics.json").read_text())
    assert (found["qat"]["training_samples"], found["qat"]["training_split"]) == (20, TRAIN)
    assert "20, of 60, a reduced training set" in (workshop / "reduced" / "report.md").read_text()


def test_resuming_by_the_command_line(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "write_report", lambda *args: None)
    assert job(workshop, "whole", **QAT).run() == 0
    calls = iter(range(1, 1000))
    step = qat._Run._step

    def deadly(*args: Any) -> float:
        if next(calls) == 12:
            raise KeyboardInterrupt
        return step(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qat._Run, "_step", deadly)
        assert job(workshop, "stopped", **QAT).run() == cli.EXIT_INTERRUPTED
    steps: list[int] = []
    monkeypatch.setattr(qat._Run, "_step", lambda *args: steps.append(1) or step(*args))
    assert job(workshop, "stopped", **QAT).run("--resume") == 0
    assert len(steps) == 16 - 11  # 8 steps a stage; the checkpoint of step 3 of stage 2 is the last
    tensors = [(workshop / out / artifact.TENSORS).read_bytes() for out in ("whole", "stopped")]
    assert tensors[0] == tensors[1]
