"""Peak memory of one training step of a quantized module: our ops against ordinary autograd.

Our matmuls keep X and W for the backward pass and quantize them again there; ordinary autograd keeps every
intermediate of every quantizer. Each implementation trains in a separate process, by the trainer of a real
run. Reports two numbers: the peak of the entire process, with models and libraries, and what training adds to
them (activations, gradients, the optimizer's state, buffers).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mrem_deploy.base import processes
from mrem_deploy.base.progress import track
from mrem_deploy.benchmarks import options as opt
from mrem_deploy.benchmarks.contenders import ON_CPU, check_device, computing_with, contender, present
from mrem_deploy.benchmarks.geometry import parse_geometry
from mrem_deploy.benchmarks.output import Result, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLES = """\
examples:
  python -m mrem_deploy.benchmark footprint --threads 1
  python -m mrem_deploy.benchmark footprint --bits 2-2-8 --kernels cpp,unfused --out results
"""
DEFAULTS = {
    "geometry": opt.Default(parse_geometry("bert-base"), parse_geometry("minilm-l6")),
    "batch_size": opt.Default(32, 8),
    "length": opt.Default(128, 64),
    "bits": opt.Default(("8-8-8", "4-4-8", "2-2-8"), ("4-4-8",)),
    "modules": opt.Default(4, 3),
}
UNQUANTIZED = "unquantized"
STEPS = 2  # the first makes the optimizer's state, the second has it next to its activations


@dataclass(frozen=True)
class Footprint:
    """Memory of one implementation at one bit setting, as its process measured it."""

    bits: str
    kernels: str
    before_mb: float
    peak_mb: float
    added_mb: float
    peak_kind: str


@dataclass(frozen=True)
class FootprintRow:
    """The same, compared with the last implementation at these bits."""

    measured: Footprint
    of_last: float
    added_of_last: float

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self.measured), "of_last": self.of_last, "added_of_last": self.added_of_last}


def add_options(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, read: Callable[[str], Any], help: str) -> None:
        opt.add_option(parser, flag, read, help, DEFAULTS)

    add("--bits", opt.several(opt.bits, "--bits", "4-4-8,2-2-8"), "W-E-A settings to measure")
    add("--modules", opt.whole("--modules", 2), "modules that the model is cut into; the second is trained")
    parser.add_argument(
        "--kernels",
        type=opt.several(contender, "--kernels", "cpp,unfused"),
        metavar="KERNELS",
        help=f"implementations to compare: {','.join(ON_CPU)} (default: all that run here)",
    )
    opt.add_shared(parser, DEFAULTS)


def run(options: argparse.Namespace) -> Result:
    opt.fill_in(options, DEFAULTS)
    options.kernels = options.kernels or present()
    check_device(options.kernels, "cpu")
    jobs = [(bits, name) for bits in options.bits for name in (UNQUANTIZED, *options.kernels)]
    found = [in_fresh_process(options, bits, name) for bits, name in track(jobs, "training steps")]
    last = {one.bits: one for one in found}
    rows = [
        FootprintRow(
            one,
            one.peak_mb / last[one.bits].peak_mb,
            one.added_mb / max(last[one.bits].added_mb, 1.0),
        )
        for one in found
    ]
    return Result(
        "footprint",
        opt.as_settings(options),
        [row.to_dict() for row in rows],
        _table(rows),
        _summary(options),
        lambda: _draw(rows),
    )


def in_fresh_process(options: argparse.Namespace, bits: str, name: str) -> Footprint:
    """A process may keep memory that it freed; a new interpreter shares none with this one."""
    return processes.in_fresh_process(measure, options, bits, name, forks=False)


def measure(options: argparse.Namespace, bits: str, name: str) -> Footprint:
    """Resident memory of this process before two steps, and its peak in them."""
    import psutil
    import torch

    from mrem_deploy.base.machine import PeakMemory
    from mrem_deploy.base.units import MIB
    from mrem_deploy.benchmarks.geometry import random_model, random_tokens
    from mrem_deploy.benchmarks.quantized import names_outside
    from mrem_deploy.benchmarks.step_job import unquantized_student
    from mrem_deploy.models.partition import module_cuts
    from mrem_deploy.models.parts import carve
    from mrem_deploy.quant.insert import prepare
    from mrem_deploy.recipe import Recipe
    from mrem_deploy.train.job import TrainSettings
    from mrem_deploy.train.module import ModuleTrainer
    from mrem_deploy.train.student import make_student

    if options.threads:
        torch.set_num_threads(options.threads)
    teacher = random_model(options.geometry, options.seed).requires_grad_(False)
    prepare(teacher)
    cuts = module_cuts(teacher, options.modules)
    part = carve(teacher, cuts)[1]
    recipe = Recipe(bits=bits, init_batches=1, batch_size=2, keep_fp=names_outside(teacher, part))
    if name == UNQUANTIZED:
        student = unquantized_student(teacher)
    else:
        student = make_student(
            teacher, recipe, random_tokens(options.geometry, 2, options.length, options.seed)
        )
    settings = TrainSettings(STEPS, recipe.lr, recipe.step_lr, options.batch_size, options.seed)
    trainer = ModuleTrainer(part, carve(student, cuts)[1], settings)
    shape = (options.batch_size, options.length, options.geometry.hidden)
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(options.seed))
    batch = {"attention_mask": torch.ones(shape[:2], dtype=torch.long)}
    batch["input_ids"] = torch.zeros(shape[:2], dtype=torch.long)
    with computing_with("reference" if name == UNQUANTIZED else name):
        before = psutil.Process().memory_info().rss / MIB
        with PeakMemory("cpu") as peak:
            for number in range(STEPS):
                trainer.step(number, batch, hidden, hidden.clone())
    return Footprint(bits, name, before, peak.mb, peak.mb - before, peak.kind)


def _table(rows: list[FootprintRow]) -> str:
    head = [
        "bits",
        "kernels",
        "before, MiB",
        "peak, MiB",
        "training adds, MiB",
        "peak / last's",
        "added / last's",
    ]
    cells = [
        [
            row.measured.bits,
            row.measured.kernels,
            f"{row.measured.before_mb:,.0f}",
            f"{row.measured.peak_mb:,.0f}",
            f"{row.measured.added_mb:,.0f}",
            f"{row.of_last:.2f}×",
            f"{row.added_of_last:.2f}×",
        ]
        for row in rows
    ]
    return table(head, cells)


def _summary(options: argparse.Namespace) -> str:
    return (
        f"{options.geometry}, the second of {options.modules} modules, batch {options.batch_size} × "
        f"{options.length} tokens; resident memory of a separate process."
    )


def _draw(rows: list[FootprintRow]) -> Figure:
    from mrem_deploy.report.plots import BLUE, SKY, new_figure

    figure, axes = new_figure(1.5 + 0.34 * len(rows))
    at = range(len(rows))
    before = [row.measured.before_mb / 1024 for row in rows]
    axes.barh(at, before, 0.6, color=SKY, label="models, libraries")
    axes.barh(
        at, [row.measured.added_mb / 1024 for row in rows], 0.6, left=before, color=BLUE, label="training"
    )
    axes.set_yticks(at, [f"{row.measured.bits} {row.measured.kernels}" for row in rows])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="peak memory (GiB)", title="Memory of one training step")
    axes.legend(loc="lower right")
    return figure
