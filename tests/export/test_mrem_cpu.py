"""Profile mrem-cpu without the runtime's library: its functions run what ort-cpu runs, bit for bit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
ir = pytest.importorskip("onnx_ir")

from exported import BITS, CLASSIFIER, frozen_model, run, skeleton, to_onnx  # noqa: E402
from fused import MODELS, fused, fused_nodes, with_hidden  # noqa: E402
from quant_specs import SPECS  # noqa: E402
from tiny_models import BLOCKS, HEAD_NAMES, TRACED, tiny_batch  # noqa: E402

from mrem_deploy.export import write  # noqa: E402
from mrem_deploy.export.panels import Stored, panels, rows, stored_as  # noqa: E402
from mrem_deploy.quant.frozen import FrozenModel  # noqa: E402
from mrem_deploy.quant.spec import QuantSpec  # noqa: E402

# Of three blocks: what becomes one operator. MPNet and DeBERTa attend by relative positions, and
# ModernBERT is pre-norm with gates; there, the linears are operators: q, k and v as one, and the output.
EMBEDDING_AND_BLOCKS = {"PackedEmbedding": 1, "AttentionBlock": 3, "FeedForwardBlock": 3}
EXPECTED = {
    "bert": EMBEDDING_AND_BLOCKS | {"LowBitLinear": 1},  # the pooler, or a dense layer of the head
    "roberta": EMBEDDING_AND_BLOCKS | {"LowBitLinear": 1},
    "xlm-roberta": EMBEDDING_AND_BLOCKS | {"LowBitLinear": 1},
    "electra": EMBEDDING_AND_BLOCKS | {"LowBitLinear": 1 + 1},  # and the projection of its embeddings
    "distilbert": EMBEDDING_AND_BLOCKS | {"LowBitLinear": 1},
    "mpnet": {"PackedEmbedding": 1, "FeedForwardBlock": 3, "LowBitLinear": 3 * 2 + 1},
    "deberta-v2": {"FeedForwardBlock": 3, "LowBitLinear": 3 * 2 + 1},
    "modernbert": {"LowBitLinear": 3 * 4 + 1},
    "gte": {"PackedEmbedding": 1, "LowBitLinear": 3 * 4 + 1},  # gate and up are one, too
    "qwen3": {"LowBitLinear": 3 * 4},
    "gemma3_text": {"LowBitLinear": 3 * 4},
    "t5": {"LowBitLinear": 3 * 4},
}


def same(model: Any, other: Any, batch: dict[str, torch.Tensor]) -> None:
    """Outputs and hidden states equal bit for bit, with optimizations and without."""
    for exact in (False, True):
        came, expected = (run(with_hidden(m), batch, exact) for m in (model, other))
        assert set(came) == set(expected)
        for name, value in expected.items():
            assert np.array_equal(came[name], value), (name, exact)


@pytest.mark.parametrize("bits", [*BITS, "2-2-8 twn", "8-8-8 per channel"])
@pytest.mark.parametrize("kind", TRACED)
def test_functions_run_what_ort_cpu_runs(kind: str, bits: str) -> None:
    frozen = MODELS[bits](kind)
    model, batch = fused(frozen), tiny_batch(kind)
    assert fused_nodes(model) == EXPECTED[kind]
    onnx.checker.check_model(model, full_check=True)
    same(model, to_onnx(frozen), batch)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_every_way_of_quantizing_has_a_form(spec: QuantSpec) -> None:
    frozen = frozen_model("bert", CLASSIFIER, spec)
    same(fused(frozen), to_onnx(frozen), tiny_batch("bert"))


@pytest.mark.parametrize("head", HEAD_NAMES)
def test_every_head(head: str) -> None:
    frozen = frozen_model("bert", head, BITS["2-2-8"])
    same(fused(frozen), to_onnx(frozen), tiny_batch("bert"))


@pytest.mark.parametrize("hot", [1, 40])
def test_hot_rows(hot: int) -> None:
    frozen = MODELS["hot rows"]("bert", hot)
    same(fused(frozen), to_onnx(frozen), tiny_batch("bert"))


def test_bits_may_differ_from_block_to_block() -> None:
    frozen = MODELS["mixed"]("bert")
    model = fused(frozen)
    # Block 0 has q of other bits than k and v, so its attention is no operator.
    assert fused_nodes(model) == {"PackedEmbedding": 1, "AttentionBlock": 2, "FeedForwardBlock": 3} | {
        "LowBitLinear": 1 + 3
    }
    overloads = {f.overload for f in model.functions if f.name == "AttentionBlock"}
    assert overloads == {"", "1"}
    same(model, to_onnx(frozen), tiny_batch("bert"))


def test_attention_in_float_quantizes_nothing_between_its_linears() -> None:
    frozen = frozen_model("bert", CLASSIFIER, BITS["2-2-8"])
    scales = {
        name: s for name, s in frozen.scales.items() if ".scores." not in name and ".context." not in name
    }
    unquantized = to_onnx(dataclasses.replace(frozen, scales=scales))
    stored = skeleton("bert", CLASSIFIER)
    model = write.compact_proto(write.lowered(frozen, "mrem-cpu", skeleton=stored, attention="float"))
    blocks = [node for node in model.graph.node if node.op_type == "AttentionBlock"]
    for block in blocks:
        assert not {"q_scale", "q_scaled", "p_zero_point"} & {a.name for a in block.attribute}
    assert len(blocks) == BLOCKS
    same(model, unquantized, tiny_batch("bert"))


def test_onnxruntime_runs_the_same_operators_and_keeps_the_same_weights(tmp_path: Path) -> None:
    """What is left after it has put in the functions, folded the weights and optimized."""
    counts, stored = [], []
    frozen = frozen_model("bert", CLASSIFIER, BITS["2-2-8"])
    for name, model in (("a", to_onnx(frozen)), ("b", fused(frozen))):
        options = ort.SessionOptions()
        options.optimized_model_filepath, options.log_severity_level = str(tmp_path / name), 3
        ort.InferenceSession(model.SerializeToString(), options)
        optimized = onnx.load(tmp_path / name).graph
        kinds = Counter(node.op_type for node in optimized.node)
        # Shapes of the heads' axes are computed for each block, not once.
        counts.append({kind: n for kind, n in kinds.items() if kind not in ("Shape", "Concat")})
        weights = [i for i in optimized.initializer if i.data_type == onnx.TensorProto.INT8]
        stored.append(Counter(tuple(i.dims) for i in weights))
    assert counts[0] == counts[1]
    assert stored[0] == stored[1]


def test_the_file_is_as_small_as_packed_weights_allow() -> None:
    frozen = frozen_model("bert", CLASSIFIER, BITS["2-2-8"])
    model = fused(frozen)
    kinds = {i.name: i for i in model.graph.initializer if i.name.endswith(".weight.codes")}
    assert len(kinds) == 1 + 4 * BLOCKS + 1
    assert {i.data_type for i in kinds.values()} == {onnx.TensorProto.UINT8}
    qkv = kinds["bert.encoder.layer.0.attention.self.qkv.weight.codes"]
    assert list(qkv.dims) == [3, 1, 64]  # 48 outputs, 16 inputs
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": 21, "mrem.runtime": 1}
    for node in model.graph.node:
        if node.domain == "mrem.runtime":
            assert {a.name: a.i for a in node.attribute}["format"] == 1


@pytest.mark.parametrize(("bits", "spacing"), [(2, 1), (2, 2), (3, 1), (4, 1), (8, 1)])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (16, 16), (17, 15), (40, 33), (3, 64)])
def test_panels_are_where_the_runtime_looks(bits: int, spacing: int, inputs: int, outputs: int) -> None:
    """By the definition: byte 4c + k of panel p and step s has at field f the code of one weight."""
    stored = stored_as(bits, spacing)
    top = 2 ** (bits - 1) - 1
    values = np.array([-3, -1, 1, 3]) if spacing == 2 else np.arange(-top, top + 1)
    codes = np.random.default_rng(bits).choice(values, (inputs, outputs)).astype(np.int8)
    packed, fields = panels(codes, stored), 8 // stored.bits
    assert packed.shape == (-(-outputs // 16), -(-inputs // (4 * fields)), 64)
    assert packed.dtype == np.uint8
    for (p, s, byte), held in np.ndenumerate(packed):
        for field in range(fields):
            i, o = s * 4 * fields + 4 * field + byte % 4, 16 * p + byte // 4
            code = int(held) >> field * stored.bits & 2**stored.bits - 1
            inside = i < inputs and o < outputs
            assert (code * spacing + stored.low == codes[i, o]) if inside else code == 0
    table = rows(codes, stored)
    assert table.shape == (inputs, -(-outputs // fields))
    unpacked = stored.table()[table].reshape(inputs, -1)[:, :outputs]
    assert np.array_equal(unpacked.view(np.int8), codes)


def test_low_codes_are_the_least_of_their_bits() -> None:
    assert stored_as(2, 1) == Stored(2, 1, -1)
    assert stored_as(2, 2) == Stored(2, 2, -3)
    assert stored_as(3, 1) == stored_as(4, 1) == Stored(4, 1, -8)
    assert stored_as(8, 1) == Stored(8, 1, -128)


def test_a_bare_weight_only_model_has_no_operators() -> None:
    frozen: FrozenModel = frozen_model("bert", CLASSIFIER, QuantSpec(4, 4, 32))
    assert fused_nodes(fused(frozen)) == {"PackedEmbedding": 1}
