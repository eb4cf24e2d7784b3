"""The picture of `mrem benchmark compare`: up is more accurate, right is faster, small bubbles are small.

Our models are in colour; what a user would pick instead is grey. Every bubble has its label next to it, on
the side where it covers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from mrem_deploy.report.plots import BLUE, GREEN, INK, ORANGE, PINK, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

    from mrem_deploy.benchmarks.compare_rows import Conditions, Entry

GREY = "#8a949e"
OURS = (BLUE, GREEN, ORANGE, PINK)
HEIGHT = 4.3  # inches
LARGEST = 58.0  # points: diameter of the bubble of the largest file
CAP = 3.0  # points: half the width of an error bar's ends
SMALLEST = 9.0  # points: below this a bubble is hard to see
# Where a label may stand: (horizontal, vertical) direction from the bubble, best first.
DISTANCES = (4.0, 22.0, 40.0)  # points between bubble and label
SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))


def draw(conditions: Conditions, entries: Sequence[Entry]) -> Figure:
    figure, axes = new_figure(HEIGHT)
    base = entries[0]
    colours = _colours(entries)
    diameters = _diameters(entries)
    for entry, colour, diameter in zip(entries, colours, diameters, strict=True):
        x, y = entry.speed.ratio, entry.score.value
        axes.scatter([x], [y], s=diameter**2, color=colour, alpha=0.85 if entry.ours else 0.6, linewidth=0)
        if (bar := _bar(entry)) is not None:
            error = [[y - bar[0]], [bar[1] - y]]
            axes.errorbar([x], [y], yerr=error, color=INK, linewidth=1.2, capsize=CAP, zorder=3)
    axes.axhline(base.score.value, color=INK, linewidth=1, linestyle=(0, (4, 3)), alpha=0.5, zorder=0)
    _limits(axes, entries)
    threads = f"{conditions.threads} thread{'s' if conditions.threads > 1 else ''}"
    shape = conditions.shape.replace("x", "×")
    axes.set(
        xlabel=f"times faster than full precision  →   (onnxruntime on a CPU, {threads}, {shape} tokens)",
        ylabel=f"{conditions.metric} on {conditions.task}, %  →",
        title=f"{conditions.model}: up is more accurate, right is faster, small bubbles are small files",
    )
    labels = [_label(entry, entry is base) for entry in entries]
    _place_labels(axes, entries, labels, colours, diameters)
    if any(_bar(entry) is not None for entry in entries):
        axes.text(
            0.005,
            0.01,
            f"bars: 95% interval of the change from full precision, {conditions.examples:,} examples",
            transform=axes.transAxes,
            fontsize=8,
            alpha=0.7,
        )
    return figure


def _colours(entries: Sequence[Entry]) -> list[str]:
    ours = [entry for entry in entries if entry.ours]
    return [OURS[ours.index(entry) % len(OURS)] if entry.ours else GREY for entry in entries]


def _diameters(entries: Sequence[Entry]) -> list[float]:
    """The area of a bubble is proportional to the file."""
    most = max(entry.file_mib for entry in entries)
    return [max(SMALLEST, LARGEST * math.sqrt(entry.file_mib / most)) for entry in entries]


def _bar(entry: Entry) -> tuple[float, float] | None:
    """The interval of the change, moved to this model's score; full precision has none."""
    score = entry.score
    if score.low is None or score.high is None or score.low == score.high == 0:
        return None
    base = score.value - score.change
    return base + score.low, base + score.high


def _label(entry: Entry, base: bool) -> str:
    what = "full precision" if base else entry.name.replace("ours", "mrem-deploy")
    return f"{what}\n{entry.score.value:.1f}%, {entry.file_mib:.0f} MiB, {entry.speed.ratio:.1f}×"


def _limits(axes: Axes, entries: Sequence[Entry]) -> None:
    """Room around the bubbles for their labels."""
    ratios = [entry.speed.ratio for entry in entries]
    span = max(max(ratios) - min(ratios), 0.5)
    axes.set_xlim(min(ratios) - 0.22 * span, max(ratios) + 0.42 * span)
    edges = [entry.score.value for entry in entries]
    for entry in entries:
        edges += _bar(entry) or ()
    span = max(max(edges) - min(edges), 1.0)
    axes.set_ylim(min(edges) - 0.28 * span, max(edges) + 0.25 * span)


def _place_labels(
    axes: Axes,
    entries: Sequence[Entry],
    labels: Sequence[str],
    colours: Sequence[str],
    diameters: Sequence[float],
) -> None:
    """Put every label on the side where it overlaps least with bubbles, other labels and the frame."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure: Any = axes.figure
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()  # the layout decides where points of the data are on the page
    taken = [box for e, d in zip(entries, diameters, strict=True) for box in _drawn(axes, e, d)]
    taken.append(_line(axes, entries[0].score.value))
    bounds = axes.get_window_extent(renderer)
    for entry, label, colour, diameter in zip(entries, labels, colours, diameters, strict=True):
        best, least = None, math.inf
        for distance, side in product(DISTANCES, SIDES):
            text = _text(axes, entry, label, colour, diameter, distance, side)
            box = text.get_window_extent(renderer)
            overlap = sum(_area(box, other) for other in taken) + _outside(box, bounds)
            if overlap < least:
                if best is not None:
                    best.remove()
                best, least = text, overlap
            else:
                text.remove()
            if least == 0:
                break
        assert best is not None
        taken.append(best.get_window_extent(renderer))


def _text(
    axes: Axes,
    entry: Entry,
    label: str,
    colour: str,
    diameter: float,
    distance: float,
    side: tuple[int, int],
) -> Any:
    across, up = side
    reach = (diameter / 2 + distance) * (0.75 if across and up else 1.0)
    if not across:  # above or below the error bar, where that is longer than the bubble
        ends = [edge for box in _drawn(axes, entry, diameter) for edge in (box.y0, box.y1)]
        middle = axes.transData.transform((entry.speed.ratio, entry.score.value))[1]
        reach = max(up * (edge - middle) for edge in ends) * 72 / axes.figure.dpi + distance
    return axes.annotate(
        label,
        (entry.speed.ratio, entry.score.value),
        xytext=(across * reach, up * reach),
        textcoords="offset points",
        ha={1: "left", 0: "center", -1: "right"}[across],
        va={1: "bottom", 0: "center", -1: "top"}[up],
        fontsize=9,
        fontweight="bold" if entry.ours else "normal",
        color=colour if entry.ours else INK,
        linespacing=1.25,
    )


def _drawn(axes: Axes, entry: Entry, diameter: float) -> list[Bbox]:
    """The bubble and its error bar, in pixels."""
    from matplotlib.transforms import Bbox as Box

    pixels = axes.figure.dpi / 72
    radius, half = diameter / 2 * pixels, CAP * pixels
    x, y = axes.transData.transform((entry.speed.ratio, entry.score.value))
    found = [Box.from_extents(x - radius, y - radius, x + radius, y + radius)]
    if (bar := _bar(entry)) is not None:
        bottom, top = (axes.transData.transform((entry.speed.ratio, end))[1] for end in bar)
        found.append(Box.from_extents(x - half, bottom, x + half, top))
    return found


def _line(axes: Axes, height: float) -> Bbox:
    """The horizontal line of full precision, in pixels."""
    from matplotlib.transforms import Bbox as Box

    y = axes.transData.transform((0, height))[1]
    left, right = axes.bbox.x0, axes.bbox.x1
    return Box.from_extents(left, y - 1, right, y + 1)


def _area(one: Bbox, other: Bbox) -> float:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return width * height if width > 0 and height > 0 else 0.0


def _outside(box: Bbox, bounds: Bbox) -> float:
    return box.width * box.height - _area(box, bounds)
