"""DeBERTa's attention: equal to transformers' own in every form of it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import FIRST_WORD, VOCABULARY, tiny_batch, tiny_config, tiny_model
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from mrem_deploy.base.errors import UserError
from mrem_deploy.models import gate
from mrem_deploy.models.architectures import anatomy, model_outputs
from mrem_deploy.quant.disentangled import bucket_rows, skewed
from mrem_deploy.quant.insert import activation_points, prepare
from mrem_deploy.quant.spec import QuantSpec

# What published checkpoints of DeBERTa-v2 and v3 differ in.
FORMS = {
    "v3": {},
    "without buckets": {"position_buckets": -1, "max_relative_positions": -1, "max_position_embeddings": 6},
    "projections of its own": {"share_att_key": False},
    "content to position only": {"pos_att_type": ["c2p"], "share_att_key": False},
    "position to content only": {"pos_att_type": "p2c"},
    "embeddings as they are": {"norm_rel_ebd": "none"},
    "positions in the input, too": {"position_biased_input": True, "type_vocab_size": 2},
    "no relative positions": {"relative_attention": False, "position_biased_input": True},
    "a narrow embedding": {"embedding_size": 12},
}


def model_of(form: str, dtype: torch.dtype = torch.float64) -> transformers.PreTrainedModel:
    return tiny_model("deberta-v2", dtype=dtype, **FORMS[form])


@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_that_of_transformers(form: str) -> None:
    """In fp64; 1e-12 is the order of sums. Sentences reach beyond the farthest distance of the table."""
    model, batch = model_of(form), tiny_batch("deberta-v2")
    with torch.no_grad():
        expected = model_outputs(model(**batch))[0]
        found = prepare(model)
        torch.testing.assert_close(model_outputs(model(**batch))[0], expected, rtol=0, atol=1e-12)
    points = {name.rpartition("self.")[2] for name in activation_points(found, QuantSpec())}
    products = set(FORMS[form].get("pos_att_type", ["c2p", "p2c"])) & {"c2p", "p2c"}
    if form == "position to content only":
        products = {"p2c"}
    if form == "no relative positions":
        products = set()
    assert {name for name in points if name[:3] in ("c2p", "p2c")} == {f"{name}.right" for name in products}
    shared = FORMS[form].get("share_att_key", True) and bool(products)
    assert ("position_quantizer" in points) == shared


def test_skewed_by_hand() -> None:
    columns = torch.arange(6.0).expand(3, 6) + 10 * torch.arange(3.0)[:, None]
    assert skewed(columns[None]).tolist() == [[[2, 3, 4], [11, 12, 13], [20, 21, 22]]]
    assert skewed(torch.tensor([[[7.0, 8.0]]])).tolist() == [[[7.0]]]  # a single token


@pytest.mark.parametrize(("buckets", "farthest"), [(256, 512), (-1, 40), (32, 128)])
def test_the_table_gives_the_buckets_of_transformers(buckets: int, farthest: int) -> None:
    """For distances far beyond the table, too; 256 and 512 are those of DeBERTa-v3."""
    config = tiny_config("deberta-v2")
    config.position_buckets, config.max_relative_positions = buckets, farthest
    encoder = transformers.AutoModel.from_config(config).encoder
    tokens = torch.zeros(1, 2 * farthest + 9, 1)
    relative = build_relative_position(tokens, tokens, buckets, farthest)[0]
    span = buckets if buckets > 0 else farthest
    expected = (relative + span).clamp(0, 2 * span - 1)
    rows = bucket_rows(encoder)
    distances = torch.arange(len(relative))[:, None] - torch.arange(len(relative))
    assert torch.equal(rows[distances.clamp(-farthest, farthest) + farthest], expected)


def test_a_convolution_is_refused(tmp_path: Path) -> None:
    """DeBERTa-v2 xlarge has one: in a folder before its weights are read, and in a model in memory."""
    config = tiny_config("deberta-v2")
    config.conv_kernel_size, config.conv_act = 3, "gelu"
    with pytest.raises(UserError, match="convolution"):
        anatomy(transformers.AutoModel.from_config(config))
    with pytest.raises(UserError, match="conv_kernel_size"):
        gate.check_config(config.to_dict(), tmp_path / "config.json")


@pytest.mark.parametrize(("key", "value"), [("position_buckets", 10**9), ("max_relative_positions", -2)])
def test_sizes_that_no_model_has_are_refused(key: str, value: int, tmp_path: Path) -> None:
    content = tiny_config("deberta-v2").to_dict()
    assert gate.check_config(content, tmp_path) == content  # −1 is usual for both
    with pytest.raises(UserError, match=key):
        gate.check_config(content | {key: value}, tmp_path)


def test_a_vector_does_not_depend_on_its_batch() -> None:
    """Relative positions come from distances, and padding is left out: alone as among others, in fp64."""
    model = model_of("v3")
    prepare(model)
    batch = tiny_batch("deberta-v2")
    length = int(batch["attention_mask"][1].sum())
    assert FIRST_WORD <= int(batch["input_ids"][1, 0]) < VOCABULARY
    alone = {name: value[1:2, :length] for name, value in batch.items()}
    with torch.no_grad():
        together, single = model(**batch).logits[1], model(**alone).logits[0]
    torch.testing.assert_close(single, together, rtol=0, atol=1e-12)
