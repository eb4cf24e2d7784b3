"""Time and memory of the paper's models on this machine: a few steps are measured, the rest is computed.

Time and memory depend on the shape of a model and not on its weights, so random weights will do. Every
method runs its real training code for a few steps in a separate process; the time is seconds per step times
the paper's steps. The table labels what is extrapolated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mrem_deploy.base.files import write_json
from mrem_deploy.base.processes import in_fresh_process
from mrem_deploy.base.progress import say
from mrem_deploy.benchmarks import memory_job
from mrem_deploy.benchmarks.geometry import Geometry, random_model, random_tokens
from mrem_deploy.benchmarks.memory import with_totals
from mrem_deploy.reproduce import claims, paper
from mrem_deploy.reproduce.layout import NAMES, Record, Shown, method, quantity, words
from mrem_deploy.reproduce.plan import available_methods, paper_plan

if TYPE_CHECKING:
    from mrem_deploy.train.job import TrainJob

TRAINING_EXAMPLES = 392_702  # of MNLI
REM_LAYERS = 3  # the first, the last, and one for all between them


@dataclass(frozen=True)
class Shape:
    """What is measured: one of the paper's models with the batch of a training step."""

    name: str
    geometry: Geometry
    bits: str
    batch_size: int
    length: int
    steps: int
    threads: int


@dataclass(frozen=True)
class Measurement:
    """What a few steps of one method cost."""

    seconds: list[float]  # per step: of every module (MREM), layer (REM) or stage (QAT)
    gigabytes: float  # GiB, of the entire process
    worker: float | None = None  # GiB of a worker of MREM-P


def measure_all(shapes: Sequence[Shape], methods: Sequence[str], folder: Path) -> list[Record]:
    """Every method on every shape; what `folder` has already is not measured again."""
    records = []
    for shape in shapes:
        for name in ("qat", "rem", "mrem-s"):
            if name not in methods or name not in available_methods():
                continue
            key = hashlib.sha256(json.dumps([asdict(shape), name]).encode()).hexdigest()[:16]
            path = folder / f"{key}.json"
            if not path.exists():
                say(f"measuring {NAMES[name]} on {shape.name}, {shape.steps} steps")
                write_json(path, {**asdict(shape), "method": name, **asdict(_MEASURES[name](shape))})
            content = json.loads(path.read_text(encoding="utf-8"))
            found = Measurement(content["seconds"], content["gigabytes"], content.get("worker"))
            records += [_record(shape, row, found) for row in _rows(name, methods)]
    return records


def _rows(name: str, methods: Sequence[str]) -> list[str]:
    """MREM-P has the steps of MREM-S, all modules at the same time."""
    return [name, *(["mrem-p"] if name == "mrem-s" and "mrem-p" in methods else [])]


def _measure_mrem(shape: Shape) -> Measurement:
    modules = paper_plan("mnli").modules
    examples = shape.steps * shape.batch_size
    job = memory_job.Job(
        shape.geometry, modules, shape.bits, shape.batch_size, shape.length, shape.steps, examples,
        on_disk=False, cache_dir=None, threads=shape.threads, seed=0,
    )  # fmt: skip
    measured = memory_job.in_fresh_process(job)
    whole = memory_job.cache_megabytes(paper_plan("mnli").calib_size, shape.length, shape.geometry.hidden)
    row = with_totals(measured, whole, float("inf"))
    seconds = [phase.seconds / shape.steps for phase in measured.phases if phase.seconds is not None]
    return Measurement(seconds, row.total_mb / 1024, row.training_mb / 1024)


def _measure_rem(shape: Shape) -> Measurement:
    return in_fresh_process(_rem_job, shape)


def _rem_job(shape: Shape) -> Measurement:
    from mrem_deploy.base.machine import PeakMemory
    from mrem_deploy.train.rem import train_rem

    short = replace(shape.geometry, layers=REM_LAYERS)
    with PeakMemory("cpu") as peak:
        job = _prepare(shape, short, "rem")
        log = train_rem(job)
    first, middle, last = (seconds / shape.steps for seconds in log.seconds.values())
    layers = shape.geometry.layers
    block = sum(value.numel() for value in job.teacher.bert.encoder.layer[0].parameters())
    absent = 2 * 4 * block * (layers - REM_LAYERS) / 2**30  # teacher and student, in float32
    calibration = paper_plan("mnli").calib_size
    cache = memory_job.cache_megabytes(calibration, shape.length, shape.geometry.hidden) / 1024
    return Measurement([first, *[middle] * (layers - 2), last], peak.mb / 1024 + absent + cache)


def _measure_qat(shape: Shape) -> Measurement:
    return in_fresh_process(_qat_job, shape)


def _qat_job(shape: Shape) -> Measurement:
    from mrem_deploy.base.machine import PeakMemory
    from mrem_deploy.train.qat import train_qat

    with PeakMemory("cpu") as peak:
        log = train_qat(_prepare(shape, shape.geometry, "qat"))
    stages = [seconds / shape.steps for name, seconds in log.seconds.items() if name.startswith("stage")]
    return Measurement(stages, peak.mb / 1024)


_MEASURES = {"qat": _measure_qat, "rem": _measure_rem, "mrem-s": _measure_mrem}


def _prepare(shape: Shape, geometry: Geometry, method: str) -> TrainJob:
    """Teacher, student and recipe as in a real run, with random tokens as data."""
    import torch

    from mrem_deploy.base.machine import keep_large_blocks
    from mrem_deploy.recipe import Recipe
    from mrem_deploy.train.job import TrainJob
    from mrem_deploy.train.student import make_student

    if shape.threads:
        torch.set_num_threads(shape.threads)
    keep_large_blocks()
    recipe = Recipe(
        bits=shape.bits, method=method, steps=shape.steps, batch_size=shape.batch_size, init_batches=1,
        qat_epochs="1+1", max_memory="1000000GB",  # all in memory
    )  # fmt: skip
    tokens = random_tokens(geometry, shape.steps * shape.batch_size, shape.length, seed=0)
    teacher = random_model(geometry, seed=0).requires_grad_(False)
    student = make_student(teacher, recipe, tokens)
    return TrainJob(teacher, student, tokens, recipe, score=lambda model: 0.0)


def minutes(name: str, seconds: Sequence[float]) -> float:
    """The paper's entire training on MNLI, from the seconds per step."""
    plan = paper_plan("mnli")
    if name == "qat":  # two stages of three epochs
        epochs = [float(part) for part in plan.qat_epochs.split("+")]
        batches = TRAINING_EXAMPLES / plan.batch_size
        return sum(e * batches * s for e, s in zip(epochs, seconds, strict=True)) / 60
    if name == "rem":
        return plan.rem_steps * sum(seconds) / 60
    return plan.steps * (max(seconds) if name == "mrem-p" else sum(seconds)) / 60


def _record(shape: Shape, name: str, found: Measurement) -> Record:
    papers = paper.MAIN["mnli"][2][paper.PAPER_MODELS[shape.name]].get((shape.bits, name))
    share = shape.batch_size / paper_plan("mnli").batch_size
    seconds = found.seconds
    gigabytes = found.worker if name == "mrem-p" else found.gigabytes
    return {
        "model": shape.name,
        "method": name,
        "seconds_per_step": max(seconds) if name in ("qat", "mrem-p") else sum(seconds),
        "minutes": minutes(name, seconds) / share,
        "paper_minutes": papers and papers.minutes,
        "gigabytes": gigabytes,
        "paper_gigabytes": papers and papers.gigabytes,
    }


def show(records: list[Record], shape: Shape) -> Shown:
    columns = [
        words("model", "Model"),
        method(),
        quantity("seconds_per_step", "Seconds per step"),
        quantity("minutes", "Time, min (extrapolated)"),
        quantity("paper_minutes", "paper"),
        quantity("gigabytes", "Memory, GiB"),
        quantity("paper_gigabytes", "paper"),
    ]
    found = []
    for model in dict.fromkeys(r["model"] for r in records):
        own = {r["method"]: r for r in records if r["model"] == model}
        for key, unit, pairs in (
            ("gigabytes", "GiB", (("rem", "mrem-s"), ("mrem-p", "mrem-s"), ("mrem-s", "qat"))),
            ("minutes", "min", (("mrem-p", "mrem-s"), ("mrem-s", "qat"))),
        ):
            for less, more in pairs:
                if less in own and more in own:
                    what = "memory" if unit == "GiB" else "time"
                    claim = f"{model}: {NAMES[less]} takes less {what} than {NAMES[more]}"
                    printed = [own[m][f"paper_{key}"] for m in (less, more)]
                    papers = (printed[0], printed[1]) if None not in printed else None
                    found.append(claims.less(claim, own[less][key], own[more][key], unit, papers))
    plan = paper_plan("mnli")
    scaled = shape.batch_size != plan.batch_size
    batch = f", scaled to batches of {plan.batch_size}" if scaled else ""
    notes = [
        f"Random weights, {shape.bits}, batch {shape.batch_size} × {shape.length} tokens; means of "
        f"{shape.steps} measured steps, extrapolated to the paper's on MNLI{batch}: {plan.steps:,} per "
        f"module, {plan.rem_steps} per matmul of REM, {plan.qat_epochs} epochs of {TRAINING_EXAMPLES:,} "
        "examples for QAT.",
        f"REM is measured on {REM_LAYERS} layers and computed for all. MREM-P: the slowest module, with a "
        "device per module. Seconds per step of REM and MREM-S are sums over all modules. Memory is that of "
        f"the process with its libraries and the cache of {plan.calib_size:,} examples; MREM-P has queues "
        "instead of the cache. The time to fill the cache is not included. The paper used V100 GPUs.",
    ]
    if scaled:
        notes.append(
            f"Memory is for batches of {shape.batch_size}, not scaled: with {plan.batch_size} the "
            "activations of a step, most of QAT's memory, would be larger."
        )
    return Shown(columns, records, found, [], notes)
