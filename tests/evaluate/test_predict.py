"""Predictions in the order of the examples, pooling, and the error of every layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import HEAD_NAMES, tiny_encoded, tiny_model, tiny_pair

from mrem_deploy.evaluate.layer_error import layer_errors
from mrem_deploy.evaluate.predict import predict, remember, torch_predictor
from mrem_deploy.models.architectures import model_outputs
from mrem_deploy.models.sentence_head import Pooling, SentenceHead
from mrem_deploy.quant.insert import prepare
from mrem_deploy.quant.spec import QuantSpec


def one_by_one(model: torch.nn.Module, encoded: object, index: int) -> list[np.ndarray]:
    with torch.no_grad():
        return [value[0].numpy() for value in model_outputs(model(**encoded.batch(np.array([index]))))]


@pytest.mark.parametrize("head", HEAD_NAMES)
@pytest.mark.parametrize("batch_size", [1, 5, 32])  # singly, with a short last batch, all at once
def test_predictions_come_in_the_order_of_the_examples(head: str, batch_size: int) -> None:
    """fp32 against each sentence alone: 1e-5 for sums in another order."""
    model = tiny_model("bert", head)
    encoded = tiny_encoded(count=12)
    rows = predict(torch_predictor(model), encoded, "", batch_size)
    assert len(rows) == 12
    for index, row in enumerate(rows):
        expected = one_by_one(model, encoded, index)
        truth = np.stack(expected, axis=-1) if len(expected) > 1 else expected[0]
        assert row.shape == truth.shape  # without padding
        np.testing.assert_allclose(row, truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", ["mean", "cls"])
def test_sentence_embeddings(how: str) -> None:
    model = tiny_model("bert", "feature-extraction")
    encoded = tiny_encoded(count=6)
    rows = predict(torch_predictor(model), encoded, "", 4, pooling=SentenceHead(Pooling((how,))))
    for index, row in enumerate(rows):
        hidden = one_by_one(model, encoded, index)[0]
        np.testing.assert_allclose(
            row, hidden.mean(axis=0) if how == "mean" else hidden[0], rtol=0, atol=1e-5
        )


def test_a_predictor_leaves_the_model_alone() -> None:
    model = tiny_model()
    encoded = tiny_encoded()
    predict(torch_predictor(model), encoded, "")
    assert all(p.grad is None for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("head", HEAD_NAMES)
def test_the_error_of_a_model_against_itself_is_zero(head: str) -> None:
    model = tiny_model("bert", head)
    prepare(model)
    errors = layer_errors(model, model, tiny_encoded(), [np.arange(4)])
    assert list(errors) == ["embeddings", "block 1", "block 2", "block 3", "output"]
    assert set(errors.values()) == {0.0}


def test_a_change_in_the_head_is_an_error_of_the_output_alone() -> None:
    teacher, student = tiny_pair(spec=QuantSpec(32, 32, 32))
    with torch.no_grad():
        student.classifier.weight.mul_(1.5)
        student.classifier.bias.mul_(1.5)  # so the logits are 1.5 times what they were
    errors = layer_errors(teacher, student, tiny_encoded(), [np.arange(4), np.arange(4, 12)])
    assert errors.pop("output") == pytest.approx(0.5, rel=1e-5)
    assert set(errors.values()) == {0.0}


@pytest.mark.parametrize("head", HEAD_NAMES)
def test_layer_errors_by_definition(head: str) -> None:
    """√(Σ‖f̂ − f‖² / Σ‖f‖²) over all real tokens, computed one sentence at a time."""
    teacher, student = tiny_pair("bert", head, QuantSpec(32, 2, 32))  # only the words: no rounding to flip
    encoded = tiny_encoded(count=7)
    sums = np.zeros((5, 2))
    for index in range(7):
        batch = encoded.batch(np.array([index]))
        with torch.no_grad():
            clean = teacher(**batch, output_hidden_states=True)
            noisy = student(**batch, output_hidden_states=True)
        pairs = [*zip(noisy.hidden_states, clean.hidden_states, strict=True)]
        last = [torch.cat([v.flatten() for v in model_outputs(result)]) for result in (noisy, clean)]
        for row, (s, t) in enumerate([*pairs, tuple(last)]):
            sums[row] += float((s - t).double().square().sum()), float(t.double().square().sum())
    expected = np.sqrt(sums[:, 0] / sums[:, 1])
    came = layer_errors(teacher, student, encoded, [np.arange(3), np.arange(3, 7)])
    np.testing.assert_allclose(list(came.values()), expected, rtol=1e-4)
    assert (expected > 0).all()


def test_predictions_are_remembered_by_their_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    computed: list[str] = []

    def compute(name: str) -> np.ndarray:
        computed.append(name)
        return np.array([[float(len(computed)), 2.0]], dtype=np.float32)

    first = remember("model a, data 1", lambda: compute("a1"))
    again = remember("model a, data 1", lambda: compute("a1"))
    other = remember("model a, data 2", lambda: compute("a2"))
    assert computed == ["a1", "a2"]
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    for file in (tmp_path / "cache").rglob("*.safetensors"):
        file.write_bytes(b"broken")
    assert remember("model a, data 1", lambda: compute("a1")).shape == (1, 2)  # a broken file is made anew
    assert computed == ["a1", "a2", "a1"]


def test_damaged_predictions_are_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    remember("key", lambda: np.ones(4, dtype=np.float32))
    (file,) = (tmp_path / "cache").rglob("*.safetensors")
    whole = file.read_bytes()
    for bit in range(0, 8 * len(whole), 37):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        assert remember("key", lambda: np.zeros(1, dtype=np.float32)).tolist() == [0.0], bit
    file.write_bytes(whole)
    assert remember("key", lambda: np.zeros(1, dtype=np.float32)).tolist() == [1.0] * 4


def test_a_cache_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file stands in the way")
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    assert remember("key", lambda: np.array([1.0])).tolist() == [1.0]
