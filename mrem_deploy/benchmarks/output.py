"""What a benchmark writes: a table on the screen, the numbers as json, a plot."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrem_deploy.base.files import atomic_file, write_json, write_text
from mrem_deploy.base.files import check_folder as check_folder
from mrem_deploy.base.tables import table as table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = 1


@dataclass(frozen=True)
class Result:
    """One finished measurement; `name` is the stem of its files, `draw` makes its plot."""

    name: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    table: str
    summary: str
    draw: Callable[[], Figure]
    formats: tuple[str, ...] = ("png",)  # of the plot
    markdown: str | None = None  # NAME.md, for a benchmark whose table goes into a document
    drawn_again: bool = False  # the numbers come from a file: they are not written once more


def load_average() -> list[float] | None:
    """How busy the machine already is (1, 5, 15 minutes): other work affects a timing."""
    try:
        return [round(load, 2) for load in os.getloadavg()]
    except (AttributeError, OSError):  # Windows
        return None


def write(result: Result, folder: Path, environment: dict[str, Any], load: list[float] | None) -> list[Path]:
    """NAME.json, the plot and, where there is one, NAME.md; returns their paths."""
    from mrem_deploy.report.plots import plot_style

    numbers = folder / f"{result.name}.json"
    written = []
    if not result.drawn_again:
        written.append(numbers)
        write_json(
            numbers,
            {
                "format": FORMAT,
                "benchmark": result.name,
                "date": environment["date"],
                "summary": result.summary,
                "settings": result.settings,
                "rows": result.rows,
                "load_average_before": load,
                "environment": environment,
            },
        )
    if result.markdown is not None:
        written.append(folder / f"{result.name}.md")
        write_text(written[-1], result.markdown)
    with plot_style():
        figure = result.draw()
        for kind in result.formats:
            written.append(folder / f"{result.name}.{kind}")
            with atomic_file(written[-1]) as temporary:
                figure.savefig(temporary, format=kind, dpi=160, facecolor="white")
    return written
