"""The walk of a run: load → plan → train → freeze → evaluate → publish. docs/tour.md follows it."""

from __future__ import annotations

import os
from pathlib import Path

from mrem_deploy import preflight
from mrem_deploy.base import interrupt
from mrem_deploy.base.place import hold
from mrem_deploy.base.resuming import resumable
from mrem_deploy.quant.frozen import build, freeze
from mrem_deploy.recipe import Recipe
from mrem_deploy.result import Result
from mrem_deploy.train.mrem_p import launch, team
from mrem_deploy.walk.budget import fitted, plan_in_time
from mrem_deploy.walk.loading import load
from mrem_deploy.walk.plan import Plan, planned_workers, planner_of
from mrem_deploy.walk.publishing import notes_of, publish
from mrem_deploy.walk.state import Begin, Run
from mrem_deploy.walk.training import train


@interrupt.watched()
def run(recipe: Recipe, resume: bool = False, fresh: bool = False) -> Result:
    """Run a recipe from start to end: everything it makes is in the folder `recipe.out`.

    An interrupted run of the same recipe is continued; `resume` says so if there is none. `fresh` removes its
    checkpoints and starts over.
    """
    recipe = preflight.absolute_paths(recipe)
    out = preflight.check_places(recipe)
    device = preflight.resolve_device(recipe.device)
    preflight.select_backend(recipe.kernels, device)
    begin = Begin(resume, fresh, by_torchrun=launch.is_worker())
    if begin.by_torchrun:
        preflight.check_workers(recipe, int(os.environ["WORLD_SIZE"]))
    elif (workers := planned_workers(recipe, device)) > 1:
        with hold(out, begin.token), resumable(out):
            team.launch(walk_as_worker, (recipe, out, begin), workers, recipe.max_restarts)
        return Result(out)
    return Result(walk(recipe, out, begin))


def walk(recipe: Recipe, out: Path, begin: Begin) -> Path:
    """The run in one process. Of several workers that train together, the leader finishes it."""
    with Run.start(recipe, out, begin) as run, run.alone():
        loaded = load(run)
        run.open_checkpoints(loaded.identity)
        plan_in_time(run, loaded)
        trained = train(run, loaded)
        if not run.crew.leads:
            del loaded, trained  # the evaluation may need the memory
            run.follow()
            return out
        frozen = freeze(trained.student, loaded.head)
        frozen.notes = notes_of(run.recipe, trained)
        quantized = build(frozen).to(run.device)
        loaded.evaluation.add_full_precision(loaded.teacher, loaded.weights)
        publish(run, loaded, trained, frozen, quantized)
        return out


def walk_as_worker(recipe: Recipe, out: Path, begin: Begin) -> None:
    """The run in one of several processes; what it makes is in the folder."""
    walk(recipe, out, begin)


def plan(recipe: Recipe) -> Plan:
    """What `run` would do and cost on this machine. Reads the model and the training split only."""
    recipe = preflight.absolute_paths(recipe)
    out = preflight.check_places(recipe)
    with Run.start(recipe, out, Begin()) as run:
        planner = planner_of(run, load(run))
        return planner(fitted(recipe, planner))
