"""One memory measurement in a process of its own.

A process of its own, because memory that was once freed may stay with its process. There the modules
are trained one after another for a few steps by the very code of a real run. Only the cache is filled
with random numbers instead of the predecessors' outputs: 4,096 sentences through BERT-base would take
half an hour and no other memory.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.progress import track
from mrem_deploy.benchmarks.geometry import Geometry, random_model, random_tokens

if TYPE_CHECKING:
    from mrem_deploy.train.streams import ActivationCache

MB = 2**20
BYTES_PER_VALUE = 4
STREAMS = 2  # full precision and quantized


@dataclass(frozen=True)
class Job:
    """One measurement: what the process that makes it is told."""

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


def cache_megabytes(examples: int, length: int, width: int) -> float:
    """Both streams of every token, in float32."""
    return STREAMS * examples * length * width * BYTES_PER_VALUE / MB


def in_fresh_process(job: Job) -> dict[str, Any]:
    """Measure in a new interpreter; `spawn` shares no memory with this one."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure, job).result()
        except BrokenProcessPool:
            raise UserError(
                f"the process that trained {job.modules} module(s) was ended from outside, most likely for "
                "want of memory",
                "use a smaller --batch-size or --geometry, more --modules, or --fill disk",
            ) from None


def measure(job: Job) -> dict[str, Any]:
    """Train every module for a few steps, as in a real run, and watch the memory of this process.

    Each phase has its peak and the part of the cache that was resident then; the first module reads
    token ids and has none. Memory freed by one phase may still count in the next: so it is in a run.
    """
    import psutil
    import torch

    from mrem_deploy.base.machine import PeakMemory, keep_large_blocks
    from mrem_deploy.models.partition import module_cuts
    from mrem_deploy.models.parts import carve
    from mrem_deploy.recipe import Recipe
    from mrem_deploy.train.job import TrainSettings
    from mrem_deploy.train.mrem_s import train_module
    from mrem_deploy.train.streams import CacheSettings, Streams
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
    ready_mb = psutil.Process().memory_info().rss / MB
    phases = [{"name": "initialise", "peak_mb": peak.mb, "cache_mb": 0.0}]
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
                streams.cache = filled_cache(job)
            name = f"module {index + 1}/{job.modules}"
            began = time.perf_counter()
            with PeakMemory("cpu") as peak:
                curve = train_module(full, quantized, index, name, streams, settings, None, 0)
            seconds = time.perf_counter() - began
            losses.append(curve[-1][1])
            resident = streams.cache.megabytes if streams.cache else 0.0
            if streams.cache and streams.cache.on_disk:
                resident = max(_mapped_mb() - mapped_before, 0.0)
            phases.append({"name": name, "peak_mb": peak.mb, "cache_mb": resident, "seconds": seconds})
    finally:
        streams.close()
    if not np.isfinite(losses).all():
        raise AssertionError(f"training did not work: the losses are {losses}")
    return {
        "modules": job.modules,
        "cuts": cuts,
        "ready_mb": ready_mb,
        "phases": phases,
        "peak_kind": peak.kind,
        "cached_examples": job.examples if job.modules > 1 else 0,
        "losses": losses,
        "seconds": time.perf_counter() - started,
    }


def _mapped_mb() -> float:
    """Resident pages of mapped files, the libraries among them; 0 where the system does not tell."""
    import psutil

    return float(getattr(psutil.Process().memory_info(), "shared", 0)) / MB


def filled_cache(job: Job) -> ActivationCache:
    """A cache with numbers in every row (an untouched page takes no memory), read back to be sure."""
    import torch

    from mrem_deploy.data.encoded import sorted_batches
    from mrem_deploy.train.streams import ActivationCache

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
