"""Cost of a training step of a quantized module against the same step unquantized.

Both are steps of the same trainer with the same teacher, batches and loss; the students differ only in their
quantizers. Every available implementation runs the quantized step (--kernels), which gives two ratios: the
cost over the unquantized step, and what our kernels save. Before any timing, two checks: the quantized
student quantizes every operand of every matmul in the module, and all steps train.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mrem_deploy.base.errors import UserError
from mrem_deploy.benchmarks import options as opt
from mrem_deploy.benchmarks.contenders import CONTENDERS, contender
from mrem_deploy.benchmarks.geometry import parse_geometry
from mrem_deploy.benchmarks.output import Result, table
from mrem_deploy.benchmarks.step_rows import StepRow, style_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLES = """\
examples:
  python -m mrem_deploy.benchmark step
      BERT-base, second of 4 modules, four bit widths, per tensor and per channel
  python -m mrem_deploy.benchmark step --bits 2-2-8 --no-per-channel --module 1 --rounds 15
  python -m mrem_deploy.benchmark step --geometry minilm-l6 --batch-size 16 --length 64 --out results
  python -m mrem_deploy.benchmark step --device cuda
"""
DEFAULTS = {
    "geometry": opt.Default(parse_geometry("bert-base"), parse_geometry("minilm-l6")),
    "batch_size": opt.Default(32, 8),
    "length": opt.Default(128, 128),
    "bits": opt.Default(("8-8-8", "4-4-8", "2-2-8", "2-2-4"), ("4-4-8", "2-2-8")),
    "modules": opt.Default(4, 4),
    "module": opt.Default(2, 2),
    "rounds": opt.Default(9, 5),
    "warmup": opt.Default(2, 1),
}
# A quantized step should cost at most this many unquantized ones. Measured with the C++ kernels: 1.01 to 1.24
# (docs/kernels.md).
AIM = 1.25


def add_options(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, read: Callable[[str], Any], help: str) -> None:
        opt.add_option(parser, flag, read, help, DEFAULTS)

    add("--bits", opt.several(opt.bits, "--bits", "4-4-8,2-2-8"), "W-E-A settings to time")
    parser.add_argument(
        "--per-channel",
        action=argparse.BooleanOptionalAction,
        help="only per channel, or only per tensor; both when not given",
    )
    add("--modules", opt.whole("--modules", 1), "modules that the model is cut into")
    add(
        "--module", opt.whole("--module", 1), "which of them to time; 1 has the embeddings, the last the head"
    )
    parser.add_argument(
        "--kernels",
        type=opt.several(contender, "--kernels", "cpp,reference"),
        metavar="KERNELS",
        help=f"implementations of the quantized step: {','.join(CONTENDERS)} (default: all that run here)",
    )
    add("--rounds", opt.whole("--rounds", 1), "timed rounds, one step of each per round")
    add("--warmup", opt.whole("--warmup", 1), "rounds before the timed ones")
    opt.add_device(parser)
    opt.add_shared(parser, DEFAULTS)


def run(options: argparse.Namespace) -> Result:
    from mrem_deploy.benchmarks.contenders import check_device, present
    from mrem_deploy.benchmarks.step_job import measure
    from mrem_deploy.preflight import resolve_device

    opt.fill_in(options, DEFAULTS)
    options.device = resolve_device(options.device)
    options.kernels = options.kernels or present(options.device.type)
    check_device(options.kernels, options.device.type)
    _check(options)
    rows, cuts = measure(options)
    blocks = cuts[options.module - 1 : options.module + 1]
    return Result(
        "step",
        opt.as_settings(options) | {"blocks": blocks, "aim": AIM},
        [row.to_dict() for row in rows],
        _table(rows),
        _summary(rows, blocks, options),
        lambda: _draw(rows, options),
    )


def _check(options: argparse.Namespace) -> None:
    """Options that do not fit together, before anything is built."""
    from mrem_deploy.numerics import UNQUANTIZED_BITS
    from mrem_deploy.recipe_values import parse_bits

    layers = options.geometry.layers
    if options.modules > layers:
        raise UserError(
            f"{options.geometry} has {layers} blocks, so --modules must be 1 to {layers}; "
            f"got {options.modules}",
            f"use --modules {layers} or fewer",
        )
    if options.module > options.modules:
        raise UserError(
            f"--module must be 1 to {options.modules} with --modules {options.modules}; got {options.module}",
            "name one of the modules",
        )
    for bits in options.bits:
        weights, _, activations = parse_bits(bits)
        if weights == activations == UNQUANTIZED_BITS:
            raise UserError(f"--bits {bits} leaves nothing to compare", "quantize weights or activations")


def _table(rows: list[StepRow]) -> str:
    head = ["bits", "weights", "kernels", "unquantized, s", "quantized, s", "ratio", "quartiles"]
    head += ["lowest – highest", "times the first"]
    cells = []
    for row in rows:
        found = [(row.kernels, row.cost, "")]
        found += [(name, other.cost, f"{other.speed_up.ratio:.2f}×") for name, other in row.others.items()]
        for name, cost, speed_up in found:
            cells.append(
                [
                    row.bits,
                    style_name(row.per_channel),
                    name,
                    f"{cost.base_seconds:.3f}",
                    f"{cost.seconds:.3f}",
                    f"{cost.ratio:.2f}×",
                    " – ".join(f"{value:.2f}" for value in cost.ratio_quartiles),
                    " – ".join(f"{value:.2f}" for value in cost.ratio_range),
                    speed_up,
                ]
            )
    return table(head, cells)


def _summary(rows: list[StepRow], blocks: list[int], options: argparse.Namespace) -> str:
    import torch

    first, stop = blocks
    where = f"{torch.get_num_threads()} thread(s)"
    if options.device.type == "cuda":
        where = torch.cuda.get_device_name(options.device)
    worst = max(rows, key=lambda row: row.cost.ratio)
    within = "within" if worst.cost.ratio <= AIM else "above"
    return (
        f"{options.geometry}, module {options.module} of {options.modules} (blocks {first}–{stop - 1}), "
        f"batch {options.batch_size} × {options.length} tokens, {where}; "
        f"medians of {options.rounds} interleaved rounds.\n"
        f"With {worst.kernels}, the most expensive is {worst.title} at {worst.cost.ratio:.2f}×, "
        f"{within} the aim of {AIM}×."
    )


def _draw(rows: list[StepRow], options: argparse.Namespace) -> Figure:
    from mrem_deploy.report.plots import BLUE, INK, ORANGE, new_figure

    figure, axes = new_figure(1.5 + 0.34 * len(rows))
    for at, row in enumerate(rows):
        colour, marker = (ORANGE, "D") if row.per_channel else (BLUE, "o")
        axes.plot(row.cost.ratio_range, [at, at], color=colour, linewidth=1.2, alpha=0.6)
        axes.plot(
            row.cost.ratio_quartiles, [at, at], color=colour, linewidth=4.5, solid_capstyle="butt", alpha=0.6
        )
        axes.plot(row.cost.ratio, at, color=colour, marker=marker, markersize=7)
    axes.axvline(1.0, color=INK, linewidth=1, alpha=0.5)
    axes.axvline(AIM, color=INK, linewidth=1.2, linestyle=(0, (5, 2)))
    axes.annotate(
        f"aim {AIM}×",
        (AIM, 0),
        xycoords=("data", "axes fraction"),
        xytext=(4, 5),
        textcoords="offset points",
    )
    axes.set_yticks(range(len(rows)), [row.title for row in rows])
    axes.set_ylim(len(rows) - 0.1, -0.6)  # from top to bottom, with room for the label of the aim
    axes.grid(visible=False, axis="y")
    axes.set(
        xlabel="time of a quantized step / unquantized step (median, quartiles, range)",
        title=f"Training step of a module, {options.geometry}, batch {options.batch_size} × {options.length}",
    )
    return figure
