"""Latency of exported models against ONNX rivals made on the spot from the same full-precision model.

With DIR, the result folder of a run: its ONNX files, and rivals of the model that its recipe names. Without:
random weights in a --geometry. Every model runs in a process of its own; all take turns, one run each per
round, and the median of the ratios to ORT fp32 within a round is reported. Sessions have onnxruntime's
default options, but for the number of threads; the entry "with --options" alone has others.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mrem_deploy.base import machine
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import explained
from mrem_deploy.base.progress import say
from mrem_deploy.benchmarks import options as opt
from mrem_deploy.benchmarks.geometry import SPELLING, parse_geometry
from mrem_deploy.benchmarks.latency import lineup as lineup
from mrem_deploy.benchmarks.latency import report as report
from mrem_deploy.benchmarks.latency import subject as subjects
from mrem_deploy.benchmarks.latency.race import Plan, Shape, Standing, race, running
from mrem_deploy.benchmarks.output import Result
from mrem_deploy.deploy.optimizers import check_optimizers

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


def read_shape(text: str) -> Shape:
    match = re.fullmatch(r"([1-9][0-9]*)[x×]([1-9][0-9]*)", text)
    if match is None:
        raise UserError(
            f"--shapes: {text!r} is no shape", "write BATCHxTOKENS, for example --shapes 1x32,8x128"
        )
    return Shape(int(match[1]), int(match[2]))


def add_options(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, read: Callable[[str], Any], help: str, name: str | None = None) -> None:
        opt.add_option(parser, flag, read, help, DEFAULTS, name)

    parser.add_argument("folder", nargs="?", metavar="DIR", help="result folder; without it, random weights")
    add("--geometry", parse_geometry, f"without DIR: shape of the model: {SPELLING}")
    add("--bits", opt.several(opt.bits, "--bits", "4-4-8,2-2-8"), "without DIR: W-E-A settings")
    parser.add_argument("--per-channel", action="store_true", help="without DIR: one weight step per channel")
    parser.add_argument("--symmetric", action="store_true", help="without DIR: no asymmetric activations")
    parser.add_argument("--model", help="with DIR: where the full-precision model is now, if it has moved")
    parser.add_argument("--data", help="with DIR: where the task's data is now, if it has moved")
    add("--shapes", opt.several(read_shape, "--shapes", "1x32,8x128"), "batch x tokens")
    counts = opt.several(opt.whole("--threads", 1), "--threads", "1,2")
    add("--threads", counts, "threads of one session", "thread_counts")
    add("--rounds", opt.whole("--rounds", 1), "timed rounds, one run of each model per round")
    add("--warmup", opt.whole("--warmup", 1), "rounds before the clock counts")
    add("--loads", opt.whole("--loads", 1), "fresh processes per model for its load time")
    parser.add_argument(
        "--profiles",
        type=opt.several(str, "--profiles", "ort-cpu,int8"),
        help="export profiles of ours (default ort-cpu, and what else was exported into DIR)",
    )
    parser.add_argument(
        "--options",
        type=lineup.parse_session_options,
        default=TUNED,
        metavar="OPTIONS",
        help=f"session options of a second entry of ours: {lineup.OPTIONS_SPELLING} (default {TUNED})",
    )
    parser.add_argument(
        "--peers",
        type=opt.several(str, "--peers", "openvino"),
        default=(),
        help=f"other runtimes to compare with: {', '.join(lineup.PEERS)}",
    )
    parser.add_argument("--device", default="auto", help="cpu, gpu, or auto (default): both, as far as there")
    parser.add_argument("--profile-nodes", action="store_true", help="also where the time goes, by operator")
    opt.add_places(parser)


def run(options: argparse.Namespace) -> Result:
    _check(options)
    if options.options is not None:
        check_optimizers(options.options.disabled_optimizers)
    opt.fill_in(options, DEFAULTS)
    gpu = machine.describe()["gpu"]
    missing = lineup.why_no_gpu(gpu)
    if missing and options.device == "gpu":
        raise UserError(f"--device gpu: {missing}", "use --device cpu")
    subject = _subject(options)
    _check_shapes(options.shapes, subject)
    plan = Plan(
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
    with TemporaryDirectory(prefix="mrem-latency-") as name, explained(Path(name)):
        work = Path(name)
        on_cpu = lineup.cpu_lineup(subject, profiles, options.options, options.peers, work)
        on_gpu = [] if missing or options.device == "cpu" else lineup.gpu_lineup(subject, work)
        if options.device != "gpu":
            sections["CPU"] = _measured(race(on_cpu, plan))
        if on_gpu:
            # The threads of a session do not matter where the work is done elsewhere.
            sections["GPU"] = _measured(race(on_gpu, replace(plan, threads=plan.threads[:1])))
    skipped = f"GPU: skipped, {missing}." if missing and options.device == "auto" else ""
    if skipped:
        say(skipped)
    return Result(
        "latency",
        _settings(options, subject),
        report.rows(sections),
        report.tables(sections, plan),
        report.summary(sections, subject.title, plan, options.options, skipped),
        lambda: report.draw(sections, subject.title, plan),
    )


def _check(options: argparse.Namespace) -> None:
    """What does not fit together, before anything is built or loaded."""
    if options.device not in DEVICES:
        raise UserError(f"--device must be {', '.join(DEVICES)}; got {options.device!r}", "see --help")
    lineup.check_installed(options.peers)
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


def _subject(options: argparse.Namespace) -> subjects.Subject:
    if options.folder is not None:
        return subjects.from_folder(Path(options.folder), options.model, options.data, options.seed)
    return subjects.from_geometry(
        options.geometry, options.bits, options.per_channel, options.symmetric, options.seed
    )


def _settings(options: argparse.Namespace, subject: subjects.Subject) -> dict[str, Any]:
    """As given; of a result folder the bits are its own and the geometry's default says nothing."""
    settings = opt.as_settings(options) | {"subject": subject.title, "bits": list(subject.frozen)}
    return settings if subject.folder is None else settings | {"geometry": None}


def _check_shapes(shapes: tuple[Shape, ...], subject: subjects.Subject) -> None:
    too_long = [shape for shape in shapes if subject.longest and shape.sequence > subject.longest]
    if too_long:
        raise UserError(
            f"--shapes {too_long[0]}: {subject.title} reads at most {subject.longest} tokens",
            "use shorter sentences",
        )


def _measured(standings: list[Standing]) -> list[Standing]:
    """Without full precision there is nothing to compare with, and without ours nothing to say."""
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
