"""Centring changes no prediction, adds no operator, and helps where activations have few bits."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path

import onnx
import pytest
import torch
from tiny_job import job_in, workshop_in
from tiny_models import ARCHITECTURES, BLOCKS, HEAD_NAMES, tiny_batch, tiny_model

from mrem_deploy.models import architectures
from mrem_deploy.models.architectures import model_outputs
from mrem_deploy.models.parts import HIDDEN_SHIFTS, carve
from mrem_deploy.quant.calibrate import initial_scales
from mrem_deploy.quant.centring import centre, channel_means, shifts_of
from mrem_deploy.quant.frozen import FrozenModel, freeze
from mrem_deploy.quant.insert import insert_quantizers, prepare
from mrem_deploy.quant.spec import QuantSpec
from mrem_deploy.recipe import Recipe

CENTRED = [kind for kind in ARCHITECTURES if architectures.ARCHITECTURES[kind].norms]


def centred_twin(kind: str, head: str | None = "sequence-classification"):  # type: ignore[no-untyped-def]
    """A model in double precision and its centred copy."""
    model = tiny_model(kind, head, torch.float64)
    found = prepare(model)
    means = channel_means(model, shifts_of(model, found), [tiny_batch(kind)])
    twin = copy.deepcopy(model)
    centre(twin, found, means)
    return model, twin, found


@pytest.mark.parametrize("head", HEAD_NAMES)
@pytest.mark.parametrize("kind", CENTRED)
def test_predictions_stay(kind: str, head: str) -> None:
    model, twin, _ = centred_twin(kind, head)
    batch = tiny_batch(kind, seed=1)
    with torch.no_grad():
        pairs = zip(model_outputs(model(**batch)), model_outputs(twin(**batch)), strict=True)
        for usual, centred in pairs:
            torch.testing.assert_close(centred, usual, rtol=0, atol=1e-12)
    moved = {
        name for name, value in twin.state_dict().items() if not torch.equal(value, model.state_dict()[name])
    }
    assert len(moved) >= (4 if kind == "deberta-v2" else 7) * BLOCKS
    assert all(name.endswith("bias") for name in moved)


@pytest.mark.parametrize("kind", CENTRED)
def test_activations_have_mean_zero(kind: str) -> None:
    _, twin, found = centred_twin(kind)
    shifts = shifts_of(twin, found)
    after = channel_means(twin, shifts, [tiny_batch(kind)])
    # ELECTRA projects its embeddings. In DeBERTa keys, and what its projections read, meet positions, too.
    assert len(after) == (2 if kind == "deberta-v2" else 4) * BLOCKS - (kind == "electra")
    for name, mean in after.items():
        assert mean.abs().max() < 1e-6, name


@pytest.mark.parametrize("kind", CENTRED)
def test_parts_give_the_usual_hidden_states(kind: str) -> None:
    """So that losses, caches and reports compare like with like, wherever the model is cut."""
    model, twin, _ = centred_twin(kind)
    batch = tiny_batch(kind, seed=2)
    with torch.no_grad():
        hidden = None
        for usual, centred in zip(carve(model, [0, 1, BLOCKS]), carve(twin, [0, 1, BLOCKS]), strict=True):
            expected, got = usual(hidden, batch), centred(hidden, batch)
            for a, b in zip(expected.hidden, got.hidden, strict=True):
                torch.testing.assert_close(b, a, rtol=0, atol=1e-12)
            if expected.embedding is not None:
                torch.testing.assert_close(got.embedding, expected.embedding, rtol=0, atol=1e-12)
            hidden = expected.hidden[-1]


@pytest.mark.parametrize("kind", sorted({*ARCHITECTURES} - {*CENTRED}))
def test_models_without_biases_or_with_rotated_keys_are_left_alone(kind: str) -> None:
    model, twin, found = centred_twin(kind, None)
    assert shifts_of(model, found) == []
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in model.state_dict().items())


def test_four_bit_activations_lose_less() -> None:
    """Hidden states far from zero, as BERT's are: the error with centring is a fraction of that without."""
    model = tiny_model("bert")
    found = prepare(model)
    batch = tiny_batch("bert")
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("LayerNorm.bias"):
                value += torch.linspace(-6, 6, value.numel())
        spec = QuantSpec(32, 32, 4)
        errors = []
        for centred in (False, True):
            student = copy.deepcopy(model)
            if centred:
                centre(student, found, channel_means(model, shifts_of(model, found), [batch]))
            insert_quantizers(student, spec, initial_scales(student, found, spec, [batch]))
            whole, full = carve(student, [0, BLOCKS])[0], carve(model, [0, BLOCKS])[0]
            errors.append(float((whole(None, batch).hidden[0] - full(None, batch).hidden[0]).square().mean()))
    assert errors[1] < 0.5 * errors[0], errors


def test_a_frozen_model_keeps_its_shifts(tmp_path: Path) -> None:
    _, twin, found = centred_twin("bert")
    spec = QuantSpec(4, 4, 4)
    insert_quantizers(twin, spec, initial_scales(twin, found, spec, [tiny_batch("bert")]))
    frozen = freeze(twin, "sequence-classification")
    frozen.save(tmp_path)
    read = FrozenModel.read(tmp_path)
    assert sorted(read.shifts) == list(range(BLOCKS))
    assert all(torch.equal(z, getattr(twin, HIDDEN_SHIFTS)[block]) for block, z in read.shifts.items())
    batch = tiny_batch("bert", seed=3)
    with torch.no_grad():
        expected = carve(twin, [0, BLOCKS])[0](None, batch)
        got = carve(read.build(), [0, BLOCKS])[0](None, batch)
    assert all(torch.equal(a, b) for a, b in zip(expected.hidden, got.hidden, strict=True))
    assert torch.equal(expected.outputs[0], got.outputs[0])


def test_auto_centres_four_bit_activations() -> None:
    assert Recipe(bits="2-2-4").centres
    assert not Recipe(bits="2-2-8").centres
    assert Recipe(bits="2-2-8", centring="always").centres
    assert not Recipe(bits="2-2-4", centring="never").centres


def test_the_graph_gets_no_operator(tmp_path: Path) -> None:
    """Trained, exported and validated; the graph has the operators of the same run without centring."""
    graphs = {}
    with workshop_in(tmp_path) as root:
        for centring in ("always", "never"):
            job = job_in(root, centring, bits="2-2-4", steps=2, export="ort-cpu", centring=centring)
            assert job.run() == 0
            model = onnx.load(root / centring / "model.onnx")
            graphs[centring] = Counter(node.op_type for node in model.graph.node)
    assert graphs["always"] == graphs["never"]


@pytest.mark.parametrize("method", ["mrem-p", "rem"])
def test_other_methods_train_a_centred_model(method: str, tmp_path: Path) -> None:
    with workshop_in(tmp_path) as root:
        more = {"workers": 1} if method == "mrem-p" else {}
        assert job_in(root, "out", bits="2-2-4", method=method, steps=2, **more).run() == 0
        assert FrozenModel.read(root / "out").shifts
