"""The ablation of the default recipe: its rows, and a real one on a tiny model."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_job import POSITIONS, workshop_in

from mrem_deploy.base import cli
from mrem_deploy.recipe import Recipe
from mrem_deploy.reproduce import __main__ as command
from mrem_deploy.reproduce import cells, levers
from mrem_deploy.reproduce.plan import Subject, make_plan
from mrem_deploy.reproduce.run import jobs_of

MNLI = Subject("a-model", "mnli", "some-data", 12, 384, "weights")


def rows(bits: str, subject: Subject = MNLI, **given: Any) -> list[levers.Row]:
    plan = levers.default_plan(make_plan(subject.task, False, given), given)
    return levers.rows_at(plan, subject, bits)


@pytest.mark.parametrize("bits", ["4-4-8", "2-2-8", "2-2-4"])
def test_the_last_row_is_the_default_recipe(bits: str) -> None:
    usual = Recipe(model="a-model", task="mnli", data="some-data", bits=bits, export="none")
    assert rows(bits)[-1].recipe == usual


def test_the_first_row_is_the_papers() -> None:
    first = rows("2-2-4")[0].recipe
    chosen = [getattr(first, lever.option) for lever in levers.LEVERS]
    assert chosen == [False, "twn", "0", 1.0, 1e-4, "mse", "never"]


@pytest.mark.parametrize("bits", ["4-4-8", "2-2-8", "2-2-4", "8-8-8"])
def test_every_row_changes_one_option(bits: str) -> None:
    found = rows(bits)
    for above, row in itertools.pairwise(found):
        values, before = dataclasses.asdict(row.recipe), dataclasses.asdict(above.recipe)
        assert [name for name in values if values[name] != before[name]] == [row.lever]


@pytest.mark.parametrize(
    ("bits", "task", "without"),
    [
        ("2-2-4", "mnli", set()),
        ("2-2-8", "mnli", {"centring"}),
        ("4-4-8", "mnli", {"weight_quantizer", "lr", "centring"}),  # the paper's rate is the default there
        ("8-8-8", "mnli", {"weight_quantizer", "hot_rows", "lr", "centring"}),
        ("2-2-4", "stsb", {"output_loss"}),  # a regression keeps its squared error
        ("4-4-8", "squad", {"weight_quantizer", "centring"}),  # for which the paper has another rate
    ],
)
def test_a_lever_that_changes_nothing_has_no_row(bits: str, task: str, without: set[str]) -> None:
    found = {row.lever for row in rows(bits, dataclasses.replace(MNLI, task=task))[1:]}
    assert {lever.option for lever in levers.LEVERS} - found == without


def test_options_say_how_much_is_trained() -> None:
    assert (rows("2-2-8")[0].recipe.steps, rows("2-2-8")[0].recipe.batch_size) == (400, 16)
    given = rows("2-2-8", steps=70, lr=2e-3)
    assert {row.recipe.steps for row in given} == {70}
    assert [given[0].recipe.lr, given[-1].recipe.lr] == [1e-4, 2e-3]


def test_the_paper_keeps_its_own_length_next_to_an_ablation() -> None:
    pair = (make_plan("mnli", False, {}), MNLI)
    jobs, idle = jobs_of(["num-modules", "ablation"], [pair])
    assert [job.recipes()[0].steps for job in jobs] == [2000, 400]
    assert idle == []
    assert "400 steps of 16 sentences" in jobs[1].caption()
    (quick,), _ = jobs_of(["ablation"], [(make_plan("mnli", True, {}), MNLI)], {"steps", "batch_size"})
    assert quick.recipes()[0].steps == 60


def test_all_means_the_papers() -> None:
    assert "ablation" not in command.experiment_names(["all"])
    assert command.experiment_names(["ablation", "main"]) == ["main", "ablation"]
    assert "ablation" in command.experiment_names(["all", "ablation"])


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop_in(tmp_path_factory.mktemp("levers")) as folder:
        yield folder


def test_an_ablation_of_a_tiny_model(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted after three cells, it goes on with the fourth; every row has all its numbers."""
    ran: list[Recipe] = []

    def here(call: Callable[[Recipe], None], recipe: Recipe) -> None:
        if len(ran) == 3 and not stopped:
            stopped.append(recipe)
            raise KeyboardInterrupt
        ran.append(recipe)
        call(recipe)

    stopped: list[Recipe] = []
    monkeypatch.setattr(cells, "in_fresh_process", here)
    argv = [
        *("ablation", "--model", str(workshop / "model"), "--task", "text-classification"),
        *("--data", str(workshop / "data"), "--out", str(workshop / "out"), "--bits", "2-2-4"),
        *("--steps", "4", "--batch-size", "8", "--calib-size", "16", "--max-length", str(POSITIONS)),
        *("--threads", "1"),
    ]
    assert cli.run(command.main, argv) == cli.EXIT_INTERRUPTED
    assert cli.run(command.main, argv) == 0
    assert len({cells.cell_label(recipe) for recipe in ran}) == len(ran) == 8
    shown = capsys.readouterr()
    assert "3 of 8 cells are finished already" in shown.err
    assert "midrise at 2 bits" in shown.out
    content = json.loads((workshop / "out" / "ablation.json").read_text(encoding="utf-8"))
    assert content["paper"] == ""
    first, *others = content["rows"]
    assert first["gain"] is None
    assert [row["option"] for row in others] == [lever.option for lever in levers.LEVERS]
    for row in content["rows"]:
        assert all(row[name] > 0 for name in ("heldout_1", "heldout_2", "kl", "cpu_minutes"))
        assert row["flips"] is not None
        assert row["drop"] == pytest.approx(row["score"] - row["full_precision"])
    for above, row in zip(content["rows"], others, strict=False):
        assert row["gain"] == pytest.approx(row["score"] - above["score"])
        assert row["gain_error"] is not None
    losses = [(row["heldout_1"], row["heldout_2"]) for row in content["rows"]]
    assert len(set(losses)) == len(losses)  # every lever reaches the training
    markdown = (workshop / "out" / "index.md").read_text(encoding="utf-8")
    assert "Not in the paper." in markdown
    assert markdown.count("| 2-2-4 |") == 8
    assert "compare it within the rows above" in markdown
