"""From experiments to tables: which cells they need, how long those take, and what they show."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from mrem_deploy.base.format import duration
from mrem_deploy.benchmarks.geometry import GEOMETRIES
from mrem_deploy.recipe import Recipe
from mrem_deploy.reproduce import ablations, forcing, geometry, levers, tables
from mrem_deploy.reproduce.cells import Cells, cell_label, over_seeds
from mrem_deploy.reproduce.experiments import EXPERIMENTS, Experiment
from mrem_deploy.reproduce.page import Entry
from mrem_deploy.reproduce.plan import ExperimentPlan, Subject, available_methods, differences
from mrem_deploy.reproduce.results import Results

PRESENTERS = {
    "main": tables.main,
    "overview": tables.overview,
    "teacher-forcing": forcing.teacher_forcing,
    "loss-curves": forcing.loss_curves,
    "rem-vs-mrem": ablations.rem_vs_mrem,
    "num-modules": ablations.num_modules,
    "calib-size": ablations.calib_size,
    "error-propagation": ablations.error_propagation,
    "per-channel": ablations.per_channel,
    "ablation": ablations.ablation,
}
LENGTH = 128  # tokens per example of a measured step
Pair = tuple[ExperimentPlan, Subject]


@dataclass(frozen=True)
class Job:
    """One experiment on one subject, or on all of them together."""

    experiment: Experiment
    pairs: tuple[Pair, ...]

    def recipes(self) -> list[Recipe]:
        found = [recipe for plan, subject in self.pairs for recipe in self.experiment.recipes(plan, subject)]
        return list(dict.fromkeys(found))

    def caption(self) -> str:
        """Every setting in which this run differs from the paper's."""
        if not self.experiment.source:
            return levers.caption(*self.pairs[0])
        recipes, tasks = self.experiment.recipes, self.experiment.tasks
        every = (difference for pair in self.pairs for difference in differences(*pair, recipes, tasks))
        unlike = list(dict.fromkeys(every))
        return (
            f"Differs from the paper: {'; '.join(unlike)}." if unlike else "The paper's settings throughout."
        )


def jobs_of(
    names: Sequence[str], pairs: Sequence[Pair], given: Container[str] = ()
) -> tuple[list[Job], list[str]]:
    """The jobs, and sentences about those that have nothing to run.

    given: the options that say how much to train. Experiments that are not in the paper take the others from
    the default recipe.
    """
    jobs, idle = [], []
    for name in names:
        experiment, own = EXPERIMENTS[name], list(pairs)
        if not experiment.source:
            own = [(levers.default_plan(plan, given), subject) for plan, subject in pairs]
        groups = [tuple(own)] if experiment.all_subjects else [(pair,) for pair in own]
        for group in groups:
            job = Job(experiment, group)
            if job.recipes():
                jobs.append(job)
            else:
                idle.append(f"{name} is left out: --methods names none of its methods.")
    return jobs, idle


def cells_of(jobs: Sequence[Job], seeds: int) -> list[Recipe]:
    """Every cell that any job needs, once."""
    return over_seeds(list(dict.fromkeys(recipe for job in jobs for recipe in job.recipes())), seeds)


def left_out(plans: Sequence[ExperimentPlan]) -> list[str]:
    """Methods of the plans that are not installed."""
    known = available_methods()
    unknown = dict.fromkeys(m for plan in plans for m in plan.methods if m not in known)
    return [f"{name} is left out: this version of mrem_deploy does not have it." for name in unknown]


def listing(cells: Cells, recipes: Sequence[Recipe]) -> str:
    """`--dry-run`: what would be run and how long it would take, by the cells that are finished."""
    known = cells.estimate(recipes)
    lines, left = [], []
    for recipe in recipes:
        if cells.is_finished(recipe):
            lines.append(f"  finished   {cell_label(recipe)}")
            continue
        seconds = known.seconds(recipe)
        left.append(seconds)
        lines.append(f"  {duration(seconds) if seconds is not None else 'unknown':<10} {cell_label(recipe)}")
    known_seconds = [seconds for seconds in left if seconds is not None]
    if not left:
        rest = "nothing left to run"
    elif len(known_seconds) < len(left):
        rest = f"{len(left)} cells to run; the time is known once a cell has finished"
    else:
        rest = f"{len(left)} cells to run, about {duration(sum(known_seconds))}"
    return "\n".join([*lines, f"{len(recipes)} cells; {rest}"])


def of_geometry(
    names: Sequence[str], steps: int, batch: int | None, plan: ExperimentPlan, out: Path
) -> list[Entry]:
    """`--geometry`: time and memory of the paper's models on this machine.

    batch: examples per measured step; None takes the plan's.
    """
    if not names:
        return []
    length = plan.max_length or LENGTH
    bits = plan.widths(("4-4-8",))[0]
    shapes = [
        geometry.Shape(name, GEOMETRIES[name], bits, batch or plan.batch_size, length, steps, plan.threads)
        for name in names
    ]
    records = geometry.measure_all(shapes, plan.methods, out / "geometry")
    title = "Time and memory of the paper's models, extrapolated"
    caption = "Measured over a few steps on this machine with random weights, and extrapolated."
    return [Entry("geometry", title, "tab:main_mnli", caption, geometry.show(records, shapes[0]))]


def present(jobs: Sequence[Job], cells: Cells, seeds: int) -> list[Entry]:
    """The tables and plots of finished cells."""
    runs = {recipe: cells.load(recipe) for recipe in cells_of(jobs, seeds)}
    results = Results(runs, seeds)
    several = len({subject.task for job in jobs for _, subject in job.pairs}) > 1
    entries = []
    for job in jobs:
        experiment, (plan, subject) = job.experiment, job.pairs[0]
        if experiment.all_subjects:
            stem, title = experiment.name, experiment.title
            shown = tables.glue(job.pairs, results)
        else:
            stem = f"{experiment.name}-{subject.task}" if several else experiment.name
            title = f"{experiment.title}: {subject.task}"
            shown = PRESENTERS[experiment.name](plan, subject, results)
        entries.append(Entry(stem, title, experiment.source, job.caption(), shown))
    return entries
