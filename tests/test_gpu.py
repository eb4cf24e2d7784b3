"""What runs on GPUs, from end to end: `pytest -m gpu`, or `make gpu-check`. Skipped where there is none.

MREM_TEST_DEVICE=cpu runs those tests on the CPU that can, to try the tests themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import edge_job
import pytest
import torch
from tiny_job import Job, job_in, workshop_in

from mrem_deploy import benchmark, validate
from mrem_deploy.base import cli
from mrem_deploy.deploy.providers import CUDA, TENSORRT, tensorrt_problem
from mrem_deploy.kernels import backends
from mrem_deploy.train.mrem_p.team import launch

ROOT = Path(__file__).resolve().parent.parent
DEVICE = os.environ.get("MREM_TEST_DEVICE", "cuda")
GPUS = torch.cuda.device_count()
STEPS = {"steps": 10, "checkpoint_steps": 4}
# Sums in another order, carried on over ten steps. A wrong kernel or a lost tensor is far beyond it.
TOLERANCE = 0.02

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and GPUS == 0, reason="torch sees no GPU"),
]
on_gpus = pytest.mark.skipif(DEVICE != "cuda", reason="MREM_TEST_DEVICE asks for the CPU")
needs_two = pytest.mark.skipif(DEVICE == "cuda" and GPUS < 2, reason=f"needs two GPUs, and there are {GPUS}")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop_in(tmp_path_factory.mktemp("workshop")) as root:
        yield root


def last_losses(result: Path) -> list[float]:
    """Of every module."""
    curves = json.loads((result / "history.json").read_text())["curves"]
    return [curve[-1][1] for curve in curves.values()]


def ran(job: Job, *more: str) -> list[float]:
    assert job.run(*more) == 0
    return last_losses(Path(job.options["out"]))


@pytest.fixture(scope="module")
def on_cpu(workshop: Path) -> list[float]:
    """The losses of the same run on the CPU, in plain torch."""
    return ran(job_in(workshop, "on-cpu", device="cpu", kernels="reference", **STEPS))


@on_gpus
def test_torch_computes_on_every_gpu() -> None:
    x = torch.arange(64.0).reshape(8, 8)
    for index in range(GPUS):
        y = x.to(torch.device("cuda", index))
        assert torch.equal((y @ y.T).cpu(), x @ x.T), torch.cuda.get_device_name(index)


@on_gpus
def test_a_first_kernel_runs_on_every_gpu() -> None:
    assert {index: problem for index in range(GPUS) if (problem := backends.gpu_problem(index))} == {}


def test_quantize_on_a_gpu_gives_what_the_cpu_gives(workshop: Path, on_cpu: list[float]) -> None:
    job = job_in(workshop, "on-gpu", device=DEVICE, **STEPS)
    assert ran(job) == pytest.approx(on_cpu, rel=TOLERANCE)


def test_the_step_benchmark_runs_on_a_gpu(tmp_path: Path) -> None:
    line = ["step", "--device", DEVICE, "--geometry", "64x2x2x128x50", "--batch-size", "4", "--length", "16"]
    line += ["--bits", "4-4-8", "--modules", "2", "--rounds", "2", "--warmup", "1", "--out", str(tmp_path)]
    assert cli.run(benchmark.main, line) == 0
    written = json.loads((tmp_path / "step.json").read_text())
    assert written["settings"]["device"] == DEVICE
    if DEVICE == "cuda" and not backends.gpu_problem():
        assert written["rows"][0]["kernels"] == "triton"


def test_a_killed_run_continues(workshop: Path) -> None:
    """The same result as without the kill, up to the order of sums: some of torch's own ops on GPUs use
    atomics."""
    whole = ran(job_in(workshop, "whole", device=DEVICE, **STEPS))
    job = job_in(workshop, "killed", device=DEVICE, **STEPS)
    faults = json.dumps([{"rank": 0, "attempt": 0, "step": 6, "kind": "kill"}])
    script = ROOT / "tests" / "helpers" / "faulty_job.py"
    killed = subprocess.run(
        [sys.executable, str(script), *job.argv()], env=os.environ | {"FAULTS": faults}, capture_output=True
    )
    assert killed.returncode < 0, killed.stderr
    assert not (workshop / "killed").exists()
    assert ran(job, "--resume") == pytest.approx(whole, rel=TOLERANCE)


def check_edges(ranks: list[dict[str, Any]]) -> None:
    sender, receiver = (rank["free"] for rank in ranks)
    assert receiver["seen"][0] >= 0  # −1: tensors of different batches in one parcel, or overwritten ones
    assert receiver["seen"] == sorted(set(receiver["seen"]))
    assert receiver["seen"][-1] == edge_job.LAST
    assert receiver["received"] + sender["dropped"] == edge_job.LAST + 1
    assert ranks[1]["lossless"]["seen"] == list(range(edge_job.LAST + 1))
    assert all(rank[what]["closed"] for rank in ranks for what in ("free", "lossless", "given up"))


@needs_two
def test_parcels_travel_by_nccl() -> None:
    check_edges(launch(edge_job.exercise, (DEVICE, True), workers=2, max_restarts=0)["ranks"])


def test_parcels_travel_through_pinned_memory() -> None:
    check_edges(launch(edge_job.exercise, (DEVICE, False), workers=2, max_restarts=0)["ranks"])


@needs_two
def test_mrem_p_on_two_gpus(workshop: Path) -> None:
    """In lock-step, so that the CPU's run is the same computation."""
    options = {"method": "mrem-p", "modules": 2, "workers": 2, **STEPS}
    expected = ran(job_in(workshop, "p-cpu", device="cpu", kernels="reference", **options), "--deterministic")
    found = ran(job_in(workshop, "p-gpu", device=DEVICE, **options), "--deterministic")
    assert found == pytest.approx(expected, rel=TOLERANCE)


# -- onnxruntime ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(workshop: Path) -> Path:
    """Of the CPU: the file is what is tried."""
    assert job_in(workshop, "exported", device="cpu", export="int8,tensorrt", **STEPS).run() == 0
    return workshop / "exported"


def providers() -> list[str]:
    import onnxruntime

    found: list[str] = onnxruntime.get_available_providers()
    return found


def check_runs_on(folder: Path, provider: str, profile: str, asked: str) -> None:
    line = [str(folder), "--provider", asked, "--profile", profile, "--max-drop", "100"]
    assert cli.run(validate.main, line) == 0
    found = json.loads((folder / "validation.json").read_text())["onnx"]
    assert provider in found["nodes"]["providers"]
    assert all(next(iter(split.values())) >= 95 for split in found["agreement"]["quantized"].values())


def test_an_exported_model_runs_on_cuda(exported: Path) -> None:
    if DEVICE != "cuda":
        check_runs_on(exported, "CPUExecutionProvider", "int8", "cpu")
        return
    if CUDA not in providers():
        pytest.skip(f"this onnxruntime has no CUDA provider, only {', '.join(providers())}")
    check_runs_on(exported, CUDA, "int8", "cuda")


@on_gpus
def test_an_exported_model_runs_in_tensorrt(exported: Path) -> None:
    if TENSORRT not in providers():
        pytest.skip(f"this onnxruntime has no TensorRT provider, only {', '.join(providers())}")
    if problem := tensorrt_problem():
        pytest.skip(problem)
    check_runs_on(exported, TENSORRT, "tensorrt", "tensorrt")
