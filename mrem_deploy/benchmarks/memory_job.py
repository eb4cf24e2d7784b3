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

from mrem_deploy.benchmarks.geometry import Geometry, random_model, random_tokens
from mrem_deploy.errors import UserError
from mrem_deploy.progress import track

if TYPE_CHECKING:
    from mrem_deploy.train.cache import ActivationCache

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
    """Train every module for a few steps, as in a real run, and watch the memory of this process."""
    import psutil
    import torch

    from mrem_deploy.config import Recipe
    from mrem_deploy.environment import PeakMemory
    from mrem_deploy.memory import keep_large_blocks
    from mrem_deploy.models import carve
    from mrem_deploy.partition import module_cuts
    from mrem_deploy.pipeline import make_student
    from mrem_deploy.train.mrem import TrainSettings
    from mrem_deploy.train.sequential import CacheSettings, Streams, train_module

    if job.threads:
        torch.set_num_threads(job.threads)
    keep_large_blocks()  # as a real run does
    started = time.perf_counter()
    recipe = Recipe(bits=job.bits, batch_size=job.batch_size, seed=job.seed, init_batches=1)
    with PeakMemory("cpu") as peak:
        imports_mb = psutil.Process().memory_info().rss / MB
        teacher = random_model(job.geometry, job.seed).requires_grad_(False)
        calibration = random_tokens(job.geometry, job.examples, job.length, job.seed)
        student = make_student(teacher, recipe, calibration)
        ready_mb = psutil.Process().memory_info().rss / MB
        cuts = module_cuts(teacher, job.modules)
        settings = TrainSettings(job.steps, recipe.lr, recipe.step_lr, job.batch_size, job.seed)
        streams = Streams(calibration, job.geometry.hidden, CacheSettings(0.0), job.batch_size)
        cache_mb = fill_seconds = mapped_before = 0.0
        losses, so_far = [], []
        pairs = list(zip(carve(teacher, cuts), carve(student, cuts), strict=True))
        try:
            for index, (full, quantized) in enumerate(pairs):
                name = f"module {index + 1}/{len(pairs)}"
                curve = train_module(full, quantized, index, name, streams, settings, None, 0)
                losses.append(curve[-1][1])
                so_far.append(peak.mb)
                if streams.cache is None and not quantized.last:
                    filling, mapped_before = time.perf_counter(), _mapped_mb()
                    streams.cache = filled_cache(job)
                    fill_seconds = time.perf_counter() - filling
                    cache_mb = streams.cache.megabytes
            mapped_mb = _mapped_mb() - mapped_before if cache_mb and job.on_disk else 0.0
        finally:
            streams.close()
    if not np.isfinite(losses).all():
        raise AssertionError(f"training did not work: the losses are {losses}")
    return {
        "modules": job.modules,
        "cuts": cuts,
        "peak_mb": peak.mb,
        "peak_kind": peak.kind,
        "peak_after_module_mb": so_far,
        "imports_mb": imports_mb,
        "ready_mb": ready_mb,
        "cache_mb": cache_mb,
        "cache_examples": job.examples if cache_mb else 0,
        "cache_on_disk": bool(cache_mb) and job.on_disk,
        "mapped_mb": mapped_mb,
        "fill_seconds": fill_seconds,
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

    from mrem_deploy.batching import sorted_batches
    from mrem_deploy.train.cache import ActivationCache

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
