"""What is quantized, what is shared and what stays full precision, in every architecture."""

from __future__ import annotations

import fnmatch

import pytest
import torch
from tiny_models import (
    ARCHITECTURES,
    BLOCKS,
    EVERY_MODEL,
    GATED,
    POSITION_POINTS,
    heads_of,
    quantized_twin,
    tiny_batch,
    tiny_model,
    tiny_pair,
)
from torch import nn

from mrem_deploy.models.architectures import anatomy, model_outputs
from mrem_deploy.numerics import activation_grid, asymmetric_grid, symmetric_grid
from mrem_deploy.quant.insert import activation_points, prepare
from mrem_deploy.quant.layers import Matmul, QuantEmbedding, QuantLinear, mrem_attention
from mrem_deploy.quant.quantizers import LAQ, TWN, LearnedScale, Midrise, make_weight_quantizer
from mrem_deploy.quant.spec import QuantSpec, WeightSpec

# linears of one block that are quantized
PER_BLOCK = {
    "bert": 6,
    "roberta": 6,
    "xlm-roberta": 6,
    "electra": 6,
    "distilbert": 6,
    "mpnet": 6,
    "deberta-v2": 6,
    "modernbert": 4,
    "t5": 6,
    **dict.fromkeys(GATED, 7),
}
# linears outside the blocks that are quantized, by head: poolers and dense layers in front of the projection
OUTSIDE = {
    "sequence-classification": {
        "bert": 1,
        "roberta": 1,
        "xlm-roberta": 1,
        "electra": 2,
        "distilbert": 1,
        "mpnet": 1,
        "deberta-v2": 1,
        "nomic_bert": 1,
        "gte": 1,
        "eurobert": 1,
    },
    "token-classification": {"electra": 1},
    "question-answering": {"electra": 1},
    "feature-extraction": {"bert": 1, "roberta": 1, "xlm-roberta": 1, "electra": 1, "mpnet": 1},
}
for _head in ("sequence-classification", "token-classification", "question-answering"):
    OUTSIDE[_head]["modernbert"] = 1
PROJECTIONS = ("classifier", "classifier.out_proj", "qa_outputs")


def quantized_names(model: nn.Module) -> list[str]:
    """The layers whose weight is quantized, in order."""
    return [name for name, part in model.named_modules() if isinstance(part, QuantLinear | QuantEmbedding)]


def out_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model_outputs(model(**batch))[0]


def test_a_quantized_linear_by_hand() -> None:
    linear = nn.Linear(2, 1)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, -0.25]]))
        linear.bias.copy_(torch.tensor([0.3]))
    step = LearnedScale(torch.tensor(1.0), symmetric_grid(4))  # log 1 = 0, so s = 1 exactly
    layer = QuantLinear(linear, TWN(per_channel=False), step)
    # mean|w| = 0.625, Δ = 0.4375: ŵ = (1, 0). x̂ = (2, …) from 1.5 (tie to even): 2·1 + 0·5 + 0.3
    assert layer(torch.tensor([[1.5, 5.0]])).item() == pytest.approx(2.3, abs=1e-7)
    # The bias is added as it is, although 0.3 is no multiple of the step.
    assert layer(torch.zeros(1, 2)).item() == pytest.approx(0.3, abs=1e-7)


def test_a_quantized_product_by_hand() -> None:
    left, right = (LearnedScale(torch.tensor(1.0), symmetric_grid(bits)) for bits in (4, 2))
    a, b = torch.tensor([[2.6, -9.0]]), torch.tensor([[1.2], [-4.0]])
    assert Matmul(left, right)(a, b).tolist() == [[3.0 * 1.0 + -7.0 * -1.0]]
    assert Matmul()(a, b).item() == pytest.approx(2.6 * 1.2 + 36.0)


def test_attention_by_hand() -> None:
    """One head, two tokens, the second masked: all probability on the first, and v passes."""
    module = nn.Module()
    module.scores, module.context = Matmul(), Matmul()
    q = torch.tensor([[[[2.0, 0.0], [0.0, 2.0]]]])
    v = torch.tensor([[[[5.0, 7.0], [1.0, 1.0]]]])
    mask = torch.tensor([[[[0.0, float("-inf")]]]])
    context, probabilities = mrem_attention(module, q, q, v, mask)
    assert probabilities.tolist() == [[[[1.0, 0.0], [1.0, 0.0]]]]
    assert context.tolist() == [[[[5.0, 7.0]], [[5.0, 7.0]]]]  # (B, T, heads, d)
    _, spread = mrem_attention(module, q, q, v, None, scaling=0.25)  # scores 4·¼ = 1 and 0
    torch.testing.assert_close(spread[0, 0, 0], torch.tensor([1.0, 0.0]).softmax(0))
    _, default = mrem_attention(module, q, q, v, None)  # 1/√2 without a scaling of its own
    torch.testing.assert_close(default[0, 0, 0], torch.tensor([4 / 2**0.5, 0.0]).softmax(0))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_embedding_rows_equal_the_quantized_table_and_their_gradient_is_sparse(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    embedding = nn.Embedding(11, 6, padding_idx=0)
    with torch.no_grad():
        embedding.weight.copy_(torch.randn(11, 6, generator=generator))
        embedding.weight[0] = 0.0
    layer = QuantEmbedding(
        embedding, make_weight_quantizer(embedding.weight, WeightSpec(bits, per_channel=True))
    )
    ids = torch.tensor([[3, 3, 0], [10, 7, 3]])  # a repeated word, padding, the last row
    out = layer(ids)
    codes, scale = layer.weight_quantizer.codes_and_scale(embedding.weight)
    assert torch.equal(out.detach(), (codes * scale)[ids])
    out.sum().backward()
    gradients = [p.grad for p in layer.parameters()]
    assert len(gradients) == (2 if bits == 8 else 1)  # at 8 bits each row has a learned step as well
    for gradient in gradients:
        assert gradient is not None
        assert gradient.is_sparse
        assert set(gradient.coalesce().indices()[0].tolist()) <= {0, 3, 7, 10}
    if bits != 8:  # straight through: row 3 occurs three times, the padding row learns nothing
        dense = gradients[0].to_dense()
        assert dense[3].tolist() == [3.0] * 6
        assert dense[7].tolist() == [1.0] * 6
        assert dense[0].tolist() == [0.0] * 6


@pytest.mark.parametrize(("kind", "head"), EVERY_MODEL)
def test_what_is_quantized_and_what_is_not(kind: str, head: str) -> None:
    _, student = tiny_pair(kind, head, QuantSpec(2, 2, 8))
    names = quantized_names(student)
    assert len(names) == 1 + BLOCKS * PER_BLOCK[kind] + OUTSIDE[head].get(kind, 0)
    assert [n for n in names if isinstance(student.get_submodule(n), QuantEmbedding)] == [
        anatomy(student).word_embedding
    ]
    # The head, and only the final projection of it, stays a plain linear.
    plain = [name for name, part in student.named_modules() if isinstance(part, nn.Linear)]
    assert plain == [name for name in PROJECTIONS if head != "feature-extraction" and name in plain]
    assert len(plain) == (0 if head == "feature-extraction" else 1)
    # Position and token-type embeddings and MPNet's relative bias stay plain, LayerNorm as it was.
    embeddings = {
        name.rpartition(".")[2] for name, part in student.named_modules() if isinstance(part, nn.Embedding)
    }
    assert embeddings <= {
        *("position_embeddings", "token_type_embeddings"),
        *("relative_attention_bias", "rel_embeddings"),
    }
    assert ("position_embeddings" in embeddings) == (kind not in ("modernbert", "deberta-v2", "t5", *GATED))
    for part in student.modules():
        if isinstance(part, nn.LayerNorm | nn.Embedding | nn.Linear):
            assert not any(isinstance(inner, LearnedScale | TWN | Midrise | LAQ) for inner in part.modules())
    # Parameters have no other names than those of the original model, except the steps.
    original = dict(tiny_model(kind, head).named_parameters(remove_duplicate=False))
    extra = {name for name, _ in student.named_parameters()} - original.keys()
    assert all(name.endswith("log_scale") for name in extra)
    for name, value in student.named_parameters():
        if name in original:
            assert torch.equal(value, original[name]), name  # inserting quantizers changes no latent value


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_q_k_and_v_share_one_quantizer(kind: str) -> None:
    _, student = tiny_pair(kind)
    found = anatomy(student)
    batch = tiny_batch(kind)
    for name in found.attentions:
        attention = student.get_submodule(name)
        linears = [linear for linear, owner in found.shared_inputs.items() if owner == name]
        if kind == "modernbert":  # one linear gives all three
            assert linears == []
            assert isinstance(attention.Wqkv.input_quantizer, LearnedScale)
            continue
        assert len(linears) == 3
        assert isinstance(attention.input_quantizer, LearnedScale)
        seen: list[torch.Tensor] = []
        handles = [
            student.get_submodule(linear).register_forward_pre_hook(
                lambda m, args, seen=seen: seen.append(args[0])
            )
            for linear in linears
        ]
        calls: list[int] = []
        handles.append(
            attention.input_quantizer.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        )
        out_of(student, batch)
        for handle in handles:
            handle.remove()
        assert len(calls) == 1  # quantized once for all three
        assert all(
            isinstance(student.get_submodule(linear).input_quantizer, nn.Identity) for linear in linears
        )
        assert seen[0] is seen[1] is seen[2]
        step = attention.input_quantizer.scale
        assert torch.equal(seen[0], attention.input_quantizer(seen[0]))  # on the grid already
        assert len(torch.unique((seen[0] / step).round())) > 4


@pytest.mark.parametrize("kind", GATED)
def test_the_halves_of_a_gate_share_one_quantizer(kind: str) -> None:
    """Of the first block: both read the very tensor that the quantizer of their module gave."""
    _, student = tiny_pair(kind)
    mlp = student.get_submodule(f"{anatomy(student).blocks[0]}.mlp")
    assert isinstance(mlp.input_quantizer, LearnedScale)
    seen: list[torch.Tensor] = []
    mlp.input_quantizer.register_forward_hook(lambda *given: seen.append(given[-1]))
    for linear in (mlp.gate_proj, mlp.up_proj):
        assert isinstance(linear.input_quantizer, nn.Identity)
        linear.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    out_of(student, tiny_batch(kind))
    assert len(seen) == 3
    assert seen[0] is seen[1] is seen[2]


def test_heads_that_share_keys_multiply_them_without_copies() -> None:
    """Against keys and values repeated for every head; every integer sum is exact, so nothing may differ."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 3, generator=generator) for heads in (4, 2, 2))
    scores, context = (
        Matmul(*(LearnedScale(torch.tensor(scale), activation_grid(8)) for scale in pair))
        for pair in ((0.03, 0.02), (0.05, 0.01))
    )
    k = k.transpose(2, 3)
    product = scores(q, k)
    assert torch.equal(product, scores(q, k.repeat_interleave(2, dim=1)))
    assert torch.equal(context(product, v), context(product, v.repeat_interleave(2, dim=1)))


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_only_softmax_and_gelu_are_asymmetric(kind: str, symmetric: bool) -> None:
    model = tiny_model(kind)
    points = activation_points(prepare(model), QuantSpec(symmetric=symmetric))
    asymmetric = {name for name, value in points.items() if value}
    gated = kind in ("modernbert", *GATED)
    after_gelu = "" if gated else "*.output.dense.input_quantizer"
    after_gelu = "*ffn.lin2.input_quantizer" if kind == "distilbert" else after_gelu
    after_gelu = "*.wo.input_quantizer" if kind == "t5" else after_gelu
    expected = {n for n in points if n.endswith("context.left") or fnmatch.fnmatch(n, after_gelu)}
    expected -= {n for n in points if "attention.output" in n}  # BERT's attention.output.dense reads no GELU
    assert len(expected) == BLOCKS * (1 if gated else 2)  # the gate makes its GELU signed
    assert asymmetric == (set() if symmetric else expected)
    # four products' operands per block, one point per linear that does not share, one for each shared three
    # and for each shared two
    spared = 0 if kind == "modernbert" else 3 if kind in GATED else 2
    inside = BLOCKS * (4 + PER_BLOCK[kind] - spared)
    inside += BLOCKS * (len(POSITION_POINTS) if kind == "deberta-v2" else 0)
    assert len(points) == inside + OUTSIDE[heads_of(kind)[0]].get(kind, 0)


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize(("bits", "symmetric"), [(8, False), (4, False), (8, True)])
def test_every_operand_of_every_product_lies_on_its_grid(kind: str, bits: int, symmetric: bool) -> None:
    """Both operands of each multiplication of the running model have at most 2^bits values."""
    _, student = tiny_pair(kind, spec=QuantSpec(2, 2, bits, symmetric=symmetric))
    products = [m for m in student.modules() if isinstance(m, Matmul)]
    assert len(products) == (4 if kind == "deberta-v2" else 2) * BLOCKS
    grids = [part.grid for m in products for part in (m._shares[0] or m.left, m.right)]
    signed = activation_grid(bits)
    assert set(grids) == ({signed} if symmetric else {signed, asymmetric_grid(bits, 0)})
    for module in student.modules():
        if isinstance(module, QuantLinear):
            weight = module.weight_quantizer(module.weight)
            assert len(weight.unique()) <= 4
    embedding = student.get_submodule(anatomy(student).word_embedding)
    rows = embedding(torch.arange(20).reshape(1, 20))[0]
    assert all(len(row.unique()) <= 4 for row in rows)
    assert len(rows.abs().amax(dim=1).unique()) > 10  # each row has its own scale


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_per_channel_gives_each_output_its_step(bits: int, per_channel: bool) -> None:
    _, student = tiny_pair(spec=QuantSpec(bits, 2, 8, per_channel=per_channel))
    layer = student.bert.encoder.layer[0].intermediate.dense
    _, scale = layer.weight_quantizer.codes_and_scale(layer.weight)
    assert scale.shape == ((24, 1) if per_channel else ())
    _, rows = student.bert.embeddings.word_embeddings.weight_quantizer.codes_and_scale(
        student.bert.embeddings.word_embeddings.weight
    )
    assert rows.shape == (60, 1)  # the word embedding always


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_32_bits_everywhere_change_nothing(kind: str) -> None:
    teacher, student = tiny_pair(kind, spec=QuantSpec(32, 32, 32))
    batch = tiny_batch(kind)
    assert torch.equal(out_of(teacher, batch), out_of(student, batch))
    assert not any(isinstance(part, LearnedScale | TWN | Midrise | LAQ) for part in student.modules())


def test_32_bits_in_one_place_leave_only_that() -> None:
    for place, spec in enumerate((QuantSpec(32, 2, 8), QuantSpec(2, 32, 8), QuantSpec(2, 2, 32))):
        _, student = tiny_pair(spec=spec)
        found = (
            any(
                isinstance(p, QuantLinear) and isinstance(p.weight_quantizer, Midrise)
                for p in student.modules()
            ),
            any(isinstance(p, QuantEmbedding) for p in student.modules()),
            any(isinstance(p, LearnedScale) for p in student.modules()),
        )
        assert found == tuple(i != place for i in range(3))


def test_keep_fp_leaves_what_matches_and_nothing_else() -> None:
    spec = QuantSpec(4, 4, 8, keep_fp=("*layer.1.*", "*word_embeddings", "*.pooler.dense"))
    teacher, student = tiny_pair(spec=spec)
    names = quantized_names(student)
    assert len(names) == 2 * 6
    assert all("layer.0." in name or "layer.2." in name for name in names)
    kept = student.bert.encoder.layer[1]
    assert not any(isinstance(part, LearnedScale) for part in kept.modules())
    x = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kept(x), teacher.bert.encoder.layer[1](x))
    assert type(student.bert.embeddings.word_embeddings) is nn.Embedding


def test_a_kept_projection_reads_what_its_sisters_read() -> None:
    """q in full precision, k and v quantized: the three still read one tensor."""
    _, student = tiny_pair(spec=QuantSpec(4, 4, 8, keep_fp=("*layer.0.attention.self.query",)))
    attention = student.bert.encoder.layer[0].attention.self
    assert type(attention.query) is nn.Linear
    assert isinstance(attention.key, QuantLinear)
    assert isinstance(attention.input_quantizer, LearnedScale)


def test_the_chosen_quantizer_and_curvature_reach_the_linears() -> None:
    _, student = tiny_pair(spec=QuantSpec(4, 4, 8, weight_quantizer="uniform"))
    layer = student.bert.encoder.layer[0].output.dense
    assert isinstance(layer.weight_quantizer, LearnedScale)
    _, student = tiny_pair(spec=QuantSpec(4, 4, 8, curvature="adam"))
    layer = student.bert.encoder.layer[0].output.dense
    assert layer.weight_quantizer.diagonal.shape == layer.weight.shape


@pytest.mark.parametrize(("kind", "head"), EVERY_MODEL)
def test_padding_and_company_do_not_change_an_output_in_fp64(kind: str, head: str) -> None:
    """Each sentence alone and unpadded, against the batch of three with padding; and the batch in
    another order, padded further. 1e-12: sums of fp64 in another order; a step is 1e-2 and more."""
    model = tiny_model(kind, head, torch.float64)
    _, student = quantized_twin(model, QuantSpec(4, 4, 8))
    batch = tiny_batch(kind)
    lengths = batch["attention_mask"].sum(1).tolist()
    assert sorted(lengths)[0] == 1  # the lone token
    assert len(set(lengths)) == 3
    wider = {
        name: torch.nn.functional.pad(
            value.flip(0), (0, 3), value=model.config.pad_token_id or 0 if name == "input_ids" else 0
        )
        for name, value in batch.items()
    }
    for tested in (model, student):
        with torch.no_grad():
            together = model_outputs(tested(**batch))
            shuffled = model_outputs(tested(**wider))
            for row, length in enumerate(lengths):
                alone = model_outputs(tested(**{k: v[row : row + 1, :length] for k, v in batch.items()}))
                for one, many, other in zip(alone, together, shuffled, strict=True):
                    per_token = head != "sequence-classification"
                    real = slice(0, length) if per_token else slice(None)
                    assert torch.isfinite(one).all()
                    torch.testing.assert_close(many[row][real], one[0], rtol=0, atol=1e-12)
                    torch.testing.assert_close(other[2 - row][real], one[0], rtol=0, atol=1e-12)
