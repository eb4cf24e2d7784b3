"""Cost of a training step of a quantized module against the same step unquantized.

Both are steps of the same trainer with the same teacher, batches and loss; the students differ in
their quantizers alone. The quantized step is run by every way to compute it that there is (`contenders`):
so two ratios show, the cost over the unquantized step, and what our kernels save. Before anything is timed,
the quantized student is shown to quantize every operand of every product in the module, and all steps to
train.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.machine import keep_large_blocks
from mrem_deploy.base.progress import bar, say
from mrem_deploy.benchmarks import options as opt
from mrem_deploy.benchmarks.contenders import CONTENDERS, computing_with, contender, present
from mrem_deploy.benchmarks.geometry import parse_geometry, random_model, random_tokens
from mrem_deploy.benchmarks.output import Result, table
from mrem_deploy.benchmarks.quantized import check_quantized, expected_quantizers, names_outside
from mrem_deploy.benchmarks.timing import Comparison, interleave, timed
from mrem_deploy.models.architectures import anatomy
from mrem_deploy.models.partition import module_cuts
from mrem_deploy.models.parts import Part, carve
from mrem_deploy.numerics import UNQUANTIZED_BITS
from mrem_deploy.quant.insert import prepare
from mrem_deploy.recipe import Recipe, parse_bits
from mrem_deploy.train.job import TrainSettings
from mrem_deploy.train.module import ModuleTrainer
from mrem_deploy.train.student import make_student

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLES = """\
examples:
  python -m mrem_deploy.benchmark step
      BERT-base, second of 4 modules, four bit widths, per tensor and per channel
  python -m mrem_deploy.benchmark step --bits 2-2-8 --no-per-channel --module 1 --rounds 15
  python -m mrem_deploy.benchmark step --geometry minilm-l6 --batch-size 16 --length 64 --out results
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
AIM = 1.4  # a quantized step should cost no more than this many unquantized ones
BATCHES = 2  # taken in turn, so that no step finds its own input in the processor's cache
STRETCH = (
    1.02  # of the unquantized student's weights: equal to its teacher it would have no loss, no gradient
)
MANY_STEPS = 1_000_000  # the learning rate hardly decays while we measure

Batch = tuple[dict[str, torch.Tensor], torch.Tensor | None, torch.Tensor | None]


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
        help=f"who computes the quantized step, of {','.join(CONTENDERS)} (default: all that run here)",
    )
    add("--rounds", opt.whole("--rounds", 1), "timed rounds, each one step of all")
    add("--warmup", opt.whole("--warmup", 1), "rounds before the clock counts")
    opt.add_shared(parser, DEFAULTS)


def run(options: argparse.Namespace) -> Result:
    opt.fill_in(options, DEFAULTS)
    options.kernels = options.kernels or present()
    _check(options)
    keep_large_blocks()  # as a real run does
    teacher = random_model(options.geometry, options.seed).requires_grad_(False)
    prepare(teacher)
    cuts = module_cuts(teacher, options.modules)
    batches = _batches(teacher, cuts, options)
    styles = [False, True] if options.per_channel is None else [options.per_channel]
    variants = [(bits, per_channel) for bits in options.bits for per_channel in styles]
    rows = []
    with bar(
        len(variants) * (1 + len(options.kernels)) * (options.warmup + options.rounds), "training steps"
    ) as shown:
        for bits, per_channel in variants:
            say(f"{bits} {_style_name(per_channel)}")
            times = time_variant(teacher, cuts, bits, per_channel, batches, options, shown.update)
            rows.append({"bits": bits, "per_channel": per_channel, **times})
    return Result(
        "step",
        opt.as_settings(options)
        | {"blocks": list(cuts[options.module - 1 : options.module + 1]), "aim": AIM},
        rows,
        _table(rows),
        _summary(rows, cuts, options),
        lambda: _draw(rows, options),
    )


def time_variant(
    teacher: torch.nn.Module,
    cuts: list[int],
    bits: str,
    per_channel: bool,
    batches: list[Batch],
    options: argparse.Namespace,
    after_step: Callable[[], object],
) -> dict[str, object]:
    """Make both students of the module, verify the quantized one, then run their steps in turn.

    All who compute the quantized step train the same student: what it costs does not depend on values.
    """
    part = carve(teacher, cuts)[options.module - 1]
    recipe = Recipe(
        bits=bits,
        per_channel=per_channel,
        batch_size=options.batch_size,
        seed=options.seed,
        init_batches=1,
        keep_fp=names_outside(teacher, part),  # other modules are not timed: leave them as they are
    )
    calibration = random_tokens(options.geometry, options.batch_size, options.length, options.seed)
    quantized = carve(make_student(teacher, recipe, calibration), cuts)[options.module - 1]
    plain = carve(unquantized_student(teacher), cuts)[options.module - 1]
    tokens, _, noisy = batches[0]
    checked = check_quantized(part, quantized, expected_quantizers(teacher, recipe.spec), tokens, noisy)

    settings = TrainSettings(MANY_STEPS, recipe.lr, recipe.step_lr, options.batch_size, options.seed)
    plain_step, quantized_step = (
        stepper(ModuleTrainer(part, student, settings), batches) for student in (plain, quantized)
    )
    check_trains(plain_step, plain)
    steps = {"plain": timed(plain_step)}
    for name in options.kernels:
        quantized_by = by(name, quantized_step)
        check_trains(quantized_by, quantized)
        steps[name] = timed(quantized_by)
    times = interleave(steps, options.rounds, options.warmup, after_call=after_step)
    first, *others = options.kernels
    return {
        **Comparison(times["plain"], times[first]).as_dict(),
        "kernels": first,
        "others": {
            name: {
                **Comparison(times["plain"], times[name]).as_dict(),
                "speed_up": Comparison(times[first], times[name]).ratio_dict(),
            }
            for name in others
        },
        "checked": checked,
    }


def by(name: str, step: Callable[[], float]) -> Callable[[], float]:
    """The step, computed by that contender."""

    def call() -> float:
        with computing_with(name):
            return step()

    return call


def unquantized_student(teacher: torch.nn.Module) -> torch.nn.Module:
    """A trainable copy, a little off its teacher. Its word embedding gets sparse gradients as the
    quantized one does: otherwise the first module would pay for 30,000 rows here and for the batch's
    rows there."""
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(STRETCH)
    embedding = student.get_submodule(anatomy(student).word_embedding)
    assert isinstance(embedding, torch.nn.Embedding)
    embedding.sparse = True
    return student.requires_grad_(True)


def stepper(trainer: ModuleTrainer, batches: list[Batch]) -> Callable[[], float]:
    """A call that trains one step on the next batch and returns its loss."""
    numbered = enumerate(cycle(batches))

    def step() -> float:
        number, batch = next(numbered)
        return trainer.step(number, *batch).loss

    return step


def check_trains(step: Callable[[], float], student: Part) -> None:
    """One step gives a finite loss and moves every weight matrix."""
    before = {name: value.detach().clone() for name, value in student.named_parameters() if value.dim() > 1}
    loss = step()
    after = dict(student.named_parameters())
    still = [name for name, value in before.items() if torch.equal(value, after[name])]
    if not 0 < loss < float("inf") or still:
        raise AssertionError(
            f"the step does not train: loss {loss}, unmoved: {', '.join(still) or 'nothing'}"
        )


def _batches(teacher: torch.nn.Module, cuts: list[int], options: argparse.Namespace) -> list[Batch]:
    """Inputs of the module: what the full-precision modules before it make of random tokens."""
    tokens = random_tokens(options.geometry, BATCHES * options.batch_size, options.length, options.seed)
    before = carve(teacher, cuts)[: options.module - 1]
    batches: list[Batch] = []
    for indices in np.arange(len(tokens)).reshape(BATCHES, options.batch_size):
        batch = tokens.batch(indices)
        hidden = None
        with torch.no_grad():
            for part in before:
                hidden = part(hidden, batch).hidden[-1]
        batches.append((batch, hidden, None if hidden is None else hidden.clone()))
    return batches


def _check(options: argparse.Namespace) -> None:
    """Options that do not fit together, before anything is built."""
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


def _style_name(per_channel: bool) -> str:
    return "per channel" if per_channel else "per tensor"


def _table(rows: list[dict[str, Any]]) -> str:
    head = ["bits", "weights", "kernels", "unquantized, s", "quantized, s", "ratio", "quartiles"]
    head += ["lowest – highest", "times the first"]
    cells = []
    for row in rows:
        for name, found in ((row["kernels"], row), *row["others"].items()):
            cells.append(
                [
                    row["bits"],
                    _style_name(row["per_channel"]),
                    name,
                    f"{found['base_seconds']:.3f}",
                    f"{found['seconds']:.3f}",
                    f"{found['ratio']:.2f}×",
                    " – ".join(f"{value:.2f}" for value in found["ratio_quartiles"]),
                    " – ".join(f"{value:.2f}" for value in found["ratio_range"]),
                    f"{found['speed_up']['ratio']:.2f}×" if "speed_up" in found else "",
                ]
            )
    return table(head, cells)


def _summary(rows: list[dict[str, Any]], cuts: list[int], options: argparse.Namespace) -> str:
    first, stop = cuts[options.module - 1 : options.module + 1]
    worst = max(rows, key=lambda row: row["ratio"])
    within = "within" if worst["ratio"] <= AIM else "above"
    return (
        f"{options.geometry}, module {options.module} of {options.modules} (blocks {first}–{stop - 1}), "
        f"batch {options.batch_size} × {options.length} tokens, {torch.get_num_threads()} thread(s); "
        f"medians of {options.rounds} interleaved rounds.\n"
        f"With {worst['kernels']}, the dearest is {worst['bits']} {_style_name(worst['per_channel'])} at "
        f"{worst['ratio']:.2f}×, "
        f"{within} the aim of {AIM}×."
    )


def _draw(rows: list[dict[str, Any]], options: argparse.Namespace) -> Figure:
    from mrem_deploy.report.plots import BLUE, INK, ORANGE, new_figure

    figure, axes = new_figure(1.5 + 0.34 * len(rows))
    for at, row in enumerate(rows):
        colour, marker = (ORANGE, "D") if row["per_channel"] else (BLUE, "o")
        axes.plot(row["ratio_range"], [at, at], color=colour, linewidth=1.2, alpha=0.6)
        axes.plot(
            row["ratio_quartiles"], [at, at], color=colour, linewidth=4.5, solid_capstyle="butt", alpha=0.6
        )
        axes.plot(row["ratio"], at, color=colour, marker=marker, markersize=7)
    axes.axvline(1.0, color=INK, linewidth=1, alpha=0.5)
    axes.axvline(AIM, color=INK, linewidth=1.2, linestyle=(0, (5, 2)))
    axes.annotate(
        f"aim {AIM}×",
        (AIM, 0),
        xycoords=("data", "axes fraction"),
        xytext=(4, 5),
        textcoords="offset points",
    )
    axes.set_yticks(range(len(rows)), [f"{row['bits']} {_style_name(row['per_channel'])}" for row in rows])
    axes.set_ylim(len(rows) - 0.1, -0.6)  # from top to bottom, with room for the label of the aim
    axes.grid(visible=False, axis="y")
    axes.set(
        xlabel="time of a quantized step / unquantized step (median, quartiles, range)",
        title=f"Training step of a module, {options.geometry}, batch {options.batch_size} × {options.length}",
    )
    return figure
