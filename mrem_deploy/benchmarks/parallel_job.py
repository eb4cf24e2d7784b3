"""One training run of the parallel benchmark, in separate processes.

The clock starts when all workers have their models and stops when rank 0 has all trained modules. It counts
caching (MREM-S) and priming, connecting and gathering (MREM-P). It does not count starting Python, loading
and calibrating, which are the same for both.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mrem_deploy.benchmarks.geometry import Geometry, random_model, random_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mrem_deploy.train.job import WorkerReport

HOUR = 3600.0
IN_MEMORY = "1000000GB"  # the cache, however large


@dataclass(frozen=True)
class Job:
    """The settings of one run, for all of its processes."""

    method: str
    geometry: Geometry
    model: str | None  # a checkpoint in place of random weights
    modules: int
    workers: int
    threads: int  # of each worker
    bits: str
    batch_size: int
    length: int
    steps: int
    calib_size: int
    staleness: int
    seed: int
    lockstep: bool = False
    slowdown: dict[int, float] = field(default_factory=dict)  # module, from 0 -> times slower
    device: str = "cpu"  # or cuda: a GPU for each worker


@dataclass(frozen=True)
class TimedRun:
    """What one run took; without workers for MREM-S."""

    seconds: float
    workers: tuple[WorkerReport, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "workers": [report.to_dict() for report in self.workers]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TimedRun:
        from mrem_deploy.train.job import WorkerReport

        return cls(values["seconds"], tuple(map(WorkerReport.from_dict, values["workers"])))


def run_job(job: Job) -> TimedRun:
    """Run in `job.workers` new processes, which share no memory or threads with other runs."""
    from mrem_deploy.train.mrem_p.team import launch

    return TimedRun.from_dict(launch(measure, (job,), job.workers, max_restarts=0))


def measure(job: Job) -> dict[str, Any]:
    """In each of the processes: train all modules and report where the time went, as plain data."""
    import torch

    from mrem_deploy.base.machine import keep_large_blocks
    from mrem_deploy.preflight import resolve_device
    from mrem_deploy.recipe import Recipe
    from mrem_deploy.train.job import TrainJob
    from mrem_deploy.train.mrem_p.launch import crew_of, device_of
    from mrem_deploy.train.mrem_p.rank import train_mrem_p
    from mrem_deploy.train.mrem_s import train_mrem_s
    from mrem_deploy.train.student import make_student

    with crew_of(HOUR) as crew:
        torch.set_num_threads(job.threads)
        keep_large_blocks()  # as a real run does
        recipe = Recipe(
            bits=job.bits, method=job.method, modules=str(job.modules), steps=job.steps,
            batch_size=job.batch_size, staleness=job.staleness, deterministic=job.lockstep, seed=job.seed,
            init_batches=1, max_memory=IN_MEMORY,
        )  # fmt: skip
        device = device_of(resolve_device(job.device), crew)
        teacher = _model(job).requires_grad_(False).to(device)
        geometry = job.geometry
        calibration = random_tokens(geometry, job.calib_size, job.length, job.seed)
        student = make_student(teacher, recipe, calibration)
        crew.exchange("the start of the clock")
        started = time.perf_counter()
        work = TrainJob(teacher, student, calibration, recipe, crew=crew)
        log = train_mrem_s(work) if job.method == "mrem-s" else train_mrem_p(work, job.slowdown)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        losses = [curve[-1][1] for curve in log.curves.values()]
        if len(losses) != job.modules or not np.isfinite(losses).all():
            raise AssertionError(f"training did not work: the losses are {losses}")
        return TimedRun(seconds, tuple(log.workers)).to_dict()


def _model(job: Job) -> PreTrainedModel:
    if job.model is None:
        return random_model(job.geometry, job.seed)
    from mrem_deploy.models.loading import load_model

    return load_model(job.model, "sequence-classification")[0]
