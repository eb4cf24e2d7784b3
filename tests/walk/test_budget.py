"""Presets and time budgets: what they decide, and that a run keeps what was decided."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from test_plan import SHAPE, TIMING
from tiny_job import job_in, workshop_in

from mrem_deploy.base.errors import UserError
from mrem_deploy.recipe import Recipe, parse_duration
from mrem_deploy.recipe_defaults import MOST_STEPS, PRESETS
from mrem_deploy.walk import budget
from mrem_deploy.walk.budget import LEAST_STEPS, RESERVE, fitted
from mrem_deploy.walk.plan import Plan, make_plan

RECIPE = Recipe(model="somewhere/bert-base", lr=1e-4, time_budget="2h")


def planner(recipe: Recipe) -> Plan:
    return make_plan(recipe, SHAPE, TIMING, sentences=4096)


def test_a_preset_fills_what_is_not_given() -> None:
    for name, preset in PRESETS.items():
        recipe = Recipe(preset=name)
        assert (recipe.steps, recipe.batch_size, recipe.calib_size) == (
            preset.steps, preset.batch_size, preset.calib_size,
        )  # fmt: skip
    assert Recipe() == Recipe(preset="balanced")
    mixed = Recipe(preset="quick", steps=7)
    assert (mixed.steps, mixed.batch_size) == (7, PRESETS["quick"].batch_size)
    with pytest.raises(UserError, match="quick, balanced, best"):
        Recipe(preset="fast")


@pytest.mark.parametrize(("text", "seconds"), [("10m", 600), ("90s", 90), ("1h30m", 5400), ("0.5h", 1800)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "ten minutes", "-5m", "10m1h"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="10m, 90s or 1h30m"):
        Recipe(time_budget=text)


def test_the_steps_fill_the_budget() -> None:
    found = fitted(RECIPE, planner)
    limit = RESERVE * 7200
    assert LEAST_STEPS < found.steps < MOST_STEPS
    assert planner(found).seconds <= limit < planner(replace(found, steps=found.steps + 1)).seconds
    assert found.time_budget is None
    assert fitted(replace(RECIPE, steps=30), planner).steps == 30  # the recipe's own number is the most
    assert fitted(replace(RECIPE, time_budget="999h"), planner).steps == MOST_STEPS
    without = replace(RECIPE, time_budget=None)
    assert fitted(without, planner) is without


def test_too_little_time_is_refused_with_what_is_needed() -> None:
    with pytest.raises(UserError, match=r"about .* on this machine"):
        fitted(replace(RECIPE, time_budget="10s"), planner)


@pytest.mark.parametrize("method", ["ptq", "qat"])
def test_methods_without_steps_have_no_budget(method: str) -> None:
    with pytest.raises(UserError, match=f"the method is {method}"):
        Recipe(method=method, time_budget="10m")


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Path]:
    with workshop_in(tmp_path) as root:
        yield root


def test_a_run_within_a_budget_can_be_repeated(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written recipe has the chosen steps and no budget, so it gives the same result anywhere."""
    monkeypatch.setattr(budget, "LEAST_STEPS", 1)
    job = job_in(workshop, "out", steps=5, time_budget="1h")
    assert job.run() == 0
    written = yaml.safe_load((workshop / "out" / "recipe.yaml").read_text())
    assert written["steps"] == 5
    assert written["time_budget"] is None
    assert job_in(workshop, "again", steps=5).run() == 0
    first, second = ((workshop / out / "mrem.safetensors").read_bytes() for out in ("out", "again"))
    assert first == second


def test_an_interrupted_run_keeps_its_steps(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has become slower must not change what was begun."""
    job = job_in(workshop, "out", steps=6, time_budget="1h", checkpoint_steps=2)
    chosen = iter([4])
    monkeypatch.setattr(budget, "fitted", lambda recipe, _: replace(recipe, steps=next(chosen)))
    with monkeypatch.context() as patch:
        from mrem_deploy.walk import training

        def fall(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(training, "layer_errors", fall)
        assert job.run() == 130
    assert job.run("--resume") == 0  # fitted is not called a second time: there is no second number
    written = yaml.safe_load((workshop / "out" / "recipe.yaml").read_text())
    assert written["steps"] == 4
