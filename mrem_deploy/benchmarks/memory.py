"""Peak memory of MREM-S training by number of modules, and what the activation cache adds.

Each number of modules is a separate run in a fresh process: all modules in order, a few steps each, by the
code of a real run. The size of the cache is computed; with --fill the cache is really held.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.progress import say
from mrem_deploy.base.units import MIB
from mrem_deploy.benchmarks import options as opt
from mrem_deploy.benchmarks.geometry import parse_geometry
from mrem_deploy.benchmarks.memory_job import Job, Measured, cache_megabytes, in_fresh_process
from mrem_deploy.benchmarks.output import Result, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLES = """\
examples:
  python -m mrem_deploy.benchmark memory
      BERT-base, 1 and 4 modules; the cache of 4,096 sentences is computed
  python -m mrem_deploy.benchmark memory --modules 1,2,4,6 --fill --out results
      the cache is really held in memory while training
  python -m mrem_deploy.benchmark memory --modules 4 --fill disk --cache-dir scratch
      the cache is in memory-mapped files
"""
DEFAULTS = {
    "geometry": opt.Default(parse_geometry("bert-base"), parse_geometry("minilm-l6")),
    "batch_size": opt.Default(32, 8),
    "length": opt.Default(128, 128),
    "modules": opt.Default((1, 4), (1, 4)),
    "steps": opt.Default(3, 2),
    "calib_size": opt.Default(4096, 1024),
    "bits": opt.Default("4-4-8", "4-4-8"),
}
LEAST_STEPS = 2  # the optimizer's moments exist from the first step on, so the second has the peak


@dataclass(frozen=True)
class MemoryRow:
    """One number of modules: peaks over all phases."""

    measured: Measured
    peak_mb: float  # of the process, as measured
    training_mb: float  # without any cache
    cache_mb: float  # of the full calibration set
    total_mb: float  # training with the full cache
    fits: bool

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.measured.to_dict(),
            "peak_mb": self.peak_mb,
            "training_mb": self.training_mb,
            "cache_mb": self.cache_mb,
            "total_mb": self.total_mb,
            "fits": self.fits,
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    counts = opt.several(opt.whole("--modules", 1), "--modules", "1,4")
    opt.add_option(parser, "--modules", counts, "numbers of modules to compare", DEFAULTS)
    opt.add_option(parser, "--bits", opt.bits, "W-E-A", DEFAULTS)
    opt.add_option(
        parser, "--steps", opt.whole("--steps", LEAST_STEPS), "training steps per module", DEFAULTS
    )
    opt.add_option(parser, "--calib-size", opt.whole("--calib-size", 1), "sentences in the cache", DEFAULTS)
    parser.add_argument(
        "--fill",
        nargs="?",
        const="ram",
        metavar="ram|disk",
        help="train with a cache of --calib-size sentences that is really filled, in memory (ram, the "
        "default) or in memory-mapped files (disk); without --fill its size is computed",
    )
    parser.add_argument("--cache-dir", metavar="DIR", help="folder of the memory-mapped files of --fill disk")
    parser.add_argument(
        "--limit", default="24GB", metavar="SIZE", help="memory that all must fit in (default 24GB)"
    )
    opt.add_shared(parser, DEFAULTS)


def run(options: argparse.Namespace) -> Result:
    opt.fill_in(options, DEFAULTS)
    limit_mb = _check(options)
    full = cache_megabytes(options.calib_size, options.length, options.geometry.hidden)
    rows = []
    for modules in options.modules:
        say(f"{options.geometry}: {modules} module{'s' if modules > 1 else ''}")
        rows.append(with_totals(in_fresh_process(_job(options, modules)), full, limit_mb))
    return Result(
        "memory",
        opt.as_settings(options),
        [row.to_dict() for row in rows],
        _table(rows, options.fill is not None),
        _summary(rows, options, full),
        lambda: _draw(rows, options, limit_mb),
    )


def _check(options: argparse.Namespace) -> float:
    """Refuse before measuring what would fail later; returns the limit in MiB."""
    import psutil

    from mrem_deploy.recipe_values import parse_megabytes

    layers = options.geometry.layers
    too_many = [count for count in options.modules if count > layers]
    if too_many:
        raise UserError(
            f"{options.geometry} has {layers} blocks, so --modules must be 1 to {layers}; got {too_many[0]}",
            "use fewer modules or a deeper --geometry",
        )
    if options.fill not in (None, "ram", "disk"):
        raise UserError(f"--fill must be ram or disk; got {options.fill!r}", "for example --fill disk")
    if options.cache_dir is not None and options.fill != "disk":
        raise UserError("--cache-dir is for memory-mapped files", "add --fill disk")
    try:
        limit_mb = parse_megabytes(options.limit)
    except UserError:
        raise UserError(
            f"--limit must be a size such as 24GB or 500MB; got {options.limit!r}",
            "give a number and GB or MB",
        ) from None
    needed = cache_megabytes(options.calib_size, options.length, options.geometry.hidden)
    free = psutil.virtual_memory().available / MIB
    if options.fill == "ram" and needed > free and max(options.modules) > 1:
        raise UserError(
            f"the cache needs {needed:.0f} MiB, but only {free:.0f} MiB of memory are free",
            "use --fill disk, or lower --calib-size or --length",
        )
    return limit_mb


def _job(options: argparse.Namespace, modules: int) -> Job:
    examples = options.steps * options.batch_size if options.fill is None else options.calib_size
    return Job(
        options.geometry,
        modules,
        options.bits,
        options.batch_size,
        options.length,
        options.steps,
        examples,
        options.fill == "disk",
        Path(options.cache_dir).absolute() if options.cache_dir else None,
        options.threads,
        options.seed,
    )


def with_totals(measured: Measured, full_cache_mb: float, limit_mb: float) -> MemoryRow:
    """Exchange what each phase had in its cache for the cache of the full calibration set.

    With --fill these are the same. Pages of mapped files count while they are resident, though the system
    takes them back when others need them.
    """
    phases = measured.phases
    total = max(
        phase.peak_mb - phase.cache_mb + (full_cache_mb if phase.cache_mb else 0.0) for phase in phases
    )
    return MemoryRow(
        measured,
        peak_mb=max(phase.peak_mb for phase in phases),
        training_mb=max(phase.peak_mb - phase.cache_mb for phase in phases),
        cache_mb=full_cache_mb if measured.modules > 1 else 0.0,
        total_mb=total,
        fits=bool(total <= limit_mb),
    )


def _table(rows: list[MemoryRow], filled: bool) -> str:
    head = [
        "modules",
        "blocks of each",
        "training, MiB",
        f"cache, MiB ({'filled' if filled else 'computed'})",
        "together, MiB",
        "process peak, MiB",
        "fits",
    ]
    cells = [
        [
            str(row.measured.modules),
            " + ".join(str(size) for size in np.diff(row.measured.cuts)),
            f"{row.training_mb:,.0f}",
            f"{row.cache_mb:,.0f}" if row.cache_mb else "none",
            f"{row.total_mb:,.0f}",
            f"{row.peak_mb:,.0f}",
            "yes" if row.fits else "no",
        ]
        for row in rows
    ]
    return table(head, cells)


def _summary(rows: list[MemoryRow], options: argparse.Namespace, full_cache_mb: float) -> str:
    lines = [
        f"{options.geometry}, {options.bits}, batch {options.batch_size} × {options.length} tokens; "
        f"{rows[0].measured.peak_kind}.",
        f"Cache of {options.calib_size:,} sentences × {options.length} tokens, two streams in float32: "
        f"{full_cache_mb:,.0f} MiB.",
    ]
    if len(rows) > 1:
        first, last = rows[0], rows[-1]
        share = last.training_mb / first.training_mb
        lines.append(
            f"Training with {last.measured.modules} modules takes {share:.0%} of the memory with "
            f"{first.measured.modules}, apart from the cache."
        )
    return "\n".join(lines)


def _draw(rows: list[MemoryRow], options: argparse.Namespace, limit_mb: float) -> Figure:
    from mrem_deploy.report.plots import BLUE, INK, ORANGE, SKY, new_figure

    figure, axes = new_figure(3.7)
    at = np.arange(len(rows))
    models = [min(row.measured.ready_mb, row.training_mb) for row in rows]
    parts = [
        ("models, libraries", models, SKY, None),
        (
            "training",
            [row.training_mb - ready for row, ready in zip(rows, models, strict=True)],
            BLUE,
            None,
        ),
        (
            f"cache ({'filled' if options.fill else 'computed'})",
            [row.total_mb - row.training_mb for row in rows],
            ORANGE,
            None if options.fill else "//",
        ),
    ]
    bottom = np.zeros(len(rows))
    for label, megabytes, colour, hatch in parts:
        height = np.array(megabytes) / 1024
        axes.bar(at, height, 0.55, bottom=bottom, color=colour, label=label, hatch=hatch, edgecolor="white")
        bottom += height
    for x, top in zip(at, bottom, strict=True):
        axes.annotate(f"{top:.1f}", (x, top), xytext=(0, 4), textcoords="offset points", ha="center")
    if limit_mb / 1024 < 5 * bottom.max():  # a limit far above would only flatten the bars
        axes.axhline(limit_mb / 1024, color=INK, linestyle=(0, (5, 2)), linewidth=1.2)
        axes.annotate(
            f"limit {options.limit}",
            (0.99, limit_mb / 1024),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="right",
        )
    axes.set_xticks(at, [str(row.measured.modules) for row in rows])
    axes.set(
        xlabel="modules",
        ylabel="peak memory (GiB)",
        title=f"MREM-S on {options.geometry}, batch {options.batch_size} × {options.length}",
    )
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure
