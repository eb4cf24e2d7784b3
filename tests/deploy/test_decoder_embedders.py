"""Embedders with a decoder's body or T5's encoder, from the users' folder to vectors in onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_decoder import CLASSES, save_decoder
from tiny_embedder import texts
from tiny_job import job_in, workshop_in, write_jsonl

import mrem_deploy
from mrem_deploy.quant.frozen import load
from mrem_deploy.recipe import Recipe

METHODS = {"qwen3": "mrem-s", "gemma3_text": "ptq", "t5": "mrem-s"}
# As in test_sentence_models.py: a code that moves by one, and float sums in another order.
ONE_CODE = 0.05
ROUNDING = 2e-6


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop_in(tmp_path_factory.mktemp("shop")) as root:
        write_jsonl(root / "sentences.jsonl", [{"text": text} for text in texts(40)])
        yield root


@pytest.fixture(scope="module", params=CLASSES)
def result(request: pytest.FixtureRequest, shop: Path) -> Path:
    """A run on the folder of the source: calibration, training, ONNX, validation, report."""
    kind, method = request.param, METHODS[request.param]
    source = save_decoder(shop / kind, kind)
    options = {"task": "feature-extraction", "model": source, "data": shop / "sentences.jsonl"}
    options |= {"method": method, "bits": "4-4-8", "modules": 3}
    options |= {"steps": 4} if method == "mrem-s" else {"steps": None, "lr": None}
    assert job_in(shop, f"{kind}-result", export="ort-cpu", **options).run() == 0
    return shop / f"{kind}-result"


def test_the_vectors_are_those_of_the_library(result: Path, shop: Path) -> None:
    """sentence-transformers with our model in torch: prompts, left padding, pooling, Dense modules."""
    library = pytest.importorskip("sentence_transformers", reason="the library to compare with")
    theirs = library.SentenceTransformer(str(shop / result.name.removesuffix("-result")), device="cpu")
    theirs.float()[0].model = load(result).eval()  # its Dense modules are in bfloat16, too
    assert theirs.tokenizer.padding_side == "left"
    ours = mrem_deploy.sentence_transformer(result)
    sentences = texts(9, seed=4)
    for name in ("encode_query", "encode_document"):
        expected, came = (getattr(model, name)(sentences) for model in (theirs, ours))
        np.testing.assert_allclose(came, expected, rtol=0, atol=ONE_CODE)
        assert np.abs(came - expected).mean() < ONE_CODE / 10
    assert not np.allclose(ours.encode_query(sentences), ours.encode_document(sentences), atol=ONE_CODE)


def test_a_vector_does_not_depend_on_its_batch(result: Path) -> None:
    """With padding on either side; the pipeline pads on the right, users' tokenizers on the left."""
    model = mrem_deploy.sentence_transformer(result)
    sentences = texts(12, seed=5)
    together = model.encode(sentences)
    for padding_side in ("left", "right"):
        model.tokenizer.padding_side = padding_side
        np.testing.assert_allclose(model.encode(sentences), together, rtol=0, atol=ROUNDING)
        alone = np.stack([model.encode(sentence) for sentence in sentences])
        np.testing.assert_allclose(alone, together, rtol=0, atol=ROUNDING)


def test_the_body_is_float32_and_without_language_model_head(result: Path) -> None:
    model = load(result)
    assert type(model).__name__ in ("Qwen3Model", "Gemma3TextModel", "T5EncoderModel")
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    assert not any("lm_head" in name for name in model.state_dict())


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3ForSequenceClassification"])
def test_a_reranker_is_refused(architecture: str, shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_decoder(shop / architecture, "qwen3", architecture)
    (source / "modules.json").unlink()
    out = f"{architecture}-result"
    assert job_in(shop, out, model=source).run() == 2
    assert "as an embedder only" in capsys.readouterr().err
    assert not (shop / out).exists()


def test_in_memory_they_are_refused_too(shop: Path) -> None:
    import transformers
    from tiny_models import tiny_config

    model = transformers.Qwen3ForTokenClassification(tiny_config("qwen3"))
    with pytest.raises(mrem_deploy.UserError, match="as an embedder only"):
        mrem_deploy.quantize_model(model, None, ["a film"], Recipe())
