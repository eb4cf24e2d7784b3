"""MREM-P on many devices and several machines, simulated, against synchronous pipelines.

The queues and the schedule are the code of training, on a virtual clock. Step times come from a measurement
(--measured, from `benchmark parallel`) or from the paper.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrem_deploy.base import interrupt
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import UNREADABLE
from mrem_deploy.base.progress import bar
from mrem_deploy.benchmarks import options as opt
from mrem_deploy.benchmarks.output import Result, table
from mrem_deploy.benchmarks.simulator import Outcome, World, gpipe, gpipe_bubble, pipedream, simulate
from mrem_deploy.train.mrem_p.schedule import ScheduleRules

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLES = """\
examples:
  python -m mrem_deploy.benchmark schedule --quick
  python -m mrem_deploy.benchmark schedule --modules 2,4,8,16,32,64 --jitter 20 --out results
  python -m mrem_deploy.benchmark schedule --measured results/parallel.json --out results
"""
DEFAULTS = {
    "modules": opt.Default((2, 4, 8, 16, 32, 64), (2, 8)),
    "staleness": opt.Default((1, 2, 4, 8, 16, 32, 64), (1, 8)),
    "steps": opt.Default(500, 100),
    "jitter": opt.Default(20, 20),
    "micro_batches": opt.Default(8, 8),
    "per_node": opt.Default(8, 8),
}
# The paper trains 2,000 steps of BERT-base in four modules in 9 minutes (V100, batch 32 × 128).
PAPER_STEP_SECONDS = 9 * 60 / 2000
USUAL_STALENESS = 8
NEGLIGIBLE = 0.01  # of the training time
SLOWER = 3.0  # the straggler
MREM_P, LOCKSTEP, PIPEDREAM, GPIPE = "mrem-p", "lock-step", "pipedream", "gpipe"


@dataclass(frozen=True)
class ScheduleRow:
    """One simulated run."""

    scheme: str
    modules: int
    outcome: Outcome
    staleness: int | None = None  # where it was chosen for the comparison
    straggler: bool = False

    @property
    def waiting(self) -> float:
        """The largest share of time that a module waited."""
        return max(self.outcome.waiting, default=0.0)

    @property
    def priming_share(self) -> float:
        return self.outcome.priming / self.outcome.seconds

    @property
    def lost(self) -> float:
        """The share of time that a device does not spend on training until it is trained."""
        return self.priming_share + self.waiting

    def to_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {"scheme": self.scheme, "modules": self.modules}
        if self.staleness is not None:
            row["staleness"] = self.staleness
        if self.straggler:
            row["straggler"] = True
        shares = {"waiting": self.waiting, "priming_share": self.priming_share, "lost": self.lost}
        return {**row, **asdict(self.outcome), **shares}


def add_options(parser: argparse.ArgumentParser) -> None:
    def several(flag: str, example: str, help: str) -> None:
        opt.add_option(parser, flag, opt.several(opt.whole(flag, 1), flag, example), help, DEFAULTS)

    several("--modules", "4,16", "numbers of modules (devices)")
    several("--staleness", "1,8", "queue lengths t₀ to compare")
    for flag, least, help in (
        ("--steps", 2, "training steps per module"),
        ("--jitter", 0, "standard deviation of every duration, in percent"),
        ("--micro-batches", 1, "into which GPipe cuts a batch"),
        ("--per-node", 1, "devices of a machine; between machines the link is slower"),
    ):
        opt.add_option(parser, flag, opt.whole(flag, least), help, DEFAULTS)
    parser.add_argument(
        "--measured", metavar="JSON", help="parallel.json of `benchmark parallel`, for the step time"
    )
    parser.set_defaults(threads=0)  # nothing here computes with torch
    parser.add_argument("--seed", type=opt.whole("--seed", 0, opt.MOST_SEED), default=0, help="of the jitter")
    parser.add_argument("--out", metavar="DIR", help="folder for the numbers (.json) and the plot (.png)")
    parser.add_argument("--quick", action="store_true", help="a first look: smaller defaults")


def run(options: argparse.Namespace) -> Result:
    opt.fill_in(options, DEFAULTS)
    step = measured_step(options.measured) if options.measured else PAPER_STEP_SECONDS
    usual = min(options.staleness, key=lambda t: abs(t - USUAL_STALENESS))
    rows: list[ScheduleRow] = []
    swept = _spread(list(options.modules))
    simulations = len(options.modules) * 6 + len(swept) * (len(options.staleness) - 1)
    with bar(simulations, "simulate", unit="run") as shown:

        def add(row: ScheduleRow) -> None:
            interrupt.check()
            rows.append(row)
            shown.update()

        for modules in options.modules:
            even, uneven = (_world(options, step, modules, slowest) for slowest in (1.0, SLOWER))
            for staleness in options.staleness if modules in swept else (usual,):
                rules = ScheduleRules(options.steps, staleness)
                add(ScheduleRow(MREM_P, modules, simulate(even, rules), staleness))
            lockstep = ScheduleRules(options.steps, 1, lockstep=True)
            add(ScheduleRow(LOCKSTEP, modules, simulate(even, lockstep)))
            add(ScheduleRow(PIPEDREAM, modules, pipedream(even, options.steps)))
            # GPipe flushes its pipeline after every step, so a few steps show what all of them do.
            few = max(1, options.steps // 20)
            add(ScheduleRow(GPIPE, modules, gpipe(even, few, options.micro_batches)))
            slowed = simulate(uneven, ScheduleRules(options.steps, usual))
            add(ScheduleRow(MREM_P, modules, slowed, straggler=True))
            add(ScheduleRow(PIPEDREAM, modules, pipedream(uneven, options.steps), straggler=True))
    return Result(
        "schedule",
        opt.as_settings(options) | {"step_seconds": step, "world": _plain(even)},
        [row.to_dict() for row in rows],
        f"{_scheme_table(rows, options, usual)}\n\n{_staleness_table(rows, options)}",
        _summary(rows, options, usual, step),
        lambda: _draw(rows, options, usual),
    )


def measured_step(path: str) -> float:
    """Seconds of a training step, the mean over the modules of a measured MREM-P run."""
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
        seconds = next(row["step_seconds"] for row in rows if row["run"] == MREM_P)
        step = float(sum(seconds.values()) / len(seconds))
        if not 0 < step < math.inf:
            raise ValueError(f"a step of {step} seconds")
        return step
    except (*UNREADABLE, StopIteration, ArithmeticError) as error:
        raise UserError(
            f"--measured {path} is not a result of `benchmark parallel`: {error!r}",
            "give the parallel.json that it writes with --out",
        ) from error


def _world(options: argparse.Namespace, step: float, modules: int, slowest: float) -> World:
    """Equal modules, with a slower one in the middle if `slowest` is above 1."""
    steps = [step] * modules
    steps[modules // 2] *= slowest
    return World(tuple(steps), jitter=options.jitter / 100, per_node=options.per_node, seed=options.seed)


def _plain(world: World) -> dict[str, Any]:
    return {name: value for name, value in asdict(world).items() if name != "step"}


def _find(
    rows: list[ScheduleRow], scheme: str, modules: int, staleness: int | None = None, straggler: bool = False
) -> ScheduleRow:
    """The first row that fits; without `staleness` any will do."""
    return next(
        row
        for row in rows
        if (row.scheme, row.modules, row.straggler) == (scheme, modules, straggler)
        and staleness in (None, row.staleness)
    )


def _scheme_table(rows: list[ScheduleRow], options: argparse.Namespace, usual: int) -> str:
    head = [
        "modules",
        f"mrem-p, t₀ = {usual}",
        "lock-step",
        "pipedream 1F1B",
        f"gpipe, M = {options.micro_batches}",
        "by its formula",
        f"mrem-p, one {SLOWER:g}× slower: others wait",
        "pipedream, the same: busy",
    ]
    cells = []
    for modules in options.modules:
        slowed = _find(rows, MREM_P, modules, straggler=True)
        busy = (
            _find(rows, MREM_P, modules, staleness=usual).outcome.busy,
            _find(rows, LOCKSTEP, modules).outcome.busy,
            _find(rows, PIPEDREAM, modules).outcome.busy,
            _find(rows, GPIPE, modules).outcome.busy,
            1 - gpipe_bubble(modules, options.micro_batches),
            slowed.waiting,
            _find(rows, PIPEDREAM, modules, straggler=True).outcome.busy,
        )
        cells.append([str(modules), *(f"{share:.1%}" for share in busy)])
    return table(head, cells)


def _staleness_table(rows: list[ScheduleRow], options: argparse.Namespace) -> str:
    swept = _spread(list(options.modules))
    head = ["t₀", *(f"lost, {modules} modules" for modules in swept), "mean age", "new inputs"]
    cells = []
    for staleness in options.staleness:
        found = [_find(rows, MREM_P, modules, staleness=staleness) for modules in swept]
        last = found[-1]
        cells.append(
            [
                str(staleness),
                *(f"{row.lost:.2%}" for row in found),
                f"{last.outcome.mean_age:.1f}",
                f"{last.outcome.fresh:.0%}",
            ]
        )
    return table(head, cells)


def negligible(rows: list[ScheduleRow], modules: int, staleness: tuple[int, ...]) -> list[int]:
    """The queue lengths at which priming and waiting together stay negligible."""
    return [t for t in staleness if _find(rows, MREM_P, modules, staleness=t).lost <= NEGLIGIBLE]


def _range_of(rows: list[ScheduleRow], modules: int, options: argparse.Namespace) -> str:
    """Priming is a fixed time: its share falls as the steps grow."""
    good = negligible(rows, modules, options.staleness)
    if good:
        most = f"at most {NEGLIGIBLE:.0%} of {options.steps} steps"
        return f"{modules} modules: t₀ up to {max(good)} loses {most}."
    least = min(_find(rows, MREM_P, modules, staleness=t).lost for t in options.staleness)
    needed = options.steps * least / NEGLIGIBLE
    return (
        f"{modules} modules: even t₀ = {min(options.staleness)} loses {least:.1%}; at {needed:,.0f} steps 1%."
    )


def _summary(rows: list[ScheduleRow], options: argparse.Namespace, usual: int, step: float) -> str:
    waiting = max(row.waiting for row in rows if row.scheme == MREM_P)
    lines = [
        f"Simulated: steps of {step:.3g} s with {options.jitter}% jitter, {options.steps} of them, "
        f"{options.per_node} devices per machine. Shares of device time spent on training steps; "
        "lost = priming and waiting.",
        f"After priming no module of mrem-p waits, even next to a straggler (at most {waiting:.2%}): it uses "
        "an entry again.",
    ]
    lines += [_range_of(rows, modules, options) for modules in _spread(list(options.modules))]
    return "\n".join(lines)


def _draw(rows: list[ScheduleRow], options: argparse.Namespace, usual: int) -> Figure:
    from mrem_deploy.report.plots import BLUE, GREEN, INK, ORANGE, PINK, new_figure

    figure, (left, right) = new_figure(3.6, columns=2)
    counts = list(options.modules)
    for scheme, label, colour, marker, staleness in (
        (MREM_P, f"MREM-P, t₀ = {usual}", BLUE, "o", usual),
        (LOCKSTEP, "lock-step", GREEN, "s", None),
        (PIPEDREAM, "PipeDream 1F1B", PINK, "D", None),
        (GPIPE, f"GPipe, M = {options.micro_batches}", ORANGE, "^", None),
    ):
        shares = [100 * _find(rows, scheme, count, staleness).outcome.busy for count in counts]
        left.plot(counts, shares, color=colour, marker=marker, markersize=5, linewidth=1.8, label=label)
    formula = [100 * (1 - gpipe_bubble(count, options.micro_batches)) for count in counts]
    left.plot(counts, formula, color=INK, linewidth=1, linestyle=(0, (2, 2)), label="GPipe, formula")
    left.set_xscale("log", base=2)
    left.set_xticks(counts, [str(count) for count in counts])
    left.set(xlabel="modules", ylabel="device time spent training (%)", title="Use of the devices")
    left.set_ylim(0, 104)
    left.legend(loc="lower left", fontsize=8)
    for count, colour, marker in zip(_spread(counts), (BLUE, ORANGE, GREEN), "o^s", strict=False):
        lost = [100 * _find(rows, MREM_P, count, staleness=t).lost for t in options.staleness]
        right.plot(
            options.staleness, lost, color=colour, marker=marker, markersize=5, label=f"{count} modules"
        )
    right.axhline(100 * NEGLIGIBLE, color=INK, linewidth=1, linestyle=(0, (5, 2)))
    right.set_xscale("log", base=2)
    right.set_xticks(options.staleness, [str(t) for t in options.staleness])
    right.set_ylim(0)
    right.set(xlabel="queue length t₀", ylabel="lost to priming and waiting (%)", title="Choice of t₀")
    right.legend(loc="upper left", fontsize=8)
    return figure


def _spread(counts: list[int]) -> list[int]:
    """The first, a middle and the last: more than three lines would be hard to tell apart."""
    return sorted({counts[0], counts[len(counts) // 2], counts[-1]})
