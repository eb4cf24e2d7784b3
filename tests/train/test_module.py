"""One training step of one module: what it changes, by how much, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from tiny_models import (
    ARCHITECTURES,
    READ_BY_ALL,
    assert_same_state,
    differing,
    quantized_twin,
    settings,
    state_of,
    tiny_batch,
    tiny_model,
    tiny_pair,
)
from torch import nn

from mrem_deploy.models.architectures import anatomy
from mrem_deploy.models.parts import carve
from mrem_deploy.quant.spec import QuantSpec
from mrem_deploy.train.loss import reconstruction_terms
from mrem_deploy.train.module import ModuleTrainer, teacher_forcing
from mrem_deploy.train.optimizer import ADAM_BETAS, ADAM_EPS, LocalOptimizer, rate_at

Trainers = list[ModuleTrainer]


def trainers_of(teacher: nn.Module, student: nn.Module, cuts: list[int], **changes: float) -> Trainers:
    parts = zip(carve(teacher, cuts), carve(student, cuts), strict=True)
    return [ModuleTrainer(full, quantized, settings(**changes)) for full, quantized in parts]


def inputs_of(
    trainers: Trainers, number: int, batch: dict
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Both streams at the entrance of module `number`."""
    clean = noisy = None
    with torch.no_grad():
        for trainer in trainers[:number]:
            clean = trainer.teacher(clean, batch).hidden[-1]
            noisy = trainer.student(noisy, batch).hidden[-1]
    return clean, noisy


def names_of(part: nn.Module, model: nn.Module) -> set[str]:
    """The model's names of what belongs to a part: parameters and quantizers' buffers."""
    inside = {id(value) for value in [*part.view.parameters(), *part.view.buffers()]}
    return {
        name for name, value in [*model.named_parameters(), *model.named_buffers()] if id(value) in inside
    }


@pytest.mark.parametrize(
    ("step", "anneal", "expected"), [(0, 10, 1.0), (5, 10, 0.5), (10, 10, 0.0), (11, 10, 0.0), (0, 0, 0.0)]
)
def test_teacher_forcing(step: int, anneal: int, expected: float) -> None:
    assert teacher_forcing(step, anneal) == expected


@pytest.mark.parametrize(
    ("kind", "cuts"),
    [*((kind, [0, 1, 3]) for kind in ARCHITECTURES), ("bert", [0, 3]), ("mpnet", [0, 3])],  # uneven; N = 1
)
def test_training_lowers_the_loss_of_each_module_and_touches_nothing_else(kind: str, cuts: list[int]) -> None:
    teacher, student = tiny_pair(kind, spec=QuantSpec(2, 2, 8))
    trainers = trainers_of(teacher, student, cuts, steps=20)
    batch = tiny_batch(kind)
    full = state_of(teacher)
    for number, trainer in enumerate(trainers):
        before = state_of(student)
        inputs = inputs_of(trainers, number, batch)
        losses = [trainer.step(step, batch, *inputs).loss for step in range(20)]
        assert losses[-1] < 0.8 * losses[0]
        changed = differing(student.state_dict(), before)
        assert changed <= names_of(trainer.student, student)  # gradients never leave the module
        assert len(changed) > 10
        assert not any(p.grad is not None for p in teacher.parameters())
        others = {
            id(p) for other in trainers if other is not trainer for p in other.student.view.parameters()
        }
        others -= trainer.student.shared_parameters
        assert not any(p.grad is not None for p in student.parameters() if id(p) in others)
    assert_same_state(state_of(teacher), full)
    # What every block reads no module may train, not even a single one.
    for parameter in READ_BY_ALL.get(kind, ()):
        (name,) = (name for name in full if name.endswith(f"encoder.{parameter}"))
        assert torch.equal(student.state_dict()[name], full[name])


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_all_that_can_learn_learns(kind: str) -> None:
    """Weights, biases, norms, head and every step size; of embeddings, the rows that occurred."""
    teacher, student = tiny_pair(kind, spec=QuantSpec(3, 8, 8))  # the quantizers with learned steps
    before = state_of(student)
    batch = tiny_batch(kind)
    (trainer,) = trainers_of(teacher, student, [0, 3])
    for step in range(3):
        trainer.step(step, batch, None, None)
    same = before.keys() - differing(student.state_dict(), before)
    assert {name.rpartition("encoder.")[2] for name in same} == READ_BY_ALL.get(kind, set())
    words = anatomy(student).word_embedding
    absent = torch.ones(60, dtype=torch.bool)
    absent[batch["input_ids"][batch["attention_mask"].bool()]] = False
    for name in (f"{words}.weight", f"{words}.weight_quantizer.log_scale"):
        now = student.state_dict()[name]
        padding = student.config.pad_token_id or 0
        absent[padding] = False  # it stands in the batch, but what it learns is nobody's concern
        assert torch.equal(now[absent], before[name][absent])
        present = ~absent
        present[padding] = False
        assert (now != before[name]).any(dim=-1)[present].all()


def test_one_update_by_hand() -> None:
    """Adam's first step is the rate in the direction of the sign, whatever the gradient's size."""
    linear, rates = nn.Linear(2, 1), settings(steps=4, lr=0.5)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, 1.0]]))
        linear.bias.zero_()
    optimizer = LocalOptimizer([linear], frozenset(), rates)
    optimizer.update((linear.weight * torch.tensor([[1000.0, -1e-3]])).sum(), 0)
    torch.testing.assert_close(linear.weight.detach(), torch.tensor([[0.5, 1.5]]), rtol=0, atol=1e-5)
    assert linear.bias.item() == 0.0  # it had no gradient
    assert linear.weight.grad is None  # given back at once


@pytest.mark.parametrize(("step", "left"), [(0, 1.0), (3, 0.7), (9, 0.1)])
def test_rates_decay_linearly(step: int, left: float) -> None:
    _, student = tiny_pair(spec=QuantSpec(3, 8, 8))
    part = carve(student, [0, 3])[0]
    given = settings(steps=10, lr=2e-3, step_lr=3e-2, embedding_rate=0.1)
    optimizer = LocalOptimizer([part.view], frozenset(), given)
    optimizer.update(part(None, tiny_batch()).outputs[0].sum(), step)
    rates = {type(o).__name__: [group["lr"] for group in o.param_groups] for o in optimizer.optimizers}
    weights, scales, embeddings = (pytest.approx(rate * left) for rate in (2e-3, 3e-2, 2e-4))
    assert rates == {"AdamW": [weights, scales, embeddings], "SparseAdam": [embeddings, scales]}
    assert all(
        group.get("weight_decay", 0.0) == 0.0 for o in optimizer.optimizers for group in o.param_groups
    )


@pytest.mark.parametrize(
    ("step", "share"),
    [(0, 1 / 3), (1, 2 / 3), (2, 1.0), (3, 7 / 8), (9, 1 / 8)],  # two of ten steps
)
def test_rates_rise_over_the_warm_up(step: int, share: float) -> None:
    assert rate_at(step, 10, warmup=0.2) == pytest.approx(share)
    assert rate_at(step, 10) == 1.0 - step / 10  # to the bit: without one nothing has changed


def test_each_parameter_is_in_one_group() -> None:
    _, student = tiny_pair(spec=QuantSpec(3, 8, 8))
    part = carve(student, [0, 3])[0]
    optimizer = LocalOptimizer([part.view], frozenset(), settings())
    groups = [group["params"] for o in optimizer.optimizers for group in o.param_groups]
    listed = [id(p) for group in groups for p in group]
    assert len(listed) == len(set(listed))
    assert set(listed) == {id(p) for p in student.parameters()}
    names = {id(p): name for name, p in student.named_parameters()}
    dense, dense_steps, beside, rows, row_steps = ({names[id(p)] for p in group} for group in groups)
    words = "bert.embeddings.word_embeddings"
    assert beside == {
        f"bert.embeddings.{name}"
        for name in (
            "position_embeddings.weight",
            "token_type_embeddings.weight",
            "LayerNorm.weight",
            "LayerNorm.bias",
        )
    }
    assert rows == {f"{words}.weight"}
    assert row_steps == {f"{words}.weight_quantizer.log_scale"}
    assert all(name.endswith("log_scale") for name in dense_steps)
    assert not any(name.endswith("log_scale") for name in dense)


def test_the_result_of_a_step() -> None:
    teacher, student = tiny_pair()
    batch = tiny_batch()
    trainers = trainers_of(teacher, student, [0, 1, 3])
    clean, noisy = inputs_of(trainers, 1, batch)
    last = trainers[1]
    with torch.no_grad():
        target, output = last.teacher(clean, batch), last.student(noisy, batch)
        terms = reconstruction_terms(output, target, batch["attention_mask"])
    result = last.step(0, batch, clean, noisy)
    assert result.loss == torch.stack(terms).sum().item()
    assert torch.equal(result.clean, target.hidden[-1])
    assert torch.equal(result.noisy, output.hidden[-1])  # from before the update: the input of a queue
    assert not result.noisy.requires_grad


@pytest.mark.parametrize("forcing", [0.0, 0.25, 1.0])
def test_forcing_mixes_the_streams(forcing: float) -> None:
    teacher, student = tiny_pair()
    batch = tiny_batch()
    trainers = trainers_of(teacher, student, [0, 1, 3])
    clean, noisy = inputs_of(trainers, 1, batch)
    assert clean is not None
    assert noisy is not None
    with torch.no_grad():
        expected = trainers[1].student(forcing * clean + (1 - forcing) * noisy, batch).hidden[-1]
    came = trainers[1].step(0, batch, clean, noisy, forcing).noisy
    if forcing in (0.0, 1.0):
        assert torch.equal(came, expected)
    else:  # lerp rounds otherwise than the formula: a code or two may fall on the other side
        assert (came - expected).norm() < 0.05 * expected.norm()


def test_the_curvature_is_adams_second_moment() -> None:
    """After one step v̂ = g² exactly (bias-corrected), so D = |g| + ε; later D = √v̂ + ε."""
    teacher, student = tiny_pair(spec=QuantSpec(4, 4, 8, curvature="adam"))
    layer = student.bert.encoder.layer[0].output.dense
    assert (layer.weight_quantizer.diagonal == 1).all()
    batch = tiny_batch()
    part = carve(student, [0, 3])[0]
    teacher_part = carve(teacher, [0, 3])[0]
    optimizer = LocalOptimizer([part.view], frozenset(), settings(steps=10))
    moment = torch.zeros_like(layer.weight)
    for step in range(3):
        terms = reconstruction_terms(part(None, batch), teacher_part(None, batch), batch["attention_mask"])
        loss = torch.stack(terms).sum()
        (gradient,) = torch.autograd.grad(loss, layer.weight, retain_graph=True)
        moment = ADAM_BETAS[1] * moment + (1 - ADAM_BETAS[1]) * gradient.square()
        corrected = moment / (1 - ADAM_BETAS[1] ** (step + 1))
        optimizer.update(loss, step)
        torch.testing.assert_close(
            layer.weight_quantizer.diagonal, corrected.sqrt() + ADAM_EPS, rtol=1e-4, atol=1e-9
        )
    assert layer.weight_quantizer.diagonal.std() > 0


def test_a_layer_that_no_loss_reaches_does_not_stop_the_training() -> None:
    """The pooler of a bare encoder is quantized, but what is measured is the last hidden state."""
    model = tiny_model("bert", "feature-extraction")
    teacher, student = quantized_twin(model, QuantSpec(4, 4, 8, curvature="adam"))
    before = state_of(student)
    (trainer,) = trainers_of(teacher, student, [0, 3])
    for step in range(2):
        trainer.step(step, tiny_batch(), None, None)
    changed = differing(student.state_dict(), before)
    assert changed
    assert not any(name.startswith("pooler") for name in changed)


def test_a_full_precision_embedding_is_trained_by_rows_too() -> None:
    teacher, student = tiny_pair(spec=QuantSpec(2, 32, 8))
    before = state_of(student)["bert.embeddings.word_embeddings.weight"]
    batch = tiny_batch()
    (trainer,) = trainers_of(teacher, student, [0, 3])
    trainer.step(0, batch, None, None)
    changed = (student.bert.embeddings.word_embeddings.weight != before).any(dim=1)
    assert set(changed.nonzero().flatten().tolist()) <= set(batch["input_ids"].flatten().tolist())
