"""DeBERTa in ONNX: stored positions have the integers of torch, and every form of it runs at every length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from exported import BITS, CLASSIFIER, CLOSE, run, torch_codes, torch_outputs, with_codes  # noqa: E402
from tiny_models import quantized_twin, tiny_encoded, tiny_model  # noqa: E402

from mrem_deploy.export import write  # noqa: E402
from mrem_deploy.export.disentangled import projected  # noqa: E402
from mrem_deploy.export.skeleton import trace  # noqa: E402
from mrem_deploy.models.architectures import anatomy  # noqa: E402
from mrem_deploy.numerics import quantize  # noqa: E402
from mrem_deploy.quant.frozen import FrozenModel, build, freeze  # noqa: E402
from mrem_deploy.quant.spec import QuantSpec  # noqa: E402

FORMS: dict[str, dict[str, Any]] = {
    "v3": {},
    "v2": {"share_att_key": False, "norm_rel_ebd": "none", "position_buckets": -1, "type_vocab_size": 2},
    "c2p": {"pos_att_type": ["c2p"]},
    "absolute": {"relative_attention": False, "position_biased_input": True},
}


def frozen_form(form: str, spec: QuantSpec) -> FrozenModel:
    _, student = quantized_twin(tiny_model("deberta-v2", **FORMS[form]), spec)
    return freeze(student, CLASSIFIER)


@pytest.mark.parametrize("form", ["v3", "v2"])
def test_stored_positions_have_the_integers_of_torch(form: str) -> None:
    """All of them in the file; torch's product reads those of the distances in the batch."""
    frozen = frozen_form(form, BITS["4-4-8"])
    batch = tiny_encoded("deberta-v2", count=2).batch(np.arange(2))
    found, codes = anatomy(build(frozen)), torch_codes(frozen, batch)
    model = write.lowered(frozen, "ort-cpu", skeleton=trace(frozen))
    asked, names = with_codes(write.compact_proto(model), frozen)
    came = run(asked, {**batch, "token_type_ids": torch.zeros_like(batch["input_ids"])})
    first = [step for step in names if ".layer.0." in step]
    assert len(first) == 8
    off = [came[names[step]].astype(int) - 128 * (codes[step].min() < 0) - codes[step] for step in first]
    assert np.mean(np.concatenate([part.ravel() for part in off]) == 0) >= 0.999  # a tie may fall elsewhere
    encoder = build(frozen).deberta.encoder
    rows = encoder.get_rel_pos(torch.zeros(1, batch["input_ids"].shape[1], 1))
    for attention in found.attentions:
        for number, product in enumerate(("c2p", "p2c")):
            point = f"{attention}.{product}"
            stored = model.graph.initializers[f"{point}.positions"].const_value.numpy().astype(int) - 128
            assert np.array_equal(stored[:, rows[number]].swapaxes(-1, -2), codes[f"{point}.right"][0])
            scale = frozen.scales[f"{point}.right"]
            whole = quantize(projected(frozen, found, attention, product), scale.scale, scale.grid)
            assert np.array_equal(stored, whole.numpy())


@pytest.mark.parametrize("form", FORMS)
def test_every_form_runs_at_every_length(form: str) -> None:
    """One token, and more than the table of distances has, with activations in full precision: no code can
    fall on another side."""
    frozen = frozen_form(form, QuantSpec(4, 4, 32))
    encoded = tiny_encoded("deberta-v2", count=4, longest=30)
    longest = encoded.batch(np.arange(4))
    model = write.compact_proto(write.lowered(frozen, "ort-cpu", skeleton=trace(frozen)))
    onnx.checker.check_model(model, full_check=True)
    for batch in (longest, {name: value[:1, :1] for name, value in longest.items()}):
        given = {**batch, "token_type_ids": torch.zeros_like(batch["input_ids"])}  # read by v2 only
        np.testing.assert_allclose(run(model, given)["logits"], torch_outputs(frozen, batch)[0], **CLOSE)
