"""`benchmark latency`: CTranslate2 and llama.cpp, where installed, answer like the model they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrem_deploy.benchmarks.geometry import parse_geometry, random_model
from mrem_deploy.benchmarks.latency import lineup, peers
from mrem_deploy.benchmarks.latency.contenders import Contender, Worker
from mrem_deploy.benchmarks.latency.heads import read_head

GEOMETRY = parse_geometry("64x2x4x128x50")  # llama.cpp's blocks have 32 numbers
SEED = 7


@pytest.fixture(scope="module")
def model() -> Any:
    """With biases and gains that matter: freshly made ones are all 0 and 1."""
    made = random_model(GEOMETRY, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in made.parameters():
            value.mul_(2).add_(0.1 * torch.randn(value.shape, generator=generator))
    return made


def logits(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = model(input_ids=torch.from_numpy(ids)).logits.numpy()
    return found


def error_of(contender: Contender, model: Any, batch: int, sequence: int) -> float:
    """Relative, of sentences without padding."""
    ids = np.random.default_rng(SEED).integers(0, GEOMETRY.vocabulary, size=(batch, sequence))
    expected = logits(model, ids)
    with Worker(contender, 1) as worker:
        reply = worker.feed(batch, sequence, GEOMETRY.vocabulary, SEED)
    assert reply["shapes"] == [list(expected.shape)]
    got = np.array(reply["sample"][0]).reshape(expected.shape)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def test_ctranslate2_answers_like_the_model(model: Any, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (made,) = peers.peer_contenders(model, ("ctranslate2",), tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not hasattr(model.config, "position_embedding_type")
    assert [path.name for path in tmp_path.iterdir()] == ["ctranslate2"]
    assert made.file_mb > 0
    assert 0 < error_of(made, model, 3, 9) < 0.1  # int8 weights and activations


def test_llama_cpp_answers_like_the_model(model: Any, tmp_path: Path) -> None:
    for package in ("gguf", "llama_cpp"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    eight, four = peers.peer_contenders(model, ("llama.cpp",), tmp_path)
    assert (eight.name, four.name) == ("llama.cpp Q8_0", "llama.cpp Q4_0")
    assert four.file_mb < eight.file_mb
    assert error_of(eight, model, 3, 9) < 0.1
    assert error_of(eight, model, 5, 200) < 0.1  # more tokens than one batch of llama.cpp takes
    assert error_of(four, model, 3, 9) < 0.4


def test_every_tensor_has_llama_cpps_name(model: Any) -> None:
    found = dict(peers.gguf_tensors(model))
    body = [name for name in model.state_dict() if name.startswith("bert.") and "pooler" not in name]
    assert len(found) == len(body)
    query = model.bert.encoder.layer[1].attention.self.query
    assert np.array_equal(found["blk.1.attn_q.weight"], query.weight.detach().numpy())


def test_the_head_beside_a_peers_model(model: Any, tmp_path: Path) -> None:
    peers.head_of(model).save(tmp_path)
    ids = np.arange(10).reshape(2, 5)
    with torch.no_grad():
        body = model.bert(input_ids=torch.from_numpy(ids))
    head = read_head(tmp_path)
    expected = logits(model, ids)
    # float32 sums in another order
    assert head.of_first(body.last_hidden_state[:, 0].numpy()) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert head.of_pooled(body.pooler_output.numpy()) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_model_without_such_a_rival_is_left_out_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from transformers import BertConfig, BertForTokenClassification

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    assert peers.peer_contenders(BertForTokenClassification(config), ("ctranslate2",), tmp_path) == []
    assert (
        "left out: ctranslate2: made here for BertForSequenceClassification only" in capsys.readouterr().err
    )
    assert peers.peer_contenders(BertForTokenClassification(config), (), tmp_path) == []


@pytest.mark.parametrize(
    ("peer", "package", "remedy"),
    [
        ("ctranslate2", "ctranslate2", "pip install ctranslate2"),
        ("llama.cpp", "gguf", "pip install llama-cpp-python gguf"),
    ],
)
def test_a_missing_package_is_named(
    peer: str, package: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = lambda name: None if name == package else True  # noqa: E731
    monkeypatch.setattr(lineup.importlib.util, "find_spec", absent)
    with pytest.raises(Exception, match=f"the package {package} is not installed") as caught:
        lineup.check_installed((peer,))
    assert remedy in str(caught.value)
