"""The ablation of the default recipe: from the paper's quantizers, losses and rate, one lever more per row.

Every lever is an option of the recipe, and its value is the default of `mrem quantize`: the last row is the
default recipe. A lever that changes nothing at the bits or the task of a table has no row. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any

from mrem_deploy.data.tasks import find_task
from mrem_deploy.quant.spec import HOT_ROWS, USUAL_QUANTIZERS
from mrem_deploy.recipe import Recipe
from mrem_deploy.recipe_defaults import BALANCED, PRESETS
from mrem_deploy.reproduce.plan import ExperimentPlan, Subject, paper_plan, recipe_of

METHOD = "mrem-s"
OUTPUT_LEVERS = {  # by the kind of task; a regression keeps its squared error
    "classification": "KL of the predictions",
    "token-classification": "KL of the predictions",
    "question-answering": "KL of the predictions",
    "embedding": "cosine of the embeddings",
}


@dataclass(frozen=True)
class Lever:
    """One option of the recipe that goes from the paper's value to the default."""

    option: str
    title: Callable[[Recipe], str]  # of its row, from the default recipe
    matters: Callable[[Recipe], bool] = lambda recipe: True  # whether the default differs in what it computes


def _has_two_bits(recipe: Recipe) -> bool:
    return 2 in (recipe.spec.weight_bits, recipe.spec.embedding_bits)


def _kind(recipe: Recipe) -> str:
    return find_task(str(recipe.task)).kind


LEVERS = (
    Lever("per_channel", lambda recipe: "one scale per channel"),
    Lever("weight_quantizer", lambda recipe: f"{USUAL_QUANTIZERS[2]} at 2 bits", _has_two_bits),
    Lever(
        "hot_rows",
        lambda recipe: f"{HOT_ROWS[recipe.spec.embedding_bits]} hot rows",
        lambda recipe: recipe.spec.embedding_bits in HOT_ROWS,
    ),
    Lever("embedding_rate", lambda recipe: f"embeddings at {recipe.embedding_rate:g} of the rate"),
    Lever(
        "lr",
        lambda recipe: f"learning rate {recipe.lr:g}",
        lambda recipe: recipe.lr != paper_plan(str(recipe.task)).lr,
    ),
    Lever(
        "output_loss",
        lambda recipe: OUTPUT_LEVERS[_kind(recipe)],
        lambda recipe: _kind(recipe) in OUTPUT_LEVERS,
    ),
    Lever("centring", lambda recipe: "centred activations", lambda recipe: recipe.centres),
)
OUTPUT_LOSS = "output_loss"


@dataclass(frozen=True)
class Row:
    """One row of the ablation: the levers of the rows above, and this one."""

    title: str
    lever: str  # the option that is new in this row; empty in the first
    recipe: Recipe


def default_plan(plan: ExperimentPlan, given: Container[str]) -> ExperimentPlan:
    """The plan with as much training as `mrem quantize` has by default, where no option says otherwise."""
    preset = vars(PRESETS[BALANCED])
    return replace(plan, **{name: value for name, value in preset.items() if name not in given})


def default_recipe(plan: ExperimentPlan, subject: Subject, bits: str) -> Recipe:
    """What `mrem quantize` does with these bits, as long as the plan says."""
    usual = Recipe(task=subject.task, bits=bits, method=METHOD)
    options: dict[str, Any] = {lever.option: getattr(usual, lever.option) for lever in LEVERS}
    options |= {} if plan.lr is None else {"lr": plan.lr}
    return recipe_of(plan, subject, METHOD, bits, **options)


def rows_at(plan: ExperimentPlan, subject: Subject, bits: str) -> list[Row]:
    """The ablation at one setting of bits."""
    goal = default_recipe(plan, subject, bits)
    mattering = [lever for lever in LEVERS if lever.matters(goal)]
    papers = recipe_of(replace(plan, per_channel=False), subject, METHOD, bits)
    start = {lever.option: getattr(papers, lever.option) for lever in mattering}
    if "lr" in start:
        start["lr"] = paper_plan(subject.task).lr
    recipe = replace(goal, **start)
    rows = [Row(f"the paper's, learning rate {recipe.lr:g}", "", recipe)]
    for lever in mattering:
        recipe = replace(recipe, **{lever.option: getattr(goal, lever.option)})
        rows.append(Row(f"+ {lever.title(goal)}", lever.option, recipe))
    return rows


def ablation(plan: ExperimentPlan, subject: Subject) -> list[Recipe]:
    if not plan.does(METHOD):
        return []
    return [row.recipe for bits in plan.bits for row in rows_at(plan, subject, bits)]


def caption(plan: ExperimentPlan, subject: Subject) -> str:
    """What all rows have in common."""
    scored = f"{plan.eval_size:,} evaluation examples" if plan.eval_size else "all evaluation examples"
    seeds = f"{plan.seeds} calibration sets" if plan.seeds > 1 else "one calibration set"
    return (
        f"Every row adds an option to those of the rows above it; the last one is the default recipe. All "
        f"with {METHOD}, {min(plan.modules, subject.layers)} modules, {plan.steps:,} steps of "
        f"{plan.batch_size} sentences for each, {plan.calib_size:,} calibration sentences, {seeds}, {scored}."
    )
