"""`--time-budget`: the number of steps that fits, from the plan's own estimate."""

from __future__ import annotations

from dataclasses import replace

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.format import duration
from mrem_deploy.base.progress import say
from mrem_deploy.recipe import Recipe, parse_duration
from mrem_deploy.walk.loading import Loaded
from mrem_deploy.walk.plan import Planner, planner_of
from mrem_deploy.walk.state import Run

CHECKPOINT = "budget"
LEAST_STEPS = 20  # fewer change the model less than they cost
RESERVE = 0.9  # of the budget is planned: estimates from a few steps are rough


def plan_in_time(run: Run, loaded: Loaded) -> None:
    """Print the plan of a new run, with the steps that fit its time budget if it has one.

    The choice is kept as a checkpoint: an interrupted run must continue with the same number of steps. From
    here on the recipe has no budget but the chosen steps: run again, it gives the same result on any machine.
    """
    recipe, leads = run.recipe, run.crew.leads
    kept = run.store.notes(CHECKPOINT) if leads and recipe.time_budget else None
    steps = kept["steps"] if kept else recipe.steps
    if leads and not run.store.resumed:
        planner = planner_of(run, loaded)
        if recipe.time_budget and not kept:
            steps = fitted(recipe, planner).steps
            run.store.save(CHECKPOINT, {}, {"steps": steps})
        for line in planner(replace(recipe, steps=steps)).lines():
            say(line)
    if recipe.time_budget:
        steps = run.crew.exchange("the number of steps", steps, patient=True)[0]
        run.recipe = replace(recipe, steps=steps, time_budget=None)


def fitted(recipe: Recipe, planner: Planner) -> Recipe:
    """The recipe with the most steps, up to its own number, whose plan takes no longer than its budget."""
    if recipe.time_budget is None:
        return recipe
    budget = parse_duration(recipe.time_budget)
    one, more = (planner(replace(recipe, steps=steps)).seconds for steps in (1, 101))
    each = (more - one) / 100
    steps = int((RESERVE * budget - (one - each)) / each)
    if steps < LEAST_STEPS:
        needed = (one - each + LEAST_STEPS * each) / RESERVE
        raise UserError(
            f"--time-budget {recipe.time_budget} is too short: {LEAST_STEPS} steps and what comes with "
            f"them take about {duration(needed)} on this machine",
            "give more time, --preset quick, fewer sentences with --calib-size, or --method ptq",
        )
    return replace(recipe, steps=min(steps, recipe.steps), time_budget=None)
