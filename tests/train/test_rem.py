"""REM: each matrix product on its own error, in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    ARCHITECTURES,
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

from mrem_deploy import recipe_defaults
from mrem_deploy.models.parts import carve
from mrem_deploy.quant.layers import Matmul, QuantEmbedding, QuantLinear
from mrem_deploy.quant.quantizers import LearnedScale
from mrem_deploy.quant.spec import QuantSpec
from mrem_deploy.recipe import Recipe
from mrem_deploy.train import checkpoint, rem
from mrem_deploy.train.checkpoint import CheckpointStore
from mrem_deploy.train.job import TrainLog
from mrem_deploy.train.optimizer import LocalOptimizer
from mrem_deploy.train.rem import find_units, train_rem
from mrem_deploy.train.streams import Streams

EVERY_BLOCK = [0, 1, 2, 3]
BERT_BLOCK = [
    "attention.self q·k·v",
    "attention.self.scores",
    "attention.self.context",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
]


def run(
    kind: str = "bert",
    spec: QuantSpec | None = None,
    store: CheckpointStore | None = None,
    **changes: Any,
) -> tuple[dict[str, torch.Tensor], TrainLog]:
    teacher, student = tiny_pair(kind, spec=spec or QuantSpec(4, 4, 8, curvature="adam"))
    before = state_of(teacher)
    log = train_rem(train_job(teacher, student, tiny_encoded(kind), store=store, **{"steps": 2} | changes))
    assert_same_state(state_of(teacher), before)
    return state_of(student), log


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[dict[str, torch.Tensor], TrainLog]:
    return run()


def units_of(kind: str = "bert", spec: QuantSpec | None = None) -> tuple[nn.Module, list[list[rem.Unit]]]:
    teacher, student = tiny_pair(kind, spec=spec or QuantSpec(2, 2, 8))
    batch = tiny_batch(kind)
    noisy, units = None, []
    for full, quantized in zip(carve(teacher, EVERY_BLOCK), carve(student, EVERY_BLOCK), strict=True):
        units.append(find_units(full, quantized, batch, noisy))
        with torch.no_grad():
            noisy = quantized(noisy, batch).hidden[-1]
    return student, units


def test_the_products_of_bert_in_the_order_of_execution() -> None:
    _, (first, middle, last) = units_of()
    assert [unit.name for unit in first] == [
        "embeddings.word_embeddings",
        *(f"encoder.layer.0.{name}" for name in BERT_BLOCK),
    ]
    assert [unit.name for unit in middle] == [f"encoder.layer.0.{name}" for name in BERT_BLOCK]
    assert [unit.name for unit in last] == [
        *(f"bert.encoder.layer.0.{name}" for name in BERT_BLOCK),
        "bert.pooler.dense",
    ]
    shared = middle[0]
    assert len(shared.members) == 3
    assert shared.shared
    assert not any(unit.shared for unit in middle[1:])


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("bits", [8, 32])  # without activation quantizers q, k and v share nothing
def test_every_product_is_in_one_unit(kind: str, bits: int) -> None:
    student, units = units_of(kind, QuantSpec(2, 2, bits))
    members = [id(member) for block in units for unit in block for member in unit.members]
    products = [
        m
        for name, m in student.named_modules()
        if isinstance(m, QuantLinear | QuantEmbedding | Matmul)
        or (isinstance(m, LearnedScale) and name.endswith("position_quantizer"))
    ]
    assert sorted(members) == sorted(id(m) for m in products)
    trainable = [id(p) for block in units for unit in block for m in unit.trainable() for p in m.parameters()]
    assert len(trainable) == len(set(trainable))
    steps = {id(p) for name, p in student.named_parameters() if name.endswith("log_scale")}
    assert steps <= set(trainable)  # no step size is forgotten, the shared ones included


@pytest.mark.parametrize(
    "kind", ["bert", "electra", "distilbert", "mpnet", "deberta-v2", "modernbert"]
)  # RoBERTa is a BERT here
def test_rem_lowers_the_error_of_its_products_and_touches_nothing_else(kind: str) -> None:
    """One batch holds all examples. Norms, head and what no product owns keep every bit."""
    teacher, student = tiny_pair(kind, spec=QuantSpec(2, 2, 4, weight_quantizer="twn"))
    before = state_of(student)
    rates = {"steps": 10, "batch_size": 12, "lr": 1e-3, "step_lr": 3e-2}
    log = train_rem(train_job(teacher, student, tiny_encoded(kind), **rates))
    for name, curve in log.curves.items():
        assert len(curve) == 10
        if name.endswith(
            ("_embeddings", ".scores", ".context", ".c2p", ".p2c")
        ):  # TWN's scale is the best already;
            assert curve[-1][1] < 1.05 * curve[0][1], name  # two steps alone may have nothing to win
        else:
            assert curve[-1][1] < curve[0][1], name
    own = {
        f"{name}.{inner}"
        for name, part in student.named_modules()
        if isinstance(part, QuantLinear | QuantEmbedding | Matmul)
        for inner, _ in part.named_parameters()
    }
    own |= {
        name
        for name in before
        if name.endswith(("input_quantizer.log_scale", "position_quantizer.log_scale"))
    }
    changed = differing(student.state_dict(), before)
    assert changed <= own
    weights = {name for name in own if name.endswith(".weight")}
    assert weights <= changed


def test_a_unit_changes_nothing_but_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student = tiny_pair(spec=QuantSpec(2, 2, 8))
    names = {id(p): name for name, p in student.named_parameters()}
    original = rem._train_unit
    seen: set[str] = set()

    def watched(unit: rem.Unit, *rest: Any) -> Any:
        before = state_of(student)
        result = original(unit, *rest)
        own = {names[id(p)] for module in unit.trainable() for p in module.parameters()}
        changed = differing(student.state_dict(), before)
        assert changed <= own
        assert changed
        assert not (changed & seen)  # greedy: no product is trained twice
        seen.update(changed)
        return result

    monkeypatch.setattr(rem, "_train_unit", watched)
    train_rem(train_job(teacher, student, tiny_encoded(), steps=2))
    assert len(seen) > 40


def test_a_run_repeats_itself_and_another_seed_does_not(
    uninterrupted: tuple[dict[str, torch.Tensor], TrainLog],
) -> None:
    state, log = run()
    assert_same_state(state, uninterrupted[0])
    assert log.curves == uninterrupted[1].curves
    assert differing(run(seed=1)[0], uninterrupted[0])


def test_mapped_files_give_what_memory_gives(
    uninterrupted: tuple[dict[str, torch.Tensor], TrainLog], tmp_path: Path
) -> None:
    state, _ = run(max_memory="0MB", cache_dir=str(tmp_path))
    assert_same_state(state, uninterrupted[0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        pytest.param(LocalOptimizer, "update", 1, id="before the first step"),
        pytest.param(LocalOptimizer, "update", 18, id="inside a block, between products"),
        pytest.param(
            rem, "_train_unit", 9, id="at the first product of the second block, before training it"
        ),
        pytest.param(Streams, "advance", 1, id="between blocks"),
        pytest.param(checkpoint, "save_file", 2, id="while the second block is saved"),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bits(
    uninterrupted: tuple[dict[str, torch.Tensor], TrainLog], tmp_path: Path, owner: Any, name: str, call: int
) -> None:
    with killed_at_call(owner, name, call):
        run(store=CheckpointStore(tmp_path / "work", {}, resume=False))
    state, log = run(store=CheckpointStore(tmp_path / "work", {}, resume=True))
    assert_same_state(state, uninterrupted[0])
    assert log.curves == uninterrupted[1].curves


def test_full_precision_activations_and_weights_leave_nothing_to_train() -> None:
    teacher, student = tiny_pair(spec=QuantSpec(32, 32, 8))
    before = state_of(student)
    log = train_rem(train_job(teacher, student, tiny_encoded(), steps=2))
    changed = differing(student.state_dict(), before)
    assert any(name.endswith("scores.left.log_scale") for name in changed)
    assert all(len(curve) == 2 for curve in log.curves.values())
    teacher, student = tiny_pair(spec=QuantSpec(2, 32, 32))  # products without any parameter of their own
    log = train_rem(train_job(teacher, student, tiny_encoded(), steps=2))
    assert log.curves["block 1/3 encoder.layer.0.attention.self.scores"] == []


def test_the_word_embedding_has_its_lower_rate() -> None:
    """Adam's first step is the rate in the direction of the sign: a tenth of it moves a tenth as far."""
    name, spec = "bert.embeddings.word_embeddings.weight", QuantSpec(2, 2, 8)
    before = state_of(tiny_pair(spec=spec)[1])
    moved = {}
    for rate in (1.0, 0.1):
        after, _ = run(spec=spec, steps=1, embedding_rate=rate)
        moved[rate] = float((after[name] - before[name]).abs().max())
    assert moved[1.0] == pytest.approx(3e-3, rel=0.01)  # the rate of `train_job`
    assert moved[0.1] == pytest.approx(3e-4, rel=0.01)


def test_a_method_can_have_rates_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_defaults, "RATES_BY_METHOD", {"rem": {2: 2e-4}})
    assert Recipe(method="rem", bits="2-2-8").lr == 2e-4
    assert Recipe(method="rem", bits="4-4-8").lr == recipe_defaults.RATES[4]
    assert Recipe(method="mrem-s", bits="2-2-8").lr == recipe_defaults.RATES[2]
    assert Recipe(method="rem", bits="2-2-8", lr=5e-3).lr == 5e-3
    assert recipe_defaults.by_bits().endswith("; rem 0.0002 at 2 bits")
