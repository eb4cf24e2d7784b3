"""The pages of a result: the numbers are the given ones, nothing given becomes markup, nothing stops them."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from a_result import CURVES, ERRORS, RECIPE, Page, accuracy, cost, fidelity, front_matter, metrics, write

from mrem_deploy.evaluate import uncertainty
from mrem_deploy.evaluate.accuracy import SplitScores
from mrem_deploy.evaluate.fidelity import Fidelity
from mrem_deploy.recipe import Recipe
from mrem_deploy.report import summary
from mrem_deploy.report.card import browser_card
from mrem_deploy.report.plots import draw_plots
from mrem_deploy.result import Accuracy, History, LayerErrors, Metrics, Parallel, Sizes, WorkerCost
from mrem_deploy.train.job import ProcessCost, WorkerReport, WorkerSeconds

# The numbers


def test_all_files_and_nothing_else(written: Path) -> None:
    names = {path.relative_to(written).as_posix() for path in written.rglob("*") if path.is_file()}
    plots = {f"plots/{stem}.png" for stem in ("loss", "layer_errors", "size")}
    assert names == {"report.html", "report.md", "README.md"} | plots
    for name in plots:
        assert (written / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_html_tells_the_given_numbers(page: Page) -> None:
    # 100·sqrt(.9·.1/900) = 1.0; sqrt(.92·.08/900 + .9·.1/900)·100 = 1.348…
    assert page.row("dev") == ["dev", "Accuracy", "92.0", "90.0 ± 1.0", "−2.0 ± 1.3", "900"]
    for told in (
        "90.0%",
        "−2.0 ± 1.3 points from 92.0%",
        "8.0× smaller",
        "50.0 MiB, was 400.0 MiB",
        "5.0 min",
    ):
        assert told in page.text
    assert "2.5 min of it training, 4,096 calibration texts" in page.text
    assert page.row("train") == ["train", "2.5 min", "50%"]
    assert page.row("load") == ["load", "0.6 s", "< 1%"]
    assert page.row("Peak memory")[1] == "2.0 GiB"
    assert page.row("second worker")[1] == "512 MiB"
    assert page.row("Seed")[1] == "7"
    assert page.row("Bits")[1] == "4-4-8: 4-bit weights, 4-bit word embeddings, 8-bit activations"
    # 20 steps: the first tenth is (2, 1) → 1.5, the last (2/19, 2/20) → 0.103
    assert page.row("module 1") == ["module 1", "20", "1.50", "0.103", "0.0684"]
    assert page.row("Processor")[1] == "A Processor"
    assert page.row("Memory")[1] == "8.0 GiB"
    assert (page.row("GPU")[1], page.row("onnxruntime")[1]) == ("none", "not installed")


def test_html_shows_the_recipe_and_every_figure(page: Page) -> None:
    assert "lr: 0.0001" in page.text
    assert "out: result" in page.text
    assert [tag for tag, _ in page.tags].count("svg") == 3
    for label in ("module 0", "module 1", "embeddings", "after training", "relative RMS error", "49.5 MiB"):
        assert label in page.text


def test_markdown_tells_the_same_numbers(written: Path) -> None:
    text = (written / "report.md").read_text(encoding="utf-8")
    assert "| dev | Accuracy | 92.0 | 90.0 ± 1.0 | −2.0 ± 1.3 | 900 |" in text
    assert "| Size | 8.0× smaller | 50.0 MiB, was 400.0 MiB |" in text
    assert "| module 1 | 20 | 1.50 | 0.103 | 0.0684 |" in text
    links = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert len(links) == 3
    assert all((written / link).is_file() for link in links)
    recipe = re.search(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert recipe is not None
    assert yaml.safe_load(recipe[1]) == RECIPE.as_dict()


@pytest.mark.parametrize("name", ["report.md", "README.md"])
def test_every_markdown_table_is_rectangular(written: Path, name: str) -> None:
    blocks = re.findall(r"(?:^\|.*\n)+", (written / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(blocks) >= 3
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_the_same_result_gives_the_same_pages(written: Path, tmp_path: Path) -> None:
    write(tmp_path, draw=True)
    for path in (path for path in written.rglob("*") if path.is_file()):
        assert (tmp_path / path.relative_to(written)).read_bytes() == path.read_bytes()


# The uncertainty


def test_standard_errors_by_hand() -> None:
    assert uncertainty.accuracy_error(50.0, 100) == pytest.approx(5.0)
    assert uncertainty.accuracy_error(100.0, 100) == 0.0
    split = accuracy(50.0, 50.0, examples=100).splits["dev"]
    assert summary.change_error(split) == pytest.approx(math.sqrt(50))
    # Paired: 12 lost, 4 gained of 100: sqrt(16 − 64/100)/100.
    assert summary.change_error(replace(split, lost=12, gained=4)) == pytest.approx(math.sqrt(15.36))
    assert summary.change_error(replace(split, examples=0)) is None
    assert summary.change_error(accuracy(50.0, math.nan, examples=100).splits["dev"]) is None


def test_paired_error_agrees_with_a_simulation() -> None:
    rng = np.random.default_rng(0)
    n, lost, gained = 400, 0.10, 0.04
    draws = rng.multinomial(n, [lost, gained, 1 - lost - gained], size=20_000)
    spread = (100 * (draws[:, 1] - draws[:, 0]) / n).std()
    split = accuracy(80.0, 74.0, examples=n).splits["dev"]
    split = replace(split, lost=round(lost * n), gained=round(gained * n))
    assert summary.change_error(split) == pytest.approx(spread, rel=0.03)  # 20,000 draws: ± 0.5 %


@pytest.mark.parametrize(
    ("quantized", "expected"),
    [(90.0, "900 examples cannot tell it from none"), (80.0, "more than the sampling of 900 examples")],
)
def test_verdict_compares_the_change_with_its_error(tmp_path: Path, quantized: float, expected: str) -> None:
    assert expected in write(tmp_path, metrics(accuracy=accuracy(92.0, quantized))).text


def test_headline_of_two_splits() -> None:
    matched = accuracy(50.0, 50.0, examples=100).splits["dev"]
    splits = {"matched": matched, "mismatched": accuracy(50.0, 50.5, examples=400).splits["dev"]}
    one = math.sqrt(50)
    quoted = Accuracy("accuracy", splits, {"full_precision": 50.0, "quantized": 50.0})
    assert summary.headline_error(quoted) == (pytest.approx(one), 100)
    mean = replace(quoted, quoted={"full_precision": 50.0, "quantized": 50.25})
    error, examples = summary.headline_error(mean)
    assert error == pytest.approx(math.hypot(one, one / 2) / 2, rel=1e-4)
    assert examples == 500
    assert summary.headline_error(replace(quoted, metric="matthews")) == (None, None)
    splits["matched"] = replace(matched, change={"matthews": {"standard_error": 1.5}})
    assert summary.headline_error(replace(quoted, metric="matthews")) == (1.5, 100)


def test_no_uncertainty_is_claimed_for_correlations(tmp_path: Path) -> None:
    scores = {
        "full_precision": {"spearman": 88.0, "pearson": 88.5},
        "quantized": {"spearman": 88.04, "pearson": 86.0},
    }
    quoted = {"full_precision": 88.0, "quantized": 88.04}
    found = Accuracy("spearman", {"dev": SplitScores(1500, scores=scores)}, quoted)
    page = write(tmp_path, metrics(task="stsb", accuracy=found))
    rows = [row for row in page.rows if row and row[0] == "dev"]
    assert rows[0] == ["dev", "Spearman correlation", "88.0", "88.0", "0.0", "1,500"]
    assert rows[1] == ["dev", "Pearson correlation", "88.5", "86.0", "−2.5", "1,500"]
    assert "±" not in page.text
    assert "88.0%" not in page.text  # a correlation is no percentage


def test_what_changed_stands_next_to_the_score(tmp_path: Path) -> None:
    """Flips and KL of the quantized model and of the same model in torch, on all pages."""
    page = write(tmp_path, metrics(accuracy=fidelity()))
    rows = [row for row in page.rows if row and row[0] in ("Split", "dev")]
    assert rows == [
        ["Split", "Metric", "Full precision", "Quantized", "Torch", "Change", "Examples"],
        ["dev", "Accuracy", "92.0", "90.0 ± 1.0", "91.0", "−2.0 ± 1.3", "900"],
        ["dev", "Flips", "", "3.10 ± 0.59", "4.00 ± 0.66", "", "900"],
        ["dev", "KL", "", "0.0412 ± 0.0031", "0.0500 ± 0.0040", "", "900"],
    ]
    assert "Quantized is the exported model in onnxruntime. Torch is the same model in torch." in page.text
    assert "3.1% of predictions changed" in page.text
    for name in ("report.md", "README.md"):
        assert "| dev | KL |   | 0.0412 ± 0.0031 |" in (tmp_path / name).read_text(encoding="utf-8")
    in_torch = fidelity()
    split = in_torch.splits["dev"]
    scores = {name: split.scores[name] for name in ("full_precision", "quantized")}
    alone = replace(split, scores=scores, fidelity={"quantized": Fidelity(1.5e-6, 2e-7, 0.0, 0.0)})
    page = write(tmp_path, metrics(accuracy=replace(in_torch, splits={"dev": alone}, scored_by="torch")))
    assert ["dev", "KL", "", "1.50e-06 ± 2.00e-07", "", "900"] in page.rows
    assert "onnxruntime" not in page.text.partition("Environment")[0]


# Strings from outside


HOSTILE = "<script>alert(1)</script> & \"q\" 'a' | `b` *c* $x_1$ [l](u) </svg>\nnext"


def hostile() -> Metrics:
    scores = {"full_precision": {"accuracy": 92.0}, "quantized": {"accuracy": 90.0, HOSTILE: 1.0}}
    quoted = {"full_precision": 92.0, "quantized": 90.0}
    workers = (WorkerCost(HOSTILE, 2048.0), WorkerCost("second worker", 512.0))
    return replace(
        cost(stages={HOSTILE: 1.0}, workers=workers),
        task=HOSTILE,
        data=HOSTILE,
        model=HOSTILE,
        method=HOSTILE,
        bits=HOSTILE,
        environment={HOSTILE: HOSTILE},
        accuracy=Accuracy("accuracy", {HOSTILE: SplitScores(900, scores=scores)}, quoted),
    )


def test_nothing_given_becomes_markup(tmp_path: Path) -> None:
    curves = {HOSTILE: CURVES["module 0"], "_hidden": CURVES["module 1"], r"$\frac{x$": CURVES["module 1"]}
    errors = replace(ERRORS, layers=[HOSTILE, "a", "b", "c"], unit=HOSTILE)
    recipe = Recipe(model=HOSTILE, text_column=HOSTILE, label_column="```\n# x", keep_fp=(HOSTILE,))
    page = write(
        tmp_path, hostile(), curves, errors, draw=True, recipe=recipe
    )  # also checks that tags balance
    assert not {"script", "img", "a", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert "<script>alert(1)</script>" in page.text
    assert "_hidden" in page.text  # matplotlib would drop it from the legend
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert r"$\frac{x$" in "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))  # not mathematics

    for name in ("report.md", "README.md"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        # Not even in the front matter and the recipe: not every reader of Markdown knows them as such.
        assert not re.search(r"<(?!/?details>|/?summary>)", text)
        body = text.split("---\n", 2)[2] if name == "README.md" else text
        body = re.sub(r"^(`{3,}).*?^\1$", "", body, flags=re.DOTALL | re.MULTILINE)
        assert "<script" not in body
        assert "[l](u)" not in body
        for line in body.splitlines():
            if line.startswith("|"):
                assert len(re.findall(r"(?<!\\)\|", line)) in (3, 4, 6, 7)
    fenced = re.search(
        r"^````yaml\n(.*?)^````$", (tmp_path / "report.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert fenced is not None
    assert yaml.safe_load(fenced[1])["label_column"] == "```\n# x"
    assert yaml.safe_load(fenced[1]) == recipe.as_dict()
    assert front_matter(tmp_path)["library_name"] == "mrem_deploy"
    (index,) = front_matter(tmp_path)["model-index"]
    assert index["results"][0]["dataset"]["split"] == HOSTILE


def test_nothing_given_becomes_markup_on_the_card_for_browsers(tmp_path: Path) -> None:
    text = browser_card(tmp_path, hostile(), "onnx/model_q4.onnx", "q4")
    body = re.sub(r"^```.*?^```$", "", text.split("---\n", 2)[2], flags=re.DOTALL | re.MULTILINE)
    assert "script" in text
    assert not re.search(r"<\w", text)
    assert "[l](u)" not in body


def test_html_is_self_contained(written: Path, page: Page) -> None:
    text = (written / "report.html").read_text(encoding="utf-8")
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text
    references = [value for _, attrs in page.tags for key, value in attrs.items() if key in ("src", "href")]
    references += re.findall(r"url\(([^)]*)\)", text)
    assert references
    assert all(str(reference).startswith("#") for reference in references)
    policy = [attrs["content"] for tag, attrs in page.tags if tag == "meta" and "http-equiv" in attrs]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_ids_are_unique_and_all_references_resolve(written: Path, page: Page) -> None:
    text = (written / "report.html").read_text(encoding="utf-8")
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids)) > 10
    used = re.findall(r"url\(#([^)]+)\)", text) + re.findall(r'href="#([^"]+)"', text)
    assert set(used) <= set(ids)


def test_figures_follow_the_page_colour_and_the_page_knows_dark_and_print(written: Path) -> None:
    text = (written / "report.html").read_text(encoding="utf-8")
    figures = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert "currentColor" in figures
    assert "#1f2933" not in figures
    assert "fill: #ffffff" not in figures
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


# Methods


def test_ptq_has_no_curves(tmp_path: Path) -> None:
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "loss.png").write_bytes(b"of an earlier result in this folder")
    given = replace(cost(train_seconds=0.0), method="ptq")
    page = write(tmp_path, given, {}, replace(ERRORS, after=ERRORS.before), draw=True)
    assert not (tmp_path / "plots" / "loss.png").exists()
    assert "loss.png" not in (tmp_path / "README.md").read_text() + (tmp_path / "report.md").read_text()
    assert "nothing was trained" in page.text
    assert "nothing trained, 4,096 calibration texts" in page.text
    assert "after training" not in page.text
    assert [tag for tag, _ in page.tags].count("svg") == 2


def test_rem_with_many_units(tmp_path: Path) -> None:
    curves = {
        f"block {n // 8} unit {n % 8}": [[s, 2.0 if s < 25 else 1.0] for s in range(50)] for n in range(96)
    }
    page = write(tmp_path, metrics(method="rem"), curves, draw=True)
    assert page.row("block 11 unit 7") == ["block 11 unit 7", "50", "2.00", "1.00", "0.500"]
    assert "96 units" in page.text
    assert "Median loss at the end: 0.5 of the loss at the start" in page.text
    assert "details" in {tag for tag, _ in page.tags}  # a long table is folded away
    assert len((tmp_path / "report.html").read_bytes()) < 1_000_000


def test_long_curves_are_condensed() -> None:
    curve = [[step, 1 + step % 7] for step in range(20_000)]
    plots = draw_plots(History({"module": curve}), Sizes())
    assert [plot.name for plot in plots] == ["loss"]
    assert len(plots[0].svg) < 100_000


def test_embedding_models_without_a_reference_score(tmp_path: Path) -> None:
    split = SplitScores(500, scores={"quantized": {"cosine": 98.76, "spearman": 97.0}})
    found = Accuracy("cosine", {"dev": split}, {"quantized": 98.76})
    page = write(tmp_path, metrics(task="feature-extraction", accuracy=found))
    assert "mean cosine agreement 98.8%," in page.text
    assert ["dev", "Mean cosine agreement", "—", "98.8", "—", "500"] in page.rows
    assert front_matter(tmp_path)["pipeline_tag"] == "feature-extraction"


# Missing and broken numbers


def test_not_a_number_is_shown_as_missing_and_warned_about(tmp_path: Path) -> None:
    content = metrics(accuracy=accuracy(92.0, math.nan)).to_dict()
    content["cost"]["peak_memory_mb"] = None
    content["size"] = {"full_precision_mb": 400.0, "quantized_mb": None, "formula_mb": math.inf}
    curves: dict[str, Any] = {
        "fine": CURVES["module 0"],
        "burst": [[0, 1.0], [1, math.nan], [2, None]],
        "gone": [[0, math.inf]],
    }
    errors = replace(ERRORS, before=[None, math.nan, 0.4, 0.8], after=[0.0, 0.1])
    page = write(tmp_path, Metrics.from_dict(content), curves, errors, draw=True)
    assert page.row("dev") == ["dev", "Accuracy", "92.0", "—", "—", "900"]
    assert page.row("Peak memory")[1] == "not measured"
    assert page.row("gone") == ["gone", "1", "—", "—", "—"]
    assert "not finite at some steps of: burst, gone." in page.text
    assert not re.search(r"\b(nan|inf|None)\b", page.text)
    assert "model-index" not in front_matter(tmp_path)


def test_growing_loss_and_error_are_warned_about(tmp_path: Path) -> None:
    curves = {"good": CURVES["module 0"], "bad": [[step, 1.0 + step] for step in range(20)]}
    page = write(tmp_path, curves=curves, errors=replace(ERRORS, after=[0.04, 0.3, 0.1, 0.2]))
    assert "The loss ended higher than it began for: bad." in page.text
    assert "Training raised the error at: block 0." in page.text
    assert "> **Note:** The loss ended higher" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_a_sound_run_has_no_warnings(page: Page) -> None:
    assert not [attrs for _, attrs in page.tags if attrs.get("class") == "warning"]


@pytest.mark.parametrize("given", [{}, {"accuracy": None, "cost": None, "size": None, "environment": None}])
def test_an_empty_result_still_gives_pages(tmp_path: Path, given: dict[str, Any]) -> None:
    page = write(tmp_path, Metrics.from_dict(given), {}, LayerErrors(), draw=True)
    assert "Quantization report" in page.text
    assert not re.search(r"\b(nan|None)\b", page.text)
    assert front_matter(tmp_path)["library_name"] == "mrem_deploy"
    assert not list(tmp_path.glob("plots/*"))


def test_numpy_numbers_are_numbers(tmp_path: Path) -> None:
    found = accuracy(92.0, np.float64(90), examples=np.int64(900))  # type: ignore[arg-type]
    page = write(tmp_path, replace(cost(total_seconds=np.float32(300)), accuracy=found))
    assert page.row("dev")[3:] == ["90.0 ± 1.0", "−2.0 ± 1.3", "900"]
    assert page.row("Total time")[1] == "5.0 min"
    assert front_matter(tmp_path)["model-index"][0]["results"][0]["metrics"][0]["value"] == 90.0


# -- modules trained at the same time ----------------------------------------------------------------------

AGES = {"module 2/3": [(0, 5), (1, 3), (3, 2)], "module 3/3": [(0, 2), (2, 8)]}
PARALLEL = Parallel(staleness=4, teacher_forcing_steps=8.0, ages=AGES)


def test_teacher_forcing_is_shaded_and_ages_are_drawn() -> None:
    plots = {plot.name: plot for plot in draw_plots(History(CURVES), Sizes(), PARALLEL)}
    assert list(plots) == ["loss", "ages"]
    assert "Shaded: the 8 steps" in plots["loss"].caption
    assert "module 3/3" in plots["ages"].svg
    plain = draw_plots(History(CURVES), Sizes(), Parallel())
    assert [p.name for p in plain] == ["loss"]
    assert "Shaded" not in plain[0].caption


def test_the_workers_table_tells_where_the_time_went(tmp_path: Path) -> None:
    seconds = WorkerSeconds(computing=95.0, receiving=2.0, waiting=0.5, whole=100.0)
    reports = [WorkerReport([n + 1], seconds, 0.0, 0.0, 0.0, {}, 200.0 * n, 0, {}) for n in range(2)]
    workers = WorkerCost.of_all([ProcessCost(2048.0, 1.0)] * 2, reports)
    page = write(tmp_path, cost(workers=workers))
    assert ["worker 0", "1", "1.7 min", "95%", "2%", "< 1%", "none"] in page.rows
    assert ["worker 1", "2", "1.7 min", "95%", "2%", "< 1%", "200 MiB"] in page.rows
