"""One memory measurement, in a separate process, because a process may keep memory that it freed.

There the modules train one after another for a few steps, by the code of a real run. Only the cache differs:
it is filled with random numbers instead of the predecessors' outputs, because 4,096 sentences through
BERT-base would take half an hour and use the same memory.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mrem_deploy.base import processes
from mrem_deploy.base.errors import UserError, WorkerKilled
from mrem_deploy.base.progress import track
from mrem_deploy.base.units import MIB
from mrem_deploy.benchmarks.geometry import Geometry, random_model, random_tokens

if TYPE_CHECKING:
    from mrem_deploy.train.activation_cache import ActivationCache

BYTES_PER_VALUE = 4
STREAMS = 2  # full precision and quantized


@dataclass(frozen=True)
class Job:
    """The settings of one measurement, for the process that makes it."""

    geometry: Geometry
    modules: int
    bits: str
    batch_size: int
    length: int
    steps: int
    examples: int  # in the cache
    on_disk: bool
    cache_dir: Path | None
    threads: int
    seed: int


@dataclass(frozen=True)
class Phase:
    """Peak memory of one phase of training, and how much of the cache was resident then."""

    name: str
    peak_mb: float
    cache_mb: float
    seconds: float | None = None  # not taken while the models are made

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Measured:
    """The memory of one run."""

    modules: int
    cuts: list[int]
    ready_mb: float  # with models and libraries, before training
    phases: list[Phase]
    peak_kind: str
    cached_examples: int
    losses: list[float]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "phases": [phase.to_dict() for phase in self.phases]}


def cache_megabytes(examples: int, length: int, width: int) -> float:
    """Both streams of every token, in float32."""
    return STREAMS * examples * length * width * BYTES_PER_VALUE / MIB


def in_fresh_process(job: Job) -> Measured:
    """Measure in a new interpreter, which shares no memory with this one."""
    try:
        return processes.in_fresh_process(measure, job, forks=False)
    except WorkerKilled:
        raise UserError(
            f"the process that trained {job.modules} module(s) was killed, most likely because "
            "memory ran out",
            "use a smaller --batch-size or --geometry, more --modules, or --fill disk",
        ) from None


def measure(job: Job) -> Measured:
    """Train every module for a few steps, as in a real run, and watch the memory of this process.

    The first module reads token ids and has no cache. Memory freed by one phase may still count in the next,
    as it does in a real run.
    """
    import psutil
    import torch

    from mrem_deploy.base.machine import PeakMemory, keep_large_blocks
    from mrem_deploy.data.encoded import BatchSchedule
    from mrem_deploy.models.partition import module_cuts
    from mrem_deploy.models.parts import carve
    from mrem_deploy.recipe import Recipe
    from mrem_deploy.train.activation_cache import CacheSettings
    from mrem_deploy.train.job import TrainSettings
    from mrem_deploy.train.module import ModuleTrainer
    from mrem_deploy.train.mrem_s import ModuleCheckpoint, train_module
    from mrem_deploy.train.streams import Streams
    from mrem_deploy.train.student import make_student

    if job.threads:
        torch.set_num_threads(job.threads)
    keep_large_blocks()  # as a real run does
    started = time.perf_counter()
    recipe = Recipe(bits=job.bits, batch_size=job.batch_size, seed=job.seed, init_batches=1)
    settings = TrainSettings(job.steps, recipe.lr, recipe.step_lr, job.batch_size, job.seed)
    calibration = random_tokens(job.geometry, job.examples, job.length, job.seed)
    with PeakMemory("cpu") as peak:
        teacher = random_model(job.geometry, job.seed).requires_grad_(False)
        student = make_student(teacher, recipe, calibration)
    ready_mb = psutil.Process().memory_info().rss / MIB
    phases = [Phase("initialise", peak.mb, 0.0)]
    losses = []
    cuts = module_cuts(teacher, job.modules)
    streams = Streams(calibration, job.geometry.hidden, CacheSettings(0.0), job.batch_size)
    mapped_before = _mapped_mb()
    try:
        for index, (full, quantized) in enumerate(
            zip(carve(teacher, cuts), carve(student, cuts), strict=True)
        ):
            if streams.cache is None and not full.first:
                mapped_before = _mapped_mb()
                streams.cache, streams.clean_at, streams.noisy_at = filled_cache(job), 1, 1
            name = f"module {index + 1}/{job.modules}"
            began = time.perf_counter()
            with PeakMemory("cpu") as peak:
                trainer = ModuleTrainer(full, quantized, settings)
                schedule = BatchSchedule(calibration.lengths, job.batch_size, job.seed + 1 + index)
                curve = train_module(trainer, name, streams, schedule, ModuleCheckpoint(None, name, trainer))
            seconds = time.perf_counter() - began
            losses.append(curve[-1][1])
            resident = streams.cache.megabytes if streams.cache else 0.0
            if streams.cache and streams.cache.on_disk:
                resident = max(_mapped_mb() - mapped_before, 0.0)
            phases.append(Phase(name, peak.mb, resident, seconds))
    finally:
        streams.close()
    if not np.isfinite(losses).all():
        raise AssertionError(f"training did not work: the losses are {losses}")
    return Measured(
        modules=job.modules,
        cuts=cuts,
        ready_mb=ready_mb,
        phases=phases,
        peak_kind=peak.kind,
        cached_examples=job.examples if job.modules > 1 else 0,
        losses=losses,
        seconds=time.perf_counter() - started,
    )


def _mapped_mb() -> float:
    """Resident pages of mapped files, the libraries among them; 0 where the system does not say."""
    import psutil

    return float(getattr(psutil.Process().memory_info(), "shared", 0)) / MIB


def filled_cache(job: Job) -> ActivationCache:
    """A cache with numbers in every row, because an untouched page takes no memory; read back as a check."""
    import torch

    from mrem_deploy.data.encoded import sorted_batches
    from mrem_deploy.train.activation_cache import ActivationCache

    lengths = np.full(job.examples, job.length, dtype=np.int64)
    cache = ActivationCache(lengths, job.geometry.hidden, 0.0 if job.on_disk else float("inf"), job.cache_dir)
    generator = torch.Generator().manual_seed(job.seed)
    shape = (job.batch_size, job.length, job.geometry.hidden)
    for indices in track(sorted_batches(lengths, job.batch_size), "fill the cache"):
        clean = torch.randn(shape, generator=generator)[: len(indices)]
        noisy = clean + 0.01
        cache.put(indices, clean, noisy)
    if not all(map(torch.equal, cache.get(indices, job.length), (clean, noisy))):
        raise AssertionError("the activation cache does not give back what was put in")
    return cache
