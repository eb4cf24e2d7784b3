"""Tables, plots and sentences of `reproduce`, from results made up for the purpose: nothing is trained."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrem_deploy.evaluate.accuracy import SplitScores
from mrem_deploy.evaluate.examples import Examples
from mrem_deploy.evaluate.fidelity import Fidelity
from mrem_deploy.recipe import Recipe
from mrem_deploy.reproduce import claims, figures, paper, run
from mrem_deploy.reproduce.cells import CellResult
from mrem_deploy.reproduce.estimate import Estimate
from mrem_deploy.reproduce.experiments import EXPERIMENTS, PAPERS
from mrem_deploy.reproduce.layout import fidelity_columns, fidelity_fields
from mrem_deploy.reproduce.page import Provenance, to_csv, write_entry, write_page
from mrem_deploy.reproduce.plan import ExperimentPlan, Subject, differences, make_plan, paper_plan
from mrem_deploy.reproduce.results import Gap, Measured, gap
from mrem_deploy.result import Accuracy, Cost, HeldOut, History, LayerErrors, Metrics, Sizes, WorkerCost

EXAMPLES = 400
MNLI = Subject("a-model", "mnli", "some-data", 12, 768, "weights")
# Right answers of 400; REM is far behind, so that orderings are beyond doubt.
RIGHT = {"rem": 200, "mrem-s": 340, "mrem-p": 330, "qat": 350, "ptq": 300}  # ptq: what GOBO goes by


def made_up(recipe: Recipe, right: dict[str, int]) -> CellResult:
    """A run whose first `right[method]` answers are right, a few more with every seed."""
    truth = np.zeros(EXAMPLES, dtype=np.int64)
    count = right[recipe.method] + recipe.seed
    guess = np.where(np.arange(EXAMPLES) < count, 0, 1)
    splits = ("matched", "mismatched") if recipe.task == "mnli" else ("dev",)
    metric, also = ("f1", "exact") if recipe.task == "squad" else ("accuracy", "accuracy")
    predictions = {"full_precision": np.where(np.arange(EXAMPLES) < 360, 0, 1), "quantized": guess}
    fidelity = {"quantized": Fidelity(0.1 + 0.02 * recipe.seed, 0.003, 10.0, 1.5)}
    scores = {
        "full_precision": {also: 80.0, metric: 90.0},
        "quantized": {also: 50.0, metric: 100.0 * count / EXAMPLES},
    }
    layers = ["embeddings", "block 1", "block 2", "output"]
    error = 0.4 if recipe.method == "rem" else 0.1
    modules = 1 if recipe.method == "rem" else int(recipe.modules)
    return CellResult(
        Metrics(
            accuracy=Accuracy(
                metric, dict.fromkeys(splits, SplitScores(EXAMPLES, scores=scores, fidelity=fidelity))
            ),
            cost=Cost(
                train_seconds=60.0,
                total_seconds=70.0,
                peak_memory_mb=8192.0 / modules,
                memory_kind="peak resident memory",
                workers=(WorkerCost("main"),),
                calibration_samples=recipe.calib_size,
            ),
            size=Sizes(400.0, 50.0),
            heldout={f"module {i + 1}": HeldOut(end=0.2, best=0.1 * (i + 1)) for i in range(modules)},
        ),
        History(
            {
                f"module {i + 1}": [
                    [step, (2.0 if recipe.teacher_forcing else 3.0) / (1 + step)] for step in range(40)
                ]
                for i in range(modules)
            },
            LayerErrors(layers, [0.5] * 4, [error] * 4),
        ),
        dict.fromkeys(splits, Examples("accuracy", truth, predictions)),
    )


class Pretend:
    """Cells that are all finished."""

    def __init__(self, right: dict[str, int] = RIGHT) -> None:
        self.right = right

    def load(self, recipe: Recipe) -> CellResult:
        return made_up(recipe, self.right)


def entries_of(
    names: list[str], plan: ExperimentPlan, *subjects: Subject, right: dict[str, int] = RIGHT
) -> list[Any]:
    jobs, _ = run.jobs_of(names, [(plan, subject) for subject in subjects or (MNLI,)])
    return run.present(jobs, Pretend(right), plan.seeds)  # type: ignore[arg-type]


@pytest.mark.parametrize(("seeds", "kl", "error"), [(1, 0.1, 0.003), (3, 0.12, 0.02 / math.sqrt(3))])
def test_the_main_table_shows_what_changed(seeds: int, kl: float, error: float) -> None:
    """The error is that over the examples, or with several seeds that over the seeds."""
    (entry,) = entries_of(["main"], replace(paper_plan("mnli"), seeds=seeds))
    full, *others = entry.shown.records
    assert (full["kl"], full["flips"]) == (None, None)
    assert others
    for record in others:
        assert (record["kl"], record["kl_error"]) == (pytest.approx(kl), pytest.approx(error))
        assert (record["flips"], record["flips_error"]) == (10.0, 1.5 if seeds == 1 else 0.0)
    text = entry.text()
    assert "KL, nats" in text
    assert f"{kl:.4f} ± {error:.4f}" in text


def test_runs_without_divergences_have_no_column_of_them() -> None:
    run_without = made_up(Recipe(task="mnli"), RIGHT)
    accuracy = run_without.metrics.accuracy
    bare = {name: replace(split, fidelity={}) for name, split in accuracy.splits.items()}
    old = replace(run_without, metrics=replace(run_without.metrics, accuracy=replace(accuracy, splits=bare)))
    assert Measured([old]).fidelity("kl") is None
    assert Measured([old, run_without]).fidelity("kl") is None
    assert fidelity_columns([fidelity_fields(Measured([old]))]) == []


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_every_experiment_gives_a_table_that_can_be_read_back(name: str, tmp_path: Path) -> None:
    plan = replace(paper_plan("mnli"), seeds=2)
    (entry,) = entries_of([name], plan)
    provenance = Provenance("the command", {"date": "today"}, ["something is left out."])
    write_entry(entry, tmp_path, provenance)
    stored = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert stored["rows"] == entry.shown.records
    assert (stored["command"], stored["date"]) == ("the command", "today")
    with (tmp_path / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = list(dict.fromkeys(key for record in entry.shown.records for key in record))
    expected = [
        {key: "" if r.get(key) is None else str(r[key]) for key in names} for r in entry.shown.records
    ]
    assert rows == expected
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("plots/*.png"))
    assert len(list(tmp_path.glob("plots/*.png"))) == len(entry.shown.plots)
    assert str(entry.title) in entry.text()


def test_the_page_has_every_experiment_and_fetches_nothing(tmp_path: Path) -> None:
    entries = entries_of(list(EXPERIMENTS), replace(paper_plan("mnli"), seeds=1))
    provenance = Provenance("mrem reproduce all", {"date": "today"}, ["gobo is left out: <why>."])
    write_page(entries, tmp_path, "a title & more", provenance)
    markdown, html = ((tmp_path / f"index.{end}").read_text(encoding="utf-8") for end in ("md", "html"))
    for entry in entries:
        assert f"## {entry.title}" in markdown
        assert f'id="{entry.stem}"' in html
    assert "gobo is left out: &lt;why&gt;." in html
    assert "<why>" not in markdown
    assert "default-src 'none'" in html
    assert "mrem reproduce all" in html


def test_plots_on_one_page_refer_to_parts_of_their_own(tmp_path: Path) -> None:
    other = replace(MNLI, task="sst2")
    entries = entries_of(["main", "error-propagation"], replace(paper_plan("mnli"), seeds=1), MNLI, other)
    assert [entry.stem for entry in entries] == [
        "main-mnli", "main-sst2", "error-propagation-mnli", "error-propagation-sst2",
    ]  # fmt: skip
    write_page(entries, tmp_path, "a title", Provenance("mrem reproduce", {"date": "today"}, []))
    html = (tmp_path / "index.html").read_text(encoding="utf-8")
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    references = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', html)
    assert len(references) > 40
    assert {one or other for one, other in references} <= set(ids)


def test_the_main_table_has_the_papers_figures_beside_ours() -> None:
    (entry,) = entries_of(["main"], replace(paper_plan("mnli"), seeds=1))
    record = next(r for r in entry.shown.records if (r["bits"], r["method"]) == ("2-2-4", "mrem-s"))
    assert (record["matched"], record["paper_matched"], record["paper_matched_std"]) == (85.0, 81.1, 0.2)
    assert (record["gigabytes"], record["paper_gigabytes"], record["paper_minutes"]) == (2.0, 4.6, 24)
    assert record["drop"] == pytest.approx(-5.0)
    assert "paired bootstrap over 400 examples" in record["drop_how"]
    assert 0 < record["drop_error"] < 2
    row = next(line for line in entry.text().splitlines() if "2-2-4" in line and "MREM-S" in line)
    assert "81.1 ± 0.2" in row
    assert "85.00" in row


def test_squad_has_two_scores_of_one_split() -> None:
    squad = replace(MNLI, task="squad")
    (entry,) = entries_of(["main"], replace(paper_plan("squad"), seeds=1), squad)
    record = next(r for r in entry.shown.records if (r["bits"], r["method"]) == ("2-2-8", "mrem-s"))
    assert (record["exact"], record["paper_exact"], record["f1"], record["paper_f1"]) == (
        50.0,
        77.8,
        85.0,
        86.0,
    )
    finding = next(f for f in entry.shown.findings if f.claim == "2-2-8: MREM-S scores above REM")
    assert finding.evidence.startswith("+35.00")  # of F1, the main score
    assert finding.evidence.endswith("paper +31.0")
    assert "F1 − full precision" in entry.text()
    assert entry.caption == "Differs from the paper: 1 seed (paper: 10)."


def test_a_wide_model_is_compared_with_bert_large() -> None:
    large = replace(MNLI, layers=24, hidden=1024)
    (entry,) = entries_of(["main"], replace(paper_plan("mnli"), seeds=1), large)
    record = next(r for r in entry.shown.records if (r["bits"], r["method"]) == ("4-4-8", "rem"))
    assert record["paper_matched"] == 70.0
    assert entry.caption == "Differs from the paper: 1 seed (paper: 10)."


def test_sentences_about_orderings_follow_the_numbers() -> None:
    def verdicts(right: dict[str, int]) -> dict[str, str]:
        (entry,) = entries_of(["main"], replace(paper_plan("mnli"), seeds=1, bits=("2-2-8",)), right=right)
        return {finding.claim: finding.verdict for finding in entry.shown.findings}

    claim = "2-2-8: MREM-S scores above REM"
    assert verdicts(RIGHT)[claim] == claims.HOLDS
    assert verdicts({**RIGHT, "rem": 350, "mrem-s": 200})[claim] == claims.FAILS
    assert verdicts({**RIGHT, "rem": 340})[claim] == claims.OPEN


def test_memory_that_does_not_fall_is_said() -> None:
    assert claims.falling("memory falls", [4.0, 3.0, 2.0], "GB").verdict == claims.HOLDS
    assert claims.falling("memory falls", [4.0, 3.0, 3.5], "GB").verdict == claims.FAILS
    assert claims.falling("memory falls", [4.0, 3.0, 2.99], "GB").verdict == claims.OPEN
    assert claims.less("less", 1.0, 2.0, "GB").verdict == claims.HOLDS
    assert claims.less("less", 2.0, 1.0, "GB").verdict == claims.FAILS
    large = claims.less("less", 1337.6, 44691.0, "min", (24, 882))
    assert large.evidence == "1,338 against 44,691 min; paper 24 against 882"


def test_summary_counts_verdicts() -> None:
    found = [claims.Finding("a", verdict, "") for verdict in (claims.HOLDS, claims.HOLDS, claims.FAILS)]
    assert claims.summary(found) == (
        "Of 3 orderings of the paper, 2 hold here, 1 does not, and 0 cannot be told from these runs."
    )
    assert claims.summary(found[:1]).startswith("Of 1 ordering of the paper, 1 holds here")
    assert claims.summary([]) == ""


def test_uncertainty_comes_from_examples_or_from_seeds() -> None:
    rem, mrem = (Recipe(task="mnli", method=method) for method in ("rem", "mrem-s"))
    one = gap(Measured([made_up(rem, RIGHT)]), Measured([made_up(mrem, RIGHT)]))
    assert one.value == 35.0
    assert "paired bootstrap" in one.how
    # 140 of 400 answers differ, all in one direction: 100·sqrt(p(1 − p)/n) with p = 0.35
    assert one.error == pytest.approx(100 * np.sqrt(0.35 * 0.65 / EXAMPLES), rel=0.1)  # of a resampled spread
    runs = [[made_up(replace(r, seed=s), {**RIGHT, "rem": 200 - s}) for s in range(3)] for r in (rem, mrem)]
    several = gap(Measured(runs[0]), Measured(runs[1]))
    assert several.how == "spread over 3 seeds"
    assert several.value == pytest.approx(35.25)
    # differences 35, 35.25, 35.5: standard deviation 0.25, t of two degrees of freedom 4.303
    assert several.error == pytest.approx(0.25 / np.sqrt(3))
    assert several.high - several.value == pytest.approx(4.3027 * several.error, rel=1e-3)


def test_answers_to_other_examples_are_not_paired() -> None:
    rem, mrem = (made_up(Recipe(task="mnli", method=method), RIGHT) for method in ("rem", "mrem-s"))
    other = replace(mrem.examples["matched"], truth=np.ones(EXAMPLES, dtype=np.int64))
    found = gap(Measured([rem]), Measured([replace(mrem, examples={"matched": other})]))
    assert np.isnan(found.error)
    assert claims.verdict_of(found) == claims.OPEN
    assert str(found) == "+35.00"


def test_a_difference_of_differences_adds_the_errors() -> None:
    one, other = Gap(3.0, 0.3, 2.4, 3.6, "x"), Gap(1.0, 0.4, 0.2, 1.8, "x")
    more = one.minus(other)
    assert (more.value, more.error) == (2.0, pytest.approx(0.5))
    assert claims.verdict_of(more) == claims.HOLDS
    assert claims.verdict_of(other.minus(one)) == claims.FAILS


def test_the_papers_own_plan_differs_in_nothing() -> None:
    for experiment in PAPERS.values():
        assert differences(paper_plan("mnli"), MNLI, experiment.recipes) == []


@pytest.mark.parametrize("name", list(PAPERS))
def test_captions_label_every_reduction_of_quick(name: str) -> None:
    subject = Subject("m", "sst2", "d", 6, 384)
    plan = make_plan("sst2", True, {})
    told = "; ".join(differences(plan, subject, EXPERIMENTS[name].recipes))
    for words in (
        "1 seed (paper: 10)",
        "learning rate 0.001 (paper: 0.0001)",
        "evaluation examples 500 (paper: all)",
        "batch size 16",
        "6 layers of width 384",
    ):
        assert words in told
    published = EXPERIMENTS[name].recipes(paper_plan("sst2"), replace(subject, layers=12))
    for option in ("bits", "steps", "modules", "calib_size"):
        ours = {getattr(r, option) for r in EXPERIMENTS[name].recipes(plan, subject)}
        theirs = {getattr(r, option) for r in published}
        words = {
            "bits": "bits",
            "steps": "steps",
            "modules": "modules",
            "calib_size": "calibration examples",
        }[option]
        assert ours == theirs or words in told


def test_steps_alone_scale_what_follows_them() -> None:
    plan = make_plan("mnli", False, {"steps": 200})
    assert (plan.rem_steps, plan.forcing_steps) == (25, (25, 50, 200, 400))
    assert make_plan("mnli", False, {"steps": 200, "rem_steps": 7}).rem_steps == 7
    assert make_plan("squad", False, {}).steps == 4000


def test_a_shallow_model_is_cut_into_no_more_modules_than_it_has_blocks() -> None:
    shallow = replace(MNLI, layers=3)
    recipes = EXPERIMENTS["num-modules"].recipes(paper_plan("mnli"), shallow)
    assert [r.modules for r in recipes] == ["1", "2", "3"]
    assert "modules 1, 2, 3 (paper: 1, 2, 3, 4, 6)" in differences(
        paper_plan("mnli"), shallow, EXPERIMENTS["num-modules"].recipes
    )


def test_experiments_share_their_cells() -> None:
    plan = replace(paper_plan("mnli"), seeds=2)
    pairs = [(plan, MNLI)]
    alone = [
        len(run.cells_of(run.jobs_of([name], pairs)[0], 2)) for name in ("main", "overview", "rem-vs-mrem")
    ]
    together = len(run.cells_of(run.jobs_of(["main", "overview", "rem-vs-mrem"], pairs)[0], 2))
    assert together == alone[0] + 2 * 3  # only REM of as many steps as MREM is new, at three widths


def test_methods_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrem_deploy.reproduce.plan.available_methods", lambda: ("rem", "mrem-s"))
    monkeypatch.setattr("mrem_deploy.reproduce.run.available_methods", lambda: ("rem", "mrem-s"))
    plan = paper_plan("mnli")
    assert run.left_out([plan])[0].startswith("qat is left out")
    jobs, idle = run.jobs_of(["main", "teacher-forcing"], [(plan, MNLI)])
    assert [job.experiment.name for job in jobs] == ["main"]
    assert idle[0].startswith("teacher-forcing is left out")
    assert {recipe.method for recipe in jobs[0].recipes()} == {"rem", "mrem-s"}


def test_the_papers_tables_as_printed() -> None:
    assert len(paper.GLUE) == 11
    assert all(len(table) == 13 for _, _, t in paper.MAIN.values() for table in t.values())
    assert paper.MAIN["squad_v2"][2][paper.LARGE]["2-2-4", "mrem-p"].scores[1] == paper.Figure(75.0, 0.3)
    # "11.7% and 11.3% above GOBO" on MNLI-m, "3.4% and 2.8% under 250 steps": sentences of the paper
    rows = {(row.method, row.bits): row for row in paper.GLUE}
    ahead = [
        rows[m, "2-2-8"].scores["mnli"].value - rows["gobo", "2-2-32"].scores["mnli"].value
        for m in ("mrem-s", "mrem-p")
    ]
    assert ahead == pytest.approx([11.7, 11.3])
    few = paper.TEACHER_FORCING["2-2-4", 250]
    gains = [paper.figure(few[m][1]).value - paper.figure(few[m][0]).value for m in (paper.BASE, paper.LARGE)]
    assert gains == pytest.approx([3.4, 2.8])


def test_csv_keeps_every_digit() -> None:
    text = to_csv([{"a": 1 / 3, "b": None}, {"a": 2.0, "c": "x, y"}])
    rows = list(csv.DictReader(io.StringIO(text)))
    assert float(rows[0]["a"]) == 1 / 3
    assert rows[0]["b"] == ""
    assert rows[1]["c"] == "x, y"


def test_estimates_scale_with_the_work() -> None:
    known = Estimate()
    recipe = Recipe(steps=100, calib_size=64, batch_size=8, eval_size=100)
    assert known.seconds(recipe) is None
    assert known.total([recipe]) is None
    known.learn(recipe, made_up(replace(recipe, task="sst2"), RIGHT).metrics)
    longer = known.seconds(replace(recipe, steps=1000))
    shorter = known.seconds(recipe)
    assert longer is not None
    assert shorter is not None
    assert 5 * shorter < longer < 10 * shorter
    assert known.seconds(replace(recipe, method="rem")) is not None  # from the other method's rate


def test_the_glue_plot_has_a_line_for_every_row_with_an_average() -> None:
    rows: list[dict[str, Any]] = [
        {"method": "full", "bits": "32", "average": 80.0, "megabytes": 100.0, "paper_average": None},
        {"method": "mrem-s", "bits": "2-2-8", "average": 79.0, "megabytes": 7.0, "paper_average": 83.0},
        {"method": "Q-BERT", "bits": "2-8-8", "average": None, "paper_average": None, "paper_megabytes": 43},
    ]
    plot = figures.glue(rows, ["sst2"])
    for text in ("MREM-S 2-2-8", "7 MiB", "SST2 (%)", "Paper: BERT-base"):
        assert text in plot.svg
    assert "Q-BERT" not in plot.svg  # nothing to draw of it
    alone = figures.glue([{**row, "paper_average": None} for row in rows], ["sst2", "rte"])
    assert "Paper" not in alone.svg
    assert "average of SST2, RTE (%)" in alone.svg
