"""MREM-P against MREM-S: speed, where the workers' time goes, and what a slow worker costs the others.

The runs take turns: MREM-S with one thread, MREM-P with one thread for each worker, and MREM-S with as many
threads as MREM-P has workers. Then a delay in every step slows one worker down, in MREM-P and in lock-step,
where modules wait for each other as in a synchronous pipeline.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.progress import say
from mrem_deploy.benchmarks import options as opt
from mrem_deploy.benchmarks.geometry import Geometry, parse_geometry
from mrem_deploy.benchmarks.output import Result, table
from mrem_deploy.benchmarks.parallel_job import Job, TimedRun, run_job

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLES = """\
examples:
  python -m mrem_deploy.benchmark parallel --quick
  python -m mrem_deploy.benchmark parallel --modules 2 --steps 40 --rounds 3 --out results
      BERT-base geometry, random weights
  python -m mrem_deploy.benchmark parallel --model my-bert-mnli --modules 2 --out results
      your own checkpoint instead of random weights
  python -m mrem_deploy.benchmark parallel --device cuda --modules 2
      a GPU for each module
"""
DEFAULTS = {
    "geometry": opt.Default(parse_geometry("bert-base"), parse_geometry("minilm-l6")),
    "batch_size": opt.Default(16, 4),
    "length": opt.Default(128, 64),
    "modules": opt.Default(2, 2),
    "steps": opt.Default(30, 12),
    "rounds": opt.Default(3, 1),
    "bits": opt.Default("4-4-8", "4-4-8"),
    "staleness": opt.Default(8, 4),
    "calib_size": opt.Default(0, 0),
    "straggler": opt.Default(1, 1),
    "slower": opt.Default(3, 3),
}
# A full run caches 4,096 sentences for 2,000 steps of 32: a short one keeps that share of its work.
CACHED_PER_TRAINED = 4096 / (2000 * 32)
AIM = 1.8  # times the speed of MREM-S with two workers
S_ONE, P, S_MANY = "mrem-s, 1 thread", "mrem-p", "mrem-s, {} threads"
SLOW, SLOW_LOCKSTEP = "mrem-p, one slowed", "lock-step, one slowed"


@dataclass(frozen=True)
class WorkerShares:
    """Where one worker's time went: shares of its time after priming, medians over the rounds."""

    modules: list[int]
    computing: float
    receiving: float
    waiting: float
    transfer: float
    dropped: int


@dataclass(frozen=True)
class ParallelRow:
    """One kind of run over all rounds."""

    run: str
    seconds: float  # the median
    rounds: list[float]
    speed_up: float | None  # None next to a slowed worker, where it would say nothing
    workers: list[WorkerShares]
    step_seconds: dict[str, float]  # by module, from "1"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def add_options(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, least: int, help: str) -> None:
        opt.add_option(parser, flag, opt.whole(flag, least), help, DEFAULTS)

    parser.add_argument("--model", metavar="DIR", help="a checkpoint instead of random weights in --geometry")
    add("--modules", 2, "modules, and workers with one thread each")
    add("--steps", 2, "training steps per module")
    add("--rounds", 1, "times that the runs without a straggler are repeated, in turn")
    add("--staleness", 1, "entries of the queues")
    add("--calib-size", 0, "sentences that MREM-S caches; 0: the share of a full run")
    add("--straggler", 0, "module that is slowed down, from 1; 0: leave that part out")
    add("--slower", 2, "times slower")
    opt.add_option(parser, "--bits", opt.bits, "W-E-A", DEFAULTS)
    opt.add_device(parser)
    opt.add_shared(parser, DEFAULTS)


def run(options: argparse.Namespace) -> Result:
    opt.fill_in(options, DEFAULTS)
    _check(options)
    base = _job(options)
    jobs = {
        S_ONE: replace(base, method="mrem-s", workers=1),
        P: base,
    }
    if base.device == "cpu":  # on a GPU threads make no difference
        many = replace(base, method="mrem-s", workers=1, threads=options.modules)
        jobs[S_MANY.format(options.modules)] = many
    runs: dict[str, list[TimedRun]] = {name: [] for name in jobs}
    for number in range(options.rounds):
        for name, job in jobs.items():
            say(f"round {number + 1} of {options.rounds}: {name}")
            runs[name].append(run_job(job))
    if options.straggler:
        slowed = replace(base, slowdown={options.straggler - 1: float(options.slower)})
        for name, job in ((SLOW, slowed), (SLOW_LOCKSTEP, replace(slowed, lockstep=True))):
            say(name)
            runs[name] = [run_job(job)]
    # Next to a slow worker the pace of the others counts; the speed of the entire run is the slow one's.
    rows = [
        summarise(name, done, runs[S_ONE] if name in jobs else [], options.steps)
        for name, done in runs.items()
    ]
    return Result(
        "parallel",
        opt.as_settings(options) | {"calib_size": base.calib_size, "aim": AIM},
        [row.to_dict() for row in rows],
        "\n\n".join(filter(None, (_speed_table(rows), _worker_table(rows), _straggler_table(rows, options)))),
        _summary(rows, options, base),
        lambda: _draw(rows, options),
    )


def _check(options: argparse.Namespace) -> None:
    options.device = _device(options)
    if options.model is not None:
        options.geometry = geometry_of(options.model)
    if options.modules > options.geometry.layers:
        raise UserError(
            f"the model has {options.geometry.layers} blocks; --modules {options.modules} are too many",
            f"use --modules {options.geometry.layers} or fewer",
        )
    if options.straggler > options.modules:
        raise UserError(
            f"--straggler must be 1 to {options.modules}, or 0 for none; got {options.straggler}",
            "name one of the modules",
        )


def _device(options: argparse.Namespace) -> str:
    """cpu or cuda; every worker needs a separate GPU."""
    import torch

    from mrem_deploy.preflight import resolve_device

    device = resolve_device(options.device)
    if device.type == "cpu":
        return "cpu"
    gpus = 1 if device.index is not None else torch.cuda.device_count()
    if gpus < options.modules:
        raise UserError(
            f"--device {options.device} is {gpus} GPU(s), and {options.modules} workers need one each",
            "use --device cuda, with at most as many --modules as there are GPUs",
        )
    return "cuda"


def geometry_of(model: str) -> Geometry:
    """The shape of a checkpoint, for tokens within its vocabulary."""
    from mrem_deploy.models.loading import load_model

    config = load_model(model, "sequence-classification")[0].config
    return Geometry(
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.intermediate_size,
        config.vocab_size,
    )


def _job(options: argparse.Namespace) -> Job:
    cached = round(options.steps * options.batch_size * CACHED_PER_TRAINED)
    return Job(
        "mrem-p",
        options.geometry,
        options.model,
        options.modules,
        options.modules,
        1,
        options.bits,
        options.batch_size,
        options.length,
        options.steps,
        options.calib_size or max(options.batch_size, cached),
        options.staleness,
        options.seed,
        device=options.device,
    )


def summarise(name: str, runs: Sequence[TimedRun], base: Sequence[TimedRun], steps: int) -> ParallelRow:
    """Medians over the rounds; a speed-up compares runs of the same round."""
    speed_up = None
    if len(runs) == len(base):
        speed_up = statistics.median(b.seconds / r.seconds for b, r in zip(base, runs, strict=True))
    workers, step_seconds = [], {}
    for same in zip(*(run.workers for run in runs), strict=True):  # one worker in every round
        whole = [max(report.seconds.whole, 1e-9) for report in same]
        workers.append(
            WorkerShares(
                modules=list(same[0].modules),
                computing=_median_share([report.seconds.computing for report in same], whole),
                receiving=_median_share([report.seconds.receiving for report in same], whole),
                waiting=_median_share([report.seconds.waiting for report in same], whole),
                transfer=_median_share([report.transfer_seconds for report in same], whole),
                dropped=same[0].dropped,
            )
        )
        for module in same[0].modules:
            step_seconds[str(module)] = statistics.median(
                report.training_seconds[module - 1] / steps for report in same
            )
    return ParallelRow(
        run=name,
        seconds=statistics.median(run.seconds for run in runs),
        rounds=[run.seconds for run in runs],
        speed_up=speed_up,
        workers=workers,
        step_seconds=step_seconds,
    )


def _median_share(parts: Sequence[float], whole: Sequence[float]) -> float:
    return statistics.median(part / all_of_it for part, all_of_it in zip(parts, whole, strict=True))


def _speed_table(rows: list[ParallelRow]) -> str:
    cells = [
        [
            row.run,
            f"{row.seconds:.1f}",
            f"{min(row.rounds):.1f} – {max(row.rounds):.1f}",
            f"{row.speed_up:.2f}×",
        ]
        for row in rows
        if row.speed_up is not None
    ]
    return table(["run", "seconds", "lowest – highest", f"against {S_ONE}"], cells)


def _worker_table(rows: list[ParallelRow]) -> str:
    head = ["run", "worker", "modules", "computing", "receiving", "waiting", "moving, meanwhile", "dropped"]
    cells = [
        [
            row.run,
            str(rank),
            ", ".join(map(str, worker.modules)),
            f"{worker.computing:.1%}",
            f"{worker.receiving:.1%}",
            f"{worker.waiting:.1%}",
            f"{worker.transfer:.1%}",
            str(worker.dropped),
        ]
        for row in rows
        for rank, worker in enumerate(row.workers)
    ]
    return table(head, cells)


def _straggler_table(rows: list[ParallelRow], options: argparse.Namespace) -> str:
    by_name = {row.run: row.step_seconds for row in rows}
    if SLOW not in by_name:
        return ""
    cells = []
    for module, alone in by_name[P].items():
        name = f"{module} ({options.slower}× slower)" if module == str(options.straggler) else module
        slowed = [by_name[run][module] for run in (SLOW, SLOW_LOCKSTEP)]
        cells.append([name, f"{alone:.3f}", *(f"{s:.3f} ({s / alone - 1:+.0%})" for s in slowed)])
    return table(["module", "s per step", f"s per step, {SLOW}", f"s per step, {SLOW_LOCKSTEP}"], cells)


def _summary(rows: list[ParallelRow], options: argparse.Namespace, job: Job) -> str:
    by_name = {row.run: row for row in rows}
    waiting = max(worker.waiting for worker in by_name[P].workers)
    model = options.model or f"{options.geometry}, random weights"
    lines = [
        f"{model}, {options.bits}, batch {options.batch_size} × {options.length} tokens, "
        f"{options.steps} steps per module, {job.calib_size} sentences cached by mrem-s, "
        f"queues of {options.staleness}; medians of {options.rounds} rounds.",
        f"mrem-p on {options.modules} workers: {by_name[P].speed_up:.2f}× mrem-s on one thread; "
        f"after priming the workers waited at most {waiting:.1%} of the time.",
    ]
    if options.modules == 2:
        lines.append(f"The aim for two workers is {AIM}×.")
    return "\n".join(lines)


def _draw(rows: list[ParallelRow], options: argparse.Namespace) -> Figure:
    from mrem_deploy.report.plots import BLUE, ORANGE, SKY, new_figure

    figure, (left, right) = new_figure(3.4, columns=2)
    timed = [row for row in rows if row.speed_up is not None]
    bars = left.barh(range(len(timed)), [row.speed_up for row in timed], color=[SKY, BLUE, SKY], height=0.6)
    left.bar_label(bars, [f"{row.speed_up:.2f}×" for row in timed], padding=4)
    left.set_yticks(range(len(timed)), [row.run for row in timed])
    left.invert_yaxis()
    left.margins(x=0.18)
    left.grid(visible=False, axis="y")
    left.set(xlabel=f"speed, {S_ONE} = 1", title="Speed")
    by_name = {row.run: row.step_seconds for row in rows}
    runs = [name for name in (P, SLOW, SLOW_LOCKSTEP) if name in by_name]
    for index, (name, colour) in enumerate(zip(runs, (BLUE, SKY, ORANGE), strict=False)):
        at = [int(module) + (index - (len(runs) - 1) / 2) * 0.27 for module in by_name[name]]
        right.bar(at, list(by_name[name].values()), 0.25, color=colour, label=name)
    right.set_xticks([int(module) for module in by_name[P]], list(by_name[P]))
    right.grid(visible=False, axis="x")
    right.margins(y=0.3)
    right.set(xlabel="module", ylabel="seconds per step", title="Next to a slow worker")
    right.legend(loc="upper left", fontsize=8)
    return figure
