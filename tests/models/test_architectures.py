"""Every architecture with every head: our attention changes nothing, and the parts make the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from tiny_models import (
    ARCHITECTURES,
    BLOCKS,
    EVERY_MODEL,
    READ_BY_ALL,
    state_of,
    tiny_batch,
    tiny_config,
    tiny_model,
    tiny_pair,
)
from torch import nn

from mrem_deploy.base.errors import UserError
from mrem_deploy.models import architectures
from mrem_deploy.models.architectures import anatomy, model_outputs
from mrem_deploy.models.parts import carve
from mrem_deploy.quant.insert import prepare

# One module, one block each, and uneven ones on either side.
CUTS = [[0, 3], [0, 1, 2, 3], [0, 1, 3], [0, 2, 3]]
CAUSAL = ("qwen3",)  # padding on the right is never seen


def outputs_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return model_outputs(model(**batch))


def real(value: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Rows of real tokens; a sentence's logits as they are. What padding holds is nobody's concern."""
    mask = batch["attention_mask"].bool()
    return value[mask] if value.shape[:2] == mask.shape else value


def test_the_table_names_the_architectures_of_these_tests() -> None:
    assert set(architectures.ARCHITECTURES) == set(ARCHITECTURES)


@pytest.mark.parametrize(("kind", "head"), EVERY_MODEL)
def test_prepare_keeps_the_outputs(kind: str, head: str) -> None:
    """In fp64, against transformers' own attention; 1e-12 is the order of sums."""
    model = tiny_model(kind, head, torch.float64)
    batch = tiny_batch(kind)
    before = outputs_of(model, batch)
    unmasked = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    before_unmasked = outputs_of(model, unmasked)
    weights = state_of(model)
    found = prepare(model)
    assert len(found.blocks) == len(found.attentions) == BLOCKS
    assert model.state_dict().keys() == weights.keys() - {f"{name}.weight" for name in found.tied}
    assert len(found.tied) == (kind == "t5")  # its word embedding has two names
    for came, expected in zip(outputs_of(model, batch), before, strict=True):
        assert torch.isfinite(expected).all()
        torch.testing.assert_close(real(came, batch), real(expected, batch), rtol=0, atol=1e-12)
    # The mask is really read: without it the outputs are others (each a proof that the other can fail).
    for came, expected, masked in zip(outputs_of(model, unmasked), before_unmasked, before, strict=True):
        torch.testing.assert_close(came, expected, rtol=0, atol=1e-12)
        if kind not in CAUSAL:
            assert not torch.allclose(real(came, batch), real(masked, batch), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "head"), EVERY_MODEL)
def test_the_parts_compose_to_the_whole(kind: str, head: str) -> None:
    model = tiny_model(kind, head)
    prepare(model)
    batch = tiny_batch(kind)
    whole = outputs_of(model, batch)
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
    assert len(states) == BLOCKS + 1
    if architectures.ARCHITECTURES[kind].final_norm:
        states = states[:-1]  # transformers' last one is after the final norm
    for cuts in CUTS:
        hidden, seen = None, []
        parts = carve(model, cuts)
        for number, part in enumerate(parts):
            with torch.no_grad():
                out = part(hidden, {**batch, "labels": torch.zeros(3)})  # labels are none of its business
            assert (out.embedding is not None) == (number == 0) == part.first
            assert (len(out.outputs) > 0) == (number == len(parts) - 1) == part.last
            assert len(out.hidden) == part.stop - part.start == cuts[number + 1] - cuts[number]
            hidden = out.hidden[-1]
            seen += [out.embedding, *out.hidden] if out.embedding is not None else out.hidden
        assert len(out.outputs) == len(whole) == (2 if head == "question-answering" else 1)
        assert out.per_token == (head != "sequence-classification")
        for came, expected in zip(out.outputs, whole, strict=True):
            assert torch.equal(came, expected)
        for came, expected in zip(seen[: len(states)], states, strict=True):
            assert torch.equal(came, expected)


@pytest.mark.parametrize(
    "kind", [kind for kind, row in architectures.ARCHITECTURES.items() if row.positions_from_mask]
)
def test_padding_on_the_left_gives_the_same_codes(kind: str) -> None:
    """In fp64, quantized: the codes of rotated queries and keys do not move with the padding. 1e-12 as above;
    a code is 1e-2 and more. transformers' own positions move all of them (the proof that this can fail)."""
    _, student = tiny_pair(kind, dtype=torch.float64)
    batch = tiny_batch(kind)
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    width = max(lengths)
    left = {
        name: torch.stack([row.roll(width - n) for row, n in zip(value, lengths, strict=True)])
        for name, value in batch.items()
    }
    (right_padded,), (left_padded,) = outputs_of(student, batch), outputs_of(student, left)
    positions = {"position_ids": torch.arange(width)[None]}
    (shifted,) = outputs_of(student, left | positions)
    torch.testing.assert_close(real(left_padded, left), real(right_padded, batch), rtol=0, atol=1e-12)
    assert not torch.allclose(real(shifted, left), real(right_padded, batch), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_what_stands_in_padding_does_not_reach_a_token(kind: str) -> None:
    """The cache hands on zeros in place of padding; a part must not notice. fp64, as above."""
    model = tiny_model(kind, dtype=torch.float64)
    prepare(model)
    batch = tiny_batch(kind)
    first, last = carve(model, [0, 1, 3])
    with torch.no_grad():
        hidden = first(None, batch).hidden[-1]
        filled = (
            hidden * batch["attention_mask"][:, :, None] + 7.0 * (1 - batch["attention_mask"])[:, :, None]
        )
        assert not torch.equal(filled, hidden)
        expected, came = last(hidden, batch), last(filled, batch)
    for a, b in zip([*came.hidden, *came.outputs], [*expected.hidden, *expected.outputs], strict=True):
        torch.testing.assert_close(real(a, batch), real(b, batch), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "head"), EVERY_MODEL)
def test_every_parameter_belongs_to_one_part(kind: str, head: str) -> None:
    """Shared with the model, not copied; only what stands for positions is read by all, trained by none."""
    model = tiny_model(kind, head)
    before = state_of(model)
    parts = carve(model, [0, 1, 2, 3])
    everything = {id(p): name for name, p in model.named_parameters()}
    owners: dict[int, int] = dict.fromkeys(everything, 0)
    for part in parts:
        for parameter in part.view.parameters():
            assert id(parameter) in everything
            owners[id(parameter)] += 1
    shared = {everything[key] for key, count in owners.items() if count != 1}
    assert {name.rpartition("encoder.")[2] for name in shared} == READ_BY_ALL.get(kind, set())
    for part in parts:
        assert {everything[key] for key in part.shared_parameters} == shared
    assert model.state_dict().keys() == before.keys()  # carving takes nothing out of the model
    for name, block in ((n, b) for n, b in model.named_modules() if n in anatomy(model).blocks):
        assert len(block._forward_hooks) == 0, name


def test_hooks_are_gone_after_an_exception() -> None:
    model = tiny_model()
    prepare(model)
    part = carve(model, [0, 3])[0]
    with pytest.raises(IndexError):
        part(None, {"input_ids": torch.tensor([[10**6]]), "attention_mask": torch.ones(1, 1)})
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_electra_projects_its_embeddings_in_the_first_module_only() -> None:
    first, *others = carve(tiny_model("electra"), [0, 1, 2, 3])
    assert any("embeddings_project" in name for name, _ in first.named_parameters())
    assert not any("embeddings_project" in name for part in others for name, _ in part.named_parameters())


@pytest.mark.parametrize(
    ("kind", "head", "projection"),
    [
        ("bert", "sequence-classification", "classifier"),
        ("roberta", "sequence-classification", "classifier.out_proj"),
        ("mpnet", "sequence-classification", "classifier.out_proj"),
        ("electra", "sequence-classification", "classifier.out_proj"),
        ("distilbert", "sequence-classification", "classifier"),
        ("modernbert", "sequence-classification", "classifier"),
        ("bert", "question-answering", "qa_outputs"),
        ("modernbert", "question-answering", "classifier"),
        ("distilbert", "token-classification", "classifier"),
        ("deberta-v2", "sequence-classification", "classifier"),
        ("deberta-v2", "question-answering", "qa_outputs"),
    ],
)
def test_the_head_is_the_final_projection_only(kind: str, head: str, projection: str) -> None:
    model = tiny_model(kind, head)
    found = anatomy(model)
    linears = {name for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    assert linears - set(found.linears) == {projection}


def test_a_checkpoint_without_pooler_can_be_cut() -> None:
    """Embedding models often have none; then there is nothing to leave out of the first parts."""
    model = tiny_model("bert", "feature-extraction")
    model.pooler = None
    prepare(model)
    batch = tiny_batch()
    first, last = carve(model, [0, 1, 3])
    with torch.no_grad():
        came = last(first(None, batch).hidden[-1], batch).outputs[0]
    assert torch.equal(came, outputs_of(model, batch)[0])


def test_one_block_is_enough() -> None:
    config = tiny_config("bert")
    config.num_hidden_layers = 1
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    prepare(model)
    batch = tiny_batch()
    (part,) = carve(model, [0, 1])
    with torch.no_grad():
        assert np.array_equal(part(None, batch).outputs[0].numpy(), outputs_of(model, batch)[0].numpy())


def test_an_unsupported_architecture_is_refused_with_the_list() -> None:
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=10)
    model = transformers.AutoModel.from_config(config)
    for refused in (anatomy, prepare, lambda m: carve(m, [0, 1])):
        with pytest.raises(UserError) as caught:
            refused(model)
        assert "gpt2" in caught.value.problem
        for name in ARCHITECTURES:
            assert name in caught.value.remedy
