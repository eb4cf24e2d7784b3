"""T5's encoder: its forms, its table of buckets, models with a decoder, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import (
    assert_same_state,
    differing,
    quantized_twin,
    state_of,
    tiny_batch,
    tiny_config,
    tiny_encoded,
    tiny_model,
    train_job,
)
from transformers.models.t5.modeling_t5 import T5Attention

import mrem_deploy
from mrem_deploy.base.errors import UserError
from mrem_deploy.models import gate
from mrem_deploy.models.architectures import anatomy, check_head, model_outputs
from mrem_deploy.models.loading import auto_class
from mrem_deploy.models.parts import carve
from mrem_deploy.quant.frozen import build, freeze
from mrem_deploy.quant.insert import activation_points, prepare
from mrem_deploy.quant.spec import QuantSpec
from mrem_deploy.quant.t5 import RelativeBias, register_t5
from mrem_deploy.recipe import Recipe
from mrem_deploy.train import METHODS

GATED = {"feed_forward_proj": "gated-gelu"}
EMBEDDER = "feature-extraction"


@pytest.mark.parametrize("form", ["relu", "gelu", "gated-gelu", "gated-silu"])
def test_every_form_keeps_its_outputs_frozen_too(form: str) -> None:
    """Prepared in fp64 (1e-12 is the order of sums), cut into parts, and frozen bit for bit."""
    batch = tiny_batch("t5")
    exact = tiny_model("t5", EMBEDDER, torch.float64, feed_forward_proj=form)
    with torch.no_grad():
        expected = model_outputs(exact(**batch))[0]
        found = prepare(exact)
        torch.testing.assert_close(model_outputs(exact(**batch))[0], expected, rtol=0, atol=1e-12)
        first, last = carve(exact, [0, 2, 3])
        parts = last(first(None, batch).hidden[-1], batch).outputs[0]
        assert torch.equal(parts, model_outputs(exact(**batch))[0])
    gated = form.startswith("gated")
    points = activation_points(found, QuantSpec())
    assert sum("wi" in name for name in points) == (0 if gated else 3)  # halves of a gate share one
    assert {asymmetric for name, asymmetric in points.items() if name.endswith("wo.input_quantizer")} == {
        not gated
    }
    model = tiny_model("t5", EMBEDDER, feed_forward_proj=form)
    _, student = quantized_twin(model, QuantSpec(4, 4, 8))
    with torch.no_grad():
        expected = student(**batch).last_hidden_state
        assert torch.equal(build(freeze(student, EMBEDDER))(**batch).last_hidden_state, expected)


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 8), (32, 20)])
def test_the_table_gives_the_biases_of_transformers(buckets: int, farthest: int) -> None:
    """For distances beyond the table, too; 32 and 128 are those of every T5."""
    sizes = {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": farthest}
    model = tiny_model("t5", EMBEDDER, **sizes)
    (first, *_) = attentions = [part for part in model.modules() if isinstance(part, T5Attention)]
    tokens = farthest + 9
    with torch.no_grad():
        expected = first.compute_bias(tokens, tokens)
        register_t5(model, attentions, "mrem")
        assert isinstance(first.relative_attention_bias, RelativeBias)
        assert torch.equal(first.relative_attention_bias(tokens), expected)


@pytest.mark.parametrize("method", ["mrem-s", "rem", "qat"])
def test_methods_train_all_but_the_biases_of_positions(method: str) -> None:
    model = tiny_model("t5", EMBEDDER, **GATED)
    teacher, student = quantized_twin(model, QuantSpec(2, 2, 8))
    before = state_of(student)
    score = (lambda model: 0.0) if method == "qat" else None
    job = train_job(teacher, student, tiny_encoded("t5"), [0, 1, 2, 3], score=score, method=method)
    METHODS[method].train(job)
    changed = differing(state_of(student), before)
    assert not any("relative_attention_bias" in name for name in changed)
    words = "encoder.embed_tokens.weight"
    weights = {n for n in before if n.endswith(".weight") and "norm" not in n and "relative" not in n}
    assert words in weights
    assert weights <= changed


def test_the_encoder_of_a_model_with_a_decoder_is_read(tmp_path: Path) -> None:
    """One with a language model head beside it; the word embedding is stored once, and its result loads."""
    torch.manual_seed(0)
    whole = transformers.T5ForConditionalGeneration(tiny_config("t5")).eval()
    whole.save_pretrained(tmp_path / "whole")
    auto = auto_class(EMBEDDER, "t5")
    came, info = auto.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not info["missing_keys"]
    batch = tiny_batch("t5")
    with torch.no_grad():
        expected = whole.encoder(**batch).last_hidden_state
        assert torch.equal(came.eval()(**batch).last_hidden_state, expected)
    frozen = freeze(quantized_twin(came, QuantSpec(4, 4, 8))[1], EMBEDDER)
    assert sorted(frozen.weights)[0] == "encoder.block.0.layer.0.SelfAttention.k"
    assert not any("shared" in name or "embed" in name for name in frozen.full)
    frozen.save(tmp_path / "result")
    ours, theirs = mrem_deploy.load(tmp_path / "result"), auto.from_pretrained(tmp_path / "result")
    assert_same_state(ours.state_dict(), theirs.state_dict())
    assert ours.get_input_embeddings() is ours.encoder.embed_tokens
    with pytest.raises(UserError, match="AutoModelForTextEncoding"):
        transformers.AutoModel.from_pretrained(tmp_path / "result")


@pytest.mark.parametrize("name", ["T5Model", "T5ForConditionalGeneration", "T5ForSequenceClassification"])
def test_a_decoder_is_refused_in_memory(name: str) -> None:
    model = getattr(transformers, name)(tiny_config("t5"))
    with pytest.raises(UserError):
        mrem_deploy.quantize_model(model, None, ["a film"], Recipe())
    with pytest.raises(UserError, match="has a decoder"):
        anatomy(model)


@pytest.mark.parametrize("head", ["sequence-classification", "question-answering"])
def test_heads_on_a_decoder_are_refused(head: str) -> None:
    with pytest.raises(UserError, match="reads its decoder"):
        check_head("t5", head, "folder")


def test_the_layout_of_transformers_js_is_refused(tmp_path: Path) -> None:
    """Its T5 has a decoder; the ONNX file of the profile is for others."""
    pytest.importorskip("onnx_ir")
    from mrem_deploy.export.transformers_js import TOKENIZER_FILES, write_layout

    for name in TOKENIZER_FILES[:2]:
        (tmp_path / name).write_text("{}")
    frozen = freeze(quantized_twin(tiny_model("t5", EMBEDDER), QuantSpec(4, 4, 8))[1], EMBEDDER)
    with pytest.raises(UserError, match="the encoder alone"):
        write_layout(frozen, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["d_model", "d_ff", "d_kv", "num_heads", "num_layers"])
def test_sizes_that_do_not_fit_the_weights_are_refused(key: str, tmp_path: Path) -> None:
    content = tiny_config("t5").to_dict()
    weights = sum(p.numel() for p in tiny_model("t5", EMBEDDER).parameters())
    gate.check_bytes(tmp_path, gate.check_config(content, tmp_path), weights, 8)
    with pytest.raises(UserError, match="do not fit"):
        gate.check_bytes(tmp_path, content | {key: 400}, weights, 8)
    with pytest.raises(UserError, match=key):
        gate.check_config(content | {key: 10**9}, tmp_path)
