"""The plots of the experiments, one function each, from the records of their tables.

A method has the same colour and marker in every plot. Error bars and bands are standard deviations over
seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from mrem_deploy.base.format import is_number
from mrem_deploy.base.tables import short
from mrem_deploy.report.plots import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PINK,
    SKY,
    YELLOW,
    Plot,
    binned,
    finite,
    layer_labels,
    log_axis,
    new_figure,
    plot_style,
    render,
)
from mrem_deploy.reproduce.layout import NAMES, Record, Score
from mrem_deploy.reproduce.plan import Subject
from mrem_deploy.result import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = {
    "full precision": (INK, "*"),
    "QAT": (PINK, "s"),
    "REM": (ORANGE, "D"),
    "REM, fewer steps": (YELLOW, "d"),
    "MREM-S": (BLUE, "o"),
    "MREM-P": (GREEN, "^"),
    "GOBO": (SKY, "v"),
    "TernaryBERT": (YELLOW, "P"),
    "Q-BERT": (PINK, "X"),
    "Quant-Noise": (ORANGE, "h"),
}
Parts = tuple[str, str, str, "Figure"]


def styled(draw: Callable[..., Parts]) -> Callable[..., Plot]:
    """Draw and render in the style of all reports."""

    @wraps(draw)
    def rendered(*arguments: Any) -> Plot:
        with plot_style():
            return render(*draw(*arguments))

    return rendered


def _style(name: str) -> tuple[str, str]:
    return STYLES.get(name, (SKY, "v"))


def _column(records: Sequence[Record], key: str) -> np.ndarray:
    """The numbers of one column; NaN where there are none."""
    return np.array([r[key] if is_number(r.get(key)) else np.nan for r in records], dtype=np.float64)


def _spread(records: Sequence[Record], key: str) -> np.ndarray | None:
    """Standard deviations for error bars; None if no number has one."""
    std = _column(records, f"{key}_std")
    return np.nan_to_num(std) if np.isfinite(std).any() else None


def _grouped_points(
    axes: Axes, records: Sequence[Record], key: str, groups: Sequence[str], series: Sequence[str], by: str
) -> list[Any]:
    """A point per record: groups along the axis, series side by side within a group."""
    handles = []
    width = min(0.2, 0.6 / max(1, len(series) - 1))  # nearer to each other than to the next group
    for place, name in enumerate(series):
        colour, marker = _style(name)
        own = [r for r in records if r[by] == name]
        at = np.array([groups.index(r["bits"]) for r in own]) + (place - (len(series) - 1) / 2) * width
        std = _spread(own, key)
        handles.append(
            axes.errorbar(
                at, _column(own, key), std, fmt=marker, color=colour, markersize=8, capsize=3, linewidth=1.3
            )
        )
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.grid(visible=False, axis="x")
    for border in range(1, len(groups)):
        axes.axvline(border - 0.5, color=INK, linewidth=0.8, alpha=0.25)
    axes.margins(y=0.15)
    return handles


def _level(axes: Axes, value: float) -> None:
    """A line where full precision is."""
    axes.axhline(value, color=INK, linewidth=1.2, linestyle=(0, (5, 2)))
    place = (0.99, value)
    axes.annotate(
        "full precision", place, xycoords=("axes fraction", "data"), xytext=(0, 4), ha="right",
        textcoords="offset points", fontsize=9,
    )  # fmt: skip


def _ours_and_paper(
    name: str, title: str, records: Sequence[Record], score: Score, by: str, papers: str, level: Record | None
) -> Parts:
    """Two panels with separate scales: our numbers and the paper's."""
    quantized = [r for r in records if r["bits"] != "32"]
    groups = list(dict.fromkeys(r["bits"] for r in quantized))
    series = list(dict.fromkeys(r[by] for r in quantized))
    printed = [r for r in quantized if is_number(r.get(f"paper_{score.key}"))]
    panels = [(score.key, "Here"), *([(f"paper_{score.key}", papers)] if printed else [])]
    figure, drawn = new_figure(3.7, columns=len(panels))
    for axes, (key, heading) in zip(np.atleast_1d(drawn), panels, strict=True):
        handles = _grouped_points(axes, quantized, key, groups, series, by)
        if level is not None and is_number(level.get(key)):
            _level(axes, level[key])
        axes.set(title=heading, xlabel="bits (weights-embeddings-activations)")
    np.atleast_1d(drawn)[0].set_ylabel(f"{score.header} (%)")
    figure.legend(handles, series, loc="outside lower center", ncols=len(series))
    caption = (
        f"{score.header} by bits and method. The scales of the two panels differ. Bars are standard "
        "deviations over seeds, where there are several."
    )
    return name, title, caption, figure


@styled
def main(records: Sequence[Record], score: Score, subject: Subject) -> Parts:
    named = [{**record, "name": NAMES.get(record["method"], record["method"])} for record in records]
    papers = f"Paper: {subject.paper_model}, {subject.paper_task}"
    return _ours_and_paper("main", "Score by method", named, score, "name", papers, named[0])


@styled
def scores(name: str, title: str, records: Sequence[Record], score: Score, by: str) -> Parts:
    return _ours_and_paper(name, title, records, score, by, "Paper: BERT-base, mnli", None)


@styled
def per_channel(records: Sequence[Record], score: Score) -> Parts:
    """Two joined points per row: without and with per-channel scales."""
    panels = [("", "Here")]
    if any(is_number(r.get(f"paper_{score.key}_with")) for r in records):
        panels.append(("paper_", "Paper: BERT-base, mnli"))
    figure, drawn = new_figure(1.6 + 0.33 * len(records), columns=len(panels))
    for axes, (prefix, heading) in zip(np.atleast_1d(drawn), panels, strict=True):
        before, after = (_column(records, f"{prefix}{score.key}_{case}") for case in ("without", "with"))
        for at, record in enumerate(records):
            colour, marker = _style(NAMES[record["method"]])
            axes.plot([before[at], after[at]], [at, at], color=colour, linewidth=1.6, alpha=0.6)
            axes.plot(before[at], at, color=colour, marker=marker, markersize=8, fillstyle="none")
            axes.plot(after[at], at, color=colour, marker=marker, markersize=8)
        axes.set_yticks(range(len(records)), [f"{r['bits']} {NAMES[r['method']]}" for r in records])
        axes.set_ylim(len(records) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.1)
        axes.set(title=heading, xlabel=f"{score.header} (%)")
    if len(panels) > 1:
        drawn[1].tick_params(labelleft=False)
    caption = (
        "Hollow: one scale per matrix. Filled: one scale per output channel. The axes of the panels differ."
    )
    return "per-channel", "Per-channel scales", caption, figure


@styled
def overview(records: Sequence[Record], score: Score, bits: str) -> Parts:
    """Four panels with a bar per method; a missing number leaves its place empty."""
    names = [str(NAMES.get(r["method"], r["method"])) for r in records]
    panels = [
        (score.key, f"{score.header} (%)"),
        ("minutes", "Training (min)"),
        ("gigabytes", "Memory (GiB)"),
        ("thousands", "Data (thousands)"),
    ]
    figure, drawn = new_figure(1.3 + 0.36 * len(records), columns=4)
    at = np.arange(len(records))
    for index, (axes, (key, heading)) in enumerate(zip(drawn, panels, strict=True)):
        values = _column(records, key)
        bars = axes.barh(at, np.nan_to_num(values), color=[_style(name)[0] for name in names], height=0.66)
        labels = [short(value) if np.isfinite(value) else "unknown" for value in values]
        axes.bar_label(bars, labels, padding=3, fontsize=9)
        axes.set_yticks(at, names if index == 0 else [""] * len(names))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.grid(visible=False)
        axes.invert_yaxis()
        axes.margins(x=0.45)
        axes.set_title(heading, fontsize=10)
    caption = (
        f"At {bits}. Each panel has its own scale from 0. More is better for the score, less for all else."
    )
    return "overview", "Four dimensions", caption, figure


@styled
def glue(records: Sequence[Record], tasks: Sequence[str]) -> Parts:
    """A line per method and bits, with the size next to the point: sizes are too close for a second axis."""
    rows = [r for r in records if is_number(r.get("average")) or is_number(r.get("paper_average"))]
    names = [str(NAMES.get(r["method"], r["method"])) for r in rows]
    panels = [("", "Here"), ("paper_", "Paper: BERT-base")]
    panels = [panel for panel in panels if np.isfinite(_column(rows, f"{panel[0]}average")).any()]
    figure, drawn = new_figure(1.5 + 0.3 * len(rows), columns=max(1, len(panels)))
    every = list(np.atleast_1d(drawn))
    for axes, (prefix, heading) in zip(every, panels, strict=False):
        averages, sizes = _column(rows, f"{prefix}average"), _column(rows, f"{prefix}megabytes")
        for at, (name, average, size) in enumerate(zip(names, averages, sizes, strict=True)):
            colour, marker = _style(name)
            axes.plot(average, at, color=colour, marker=marker, markersize=8)
            if np.isfinite(average) and np.isfinite(size):
                axes.annotate(
                    f"{short(size)} MiB", (average, at), xytext=(8, 0), textcoords="offset points",
                    va="center", fontsize=8,
                )  # fmt: skip
        axes.set_yticks(range(len(rows)), [f"{n} {r['bits']}" for n, r in zip(names, rows, strict=True)])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        low, high = np.nanmin(averages), np.nanmax(averages)
        axes.set_xlim(low - 0.08 * (high - low) - 0.1, high + 0.3 * (high - low) + 0.1)
        axes.set_title(heading)
    for axes in every[1:]:
        axes.tick_params(labelleft=False)
    listed = ", ".join(task.upper() for task in tasks)
    figure.supxlabel(f"{listed if len(tasks) == 1 else f'average of {listed}'} (%)", fontsize=10)
    caption = (
        "Score, with the size of the model next to it. The scales of the panels differ. A row has a point "
        "if its score is known for all of these tasks."
    )
    return "glue", "Size and score", caption, figure


@styled
def teacher_forcing(records: Sequence[Record], metric: str) -> Parts:
    widths = list(dict.fromkeys(r["bits"] for r in records))
    figure, drawn = new_figure(3.5, columns=len(widths))
    handles: list[Any] = []
    for axes, bits in zip(np.atleast_1d(drawn), widths, strict=True):
        own = [r for r in records if r["bits"] == bits]
        steps = _column(own, "steps")
        handles = []
        for key, colour, marker in (("without", ORANGE, "D"), ("with", BLUE, "o")):
            std = _spread(own, key)
            handles.append(
                axes.errorbar(
                    steps, _column(own, key), std, color=colour, marker=marker, capsize=3, linewidth=1.8
                )
            )
        axes.set_xscale("log")
        axes.set_xticks(steps, [f"{int(step):,}" for step in steps])
        axes.minorticks_off()
        axes.set(title=bits, xlabel="steps per module")
        axes.margins(x=0.08, y=0.15)
    np.atleast_1d(drawn)[0].set_ylabel(f"{metric} (%)")
    figure.legend(
        handles, ["without teacher forcing", "with teacher forcing"], loc="outside lower center", ncols=2
    )
    caption = "MREM-P by training steps (log scale), with and without teacher forcing."
    return "teacher-forcing", "Teacher forcing", caption, figure


@styled
def num_modules(records: Sequence[Record], metric: str, full: float) -> Parts:
    figure, (left, right) = new_figure(3.4, columns=2)
    counts = [str(r["modules"]) for r in records]
    at = np.arange(len(records))
    std = _spread(records, "score")
    left.errorbar(at, _column(records, "score"), std, color=BLUE, marker="o", capsize=3, linewidth=1.8)
    left.set(xlabel="modules", ylabel=f"{metric} (%)")
    if is_number(full):
        _level(left, full)
    left.margins(x=0.08, y=0.25)
    series = [("gigabytes", "here", BLUE), ("paper_gigabytes", "paper (BERT-base)", SKY)]
    for place, (key, label, colour) in enumerate(series):
        gigabytes = _column(records, key)
        known = np.isfinite(gigabytes)
        if not known.any():
            continue
        # The models are so different that only shares fit on one scale.
        share = np.nan_to_num(100 * gigabytes / gigabytes[known][0])
        bars = right.bar(at + (place - 0.5) * 0.4, share, 0.4, color=colour, label=label)
        right.bar_label(
            bars, [f"{v:.2g}" if np.isfinite(v) else "" for v in gigabytes], padding=2, fontsize=9
        )
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 0.98), ncols=2, fontsize=9)
    right.set(xlabel="modules", ylabel="% of the memory with the fewest")
    right.set_title("Peak memory", pad=26)
    left.set_title("Score", pad=26)
    for axes in (left, right):
        axes.set_xticks(at, counts)
        axes.grid(visible=False, axis="x")
    caption = (
        "Left: the score; right: peak memory of training, in GiB above the bars. Here it is the memory of "
        "the entire process, with libraries, both models and the cache; the paper's is that of a GPU."
    )
    return "num-modules", "Number of modules", caption, figure


@styled
def calib_size(records: Sequence[Record], methods: Sequence[str], metric: str) -> Parts:
    figure, axes = new_figure(3.6)
    sizes = _column(records, "examples")
    for name in methods:
        colour, marker = _style(NAMES[name])
        mean, std = _column(records, name), np.nan_to_num(_column(records, f"{name}_std"))
        axes.fill_between(sizes, mean - std, mean + std, color=colour, alpha=0.16, linewidth=0)
        axes.plot(sizes, mean, color=colour, marker=marker, linewidth=1.8, label=NAMES[name])
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{int(size):,}" for size in sizes])
    axes.set(
        xlabel="calibration examples", ylabel=f"{metric} (%)", title="Score by size of the calibration set"
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    caption = "Log scale. Bands are standard deviations over seeds, where there are several."
    return "calib-size", "Size of the calibration set", caption, figure


@styled
def error_propagation(records: Sequence[Record], keys: Sequence[tuple[str, str]]) -> Parts:
    widths = list(dict.fromkeys(bits for bits, _ in keys))
    figure, drawn = new_figure(3.5, columns=len(widths))
    names, meaning = layer_labels([r["layer"] for r in records])
    names = ["emb." if name == "embeddings" else "out" if name == "output" else name for name in names]
    at = np.arange(len(records))
    top = 0.0
    panels = list(np.atleast_1d(drawn))
    for axes, bits in zip(panels, widths, strict=True):
        for own, name in keys:
            if own != bits:
                continue
            colour, marker = _style(NAMES[name])
            mean = _column(records, f"{name} {bits}")
            std = np.nan_to_num(_column(records, f"{name} {bits}_std"))
            axes.fill_between(at, mean - std, mean + std, color=colour, alpha=0.16, linewidth=0)
            axes.plot(at, mean, color=colour, marker=marker, linewidth=1.8, label=NAMES[name])
            top = max(top, float(np.nanmax(mean + std)))
        axes.set_xticks(at, names)
        axes.grid(visible=False, axis="x")
        axes.set(title=bits, xlabel=meaning)
    for axes in panels:  # the same scale, to show what fewer bits cost
        axes.set_ylim(0, 1.08 * top)
    panels[0].set_ylabel("relative error ‖f̂ − f‖ / ‖f‖")
    handles, labels = panels[0].get_legend_handles_labels()
    # Below the panels: inside, no corner is sure to be free.
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    caption = "How far every layer's output is from full precision, with all layers before it quantized too."
    return "error-propagation", "Error by layer", caption, figure


@styled
def loss_curves(curves: Mapping[tuple[int, bool], Mapping[str, Curve]], forcing: float) -> Parts:
    """A row per number of steps, a column per module; the steps with teacher forcing are shaded."""
    from matplotlib.figure import Figure as MatplotlibFigure

    steps = list(dict.fromkeys(key[0] for key in curves))
    modules = list(next(iter(curves.values())))
    figure = MatplotlibFigure(figsize=(8.4, 0.7 + 2.1 * len(steps)))
    grid = figure.subplots(len(steps), len(modules), squeeze=False)
    lines: list[Any] = []
    for row, count in zip(grid, steps, strict=True):
        for axes, module in zip(row, modules, strict=True):
            axes.axvspan(0, forcing * count, color=YELLOW, alpha=0.14, linewidth=0, zorder=0)
            lines = []
            for forced, colour, dash in ((False, ORANGE, (0, (5, 2))), (True, BLUE, "-")):
                points = finite(curves[count, forced].get(module, []))
                if len(points):
                    x, mean, _, _ = binned(points, 60)
                    lines += axes.plot(x, mean, color=colour, linestyle=dash, linewidth=1.5)
            log_axis(axes)
            axes.tick_params(labelsize=8)
            axes.set_title(f"{module}, {count:,} steps", fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("step", fontsize=9)
    for row in grid:
        row[0].set_ylabel("loss", fontsize=9)
    figure.legend(
        lines, ["without teacher forcing", "with teacher forcing"], loc="outside lower center", ncols=2
    )
    caption = (
        "Loss of every module in MREM-P, means of neighbouring steps, log scales. Shaded: the steps with "
        "teacher forcing; there the loss is low because the input is clean, so compare the curves after them."
    )
    return "loss-curves", "Loss with and without teacher forcing", caption, figure
