"""Hot rows in ONNX: every profile gives the rows of torch, bit for bit, and looks up integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
ir = pytest.importorskip("onnx_ir")

from tiny_job import POSITIONS, sentences, workshop_in  # noqa: E402
from tiny_job import job_in as job  # noqa: E402

import mrem_deploy  # noqa: E402
from mrem_deploy.export import PROFILES  # noqa: E402
from mrem_deploy.export.lower import Lowering  # noqa: E402
from mrem_deploy.export.profiles import IR_VERSIONS, choose_opset  # noqa: E402
from mrem_deploy.export.skeleton import DOMAIN  # noqa: E402
from mrem_deploy.models import loading  # noqa: E402
from mrem_deploy.quant.frozen import FrozenModel, FrozenWeight, with_hot_rows  # noqa: E402
from mrem_deploy.quant.hot_rows import HotRowQuantizer  # noqa: E402
from mrem_deploy.quant.quantizers import make_weight_quantizer  # noqa: E402
from mrem_deploy.quant.spec import WeightSpec  # noqa: E402

WORDS = "words"
WIDTH = 20  # not a multiple of the codes in a byte times the rows: packed rows share bytes with none


def frozen_table(rows: int, hot: torch.Tensor, bits: int, kind: str = "auto") -> FrozenWeight:
    generator = torch.Generator().manual_seed(rows)
    table = nn.Embedding(rows, WIDTH)
    with torch.no_grad():
        table.weight.copy_(torch.randn(rows, WIDTH, generator=generator))
    quantizer = make_weight_quantizer(table.weight, WeightSpec(bits, per_channel=True, quantizer=kind))
    codes, scale = quantizer.codes_and_scale(table.weight)
    weight = FrozenWeight(codes.to(torch.int8), scale.detach().clone(), bits, quantizer.grid.spacing)
    return with_hot_rows(weight, HotRowQuantizer(hot).freeze(table.weight))


def exported(weight: FrozenWeight, profile: str) -> Any:
    """A model that is nothing but the word embedding."""
    frozen = FrozenModel(config=None, head="", weights={WORDS: weight})
    opset = choose_opset(PROFILES[profile], {weight.bits}, None)
    ids = ir.Value(name="ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch", "sequence"]))
    floats, shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["batch", "sequence", WIDTH])
    rows = ir.Value(name="rows", type=floats, shape=shape)
    attributes = ir.convenience.convert_attributes({"name": WORDS})
    marker = ir.Node(DOMAIN, "Embedding", [ids], attributes, outputs=[rows])
    graph = ir.Graph([ids], [rows], nodes=[marker], opset_imports={"": opset, DOMAIN: 1}, name="table")
    Lowering(graph, frozen, None, PROFILES[profile], opset).run()
    model = ir.to_proto(ir.Model(graph, ir_version=IR_VERSIONS[opset]))
    onnx.checker.check_model(model, full_check=True)
    return model


def run(model: Any, ids: np.ndarray, optimized_to: Path | None = None, plain: bool = False) -> np.ndarray:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    if plain:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if optimized_to:
        options.optimized_model_filepath = str(optimized_to)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(["rows"], {"ids": ids})[0]


@pytest.mark.parametrize(("bits", "quantizer"), [(2, "twn"), (2, "midrise"), (4, "laq")])
@pytest.mark.parametrize("profile", PROFILES)
# one hot row; the last ones that fit a byte and the first that does not; every row hot
@pytest.mark.parametrize(("rows", "hot"), [(50, 1), (400, 255), (400, 256), (300, 300)])
def test_rows_are_those_of_torch(profile: str, bits: int, quantizer: str, rows: int, hot: int) -> None:
    chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(1))[:hot].sort().values
    weight = frozen_table(rows, chosen, bits, quantizer)
    model = exported(weight, profile)
    ids = np.arange(rows).reshape(2, -1)
    expected = weight.values()[torch.from_numpy(ids)].numpy()
    assert np.array_equal(run(model, ids), expected)
    assert np.array_equal(run(model, ids, plain=True), expected)
    (places,) = (i for i in model.graph.initializer if i.name == f"{WORDS}.hot.places")
    kind = onnx.TensorProto.DataType.Name(places.data_type)
    assert kind == ("INT32" if not PROFILES[profile].packed else "UINT8" if hot < 256 else "UINT16")
    (table,) = (i for i in model.graph.initializer if i.name == f"{WORDS}.hot.codes")
    assert list(table.dims) == [hot + 1, WIDTH]
    assert table.data_type == onnx.TensorProto.INT8


@pytest.mark.parametrize(("bits", "quantizer"), [(2, "twn"), (2, "midrise"), (4, "laq")])
@pytest.mark.parametrize("profile", ["ort-cpu", "int8"])
def test_onnxruntime_looks_up_integers(tmp_path: Path, profile: str, bits: int, quantizer: str) -> None:
    """What it keeps in memory: a byte per code of either table, and no table of floats."""
    weight = frozen_table(400, torch.arange(0, 400, 40), bits, quantizer)
    run(exported(weight, profile), np.zeros((1, 1), np.int64), tmp_path / "optimized.onnx")
    optimized = onnx.load(tmp_path / "optimized.onnx")
    kept = {tuple(i.dims): i.data_type for i in optimized.graph.initializer}
    assert kept[400, WIDTH] == kept[11, WIDTH] == onnx.TensorProto.INT8
    assert set(kept) == {(400, WIDTH), (11, WIDTH), (400, 1), (11, 1), (400,)}
    assert len(optimized.graph.initializer) == 5


def test_a_whole_model_agrees_with_torch_in_every_profile(tmp_path: Path) -> None:
    with workshop_in(tmp_path) as workshop:
        options = {"method": "ptq", "export": ",".join(PROFILES), "hot_rows": 5}
        assert job(workshop, "out", **options).run("--no-validate") == 0
        _, tokenizer = loading.load_model(workshop / "model", "sequence-classification")
    folder = tmp_path / "out"
    texts = [row["text"] for row in sentences(20, seed=5)]
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=POSITIONS, return_tensors="pt")
    with torch.no_grad():
        expected = mrem_deploy.load(folder)(**tokens).logits.numpy()
    for profile in PROFILES.values():
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if not profile.zero_points:  # INT8 products saturate without VNNI
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = ort.InferenceSession(profile.path_in(folder), options, providers=["CPUExecutionProvider"])
        given = {entry.name: tokens[entry.name].numpy() for entry in session.get_inputs()}
        (came,) = session.run(None, given)
        # Sums in another order move some activations across a rounding boundary; a wrong row would move
        # all of them by far more than a hundredth of the spread.
        assert np.sqrt(np.mean((came - expected) ** 2)) < 0.01 * expected.std()
