"""Latency of exported models against ONNX rivals made on the spot from the same full-precision model.

Reports median and p95 latency, throughput, load time, file size and memory. With DIR, the result folder of a
run: its ONNX files, and rivals made from the model that its recipe names. Without: random weights in a
--geometry. Every model runs in a separate process. All take turns, one run each per round; a speed-up is the
median over the rounds of the ratio to ORT fp32. Sessions have onnxruntime's default options except for the
number of threads; only the entry "with --options" has others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import explained
from mrem_deploy.base.progress import say
from mrem_deploy.base.scratch import scratch_folder
from mrem_deploy.benchmarks import options as opt
from mrem_deploy.benchmarks.geometry import SPELLING, parse_geometry
from mrem_deploy.benchmarks.latency.settings import (
    OPTIONS_SPELLING,
    PEERS,
    RaceSettings,
    Shape,
    parse_session_options,
    read_shape,
)
from mrem_deploy.benchmarks.output import Result
from mrem_deploy.deploy.optimizers import check_optimizers

if TYPE_CHECKING:
    from mrem_deploy.benchmarks.latency.race import Standing
    from mrem_deploy.benchmarks.latency.subject import Subject

EXAMPLES = """\
examples:
  python -m mrem_deploy.benchmark latency result --out results
  python -m mrem_deploy.benchmark latency --geometry minilm-l6 --bits 4-4-8,2-2-8 --peers openvino
  python -m mrem_deploy.benchmark latency result --shapes 1x16,32x64 --threads 1,4 --profile-nodes
  python -m mrem_deploy.benchmark latency result --options "disabled_optimizers=SkipLayerNormFusion"
"""
DEFAULTS = {
    "geometry": opt.Default(parse_geometry("bert-base"), parse_geometry("minilm-l6")),
    "bits": opt.Default(("4-4-8", "2-2-8"), ("4-4-8",)),
    "shapes": opt.Default((Shape(1, 32), Shape(1, 128), Shape(8, 128)), (Shape(1, 32), Shape(1, 128))),
    "thread_counts": opt.Default((1,), (1,)),
    "rounds": opt.Default(30, 8),
    "warmup": opt.Default(3, 1),
    "loads": opt.Default(3, 1),
}
TUNED = "disabled_optimizers=SkipLayerNormFusion"
DEVICES = ("auto", "cpu", "gpu")


def add_options(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, read: Callable[[str], Any], help: str, name: str | None = None) -> None:
        opt.add_option(parser, flag, read, help, DEFAULTS, name)

    parser.add_argument("folder", nargs="?", metavar="DIR", help="result folder; without it, random weights")
    add("--geometry", parse_geometry, f"without DIR: shape of the model: {SPELLING}")
    add("--bits", opt.several(opt.bits, "--bits", "4-4-8,2-2-8"), "without DIR: W-E-A settings")
    parser.add_argument(
        "--per-channel", action="store_true", help="without DIR: one weight scale per channel"
    )
    parser.add_argument("--symmetric", action="store_true", help="without DIR: no asymmetric activations")
    parser.add_argument("--model", help="with DIR: where the full-precision model is now, if it has moved")
    parser.add_argument("--data", help="with DIR: where the task's data is now, if it has moved")
    add("--shapes", opt.several(read_shape, "--shapes", "1x32,8x128"), "batch x tokens")
    counts = opt.several(opt.whole("--threads", 1, opt.MOST_THREADS), "--threads", "1,2")
    add("--threads", counts, "threads of one session", "thread_counts")
    add("--rounds", opt.whole("--rounds", 1), "timed rounds, one run of each model per round")
    add("--warmup", opt.whole("--warmup", 1), "rounds before the timed ones")
    add("--loads", opt.whole("--loads", 1), "fresh processes per model for its load time")
    parser.add_argument(
        "--profiles",
        type=opt.several(str, "--profiles", "ort-cpu,int8"),
        help="export profiles of ours (default ort-cpu, and what else was exported into DIR)",
    )
    parser.add_argument(
        "--options",
        type=parse_session_options,
        default=TUNED,
        metavar="OPTIONS",
        help=f"session options of a second entry of ours: {OPTIONS_SPELLING} (default {TUNED})",
    )
    parser.add_argument(
        "--peers",
        type=opt.several(str, "--peers", "openvino"),
        default=(),
        help=f"other runtimes to compare with: {', '.join(PEERS)}",
    )
    parser.add_argument("--device", default="auto", help="cpu, gpu, or auto (default): all that there are")
    parser.add_argument(
        "--profile-nodes", action="store_true", help="also report where the time goes, by operator"
    )
    opt.add_places(parser)


def run(options: argparse.Namespace) -> Result:
    from mrem_deploy.base import machine
    from mrem_deploy.benchmarks.latency import lineup, report
    from mrem_deploy.benchmarks.latency.race import race

    _check(options)
    if options.options is not None:
        check_optimizers(options.options.disabled_optimizers)
    opt.fill_in(options, DEFAULTS)
    gpu = machine.describe_machine()["gpu"]
    missing = lineup.why_no_gpu(gpu)
    if missing and options.device == "gpu":
        raise UserError(f"--device gpu: {missing}", "use --device cpu")
    subject = _subject(options)
    _check_shapes(options.shapes, subject)
    settings = RaceSettings(
        options.shapes,
        options.thread_counts,
        options.rounds,
        options.warmup,
        options.loads,
        subject.vocabulary,
        options.seed,
        options.profile_nodes,
    )
    profiles = lineup.choose_profiles(options.profiles, subject.folder)
    sections: dict[str, list[Standing]] = {}
    with scratch_folder("latency") as work, explained(work):
        on_cpu = lineup.cpu_lineup(subject, profiles, options.options, options.peers, work)
        if options.device != "gpu":
            sections["CPU"] = _measured(race(on_cpu, settings))
        if not missing and options.device != "cpu":
            failed = _race_on_gpu(subject, settings, work, sections)
            if failed is not None and options.device == "gpu":
                raise failed
            missing = None if failed is None else f"it failed: {_in_short(failed)}"
    skipped = f"GPU: skipped, {missing}." if missing and options.device == "auto" else ""
    if skipped:
        say(skipped)
    return Result(
        "latency",
        _settings(options, subject),
        report.rows(sections),
        report.tables(sections, settings),
        report.summary(sections, subject.title, settings, options.options, skipped),
        lambda: report.draw(sections, subject.title, settings),
    )


def _race_on_gpu(
    subject: Subject, settings: RaceSettings, work: Path, sections: dict[str, list[Standing]]
) -> Exception | None:
    """Add the section of the GPU; returns what went wrong, if anything did: the CPU's results must not be
    lost to it."""
    from mrem_deploy.benchmarks.latency import lineup
    from mrem_deploy.benchmarks.latency.race import race

    try:
        on_gpu = lineup.gpu_lineup(subject, settings.shapes, work)
        # A session's threads do not matter when a GPU does the work.
        sections["GPU"] = _measured(race(on_gpu, replace(settings, threads=settings.threads[:1])))
    except Exception as error:  # noqa: BLE001 - converters, runtimes and drivers; all mean the same here
        return error
    return None


def _in_short(error: Exception) -> str:
    return error.problem if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _check(options: argparse.Namespace) -> None:
    """Refuse what does not fit together before anything is built or loaded."""
    from mrem_deploy.benchmarks.latency import lineup
    from mrem_deploy.deploy.optimizers import check_optimizers

    if options.device not in DEVICES:
        raise UserError(f"--device must be {', '.join(DEVICES)}; got {options.device!r}", "see --help")
    lineup.check_installed(options.peers)
    if options.options is not None:
        check_optimizers(options.options.disabled_optimizers)
    lineup.choose_profiles(options.profiles, None)
    if options.folder is None:
        given = [flag for flag in ("model", "data") if getattr(options, flag)]
        reason = "belongs to a result folder, and none was given"
    else:
        given = [flag for flag in ("geometry", "bits", "per_channel", "symmetric") if getattr(options, flag)]
        reason = "is for random weights, but a result folder was given"
    if given:
        flag = f"--{given[0].replace('_', '-')}"
        raise UserError(f"{flag} {reason}", f"leave out {flag}" + (" or DIR" if options.folder else ""))


def _subject(options: argparse.Namespace) -> Subject:
    from mrem_deploy.benchmarks.latency import subject as subjects

    if options.folder is not None:
        return subjects.from_folder(Path(options.folder), options.model, options.data, options.seed)
    return subjects.from_geometry(
        options.geometry, options.bits, options.per_channel, options.symmetric, options.seed
    )


def _settings(options: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    """As given. A result folder has its own bits, and the default geometry would mean nothing."""
    settings = opt.as_settings(options) | {"subject": subject.title, "bits": list(subject.frozen)}
    return settings if subject.folder is None else settings | {"geometry": None}


def _check_shapes(shapes: tuple[Shape, ...], subject: Subject) -> None:
    too_long = [shape for shape in shapes if subject.longest and shape.sequence > subject.longest]
    if too_long:
        raise UserError(
            f"--shapes {too_long[0]}: {subject.title} reads at most {subject.longest} tokens",
            "use shorter sentences",
        )


def _measured(standings: list[Standing]) -> list[Standing]:
    """Without full precision there is nothing to compare with, and without ours nothing to report."""
    from mrem_deploy.benchmarks.latency.race import running

    first = standings[0]
    ours = [standing for standing in standings if standing.contender.ours]
    lost = first if first.failed else None
    if ours and not running(ours):
        lost = lost or ours[0]
    if lost is not None:
        raise UserError(
            f"{lost.contender.name} does not run here: {lost.failed}",
            "`mrem export --help` says which onnxruntime a profile needs: upgrade it, or use another profile",
        )
    return standings
