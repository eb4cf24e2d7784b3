"""A result as the pipeline gives it to the report, and a reader of the pages made of it."""

from __future__ import annotations

import copy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from mrem_deploy.report import page
from mrem_deploy.report.plots import draw_plots

LAYERS = ["embeddings", "block 0", "block 1", "output"]
ERRORS = {
    "layers": LAYERS,
    "before": [0.08, 0.2, 0.4, 0.8],
    "after": [0.04, 0.06, 0.1, 0.2],
    "unit": "relative RMS error",
}
CURVES = {f"module {n}": [[step, (n + 1) / (step + 1)] for step in range(20)] for n in range(2)}
RECIPE = {"model": "someone/bert", "bits": "4-4-8", "lr": 1e-4, "keep_fp": [], "out": Path("result")}
METRICS: dict[str, Any] = {
    "format": 1,
    "task": "sst2",
    "data": "/home/somebody/glue/SST-2",
    "model": "someone/bert-base-sst2",
    "method": "mrem-s",
    "bits": "4-4-8",
    "seed": 7,
    "accuracy": {
        "metric": "accuracy",
        "full_precision": 92.0,
        "quantized": 90.0,
        "splits": {
            "dev": {"full_precision": {"accuracy": 92.0}, "quantized": {"accuracy": 90.0}, "examples": 900}
        },
    },
    "cost": {
        "train_seconds": 150.0,
        "total_seconds": 300.0,
        "peak_memory_mb": 2048.0,
        "workers": [
            {"name": "first worker", "peak_memory_mb": 2048.0},
            {"name": "second worker", "peak_memory_mb": 512.0},
        ],
        "calibration_samples": 4096,
        "stages": {"load": 0.6, "train": 150.0},
    },
    "size": {"full_precision_mb": 400.0, "quantized_mb": 50.0, "formula_mb": 49.5},
    "environment": {
        "cpu": "A Processor",
        "ram_mb": 8192,
        "gpu": None,
        "onnxruntime": None,
        "torch": "2.13.0",
    },
}


def metrics(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(METRICS), **changes}


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
    folder: Path, given: Any = None, curves: Any = CURVES, errors: Any = ERRORS, draw: bool = False
) -> Page:
    """Drawing takes a second: only the tests that look at figures ask for it."""
    with mock.patch.object(page, "draw_plots", draw_plots if draw else lambda *_, **__: []):
        page.write_report(folder, metrics() if given is None else given, curves, errors, RECIPE)
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def front_matter(folder: Path) -> dict[str, Any]:
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert text.startswith("---\n")
    loaded = yaml.safe_load(text.split("---\n")[1])
    assert isinstance(loaded, dict)
    return loaded
