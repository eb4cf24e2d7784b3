"""Operators at sizes where work is cut (several blocks of weights, spans of rows, panels that are not full),
and in several sessions and threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import transformers

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("mrem_runtime", reason="mrem_runtime is not installed: make setup")

from exported import CLASSIFIER, run
from fused import MODELS, answers, fused, session_with_library, with_hidden
from tiny_models import VOCABULARY, quantized_twin

from mrem_deploy.export import write
from mrem_deploy.export.skeleton import trace
from mrem_deploy.quant.frozen import freeze
from mrem_deploy.quant.spec import QuantSpec

TOKENS = 150  # more than the 128 rows of a span
# One block. 600 inputs and 1,100 are more than a block of weights has, and neither fills its last panel.
WIDE = {
    "hidden_size": 600, "num_attention_heads": 12, "intermediate_size": 1100, "num_hidden_layers": 1,
    "vocab_size": VOCABULARY, "max_position_embeddings": TOKENS, "num_labels": 3,
}  # fmt: skip


def wide(bits: int) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(**WIDE, initializer_range=0.05)
    model = transformers.BertForSequenceClassification(config).eval()
    _, student = quantized_twin(model, QuantSpec(bits, bits, 8, per_channel=True))
    frozen = freeze(student, CLASSIFIER)
    return write.compact_proto(write.lowered(frozen, "mrem-cpu", skeleton=trace(frozen)))


def batch(rows: int, tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Sentences from one token to `tokens`."""
    draw = np.random.default_rng(seed)
    lengths = np.linspace(tokens, 1, rows).astype(int)
    mask = (np.arange(tokens) < lengths[:, None]).astype(np.int64)
    ids = draw.integers(5, VOCABULARY, size=(rows, tokens)) * mask
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_wide_block_gives_what_its_functions_give(bits: int) -> None:
    """The last bits of norms differ from onnxruntime's, and now and then move a code; a weight at a wrong
    place would change every number."""
    model, given = with_hidden(wide(bits)), batch(3, TOKENS)
    real = given["attention_mask"] != 0
    expected = run(model, {name: torch.from_numpy(value) for name, value in given.items()})
    alone = answers(session_with_library(model, 1), given)
    shared = answers(session_with_library(model, 2), given)
    for name in ("hidden.0", "hidden.1"):
        assert np.array_equal(alone[name], shared[name]), name
        error = np.abs(alone[name] - expected[name])[real]
        assert np.median(error.max(axis=-1)) < 5e-6, name  # as in test_in_onnxruntime
        assert error.max() < 0.2, name  # a few codes of one row; values are around 1
        assert expected[name][real].std() > 0.5, name


def test_sessions_and_threads_at_once_do_not_meet() -> None:
    """Two models in two sessions, each called from two threads with inputs of other sizes: what every call
    gives when nothing else runs. They share the library's scratch memory."""
    sessions = [session_with_library(fused(MODELS[bits]("bert")), 2) for bits in ("2-2-8", "mixed")]
    inputs = [batch(rows, tokens, seed=rows) for rows, tokens in ((1, 3), (9, 20), (4, 11), (2, 31))]
    calls = [(session, given) for given in inputs for session in sessions]
    quiet = [answers(session, given)["logits"] for session, given in calls]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(12):
            busy = threads.map(lambda call: answers(*call)["logits"], calls)
            for came, expected in zip(busy, quiet, strict=True):
                assert np.array_equal(came, expected)
