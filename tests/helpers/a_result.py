"""A result as the pipeline gives it to the report, and a reader of its pages."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from mrem_deploy.evaluate.accuracy import SplitScores
from mrem_deploy.evaluate.fidelity import Fidelity
from mrem_deploy.recipe import Recipe
from mrem_deploy.report import page
from mrem_deploy.report.plots import draw_plots
from mrem_deploy.result import Accuracy, Cost, Curve, History, LayerErrors, Metrics, Sizes, WorkerCost

LAYERS = ["embeddings", "block 0", "block 1", "output"]
ERRORS = LayerErrors(LAYERS, [0.08, 0.2, 0.4, 0.8], [0.04, 0.06, 0.1, 0.2])
CURVES: dict[str, Curve] = {
    f"module {n}": [[step, (n + 1) / (step + 1)] for step in range(20)] for n in range(2)
}
RECIPE = Recipe(model="someone/bert", bits="4-4-8", lr=1e-4, out="result")
METRICS = Metrics(
    task="sst2",
    data="/home/somebody/glue/SST-2",
    model="someone/bert-base-sst2",
    method="mrem-s",
    bits="4-4-8",
    seed=7,
    accuracy=Accuracy(
        "accuracy",
        {
            "dev": SplitScores(
                900, scores={"full_precision": {"accuracy": 92.0}, "quantized": {"accuracy": 90.0}}
            )
        },
        {"full_precision": 92.0, "quantized": 90.0},
    ),
    cost=Cost(
        train_seconds=150.0,
        total_seconds=300.0,
        peak_memory_mb=2048.0,
        workers=(WorkerCost("first worker", 2048.0), WorkerCost("second worker", 512.0)),
        calibration_samples=4096,
        stages={"load": 0.6, "train": 150.0},
    ),
    size=Sizes(400.0, 50.0, 49.5),
    environment={"cpu": "A Processor", "ram_mb": 8192, "gpu": None, "onnxruntime": None, "torch": "2.13.0"},
)


def metrics(**changes: Any) -> Metrics:
    return replace(METRICS, **changes)


def cost(**changes: Any) -> Metrics:
    return metrics(cost=replace(METRICS.cost, **changes))


def accuracy(
    full: float, quantized: float, metric: str = "accuracy", name: str = "dev", examples: int = 900
) -> Accuracy:
    """One split, one metric."""
    scores = {"full_precision": {metric: full}, "quantized": {metric: quantized}}
    quoted = {"full_precision": full, "quantized": quantized}
    return Accuracy(metric, {name: SplitScores(examples, scores=scores)}, quoted)


def fidelity() -> Accuracy:
    """The usual result with what changed against full precision, in torch and in onnxruntime."""
    (split,) = METRICS.accuracy.splits.values()
    own, other = Fidelity(0.0412, 0.0031, 3.1, 0.59), Fidelity(0.05, 0.004, 4.0, 0.66)
    split = replace(
        split,
        scores=split.scores | {"torch": {"accuracy": 91.0}, "onnx": {"accuracy": 90.0}},
        fidelity={"quantized": own, "torch": other, "onnx": own},
    )
    return replace(METRICS.accuracy, splits={"dev": split}, scored_by="onnxruntime")


class Page(HTMLParser):
    """Tables as lists of cells, all visible text, and every tag with its attributes."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.rows: list[list[str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], "unclosed tags"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def row(self, first: str) -> list[str]:
        return next(row for row in self.rows if row and row[0] == first)


def write(
    folder: Path,
    given: Metrics = METRICS,
    curves: dict[str, Curve] = CURVES,
    errors: LayerErrors = ERRORS,
    draw: bool = False,
    recipe: Recipe = RECIPE,
) -> Page:
    """Drawing takes a second: only the tests that look at figures ask for it."""
    with mock.patch.object(page, "draw_plots", draw_plots if draw else lambda *_, **__: []):
        page.write_report(folder, given, History(curves, errors), recipe)
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def front_matter(folder: Path) -> dict[str, Any]:
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert text.startswith("---\n")
    loaded = yaml.safe_load(text.split("---\n")[1])
    assert isinstance(loaded, dict)
    return loaded
