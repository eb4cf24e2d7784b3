"""What a killed export leaves: the next one into the same place removes it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")

from tiny_models import quantized_twin, tiny_model

from mrem_deploy.export import PROFILES, export_all, export_onnx, write
from mrem_deploy.export.skeleton import Skeleton, trace
from mrem_deploy.quant.frozen import FrozenModel, freeze
from mrem_deploy.quant.spec import QuantSpec


@pytest.fixture(scope="module")
def traced() -> tuple[FrozenModel, Skeleton]:
    head = "sequence-classification"
    _, student = quantized_twin(tiny_model("bert", head), QuantSpec(4, 4, 8))
    frozen = freeze(student, head)
    return frozen, trace(frozen)


def export_and_die(frozen: FrozenModel, path: Path, profile: str, skeleton: Skeleton) -> None:
    """In a child that is killed while it writes."""

    def die(content: bytes) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            write.seal = die
            export_onnx(frozen, path, profile, skeleton=skeleton)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_next_export_removes_what_a_killed_one_left(
    tmp_path: Path, traced: tuple[FrozenModel, Skeleton], monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, skeleton = traced
    monkeypatch.setattr(write, "trace", lambda frozen: skeleton)
    for name in ("int8", "qdq"):
        export_and_die(frozen, tmp_path / PROFILES[name].file, name, skeleton)
    assert len(list(tmp_path.iterdir())) == 2, "each kill has left its temporary file"
    export_all(frozen, tmp_path, ["qdq"])
    assert [path.name for path in tmp_path.iterdir()] == ["model_qdq.onnx"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_next_export_into_the_same_file_removes_it_too(
    tmp_path: Path, traced: tuple[FrozenModel, Skeleton]
) -> None:
    frozen, skeleton = traced
    path = tmp_path / "elsewhere.onnx"
    export_and_die(frozen, path, "int8", skeleton)
    (tmp_path / ".elsewhere.onnx.notes").write_text("not ours")
    assert len(list(tmp_path.iterdir())) == 2
    export_onnx(frozen, path, "int8", skeleton=skeleton)
    assert sorted(found.name for found in tmp_path.iterdir()) == [".elsewhere.onnx.notes", "elsewhere.onnx"]
