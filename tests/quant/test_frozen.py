"""Frozen = fake-quant, bit for bit, in every architecture and at every bit width."""

from __future__ import annotations

import pytest
import torch
from quant_specs import SPECS
from tiny_models import (
    ARCHITECTURES,
    EVERY_MODEL,
    assert_same_state,
    heads_of,
    quantized_twin,
    state_of,
    tiny_batch,
    tiny_encoded,
    tiny_model,
    tiny_pair,
    train_job,
)
from torch import nn

from mrem_deploy.models.architectures import anatomy, model_outputs
from mrem_deploy.numerics import symmetric_grid
from mrem_deploy.quant.frozen import FixedScale, FrozenLinear, FrozenModel, FrozenWeight, build, freeze, shell
from mrem_deploy.quant.layers import ATTENTION, QuantEmbedding, QuantLinear
from mrem_deploy.quant.quantizers import LearnedScale, make_weight_quantizer
from mrem_deploy.quant.spec import QuantSpec, WeightSpec
from mrem_deploy.train.mrem_s import train_mrem_s


def outputs_of(model: nn.Module, kind: str) -> list[torch.Tensor]:
    with torch.no_grad():
        result = model(**tiny_batch(kind))
    outputs = model_outputs(result)
    pooled = result.get("pooler_output")
    return outputs if pooled is None else [*outputs, pooled]


def assert_equal_outputs(came: nn.Module, expected: nn.Module, kind: str) -> None:
    for a, b in zip(outputs_of(came, kind), outputs_of(expected, kind), strict=True):
        assert torch.isfinite(b).all()
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_frozen_equals_fake_quant(kind: str, spec: QuantSpec) -> None:
    teacher, student = tiny_pair(kind, spec=spec)
    if spec.curvature == "adam":  # as it is after training: no longer all ones
        generator = torch.Generator().manual_seed(0)
        for part in student.modules():
            if isinstance(part, QuantLinear):
                part.weight_quantizer.diagonal.uniform_(0.1, 2.0, generator=generator)
    before = state_of(student)
    frozen = freeze(student, heads_of(kind)[0])
    built = build(frozen)
    assert_equal_outputs(built, student, kind)
    if spec != SPECS["32-32-32"]:
        assert not torch.equal(outputs_of(built, kind)[0], outputs_of(teacher, kind)[0])
    assert_same_state(state_of(student), before)  # freezing reads only
    assert not any(isinstance(part, QuantLinear | QuantEmbedding | LearnedScale) for part in built.modules())
    assert not any(p.requires_grad for p in built.parameters())
    assert not built.training


@pytest.mark.parametrize(("kind", "head"), EVERY_MODEL)
def test_every_head_freezes(kind: str, head: str) -> None:
    _, student = tiny_pair(kind, head, QuantSpec(2, 2, 8))
    assert_equal_outputs(build(freeze(student, head)), student, kind)


def test_fp64_freezes_too() -> None:
    _, student = tiny_pair(dtype=torch.float64)
    assert_equal_outputs(build(freeze(student, "sequence-classification")), student, "bert")


@pytest.mark.parametrize("spec", [QuantSpec(4, 4, 8, curvature="adam"), QuantSpec(3, 8, 4)])
def test_a_trained_model_freezes(spec: QuantSpec) -> None:
    """After training, scales, zero points and LAQ's curvature are no longer those of the start."""
    teacher, student = tiny_pair(spec=spec)
    start = freeze(student, "sequence-classification")
    train_mrem_s(train_job(teacher, student, tiny_encoded(), [0, 1, 3], steps=4))
    frozen = freeze(student, "sequence-classification")
    assert_equal_outputs(build(frozen), student, "bert")
    assert any(not torch.equal(frozen.weights[n].codes, start.weights[n].codes) for n in frozen.weights)


def test_a_bare_encoder_without_pooler_freezes() -> None:
    """Checkpoints of embedding models often have none, although their class would make one."""
    model = tiny_model("bert", "feature-extraction")
    model.pooler = None
    _, student = quantized_twin(model, QuantSpec(4, 4, 8))
    built = build(freeze(student, "feature-extraction"))
    assert built.pooler is None
    assert_equal_outputs(built, student, "bert")


def test_a_table_larger_than_a_search_piece_freezes() -> None:
    """1,021 rows: the per-row search goes in pieces, and exp of a long vector may round elsewhere
    than exp of the few rows that a batch looks up."""
    for bits in (2, 4, 8):
        embedding = nn.Embedding(1021, 24)
        layer = QuantEmbedding(
            embedding, make_weight_quantizer(embedding.weight, WeightSpec(bits, per_channel=True))
        )
        codes, scale = layer.weight_quantizer.codes_and_scale(layer.weight)
        table = FrozenWeight(codes.to(torch.int8), scale, bits).values()
        ids = torch.randint(1021, (4, 33), generator=torch.Generator().manual_seed(bits))
        with torch.no_grad():
            assert torch.equal(layer(ids), table[ids])


def test_what_is_inside() -> None:
    _, student = tiny_pair(spec=QuantSpec(4, 2, 8))
    frozen = freeze(student, "sequence-classification")
    found = anatomy(tiny_model())
    assert set(frozen.weights) == {*found.linears, found.word_embedding}
    for name, weight in frozen.weights.items():
        assert weight.codes.dtype == torch.int8
        assert weight.bits == (2 if name == found.word_embedding else 4)
        bound = 3 if name == found.word_embedding else symmetric_grid(weight.bits).high
        assert weight.codes.abs().max() <= bound
        assert weight.scale.shape == ((60, 1) if name == found.word_embedding else ())
    # 3 blocks of shared input, 4 operands and 3 linears; the pooler
    assert len(frozen.scales) == 3 * (1 + 4 + 3) + 1
    assert all(step.scale > 0 for step in frozen.scales.values())
    # The rest is full precision under the model's own names, and there is nothing else.
    quantized = {f"{name}.weight" for name in frozen.weights}
    assert set(frozen.full) == set(tiny_model().state_dict()) - quantized
    for name in ("classifier.weight", "bert.embeddings.position_embeddings.weight", "bert.pooler.dense.bias"):
        assert torch.equal(frozen.full[name], student.state_dict()[name])


def test_frozen_tensors_are_copies() -> None:
    _, student = tiny_pair()
    frozen = freeze(student, "sequence-classification")
    with torch.no_grad():
        for value in student.parameters():
            value.zero_()
    assert frozen.full["classifier.weight"].abs().sum() > 0
    assert all(step.scale > 0 for step in frozen.scales.values())


def test_models_built_of_one_frozen_model_do_not_share_a_config() -> None:
    """The attention function is chosen in it: tracing for export must not change a model that is in use."""
    _, student = tiny_pair()
    frozen = freeze(student, "sequence-classification")
    ours = build(frozen)
    other, _ = shell(frozen, "eager")
    assert (ours.config._attn_implementation, other.config._attn_implementation) == (ATTENTION, "eager")


def test_sizes_by_hand() -> None:
    frozen = FrozenModel(config=None, head="")
    frozen.weights["a"] = FrozenWeight(torch.zeros(1024, 1024, dtype=torch.int8), torch.tensor(1.0), 2)
    frozen.weights["b"] = FrozenWeight(torch.zeros(1024, 512, dtype=torch.int8), torch.tensor(1.0), 8)
    frozen.full["c"] = torch.zeros(256, 1024)
    assert frozen.formula_mb() == 0.25 + 0.5 + 1.0
    assert frozen.full_precision_mb() == 4.0 + 2.0 + 1.0


def test_the_size_of_bert_base_is_the_one_computed_by_hand() -> None:
    """28.07 MiB at 2-2 and 54.05 at 4-4, of 417.6, with the scales of the embedding's rows, which the
    formula leaves out: 30,522 · 4 bytes. Codes have BERT-base's shapes, without its values."""
    shapes = {"words": (30522, 768), "pooler": (768, 768)}
    for block in range(12):
        shapes |= {f"{block}.{name}": (768, 768) for name in ("q", "k", "v", "o")}
        shapes |= {f"{block}.up": (3072, 768), f"{block}.down": (768, 3072)}
    rest = (512 + 2 + 2) * 768 + 12 * (4 * 768 + 3072 + 768 + 4 * 768) + 768 + 2 * 768 + 2
    for bits, expected in ((2, 28.07), (4, 54.05)):
        frozen = FrozenModel(config=None, head="")
        for name, shape in shapes.items():
            codes = torch.zeros(1, dtype=torch.int8).expand(shape)  # one byte of memory
            frozen.weights[name] = FrozenWeight(codes, torch.tensor(1.0), bits)
        frozen.full["rest"] = torch.zeros(1).expand(rest)
        assert frozen.formula_mb() + 30522 * 4 / 2**20 == pytest.approx(expected, abs=0.01)
        assert frozen.full_precision_mb() == pytest.approx(417.6, abs=0.1)


def test_tensors_that_do_not_fit_are_refused() -> None:
    _, student = tiny_pair()
    frozen = freeze(student, "sequence-classification")
    lost = frozen.full.pop("bert.encoder.layer.0.output.LayerNorm.weight")
    with pytest.raises(ValueError, match=r"layer\.0\.output\.LayerNorm"):
        build(frozen)
    frozen.full["bert.encoder.layer.0.output.LayerNorm.weight"] = lost
    frozen.full["stranger"] = lost
    with pytest.raises(ValueError, match="stranger"):
        build(frozen)


def test_built_layers_are_the_frozen_kinds() -> None:
    _, student = tiny_pair()
    built = build(freeze(student, "sequence-classification"))
    attention = built.bert.encoder.layer[0].attention.self
    assert isinstance(attention.query, FrozenLinear)
    assert isinstance(attention.input_quantizer, FixedScale)
    assert isinstance(attention.query.input_quantizer, nn.Identity)  # the three read one quantized tensor
    assert type(built.classifier) is nn.Linear
