"""--target-drop: the smallest of a few sizes that loses at most so much, by an estimate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from test_plan import RECIPE, SHAPE, TIMING, stages
from tiny_job import job_in, workshop_in
from transformers import PretrainedConfig

from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError
from mrem_deploy.data.tasks import TASKS
from mrem_deploy.data.texts import Texts, further_rows, split_rows
from mrem_deploy.evaluate.scorers import Comparison, LabelScorer
from mrem_deploy.quant.mixed import Choices
from mrem_deploy.recipe import Recipe
from mrem_deploy.recipe_defaults import RATE_OF_CHOSEN_BITS, RATES
from mrem_deploy.report.target import target_tables, target_warnings
from mrem_deploy.result import Attempt, Metrics, TargetDrop
from mrem_deploy.train.module import ModuleTrainer
from mrem_deploy.walk import loading, publishing, target
from mrem_deploy.walk.plan import make_plan
from mrem_deploy.walk.target import RUNGS, Judge, Loss, rungs_of, smallest

BY_HAND = Choices(
    groups=[("a",), ("b", "c")],
    costs=[{2: 100, 4: 200, 8: 400}, {2: 50, 4: 100, 8: 200}],
    fixed=30,
    errors=[{2: 8.0, 4: 2.0, 8: 0.5}, {2: 9.0, 4: 1.0, 8: 0.1}],
    measure="error",
    weights={"a": 400, "b": 100, "c": 100},
)


@pytest.mark.parametrize("first", range(len(RUNGS) + 1))
def test_the_smallest_rung_is_found_by_three_trainings(first: int) -> None:
    tried: list[int] = []
    assert smallest(len(RUNGS), lambda rung: (tried.append(rung), rung >= first)[1]) == first
    assert len(tried) == len(set(tried)) <= target.MOST_SHORT


def test_rungs_go_from_two_bits_to_eight() -> None:
    rungs = rungs_of(BY_HAND)
    assert set(rungs[0].layers.values()) == {2}
    assert set(rungs[-1].layers.values()) == {8}
    sizes = [rung.planned_mb for rung in rungs]
    assert sizes == sorted(set(sizes))
    assert [round(size * 2**20) for size in sizes[:2]] == [180, 230]  # b and c go to 4 bits first
    for rung in rungs:  # a recipe of that size makes the same choice
        assert BY_HAND.within_bytes(int(rung.budget_mb * 2**20)).layers == rung.layers


def judge_of(scorer: Any, metric: str | None, full: np.ndarray) -> Judge:
    return Judge(scorer, metric, lambda rows: list(rows), list(full))  # type: ignore[arg-type]


def test_the_estimate_with_labels_is_the_drop_of_the_metric() -> None:
    """Ten examples: full precision has 8 right, the model loses two of them and gains one."""
    texts = Texts(["x"] * 10, None, np.zeros(10, dtype=np.int64), ("no", "yes"))

    config = PretrainedConfig(id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1})

    def logits(right: list[int]) -> np.ndarray:
        return np.array([[3.0, 0.0] if i in right else [0.0, 3.0] for i in range(10)])

    full, model = logits([*range(8)]), logits([2, 3, 4, 5, 6, 7, 8])
    task = replace(TASKS["text-classification"], labels=("no", "yes"))
    judge = judge_of(LabelScorer(task, texts, config), "accuracy", full)
    found = judge.of_model(model)  # type: ignore[arg-type]
    assert found.drop == pytest.approx(10.0)
    assert found.flips == pytest.approx(30.0)
    assert 10 < found.error < 25  # √(0.3 − 0.1²) / √10 = 17 points
    assert judge.estimate == "the drop of accuracy"


def test_the_estimate_without_labels_is_a_bound_of_any_drop() -> None:
    full = np.eye(4) * 5
    model = full.copy()
    model[3] = [9.0, 0.0, 0.0, 0.0]
    judge = judge_of(Comparison(TASKS["text-classification"]), None, full)
    found = judge.of_model(model)  # type: ignore[arg-type]
    assert found.drop == pytest.approx(25.0) == pytest.approx(found.flips)
    assert "bound" in judge.estimate


def test_sentences_to_judge_by_are_used_for_nothing_else() -> None:
    taken, apart = split_rows(100, 40, 10, 3)
    rows = further_rows(100, np.concatenate([taken, apart]), 30, 3)
    assert len(set(rows)) == 30
    assert not set(rows) & (set(taken) | set(apart))
    assert len(further_rows(100, taken, 1000, 3)) == 60


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(loading, "LEAST_JUDGED", 10)
    monkeypatch.setattr(publishing, "write_report", lambda *args: None)
    with workshop_in(tmp_path) as root:
        yield root


def job(workshop: Path, out: str, **options: Any) -> Any:
    return job_in(workshop, out, **{"bits": "auto", "lr": None, "steps": 4, "init_batches": 1} | options)


def losses(monkeypatch: pytest.MonkeyPatch, first: int, full: int) -> None:
    """Rungs from `first` on meet a target of 1 after a short training, those from `full` on after a long."""
    attempt = target._Walk.attempt

    def noting(self: Any, rung: int, full: bool) -> Attempt:
        now.update(rung=rung, full=full)
        return attempt(self, rung, full)

    now: dict[str, Any] = {}

    def of_model(self: Judge, model: Any) -> Loss:
        enough = now["rung"] >= (full if now["full"] else first)
        return Loss(0.5 if enough else 5.0 - 0.1 * now["rung"], 0.25, 2.0, 0.01)

    monkeypatch.setattr(target._Walk, "attempt", noting)
    monkeypatch.setattr(Judge, "of_model", of_model)


def metrics_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.json").read_text())


def test_the_walk_ends_at_the_first_rung_that_meets_it(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the written recipe gives the same model: it has the size instead of the target."""
    losses(monkeypatch, first=2, full=1)
    assert job(workshop, "out", target_drop=1.0).run() == 0
    shown = capsys.readouterr()
    found = metrics_in(workshop / "out")["target_drop"]
    assert [(one["rung"], one["full"]) for one in found["attempts"]] == [
        (3, False), (1, False), (2, False), (1, True),
    ]  # fmt: skip
    assert (found["met"], found["chosen"], found["estimate"]) == (True, 1, "the drop of accuracy")
    assert found["examples"] == 60 - 32 - 7
    assert "target: at most 1 points: met with" in shown.err
    assert "target: at most 1 points: met with" in shown.out
    size = (workshop / "out" / "mrem.safetensors").stat().st_size / 2**20
    assert size <= found["attempts"][-1]["size_mb"]
    written = yaml.safe_load((workshop / "out" / "recipe.yaml").read_text())
    assert (written["target_drop"], written["steps"]) == (None, 4)
    assert written["budget_mb"] == found["attempts"][-1]["size_mb"]
    again = job(workshop, "again", budget_mb=written["budget_mb"], lr=written["lr"])
    assert again.run() == 0
    one, other = ((workshop / out / "mrem.safetensors").read_bytes() for out in ("out", "again"))
    assert one == other


def test_a_target_that_nothing_meets_is_reported_with_the_best(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses(monkeypatch, first=99, full=99)
    assert job(workshop, "out", target_drop=1.0, method="ptq").run() == 0
    assert "NOT met, not even with 8 bits; the best is" in capsys.readouterr().out
    found = metrics_in(workshop / "out")["target_drop"]
    assert not found["met"]
    assert found["chosen"] == found["attempts"][-1]["rung"]  # the fake losses fall with the size
    assert all(one["full"] for one in found["attempts"])  # ptq trains nothing, so nothing is tried briefly


@pytest.mark.parametrize("call", [7, 20])  # in the second short training, in that in full
def test_a_killed_walk_goes_on_where_it_was(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    losses(monkeypatch, first=2, full=1)
    assert job(workshop, "whole", target_drop=1.0, steps=8).run() == 0
    steps, step = [], ModuleTrainer.step

    def killed(self: ModuleTrainer, *args: Any) -> Any:
        steps.append(self)
        if len(steps) == call:
            raise KeyboardInterrupt
        return step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ModuleTrainer, "step", killed)
        assert job(workshop, "out", target_drop=1.0, steps=8).run() == cli.EXIT_INTERRUPTED
    after: list[Any] = []
    monkeypatch.setattr(ModuleTrainer, "step", lambda self, *a: (after.append(self), step(self, *a))[1])
    assert job(workshop, "out", target_drop=1.0, steps=8).run("--resume") == 0
    whole = 2 * (2 + 2 + 2 + 8)  # steps of both modules in three short trainings and a long one
    assert len(after) < whole
    one, other = (metrics_in(workshop / out)["target_drop"] for out in ("whole", "out"))
    assert one == other
    tensors = [(workshop / out / "mrem.safetensors").read_bytes() for out in ("whole", "out")]
    assert tensors[0] == tensors[1]


def test_too_few_sentences_are_refused_before_any_work(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "LEAST_JUDGED", 22)
    assert job(workshop, "out", target_drop=1.0).run() == cli.EXIT_USER_ERROR
    shown = capsys.readouterr().err
    assert "leaves 21 sentences to estimate the drop on" in shown
    assert "--calib-size" in shown
    assert not (workshop / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": "4-4-8"}, "--bits 4-4-8 fixes them"),
        ({"budget_mb": 9.0}, "--budget-mb gives one"),
        ({"method": "mrem-p"}, "mrem-s, rem, ptq"),
        ({"method": "qat"}, "mrem-s, rem, ptq"),
        ({"time_budget": "10m"}, "--time-budget"),
        ({"target_drop": -1.0}, "points from 0 to 100"),
        ({"target_drop": float("nan")}, "points from 0 to 100"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        Recipe(**{"bits": "auto", "target_drop": 1.0} | options)
    assert words in f"{refused.value.problem} {refused.value.remedy}"


def test_one_width_everywhere_has_the_rate_of_that_width() -> None:
    recipe = Recipe(bits="auto", target_drop=1.0)
    rungs = rungs_of(BY_HAND)
    assert recipe.lr == RATE_OF_CHOSEN_BITS
    rates = [target.sized(recipe, rung).lr for rung in rungs]
    assert (rates[0], rates[1], rates[-1]) == (RATES[2], RATE_OF_CHOSEN_BITS, RATES[8])
    assert {target.sized(replace(recipe, lr=2e-4), rung).lr for rung in rungs} == {2e-4}


def test_the_plan_counts_the_worst_case() -> None:
    one = stages(make_plan(RECIPE, SHAPE, TIMING, 4096))
    recipe = replace(RECIPE, bits="auto", target_drop=1.0)
    plan = make_plan(recipe, SHAPE, TIMING, 4096)
    found = stages(plan)
    full, short = len(RUNGS), target.MOST_SHORT
    assert found["train"] == pytest.approx(full * one["train"])
    assert found["short"] == pytest.approx(short * target.SHORT * one["train"])
    assert found["cache"] == pytest.approx((full + short) * one["cache"])
    assert found["calibrate"] == pytest.approx((full + short + 1) * one["calibrate"])
    assert found["estimate"] == pytest.approx(loading.MOST_JUDGED / 32 * 12 * (0.1 + (full + short) * 0.2))
    assert "1 to 7 trainings" in "\n".join(plan.lines())
    assert "at most" in "\n".join(plan.lines())


SHORT = Attempt(0, 9.0, 2.0, False, 100, 4.0, 0.5, 9.0, 0.1)
FULL = Attempt(1, 10.0, 2.5, True, 400, 0.5, 0.4, 5.0, 0.05)
FOUND = TargetDrop(1.0, "the drop of accuracy", 2000, True, 1, (SHORT, FULL))


def test_what_is_reported() -> None:
    (table,) = target_tables(FOUND)
    assert [row[-1] for row in table.rows] == ["no", "yes, the result"]
    assert "2,000 sentences" in table.note
    assert target_warnings(FOUND) == target_warnings(None) == target_tables(None) == []
    (warning,) = target_warnings(replace(FOUND, target=0.8, met=False))
    assert "NOT met" in warning
    content = Metrics(target=FOUND).to_dict()
    assert Metrics.from_dict(json.loads(json.dumps(content))).target == FOUND
    assert "target_drop" not in Metrics().to_dict()
