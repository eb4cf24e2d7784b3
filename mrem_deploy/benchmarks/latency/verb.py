"""Latency of exported models against rivals made on the spot from the same full-precision model.

Reports median and p95 latency, throughput, load time, file size and memory. With DIR, the result folder of a
run: its ONNX files, and rivals made from the model that its recipe names. Without: random weights in a
--geometry. Every model runs in a separate process. All take turns, one run each per round; a speed-up is the
median over the rounds of the ratio to ORT fp32. Sessions have onnxruntime's default options except for the
number of threads; only the entry "with --options" has others. Entries "mrem-runtime" are opened by the
package of that name, where it is installed, and are also compared with the same weights in plain onnxruntime.

Shapes are random tokens without padding. --workload adds real sentences, or only their lengths, in batches
in order of arrival and sorted by length, padded where the runtime needs it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import check_folder, explained
from mrem_deploy.base.progress import say
from mrem_deploy.base.scratch import scratch_folder
from mrem_deploy.benchmarks import options as opt
from mrem_deploy.benchmarks.geometry import SPELLING, parse_geometry
from mrem_deploy.benchmarks.latency.settings import (
    INTEGER,
    OPTIONS_SPELLING,
    PEERS,
    RIVALS,
    RaceSettings,
    Shape,
    check_attention,
    check_rival,
    parse_session_options,
    read_shape,
    read_shapes_or_none,
)
from mrem_deploy.benchmarks.output import Result
from mrem_deploy.deploy.optimizers import check_optimizers

if TYPE_CHECKING:
    from mrem_deploy.benchmarks.latency.contenders import Contender
    from mrem_deploy.benchmarks.latency.kept import Traits
    from mrem_deploy.benchmarks.latency.serving import ServingSettings
    from mrem_deploy.benchmarks.latency.standings import Standing
    from mrem_deploy.benchmarks.latency.subject import Subject

EXAMPLES = """\
examples:
  python -m mrem_deploy.benchmark latency result --out results
  python -m mrem_deploy.benchmark latency --geometry minilm-l6 --bits 4-4-8,2-2-8 --peers openvino,ctranslate2
  python -m mrem_deploy.benchmark latency result --workload MNLI/dev_matched.jsonl --workload-batches 1,8,32
  python -m mrem_deploy.benchmark latency --workload lengths.json --rivals dynamic --shapes 1x32
  python -m mrem_deploy.benchmark latency --memory-shapes 1x128,32x128 --together 2 --threads 1,2
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
    "memory_shapes": opt.Default(
        (Shape(1, 32), Shape(1, 128), Shape(8, 128), Shape(32, 128)), (Shape(1, 32), Shape(1, 128))
    ),
    "workload_size": opt.Default(256, 64),
    "workload_batches": opt.Default((1, 8, 32), (1, 8)),
    "workload_passes": opt.Default(3, 1),
}
TUNED = "disabled_optimizers=SkipLayerNormFusion"
MOST_TOGETHER = 64
# The options that decide which models are made.
DECIDE = (
    *("folder", "model", "data", "geometry", "bits", "per_channel", "symmetric", "seed"),
    *("profiles", "options", "peers", "rivals", "attention"),
)
MOST_SENTENCES = 100_000
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
        type=opt.several(str, "--peers", "openvino,ctranslate2"),
        default=(),
        help=f"other runtimes to compare with: {', '.join(PEERS)}",
    )
    parser.add_argument(
        "--rivals",
        type=opt.several(check_rival, "--rivals", "dynamic,static"),
        default=RIVALS,
        help=f"onnxruntime's own quantizers to compare with (default {','.join(RIVALS)})",
    )
    add(
        "--memory-shapes",
        read_shapes_or_none,
        "batch x tokens at which memory is measured, each in a process of its own, or none",
        "memory_shapes",
    )
    parser.add_argument(
        "--together",
        type=opt.whole("--together", 2, MOST_TOGETHER),
        default=0,
        metavar="SESSIONS",
        help="also run so many sessions of each model at the same time: what all do together",
    )
    parser.add_argument(
        "--keep",
        metavar="FOLDER",
        help="keep the models there; a run that finds them measures them without making them again",
    )
    _add_workload(parser, add)
    parser.add_argument(
        "--attention",
        type=opt.several(check_attention, "--attention", "int8,float"),
        default=(INTEGER,),
        help="how mrem-runtime multiplies inside attention, a row for each: int8 (default), float",
    )
    parser.add_argument("--device", default="auto", help="cpu, gpu, or auto (default): all that there are")
    parser.add_argument(
        "--profile-nodes", action="store_true", help="also report where the time goes, by operator"
    )
    opt.add_places(parser)


def _add_workload(parser: argparse.ArgumentParser, add: Callable[..., None]) -> None:
    parser.add_argument(
        "--workload",
        metavar="FILE",
        help="also run sentences of mixed lengths: text, csv, tsv, jsonl or parquet, or lengths.json",
    )
    parser.add_argument(
        "--workload-columns",
        type=opt.several(str, "--workload-columns", "premise,hypothesis"),
        metavar="COLUMNS",
        help="its column of sentences, or two of pairs (default: the usual names of tasks)",
    )
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="without DIR: the model folder whose tokenizer reads the sentences"
    )
    count = opt.whole("--workload-size", 1, MOST_SENTENCES)
    add("--workload-size", count, "sentences that are taken, from the beginning of the file")
    sizes = opt.several(opt.whole("--workload-batches", 1, 4096), "--workload-batches", "1,8,32")
    add("--workload-batches", sizes, "sentences in a batch")
    add("--workload-passes", opt.whole("--workload-passes", 1), "timed passes, after one of warm-up")


def run(options: argparse.Namespace) -> Result:
    from mrem_deploy.base import machine
    from mrem_deploy.benchmarks.latency import lineup, report, tables
    from mrem_deploy.benchmarks.latency.race import race
    from mrem_deploy.benchmarks.latency.serving import serve_all

    _check(options)
    if options.options is not None:
        check_optimizers(options.options.disabled_optimizers)
    opt.fill_in(options, DEFAULTS)
    if options.keep is not None:
        check_folder(options.keep, "--keep")
    gpu = machine.describe_machine()["gpu"]
    missing = lineup.why_no_gpu(gpu)
    if missing and options.device == "gpu":
        raise UserError(f"--device gpu: {missing}", "use --device cpu")
    sections: dict[str, list[Standing]] = {}
    with scratch_folder("latency") as scratch, explained(scratch):
        work = scratch if options.keep is None else Path(options.keep).absolute()
        traits, on_cpu, subject = _lineup(options, work)
        _check_shapes((*options.shapes, *options.memory_shapes), traits)
        settings = RaceSettings(
            options.shapes,
            options.thread_counts,
            options.rounds,
            options.warmup,
            options.loads,
            traits.vocabulary,
            options.seed,
            options.profile_nodes,
            options.memory_shapes,
            options.together,
        )
        serving = _serving(options, traits)
        if options.device != "gpu":
            sections["CPU"] = _measured(race(on_cpu, settings))
            if serving is not None:
                serve_all(sections["CPU"], serving)
                _measured(sections["CPU"])
        if subject is None:
            missing = "--keep is for models on the CPU"
        elif not missing and options.device != "cpu":
            failed = _race_on_gpu(subject, settings, work, sections)
            if failed is not None and options.device == "gpu":
                raise failed
            missing = None if failed is None else f"it failed: {_in_short(failed)}"
    skipped = f"GPU: skipped, {missing}." if missing and options.device == "auto" else ""
    if skipped:
        say(skipped)
    return Result(
        "latency",
        _settings(options, traits),
        report.rows(sections),
        tables.tables(sections, settings),
        report.summary(sections, traits.title, settings, options.options, skipped, serving),
        lambda: report.draw(sections, traits.title),
    )


def _lineup(options: argparse.Namespace, work: Path) -> tuple[Traits, list[Contender], Subject | None]:
    """The models, made now or found in the folder of --keep; no subject where nothing else may be made."""
    from mrem_deploy.benchmarks.latency import kept, lineup

    asked = {name: opt.as_settings(options)[name] for name in DECIDE}
    found = None if options.keep is None else kept.read(work, asked)
    if found is not None:
        say(f"measuring the models in {work}")
        return *found, None
    subject = _subject(options)
    traits = kept.traits_of(subject)
    _check_shapes((*options.shapes, *options.memory_shapes), traits)
    _serving(options, traits)  # what is wrong with it is said before anything is made
    profiles = lineup.choose_profiles(options.profiles, subject.folder)
    made = lineup.cpu_lineup(
        subject, profiles, options.options, options.peers, work, options.rivals, options.attention
    )
    if options.keep is None:
        return traits, made, subject
    kept.save(work, asked, traits, made)
    again = kept.read(work, asked)
    assert again is not None
    return *again, None


def _serving(options: argparse.Namespace, traits: Traits) -> ServingSettings | None:
    """The workload and how it is timed; None without --workload."""
    if options.workload is None:
        return None
    from mrem_deploy.benchmarks.latency.serving import ServingSettings
    from mrem_deploy.benchmarks.latency.workload import RandomTokens, read_workload
    from mrem_deploy.models.loading import load_tokenizer

    place = options.folder or options.tokenizer
    tokenizer = None if place is None else load_tokenizer(Path(place))
    if tokenizer is not None and len(tokenizer) > traits.vocabulary:
        raise UserError(
            f"--tokenizer {place} has {len(tokenizer):,} tokens, the model only {traits.vocabulary:,}",
            "give one that belongs to the geometry",
        )
    work = read_workload(
        Path(options.workload),
        tokenizer,
        (traits.max_length, options.workload_size),
        RandomTokens(traits.vocabulary, traits.padding, options.seed),
        options.workload_columns,
    )
    say(f"workload {work.describe()}")
    return ServingSettings(work, options.workload_batches, options.workload_passes, options.thread_counts)


def _race_on_gpu(
    subject: Subject, settings: RaceSettings, work: Path, sections: dict[str, list[Standing]]
) -> Exception | None:
    """Add the section of the GPU; returns what went wrong, if anything did: the CPU's results must not be
    lost to it."""
    from mrem_deploy.benchmarks.latency import lineup
    from mrem_deploy.benchmarks.latency.race import race

    try:
        on_gpu = lineup.gpu_lineup(subject, settings.shapes, work)
        # A session's threads do not matter when a GPU does the work, nor does the process's own memory.
        there = replace(settings, threads=settings.threads[:1], memory_shapes=())
        sections["GPU"] = _measured(race(on_gpu, there))
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
    if options.keep is not None and options.device == "gpu":
        raise UserError("--keep is for models on the CPU", "leave out --keep or --device gpu")
    lineup.check_installed(options.peers)
    if options.options is not None:
        check_optimizers(options.options.disabled_optimizers)
    lineup.choose_profiles(options.profiles, None)
    if options.folder is None:
        given = [flag for flag in ("model", "data") if getattr(options, flag)]
        reason = "belongs to a result folder, and none was given"
    else:
        own = ("geometry", "bits", "per_channel", "symmetric", "tokenizer")
        given = [flag for flag in own if getattr(options, flag)]
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


def _settings(options: argparse.Namespace, traits: Traits) -> dict[str, Any]:
    """As given. A result folder has its own bits, and the default geometry would mean nothing."""
    from mrem_deploy.benchmarks.latency import lineup

    settings = opt.as_settings(options) | {"subject": traits.title, "bits": list(traits.bits)}
    with suppress(OSError):  # not built: then there are no such rows
        settings["mrem_runtime_target"] = lineup.runtime_target()
    return settings if options.folder is None else settings | {"geometry": None}


def _check_shapes(shapes: tuple[Shape, ...], traits: Traits) -> None:
    too_long = [shape for shape in shapes if traits.longest and shape.sequence > traits.longest]
    if too_long:
        raise UserError(
            f"--shapes {too_long[0]}: {traits.title} reads at most {traits.longest} tokens",
            "use shorter sentences",
        )


def _measured(standings: list[Standing]) -> list[Standing]:
    """Without full precision there is nothing to compare with, and without ours nothing to report."""
    from mrem_deploy.benchmarks.latency.standings import running

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
