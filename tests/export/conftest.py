"""What the tests of export share as fixtures."""

from __future__ import annotations

import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
ir = pytest.importorskip("onnx_ir")

from exported import skeleton  # noqa: E402

from mrem_deploy.export import write  # noqa: E402
from mrem_deploy.export.skeleton import Skeleton  # noqa: E402
from mrem_deploy.quant.frozen import FrozenModel  # noqa: E402


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[FrozenModel]:
    """Every call of `trace`, which gives the remembered skeleton."""
    seen = []

    def remembered(frozen: FrozenModel) -> Skeleton:
        seen.append(frozen)
        return skeleton(frozen.config.model_type, frozen.head)

    monkeypatch.setattr(write, "trace", remembered)
    return seen
