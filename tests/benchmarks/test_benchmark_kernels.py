"""The benchmarks of the kernels: that the contenders compute the same, and the numbers are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mrem_deploy import benchmark
from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError
from mrem_deploy.benchmarks import contenders, footprint, kernels, kernels_gpu, kernels_job, unfused
from mrem_deploy.benchmarks.timing import Comparison
from mrem_deploy.kernels import backends, ops, reference
from mrem_deploy.kernels.quantized import Quantized
from mrem_deploy.numerics import asymmetric_grid, symmetric_grid
from mrem_deploy.quant import layers

TINY = ["--geometry", "16x2x2x32x50", "--batch-size", "2", "--length", "6"]


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


@pytest.mark.parametrize("kind", ["learned", "ternary", "matmul", "alone"])
def test_ordinary_autograd_has_the_ops_values_and_gradients(kind: str) -> None:
    x, weight, bias = values(5, 20), values(7, 20), values(7)
    # Steps that saturate nothing but what is far outside: half a step beyond an end the two differ.
    step, w_step = torch.tensor(0.05, requires_grad=True), torch.tensor(0.6, requires_grad=True)
    wide, narrow = asymmetric_grid(8, 90), symmetric_grid(4)
    threshold, scale = reference.twn(weight.detach(), True)
    with torch.no_grad():
        x[0, 0], x[1, 1] = 100.0, -100.0
    x_quant = Quantized(step, wide)
    found = []
    for module in (ops, unfused):
        leaves = [x, step]
        if kind == "learned":
            y = module.fake_quant_linear(x, weight, bias, x_quant, Quantized(w_step, narrow, learned=True))
            leaves += [weight, bias, w_step]
        elif kind == "ternary":
            ternary = Quantized(scale, symmetric_grid(2), threshold)
            y = module.fake_quant_linear(x, weight, bias, x_quant, ternary)
            leaves += [weight, bias]
        elif kind == "matmul":
            y = module.fake_quant_matmul(x, weight.T, x_quant, Quantized(w_step, narrow))
            leaves += [weight, w_step]
        else:
            y = module.fake_quant(x, step, wide)
        found.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for ours, theirs in zip(*found, strict=True):  # products of integers here, of real numbers there
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def test_a_contender_is_in_force_only_inside_its_block() -> None:
    before = layers.fake_quant_linear
    with contenders.computing_with("unfused"):
        assert layers.fake_quant_linear is unfused.fake_quant_linear
    assert layers.fake_quant_linear is before
    with contenders.computing_with("reference"):
        assert backends.ops_for(torch.zeros(1)) is reference
    assert backends.choice() == "auto"
    with pytest.raises(UserError, match="--kernels triton does not compute on cpu"):
        contenders.check_device(["cpp", "triton"], "cpu")
    with pytest.raises(UserError, match="among cpp, triton, reference, unfused; got 'fast'"):
        contenders.contender("fast")


def test_whoever_computes_something_else_is_not_timed() -> None:
    truth = (torch.ones(100), torch.ones(100), torch.tensor(3.0))
    kernels_job.check_agrees("cpp", truth, truth)
    one_off = (torch.cat([torch.ones(99), torch.zeros(1)]), *truth[1:])
    for wrong in (one_off, (truth[0], one_off[0], truth[2]), (*truth[:2], torch.tensor(4.0))):
        with pytest.raises(AssertionError, match="cpp computes something else"):
            kernels_job.check_agrees("cpp", wrong, truth)


def test_kernels_writes_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels_job, "keep_large_blocks", lambda: True)
    monkeypatch.setattr(kernels_job, "_compiled", lambda: None)  # compiling takes longer than all the rest
    line = ["kernels", "--sizes", "8x32,3x7", "--rounds", "3", "--warmup", "1", "--out", str(tmp_path)]
    assert cli.run(benchmark.main, line) == 0
    assert "Not measured: compile, torch.compile does not work here" in capsys.readouterr().out
    rows = json.loads((tmp_path / "kernels.json").read_text(encoding="utf-8"))["rows"]
    names = [*(["cpp"] if backends.extension().module else []), "eager", "learnable", kernels.YARDSTICK]
    assert [(row["size"], row["contender"]) for row in rows] == [
        (size, name) for size in ([8, 32], [3, 7]) for name in names
    ]
    for row in rows:
        expected = 20 * row["size"][0] * row["size"][1] / row["seconds"] / 1e9
        assert row["gigabytes_per_second"] == pytest.approx(expected)
        assert len(row["rounds"]) == 3
    assert (tmp_path / "kernels.png").stat().st_size > 1000


@pytest.mark.parametrize("sizes", ["8", "8x0", "axb", "8x8x8"])
def test_sizes_are_checked(sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(benchmark.main, ["kernels", "--sizes", sizes]) == 2
    assert "--sizes must be ROWSxCOLUMNS" in capsys.readouterr().err


@pytest.mark.slow
def test_footprint_measures_every_contender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(*job: object) -> footprint.Footprint:
        return footprint.measure(*job)  # type: ignore[arg-type]

    monkeypatch.setattr(footprint, "in_fresh_process", here)
    line = ["footprint", *TINY, "--modules", "2", "--bits", "2-2-8", "--out", str(tmp_path)]
    assert cli.run(benchmark.main, line) == 0
    rows = json.loads((tmp_path / "footprint.json").read_text(encoding="utf-8"))["rows"]
    assert [row["kernels"] for row in rows] == ["unquantized", *contenders.present()]
    assert all(row["peak_mb"] >= row["before_mb"] > 0 for row in rows)
    assert rows[-1]["of_last"] == 1.0


def test_the_cases_for_gpus_run_and_a_wrong_backend_is_found() -> None:
    """On the CPU, with the reference in the place of Triton: shapes and arguments are the same there."""
    for name, call in kernels_gpu._cases(32, 16, device="cpu").items():
        truth = call(reference)
        assert kernels_gpu._agrees(call(reference), truth), name
        wrong = tuple(part * 1.01 for part in (truth if isinstance(truth, tuple) else (truth,)))
        assert not kernels_gpu._agrees(wrong, truth), name
    compared = Comparison(base=(0.004, 0.004, 0.003), other=(0.001, 0.001, 0.001))  # 4, 4 and 3 times
    row = kernels_gpu.GpuKernelRow("laq", "some GPU", compared, agrees=False)
    assert row.to_dict()["milliseconds"] == 1.0
    assert "4.00×" in kernels_gpu.as_table([row])
    assert "NO" in kernels_gpu.as_table([row])
