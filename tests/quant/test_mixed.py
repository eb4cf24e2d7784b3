"""Bits per layer: the curvature against the exact one, the choice against all choices, the budget kept."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tiny_job import POSITIONS, sentences, workshop_in
from tiny_job import job_in as job
from tiny_models import ARCHITECTURES, assert_same_state, state_of, tiny_batch, tiny_model
from torch import nn

import mrem_deploy
from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError
from mrem_deploy.models import loading
from mrem_deploy.models.architectures import anatomy
from mrem_deploy.models.parts import carve
from mrem_deploy.quant import artifact
from mrem_deploy.quant.insert import insert_quantizers, prepare
from mrem_deploy.quant.layers import QuantEmbedding, QuantLinear
from mrem_deploy.quant.mixed import allocate, choose_bits
from mrem_deploy.quant.quantizers import Midrise
from mrem_deploy.quant.sensitivity import (
    CHOICES,
    by_error,
    by_hessian,
    groups_of,
    hutchinson_traces,
    output_error,
    quantized_weight,
)
from mrem_deploy.quant.spec import QuantSpec
from mrem_deploy.train import student
from mrem_deploy.train.module import ModuleTrainer
from mrem_deploy.walk import publishing

SPEC = QuantSpec(32, 32, 8)


# --- the curvature ------------------------------------------------------------------------------


def quadratic(seed: int, size: int) -> torch.Tensor:
    a = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return a @ a.T


def test_hutchinson_against_the_exact_trace() -> None:
    """½xᵀAx has the Hessian A. With signs the variance of a block's estimate is 2·Σ off-diagonal² inside it
    plus Σ of the squares that couple it to other blocks; four standard errors are allowed."""
    size, probes, cut = 12, 3000, 5
    a = quadratic(0, size)
    x = [nn.Parameter(torch.randn(n, dtype=torch.float64)) for n in (cut, size - cut)]
    whole = torch.cat(x)
    found = hutchinson_traces(whole @ a @ whole / 2, x, probes, torch.Generator().manual_seed(1))
    for came, rows in zip(found, (slice(0, cut), slice(cut, size)), strict=True):
        block = a[rows, rows]
        inside = 2 * (block.square().sum() - block.diag().square().sum())
        coupled = a[rows].square().sum() - block.square().sum()
        allowed = 4 * float((inside + coupled) / probes) ** 0.5
        assert float(came) == pytest.approx(float(block.trace()), abs=allowed)
        assert allowed < 0.2 * float(block.trace()), "a bound that tells nothing"


def test_a_diagonal_hessian_needs_one_probe() -> None:
    x = nn.Parameter(torch.randn(6, dtype=torch.float64))
    curvature = torch.arange(1.0, 7.0, dtype=torch.float64)
    found = hutchinson_traces((curvature * x * x).sum() / 2, [x], 1, torch.Generator().manual_seed(0))
    assert float(found[0]) == pytest.approx(21.0)


def test_parameters_that_play_no_part_have_no_curvature() -> None:
    x, unused, linear = (nn.Parameter(torch.ones(2)) for _ in range(3))
    loss = x.square().sum() + linear.sum()
    found = hutchinson_traces(loss, [x, unused, linear], 2, torch.Generator().manual_seed(0))
    assert found.tolist() == [4.0, 0.0, 0.0]


def test_the_hessian_predicts_the_error_of_small_changes() -> None:
    """tr(H)/n·‖Δ‖² is the expectation of the error ½ΔᵀHΔ·2 over directions Δ; 8 bits are a small change."""
    model = tiny_model("bert", dtype=torch.float64)
    found = prepare(model.requires_grad_(False))
    groups = groups_of(found, SPEC)
    batches = [tiny_batch(seed=seed) for seed in range(6)]
    exact, second = by_error(model, groups, SPEC, batches), by_hessian(model, groups, SPEC, batches, 0)
    ratios = np.array([two[8] / (2 * one[8]) for one, two in zip(exact, second, strict=True) if one[8] > 0])
    assert 0.3 < np.median(ratios) < 3
    assert not any(p.requires_grad for p in model.parameters())


# --- the error ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_error_is_that_of_the_whole_model_with_one_group_quantized(kind: str) -> None:
    model = tiny_model(kind).requires_grad_(False)
    found = prepare(model)
    before = state_of(model)
    groups, batch = groups_of(found, SPEC), tiny_batch(kind)
    errors = by_error(model, groups, SPEC, [batch])
    assert_same_state(state_of(model), before)
    whole = carve(model, [0, 3])[0]
    with torch.no_grad():
        clean = whole(None, batch)
        for index in (0, 1, len(groups) // 2, len(groups) - 1):
            for name in groups[index]:
                model.get_submodule(name).weight.data = quantized_weight(model, name, 2, SPEC)
            came = float(output_error(whole(None, batch), clean, batch["attention_mask"]))
            assert came > 0
            assert errors[index][2] == pytest.approx(came, rel=1e-4)
            model.load_state_dict(before)
    assert all(error[2] > error[8] for error in errors)


def test_q_k_and_v_go_together() -> None:
    model = tiny_model("bert")
    groups = groups_of(prepare(model), SPEC)
    inside = "bert.encoder.layer.0.attention.self"
    assert tuple(f"{inside}.{name}" for name in ("query", "key", "value")) in groups
    assert groups[0] == ("bert.embeddings.word_embeddings",)
    assert len(groups) == 1 + 3 * 4 + 1  # embedding; qkv, two FFN matrices and the output per block; pooler
    kept = groups_of(anatomy(model), QuantSpec(32, 32, 8, keep_fp=("*.layer.0.*",)))
    assert len(kept) == len(groups) - 4


# --- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_no_choice_is_better(seed: int) -> None:
    """Against all 3⁶ choices; errors that do not fall with the bits are among them."""
    generator = np.random.default_rng(seed)
    items = 6
    costs = [{bits: int(generator.integers(1, 9)) * bits + 3 for bits in CHOICES} for _ in range(items)]
    errors = [{bits: float(generator.random() / bits ** (i % 3)) for bits in CHOICES} for i in range(items)]
    every = list(itertools.product(CHOICES, repeat=items))

    def total(table: list[dict[int, Any]], choice: tuple[int, ...]) -> float:
        return sum(row[bits] for row, bits in zip(table, choice, strict=True))

    prices = sorted(total(costs, choice) for choice in every)
    for budget in (int(prices[0]), int(prices[len(prices) // 3]), int(prices[-1]), int(prices[-1]) + 99):
        chosen = tuple(allocate(costs, errors, budget))
        least = min(total(errors, choice) for choice in every if total(costs, choice) <= budget)
        assert total(costs, chosen) <= budget
        assert total(errors, chosen) == pytest.approx(least)
    with pytest.raises(ValueError, match="no choice fits"):
        allocate(costs, errors, int(prices[0]) - 1)


@pytest.mark.parametrize("measure", ["error", "hessian"])
def test_more_bytes_never_hurt(measure: str) -> None:
    model = tiny_model("bert").requires_grad_(False)
    batches = [tiny_batch(seed=seed) for seed in range(2)]
    sums = []
    for budget in (0.0215, 0.0225, 0.024, 0.026):
        found = choose_bits(model, SPEC, batches, budget, measure)
        assert found.planned_mb <= budget
        sums.append(sum(errors[found.layers[name]] for name, errors in found.errors.items()))
    assert sums == sorted(sums, reverse=True)
    assert set(found.layers.values()) == {8}  # the last budget is enough for all
    with pytest.raises(UserError, match=r"takes 0\.021 MiB") as caught:
        choose_bits(model, SPEC, batches, 0.02, measure)
    least = float(caught.value.remedy.split()[1])
    assert choose_bits(model, SPEC, batches, least, measure).planned_mb <= least < 0.0215


def test_layers_have_the_bits_they_were_given() -> None:
    model = tiny_model("bert")
    found = prepare(model)
    embedding, pooler, query = found.word_embedding, "bert.pooler.dense", found.linears[0]
    bits = ((embedding, 8), (pooler, 2), (query, 4))
    insert_quantizers(model, QuantSpec(32, 32, 32, layer_bits=bits, keep_fp=("*pooler*",)), {})
    parts = {n: p for n, p in model.named_modules() if isinstance(p, QuantLinear | QuantEmbedding)}
    quantized = {
        n: p.weight_quantizer.grid.bits for n, p in parts.items() if hasattr(p.weight_quantizer, "grid")
    }
    assert quantized == {embedding: 8, query: 4}  # the pooler is kept: --keep-fp has the last word


def test_midrise_is_measured_and_inserted_at_two_bits_only() -> None:
    """Both measures see the values that the layers will have."""
    model = tiny_model("bert").requires_grad_(False)
    spec = QuantSpec(32, 32, 8, weight_quantizer="midrise")
    found = prepare(model)
    for name in (found.word_embedding, found.linears[0]):
        weight = model.get_submodule(name).weight
        asked = spec.embedding(name) if name == found.word_embedding else spec.linear(name)
        assert torch.equal(quantized_weight(model, name, 2, spec), Midrise(asked.per_channel)(weight))
        for bits in (4, 8):
            assert torch.equal(
                quantized_weight(model, name, bits, spec), quantized_weight(model, name, bits, SPEC)
            )
    batches = [tiny_batch(seed=seed) for seed in range(2)]
    ternary = replace(spec, weight_quantizer="twn")
    for measure in ("error", "hessian"):
        chosen, other = (choose_bits(model, how, batches, 0.0225, measure) for how in (spec, ternary))
        assert chosen.planned_mb <= 0.0225
        for name, errors in chosen.errors.items():
            assert errors[2] != other.errors[name][2]
            assert errors[8] == other.errors[name][8]
    assert len(set(chosen.layers.values())) > 1
    insert_quantizers(model, replace(spec, layer_bits=chosen.layer_bits), {})
    for name, bits in chosen.layers.items():
        assert isinstance(model.get_submodule(name).weight_quantizer, Midrise) == (bits == 2)


# --- by the command line ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop_in(tmp_path_factory.mktemp("workshop")) as root:
        yield root


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than all the rest here."""
    monkeypatch.setattr(publishing, "write_report", lambda *args: None)


def test_the_report_tells_the_bits(workshop: Path) -> None:
    assert job(workshop, "told", method="ptq", bits="auto-8", budget_mb=0.0165).run() == 0
    told = (workshop / "told" / "report.md").read_text(encoding="utf-8")
    assert "bits chosen layer by layer, 8-bit activations" in told
    assert "Bits of every layer" in told
    layers = json.loads((workshop / "told" / "metrics.json").read_text())["mixed_precision"]["layers"]
    assert len(layers) == 14
    for name, bits in layers.items():
        assert f"| {name} | {bits} |" in told


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize(
    ("budget", "more"),
    [
        (0.0155, ("--no-per-channel", "--hot-rows", "0")),
        (0.0165, ("--hot-rows", "0")),
        (0.0185, ()),
    ],
)
def test_the_file_keeps_to_the_budget(workshop: Path, budget: float, more: tuple[str, ...]) -> None:
    out = f"ptq-{budget}"
    assert job(workshop, out, method="ptq", bits="auto", budget_mb=budget).run(*more) == 0
    folder = workshop / out
    size = (folder / artifact.TENSORS).stat().st_size / 2**20
    found = json.loads((folder / "metrics.json").read_text())["mixed_precision"]
    assert size <= found["planned_mb"] <= budget
    assert size > 0.8 * found["planned_mb"]  # of so small a file the header, set aside in full, is half
    manifest = json.loads((folder / artifact.MANIFEST).read_text())
    assert {name: entry["bits"] for name, entry in manifest["weights"].items()} == found["layers"]
    assert manifest["notes"]["mixed_precision"].items() <= found.items()
    assert len(set(found["layers"].values())) > 1


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("method", ["mrem-s", "mrem-p", "qat"])
def test_every_method_trains_it(workshop: Path, method: str) -> None:
    own = {"mrem-p": {"workers": 1}, "qat": {"lr": None, "qat_epochs": "1+1"}}.get(method, {})
    assert job(workshop, method, method=method, bits="auto-8", budget_mb=0.0165, **own).run() == 0
    found = json.loads((workshop / method / "metrics.json").read_text())
    assert found["bits"] == "auto-8"
    assert len(set(found["mixed_precision"]["layers"].values())) > 1
    recipe = yaml.safe_load((workshop / method / "recipe.yaml").read_text())
    assert (recipe["bits"], recipe["budget_mb"]) == ("auto-8", 0.0165)
    if method == "mrem-s":
        assert job(workshop, "again", bits="auto-8", budget_mb=0.0165).run() == 0
        tensors = [(workshop / out / artifact.TENSORS).read_bytes() for out in (method, "again")]
        assert tensors[0] == tensors[1]


@pytest.mark.usefixtures("no_report")
def test_a_resumed_run_does_not_choose_again(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice between near equals might fall the other way, and the checkpoints would not fit any more."""
    options = {"bits": "auto", "budget_mb": 0.0165}
    assert job(workshop, "whole", **options).run() == 0
    steps, calls = ModuleTrainer.step, iter(range(1, 100))

    def deadly(*args: Any, **more: Any) -> Any:
        if next(calls) == 6:
            raise KeyboardInterrupt
        return steps(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleTrainer, "step", deadly)
        assert job(workshop, "stopped", **options).run() == cli.EXIT_INTERRUPTED
    monkeypatch.setattr(student, "choose_bits", lambda *args: pytest.fail("chosen again"))
    assert job(workshop, "stopped", **options).run("--resume") == 0
    tensors = [(workshop / out / artifact.TENSORS).read_bytes() for out in ("whole", "stopped")]
    assert tensors[0] == tensors[1]


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("quantizer", ["auto", "midrise"])
def test_onnxruntime_agrees_with_torch(workshop: Path, quantizer: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    folder = workshop / f"onnx-{quantizer}"
    options = {"method": "ptq", "bits": "auto", "budget_mb": 0.0165, "export": "ort-cpu"}
    assert job(workshop, folder.name, **options, weight_quantizer=quantizer).run("--no-validate") == 0
    layers = json.loads((folder / artifact.MANIFEST).read_text())["weights"]
    assert len({layer["bits"] for layer in layers.values()}) > 1
    if quantizer == "midrise":
        assert all((layer.get("grid") == "midrise") == (layer["bits"] == 2) for layer in layers.values())
    _, tokenizer = loading.load_model(workshop / "model", "sequence-classification")
    texts = [row["text"] for row in sentences(20, seed=5)]
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=POSITIONS, return_tensors="pt")
    with torch.no_grad():
        expected = mrem_deploy.load(folder)(**tokens).logits.numpy()
    (path,) = folder.glob("*.onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    given = {entry.name: tokens[entry.name].numpy() for entry in session.get_inputs()}
    (came,) = session.run(None, given)
    # Sums in another order move some activations across a rounding boundary; a wrong scale or code would
    # move all of them by far more than a hundredth of the spread.
    assert np.sqrt(np.mean((came - expected) ** 2)) < 0.01 * expected.std()
