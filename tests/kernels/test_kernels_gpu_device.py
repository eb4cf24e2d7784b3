"""The Triton kernels on a GPU: the battery of the interpreter, and what only hardware shows."""

from __future__ import annotations

import pytest
import torch
from run_gpu_battery import run

pytest.importorskip("triton", reason="Triton exists for Linux only")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


def test_every_op_agrees_with_the_reference(tmp_path: object) -> None:
    passed, failed, said = run("cuda", TRITON_INTERPRET="0", MREM_CACHE=str(tmp_path))
    assert failed == 0, said
    assert passed >= 70, said


def test_every_tile_gives_the_same_product(monkeypatch: pytest.MonkeyPatch) -> None:
    from mrem_deploy.kernels import reference
    from mrem_deploy.kernels.gpu import linear, tuning
    from mrem_deploy.kernels.gpu.launching import vendor
    from mrem_deploy.kernels.quantized import Quantized
    from mrem_deploy.numerics import activation_grid, symmetric_grid

    monkeypatch.setenv(tuning.VARIABLE, "0")
    x, weight = torch.randn(300, 257, device="cuda"), torch.randn(190, 257, device="cuda")
    x_quant = Quantized(torch.tensor(0.03, device="cuda"), activation_grid(8))
    w_quant = Quantized(torch.rand(190, 1, device="cuda") / 50, symmetric_grid(8))
    arguments = (x, weight, None, x_quant, w_quant)
    expected = reference.linear(*arguments)
    for kernel, codes in (("product", False), ("codes", True)):
        for tile in tuning.TILES[vendor()][kernel]:
            monkeypatch.setitem(tuning.TILES[vendor()], kernel, (tile,))
            assert torch.equal(linear.linear(*arguments, codes=codes), expected), (kernel, tile)


def test_the_benchmark_runs() -> None:
    from mrem_deploy.benchmarks.kernels_gpu import run_gpu

    rows = run_gpu(tokens=256, rounds=2, warmup=1)
    assert rows
    assert all(row.milliseconds > 0 and row.agrees for row in rows)
