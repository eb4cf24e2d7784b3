"""The experiments as data: which recipes each one needs. Nothing is run here, and no torch is loaded.

A recipe is one variant; `cells.py` runs it once per seed. Experiments that need the same variant share it.
All are the paper's but one: `ablation` is about the default recipe (`levers.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from mrem_deploy.recipe import Recipe
from mrem_deploy.reproduce import levers, paper
from mrem_deploy.reproduce.plan import ExperimentPlan, Recipes, Subject, gobo_of, recipe_of


@dataclass(frozen=True)
class Experiment:
    """`source` says where it is in the paper, by the labels of its LaTeX source; empty: it is not there."""

    name: str
    title: str
    source: str
    recipes: Recipes
    all_subjects: bool = False  # one table for all tasks instead of one per task
    tasks: tuple[str, ...] = tuple(paper.MAIN)  # those in the paper


def main(plan: ExperimentPlan, subject: Subject) -> list[Recipe]:
    return [
        recipe_of(plan, subject, method, bits)
        for bits in plan.widths(("4-4-8", "2-2-8", "2-2-4"))
        for method in ("qat", "rem", "mrem-s", "mrem-p")
        if plan.does(method)
    ]


def glue(plan: ExperimentPlan, subject: Subject) -> list[Recipe]:
    found = [gobo_of(plan, subject, bits) for bits in ("3-4-32", "2-2-32") if plan.does("gobo")]
    return found + [
        recipe_of(plan, subject, method, bits)
        for method in ("mrem-s", "mrem-p")
        for bits in plan.widths(("4-4-8", "2-2-8"))
        if plan.does(method)
    ]


def teacher_forcing(plan: ExperimentPlan, subject: Subject) -> list[Recipe]:
    if not plan.does("mrem-p"):
        return []
    return [
        recipe_of(plan, subject, "mrem-p", bits, steps=steps, **forcing)
        for bits in plan.widths(("2-2-8", "2-2-4"))
        for steps in plan.forcing_steps
        for forcing in ({"teacher_forcing": 0.0}, {})
    ]


def rem_vs_mrem(plan: ExperimentPlan, subject: Subject) -> list[Recipe]:
    """REM with its usual steps, REM with as many steps as MREM-S, and MREM-S."""
    found = []
    for bits in plan.widths(("4-4-8", "2-2-8", "2-2-4")):
        if plan.does("rem"):
            found.append(recipe_of(plan, subject, "rem", bits))
            found.append(recipe_of(plan, subject, "rem", bits, steps=plan.steps))
        if plan.does("mrem-s"):
            found.append(recipe_of(plan, subject, "mrem-s", bits))
    return found


def module_counts(plan: ExperimentPlan, subject: Subject) -> list[int]:
    """A model cannot be cut into more modules than it has blocks."""
    return [count for count in plan.module_counts if count <= subject.layers]


def num_modules(plan: ExperimentPlan, subject: Subject) -> list[Recipe]:
    if not plan.does("mrem-s"):
        return []
    return [
        recipe_of(plan, subject, "mrem-s", plan.lowest(), modules=str(count))
        for count in module_counts(plan, subject)
    ]


def calib_size(plan: ExperimentPlan, subject: Subject) -> list[Recipe]:
    return [
        recipe_of(plan, subject, method, plan.lowest(), calib_size=size)
        for method in ("rem", "mrem-s", "mrem-p")
        for size in plan.calib_sizes
        if plan.does(method)
    ]


def error_propagation(plan: ExperimentPlan, subject: Subject) -> list[Recipe]:
    return [
        recipe_of(plan, subject, method, bits)
        for bits in plan.widths(("2-2-8", "2-2-4"))
        for method in ("rem", "mrem-s")
        if plan.does(method)
    ]


def per_channel(plan: ExperimentPlan, subject: Subject) -> list[Recipe]:
    return [
        recipe_of(plan, subject, method, bits, per_channel=channels)
        for bits in plan.widths(("4-4-8", "2-2-8", "2-2-4"))
        for method in ("rem", "mrem-s")
        for channels in (False, True)
        if plan.does(method)
    ]


def loss_steps(plan: ExperimentPlan) -> tuple[int, ...]:
    """The paper plots 250 and 2,000 steps: the fewest of its table and the usual number."""
    return tuple(sorted({min(plan.forcing_steps), plan.steps}))


def loss_curves(plan: ExperimentPlan, subject: Subject) -> list[Recipe]:
    if not plan.does("mrem-p"):
        return []
    return [
        recipe_of(plan, subject, "mrem-p", plan.lowest(), steps=steps, **forcing)
        for steps in loss_steps(plan)
        for forcing in ({"teacher_forcing": 0.0}, {})
    ]


def overview(plan: ExperimentPlan, subject: Subject) -> list[Recipe]:
    bits = plan.widths(("4-4-8",))[0]
    return [recipe for recipe in main(plan, subject) if recipe.bits == bits]


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment("main", "Time, memory, data and score by method", "tab:main_mnli, tab:main_squad*", main),
        Experiment("overview", "Four dimensions at a glance", "fig:intro, fig:prelim", overview),
        Experiment("glue", "Comparison on GLUE", "tab:compare_sota", glue, True, paper.GLUE_TASKS),
        Experiment("teacher-forcing", "Teacher forcing by steps", "tab:teacher_forcing", teacher_forcing),
        Experiment(
            "loss-curves", "Loss with and without teacher forcing", "fig:parallel_loss_curve", loss_curves
        ),
        Experiment("rem-vs-mrem", "REM with as many steps as MREM", "tab:REM_MREM", rem_vs_mrem),
        Experiment("num-modules", "Number of modules", "fig:num_partition", num_modules),
        Experiment("calib-size", "Size of the calibration set", "fig:data_size", calib_size),
        Experiment(
            "error-propagation",
            "Error by layer",
            "fig:error_propagate_a8, fig:error_propagate_a4",
            error_propagation,
        ),
        Experiment("per-channel", "Per-channel quantization", "tab:pcq", per_channel),
        Experiment("ablation", "The default recipe, one lever at a time", "", levers.ablation),
    )
}
PAPERS = {name: experiment for name, experiment in EXPERIMENTS.items() if experiment.source}
