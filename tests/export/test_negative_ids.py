"""Negative ids are errors in every profile; without the guard they would be rows from the end of tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from tiny_models import ENCODERS, heads_of, quantized_twin, tiny_batch, tiny_model  # noqa: E402

from mrem_deploy.export import PROFILES, export_all  # noqa: E402
from mrem_deploy.export.ids import LOOKED_UP  # noqa: E402
from mrem_deploy.quant.frozen import freeze  # noqa: E402
from mrem_deploy.quant.spec import QuantSpec  # noqa: E402


@pytest.mark.parametrize("kind", [*ENCODERS, "nomic_bert", "qwen3"])
def test_a_negative_id_is_an_error_in_every_profile(kind: str, tmp_path: Path) -> None:
    _, student = quantized_twin(tiny_model(kind), QuantSpec(4, 4, 8))
    batch = {name: values.numpy() for name, values in tiny_batch(kind).items()}
    for path in export_all(freeze(student, heads_of(kind)[0]), tmp_path, tuple(PROFILES)):
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [given.name for given in session.get_inputs()]
        good = {name: batch.get(name, np.zeros_like(batch["input_ids"])) for name in names}
        session.run(None, good)
        for name in set(names) & set(LOOKED_UP):
            for wrong in (-1, -2, -(2**31), -(2**63)):
                ids = good[name].copy()
                ids[-1, 1] = wrong
                with pytest.raises(Exception, match="out of data bounds"):
                    session.run(None, {**good, name: ids})
