"""The Triton kernels in Triton's interpreter, on CPU tensors: every op against the reference."""

from __future__ import annotations

import pytest
from run_gpu_battery import run

pytest.importorskip("triton", reason="Triton exists for Linux only")


def test_every_op_agrees_with_the_reference() -> None:
    passed, failed, said = run("cpu", TRITON_INTERPRET="1")
    assert failed == 0, said
    assert passed >= 70, said  # a battery that was not collected would not fail either
