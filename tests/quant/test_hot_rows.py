"""Hot rows: which are chosen, what they become, and that every form of the model has the same numbers."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_job import job_in as job
from tiny_job import workshop_in
from tiny_models import (
    ARCHITECTURES,
    VOCABULARY,
    assert_same_state,
    heads_of,
    made_up_scales,
    state_of,
    tiny_batch,
    tiny_encoded,
    tiny_model,
    train_job,
)
from torch import nn

import mrem_deploy
from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError
from mrem_deploy.models.architectures import anatomy, model_outputs
from mrem_deploy.quant import artifact
from mrem_deploy.quant.frozen import FrozenModel, FrozenWeight, build, freeze
from mrem_deploy.quant.hot_rows import (
    HotRowQuantizer,
    HotRows,
    choose_hot_rows,
    hot_bytes,
    make_hot_quantizer,
    token_counts,
)
from mrem_deploy.quant.insert import insert_quantizers, prepare
from mrem_deploy.quant.layers import QuantEmbedding
from mrem_deploy.quant.mixed import choose_bits, layer_bytes
from mrem_deploy.quant.quantizers import make_weight_quantizer
from mrem_deploy.quant.sensitivity import quantized_weight
from mrem_deploy.quant.spec import QuantSpec, WeightSpec
from mrem_deploy.recipe import Recipe
from mrem_deploy.train.module import ModuleTrainer
from mrem_deploy.train.mrem_s import train_mrem_s
from mrem_deploy.walk import publishing

HEAD = "sequence-classification"
HOT = 7
MIDRISE = QuantSpec(2, 2, 8, weight_quantizer="midrise", hot_rows=HOT)
SPECS = [QuantSpec(2, 2, 8, hot_rows=HOT), QuantSpec(4, 4, 8, hot_rows=HOT), MIDRISE]


def hot_pair(kind: str = "bert", spec: QuantSpec | None = None) -> tuple[nn.Module, nn.Module]:
    """(teacher, student) whose word embedding has hot rows."""
    spec = spec or QuantSpec(2, 2, 8, hot_rows=HOT)
    teacher = tiny_model(kind).requires_grad_(False)
    found = prepare(teacher)
    student = copy.deepcopy(teacher)
    counts = token_counts(tiny_encoded(kind).columns["input_ids"], VOCABULARY)
    insert_quantizers(student, spec, made_up_scales(found, spec, torch.float32), counts)
    return teacher, student.requires_grad_(True)


def table_of(student: nn.Module) -> QuantEmbedding:
    return student.get_submodule(anatomy(student).word_embedding)


def outputs_of(model: nn.Module, kind: str = "bert") -> list[torch.Tensor]:
    with torch.no_grad():
        return model_outputs(model(**tiny_batch(kind)))


# --- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4])
def test_the_rows_of_greatest_count_times_error_are_chosen(bits: int) -> None:
    """Against a loop over rows. 5,000 of them: more than are quantized at a time."""
    generator = torch.Generator().manual_seed(bits)
    weight = torch.randn(5000, 12, generator=generator) * torch.rand(5000, 1, generator=generator)
    counts = torch.randint(0, 50, (5000,), generator=generator)
    quantizer = make_weight_quantizer(weight, WeightSpec(bits, per_channel=True))
    codes, scale = quantizer.codes_and_scale(weight)
    scores = {
        row: int(counts[row]) * float((codes[row] * scale[row] - weight[row]).double().square().sum())
        for row in range(5000)
    }
    best = sorted(scores, key=lambda row: -scores[row])[:20]
    assert choose_hot_rows(weight, quantizer, counts, 20).tolist() == sorted(best)


def test_rows_that_never_occur_or_have_no_error_are_not_hot() -> None:
    weight = torch.tensor([[1.0, -1.0], [0.5, 2.0], [0.3, 1.7], [3.0, 3.0], [0.1, 5.0]])
    quantizer = make_weight_quantizer(weight, WeightSpec(2, per_channel=True))
    counts = torch.tensor([9, 1, 0, 9, 1])  # rows 0 and 3 are exact in two bits; row 2 does not occur
    assert choose_hot_rows(weight, quantizer, counts, 5).tolist() == [1, 4]
    assert choose_hot_rows(weight, quantizer, torch.zeros(5, dtype=torch.long), 5) is None


def test_of_equal_rows_the_first_are_taken() -> None:
    """Every worker of a crew must choose the same ones."""
    weight = torch.tensor([[0.5, 2.0]]).repeat(40, 1)
    quantizer = make_weight_quantizer(weight, WeightSpec(2, per_channel=True))
    assert choose_hot_rows(weight, quantizer, torch.full((40,), 3), 4).tolist() == [0, 1, 2, 3]


def test_tokens_are_counted_without_padding() -> None:
    counts = token_counts([np.array([3, 1, 3]), np.array([], np.int64), np.array([3])], 6)
    assert counts.tolist() == [0, 1, 0, 3, 0, 0]
    assert token_counts([], 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("asked", "bits", "rows"),
    [
        (None, 2, 64),
        (None, 4, 64),
        (None, 8, 0),
        (None, 32, 0),
        (5, 2, 5),
        (5, 4, 5),
        (5, 8, 0),
        (5, 32, 0),
        (0, 2, 0),
    ],
)
def test_how_many_rows_are_hot(asked: int | None, bits: int, rows: int) -> None:
    spec = QuantSpec(2, bits, 8, hot_rows=asked)
    assert spec.embedding("words").hot_rows == rows
    kept = QuantSpec(2, bits, 8, hot_rows=asked, keep_fp=("words",))
    assert kept.embedding("words").hot_rows == 0


def test_without_counts_no_row_can_be_chosen() -> None:
    weight = torch.randn(4, 3)
    spec = WeightSpec(2, per_channel=True, hot_rows=2)
    quantizer = make_weight_quantizer(weight, spec)
    with pytest.raises(ValueError, match="2 hot rows are chosen by the counts"):
        make_hot_quantizer(weight, quantizer, spec, None)


# --- what they become ---------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_lookup_gives_8_bits_to_hot_rows_and_leaves_the_others(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    embedding = nn.Embedding(11, 6, padding_idx=0)
    with torch.no_grad():
        embedding.weight.copy_(torch.randn(11, 6, generator=generator))
        embedding.weight[7] = 0.0  # a hot row of zeros must not become NaN
    quantizer = make_weight_quantizer(embedding.weight, WeightSpec(bits, per_channel=True))
    plain = QuantEmbedding(embedding, quantizer)
    layer = QuantEmbedding(embedding, quantizer, HotRowQuantizer(torch.tensor([3, 7, 10])))
    ids = torch.tensor([[3, 3, 0], [10, 4, 7]])
    came = layer(ids)
    for place, token in np.ndenumerate(ids.numpy()):
        row = embedding.weight[int(token)].detach()
        if token in (3, 7, 10):
            scale = row.abs().max() / 127 if token != 7 else torch.tensor(1.0)
            assert torch.equal(came[place], torch.round(row / scale) * scale)
            assert (came[place] - row).abs().max() <= scale / 2 * (1 + 1e-5)
        else:
            assert torch.equal(came[place], plain(torch.tensor(int(token))))
    came.sum().backward()
    gradient = embedding.weight.grad
    assert gradient.is_sparse
    dense = gradient.to_dense()
    assert dense[3].tolist() == [2.0] * 6  # straight through, twice
    assert dense[10].tolist() == [1.0] * 6
    assert dense[0].tolist() == [0.0] * 6  # padding learns nothing
    if bits == 8:  # the learned scale of a hot row's low-bit part plays no part
        assert quantizer.log_scale.grad.to_dense()[[3, 7, 10]].abs().sum() == 0
        assert quantizer.log_scale.grad.to_dense()[4] != 0


@pytest.mark.parametrize("spec", SPECS, ids=["2-2-8", "4-4-8", "midrise"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_frozen_equals_fake_quant_before_and_after_training(kind: str, spec: QuantSpec) -> None:
    teacher, student = hot_pair(kind, spec)
    for trained in (False, True):
        if trained:
            train_mrem_s(train_job(teacher, student, tiny_encoded(kind), [0, 1, 3], steps=3))
        frozen = freeze(student, heads_of(kind)[0])
        for came, expected in zip(outputs_of(build(frozen), kind), outputs_of(student, kind), strict=True):
            assert torch.isfinite(expected).all()
            assert torch.equal(came, expected)
        weight = frozen.weights[anatomy(student).word_embedding]
        rows = weight.hot.ids.long()
        assert len(rows) == HOT == frozen.hot_rows
        assert (weight.hot.ids.dtype, weight.hot.codes.dtype) == (torch.int32, torch.int8)
        assert weight.hot.codes.abs().amax(dim=1).tolist() == [127] * HOT
        assert (weight.scale[rows] == 0).all()
        assert not (weight.codes[rows] * weight.scale[rows]).any()
        assert torch.equal(weight.values()[rows], weight.hot.values())
        cold = torch.ones(len(weight.codes), dtype=torch.bool)
        cold[rows] = False
        assert (weight.scale[cold] > 0).all()
    assert not any("hot" in name for name in frozen.full)


def test_hot_rows_lower_the_error_of_the_tokens_that_occur() -> None:
    teacher, student = hot_pair()
    _, plain = hot_pair(spec=QuantSpec(2, 2, 8))
    ids = tiny_batch()["input_ids"]
    clean = table_of(teacher)(ids)
    with torch.no_grad():
        errors = [float((table_of(model)(ids) - clean).norm()) for model in (student, plain)]
    assert errors[0] < 0.95 * errors[1]


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPECS[0], MIDRISE], ids=["ternary", "midrise"])
def test_hot_rows_are_saved_and_read(tmp_path: Path, spec: QuantSpec) -> None:
    _, student = hot_pair(spec=spec)
    frozen = freeze(student, HEAD)
    frozen.save(tmp_path)
    words = anatomy(student).word_embedding
    tensors = load_file(tmp_path / artifact.TENSORS)
    assert {name for name in tensors if name.startswith("hot/")} == {
        f"hot/{words}/{part}" for part in ("rows", "codes", "scale")
    }
    # The low-bit part of a hot row is stored as bits of 0.
    packed = tensors[f"codes/{words}"].reshape(VOCABULARY, -1)  # 16 codes of 2 bits are 4 bytes
    assert not packed[frozen.weights[words].hot.ids.long()].any()
    came, hot = FrozenModel.read(tmp_path).weights[words].hot, frozen.weights[words].hot
    for part in ("ids", "codes", "scale"):
        assert torch.equal(getattr(came, part), getattr(hot, part))
        assert getattr(came, part).dtype == getattr(hot, part).dtype
    loaded = mrem_deploy.load(tmp_path)
    assert torch.equal(outputs_of(loaded)[0], outputs_of(student)[0])
    assert json.loads((tmp_path / artifact.MANIFEST).read_text())["weights"][words]["hot_rows"] == HOT
    del tensors[f"hot/{words}/scale"]
    save_file(tensors, tmp_path / artifact.TENSORS)
    with pytest.raises(UserError, match=f"hot/{words}/scale"):
        mrem_deploy.load(tmp_path)


def test_a_model_without_them_has_no_trace_of_them(tmp_path: Path) -> None:
    """So files of earlier versions read as they did."""
    _, student = hot_pair(spec=QuantSpec(2, 2, 8))
    freeze(student, HEAD).save(tmp_path)
    assert not any(name.startswith("hot") for name in load_file(tmp_path / artifact.TENSORS))
    assert "hot" not in (tmp_path / artifact.MANIFEST).read_text()
    assert FrozenModel.read(tmp_path).hot_rows == 0


def test_sizes_by_hand() -> None:
    frozen = FrozenModel(config=None, head="")
    hot = HotRows(
        torch.arange(64, dtype=torch.int32), torch.zeros(64, 1024, dtype=torch.int8), torch.zeros(64, 1)
    )
    codes = torch.zeros(1024, 1024, dtype=torch.int8)
    frozen.weights["words"] = FrozenWeight(codes, torch.zeros(1024, 1), 2, hot=hot)
    assert frozen.formula_mb() == 0.25 + 1 / 16
    assert frozen.full_precision_mb() == 4.0
    assert hot_bytes(64, 1024) == 64 * (1024 + 8)


# --- bits under a budget ------------------------------------------------------------------------


def test_the_budget_counts_hot_rows() -> None:
    model = tiny_model().requires_grad_(False)
    found = prepare(model)
    words = found.word_embedding
    spec, plain = QuantSpec(32, 32, 8, hot_rows=HOT), QuantSpec(32, 32, 8)
    for bits in (2, 4, 8):
        more = layer_bytes(model, words, bits, found, spec) - layer_bytes(model, words, bits, found, plain)
        names = sum(len(f"hot/{words}/{part}") + 100 for part in ("rows", "codes", "scale"))
        assert more == (0 if bits == 8 else HOT * (16 + 8) + names)
    linear = found.linears[0]
    assert layer_bytes(model, linear, 2, found, spec) == layer_bytes(model, linear, 2, found, plain)


@pytest.mark.parametrize("measure", ["error", "hessian"])
def test_the_sensitivity_knows_hot_rows(measure: str) -> None:
    model = tiny_model().requires_grad_(False)
    encoded = tiny_encoded()
    counts = token_counts(encoded.columns["input_ids"], VOCABULARY)
    batches = [encoded.batch(np.arange(12))]
    words = anatomy(model).word_embedding
    found = {
        rows: choose_bits(model, QuantSpec(32, 32, 8, hot_rows=rows), batches, 0.05, measure, 0, counts)
        for rows in (0, 20)
    }
    assert found[20].errors[words][2] < found[0].errors[words][2]
    assert found[20].errors[words][8] == found[0].errors[words][8]
    spec = QuantSpec(32, 32, 8, hot_rows=20)
    values = quantized_weight(model, words, 2, spec, counts)
    _, student = hot_pair(spec=QuantSpec(32, 2, 8, hot_rows=20))
    assert torch.equal(values, freeze(student, HEAD).weights[words].values())


# --- runs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop_in(tmp_path_factory.mktemp("workshop")) as root:
        yield root


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "write_report", lambda *args: None)


def tensors_in(folder: Path) -> bytes:
    return (folder / artifact.TENSORS).read_bytes()


def test_the_report_tells_of_hot_rows(workshop: Path) -> None:
    assert job(workshop, "told", method="ptq", hot_rows=5).run() == 0
    folder = workshop / "told"
    assert json.loads((folder / "metrics.json").read_text())["hot_rows"] == 5
    told = "2-bit word embeddings (5 rows of them with 8 bits)"
    assert told in (folder / "report.md").read_text(encoding="utf-8")
    assert told in (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("no_report")
def test_an_interrupted_run_ends_with_the_same_bits(workshop: Path) -> None:
    assert job(workshop, "whole", hot_rows=5).run() == 0
    steps, calls = ModuleTrainer.step, iter(range(1, 100))

    def deadly(*args: Any, **more: Any) -> Any:
        if next(calls) == 6:
            raise KeyboardInterrupt
        return steps(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleTrainer, "step", deadly)
        assert job(workshop, "stopped", hot_rows=5).run() == cli.EXIT_INTERRUPTED
    assert job(workshop, "stopped", hot_rows=6).run("--resume") == cli.EXIT_USER_ERROR
    assert job(workshop, "stopped", hot_rows=5).run("--resume") == 0
    assert tensors_in(workshop / "stopped") == tensors_in(workshop / "whole")


@pytest.mark.usefixtures("no_report")
def test_workers_choose_the_same_rows(workshop: Path) -> None:
    """Two processes; the second module's owner frees the embedding, the first one's trains it."""
    options = {"method": "mrem-p", "hot_rows": 5, "workers": 2}
    assert job(workshop, "two", **options).run("--deterministic") == 0
    assert job(workshop, "one", **options | {"workers": 1}).run("--deterministic") == 0
    assert tensors_in(workshop / "two") == tensors_in(workshop / "one")
    assert FrozenModel.read(workshop / "two").hot_rows == 5


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("method", ["rem", "qat"])
def test_other_methods_train_them(workshop: Path, method: str) -> None:
    own = {"qat": {"lr": None, "qat_epochs": "1+1"}, "rem": {"steps": 2}}[method]
    assert job(workshop, method, method=method, hot_rows="auto", **own).run() == 0
    frozen = FrozenModel.read(workshop / method)
    assert 0 < frozen.hot_rows <= 21  # the vocabulary is that small; tokens that do not occur stay cold


@pytest.mark.usefixtures("no_report")
def test_the_file_keeps_to_the_budget_with_hot_rows(workshop: Path) -> None:
    options = {"method": "ptq", "bits": "auto", "budget_mb": 0.0165, "hot_rows": 5}
    assert job(workshop, "budget", **options).run() == 0
    found = json.loads((workshop / "budget" / "metrics.json").read_text())
    size = (workshop / "budget" / artifact.TENSORS).stat().st_size / 2**20
    assert size <= found["mixed_precision"]["planned_mb"] <= 0.0165
    embedding = found["mixed_precision"]["layers"]["bert.embeddings.word_embeddings"]
    assert found.get("hot_rows", 0) == (5 if embedding < 8 else 0)


# --- the recipe ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["-1", "many", "1.5", "", "٣", "1e2"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--hot-rows must be auto or a number of rows"):
        Recipe(bits="2-2-8", hot_rows=text)


def test_rows_that_have_8_bits_already_are_refused() -> None:
    for bits in ("4-8-8", "4-32-8"):
        with pytest.raises(UserError, match=f"--hot-rows 8 has no effect with --bits {bits}"):
            Recipe(bits=bits, hot_rows="8")
        assert Recipe(bits=bits, hot_rows="auto").spec.embedding("words").hot_rows == 0
    assert Recipe(bits="auto", budget_mb=9, hot_rows="8").spec.hot_rows == 8


def test_they_belong_to_the_identity_of_a_run() -> None:
    assert Recipe(bits="2-2-8", hot_rows="8").identity() != Recipe(bits="2-2-8", hot_rows="9").identity()


def test_state_of_a_student_holds_the_rows() -> None:
    """A checkpoint gives back the rows, also to a student that chose others."""
    _, student = hot_pair()
    _, other = hot_pair()
    table_of(other).hot_quantizer.ids.copy_(torch.arange(HOT))
    assert table_of(student).hot_quantizer.ids.tolist() != list(range(HOT))
    other.load_state_dict(student.state_dict())
    assert_same_state(state_of(other), state_of(student))
    assert torch.equal(outputs_of(other)[0], outputs_of(student)[0])
