"""The figures of a report: loss of every trained unit, error per layer, size.

Each figure is rendered twice: PNG on white for Markdown, and SVG inline in a page, where all neutral ink
becomes `currentColor` so that it follows the page from light to dark. Colours are those of Okabe and Ito,
which colour-blind readers can tell apart; series also differ in marker or dash.
Names come from users and modules: they are drawn literally, never parsed as mathematics.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mrem_deploy.base.format import is_number, mib
from mrem_deploy.result import Curve, History, LayerErrors, Parallel, Sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2933"
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
_PALETTE = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY)
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)))  # the second round through the palette is dashed

FEW_UNITS = 8  # up to here every unit has its own labelled line
_WIDTH = 8.4  # inches
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "text.parse_math": False,
    "svg.fonttype": "none",  # text stays text: smaller, selectable, in the page's own font
    "svg.hashsalt": "mrem",  # the same numbers give the same file
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Plot:
    """One figure: `name` is the stem of its file, `caption` explains it."""

    name: str
    title: str
    caption: str
    png: bytes
    svg: str


def draw_plots(history: History, size: Sizes, parallel: Parallel | None = None) -> list[Plot]:
    """Every figure there are numbers for, in reading order. `parallel`: modules trained at the same time."""
    parallel = parallel or Parallel()
    trained = bool(history.curves)
    with plot_style():
        drawn = [_loss(history, parallel.teacher_forcing_steps), _ages(parallel.ages)]
        drawn += [_layer_errors(history.layer_errors, trained), _size(size)]
        return [render(*parts) for parts in drawn if parts is not None]


def finite(curve: Curve) -> np.ndarray:
    """The points of a curve that can be drawn on a log scale, as an array (n, 2)."""
    points = np.array([[_number(x), _number(y)] for x, y in curve], dtype=np.float64).reshape(-1, 2)
    return points[np.isfinite(points).all(axis=1) & (points[:, 1] > 0)]


def ends(points: np.ndarray) -> tuple[float, float]:
    """Mean loss over the first and over the last tenth of the points: single batches are noisy."""
    count = max(1, len(points) // 10)
    return float(points[:count, 1].mean()), float(points[-count:, 1].mean())


_Parts = tuple[str, str, str, "Figure"]


def _loss(history: History, forcing_steps: float) -> _Parts | None:
    curves, heldout = (
        {name: points for name, points in ((n, finite(c)) for n, c in found.items()) if len(points)}
        for found in (history.curves, history.heldout)
    )
    if not curves:
        return None
    if len(curves) <= FEW_UNITS:
        return _loss_of_few(curves, heldout, forcing_steps)
    return _loss_of_many(curves, forcing_steps)


def shade_forcing(axes: Axes, forcing_steps: float) -> str:
    """Mark the steps with teacher forcing; returns the sentence that explains the mark."""
    if not forcing_steps > 0:
        return ""
    axes.axvspan(0, forcing_steps, color=YELLOW, alpha=0.14, linewidth=0, zorder=0)
    return (
        f" Shaded: the {forcing_steps:g} steps in which the input of every module but the first is mixed "
        "with the full-precision one, less and less; after them a loss may rise, because the task is harder."
    )


def _loss_of_few(
    curves: Mapping[str, np.ndarray], heldout: Mapping[str, np.ndarray], forcing_steps: float
) -> _Parts:
    figure, axes = new_figure(3.7)
    shaded = shade_forcing(axes, forcing_steps)
    lines, marks = [], []
    for index, (name, points) in enumerate(curves.items()):
        colour, dash = _PALETTE[index % len(_PALETTE)], _DASHES[index // len(_PALETTE) % 2]
        x, middle, low, high = binned(points, 150)
        axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
        marker = "o" if len(x) == 1 else None
        lines += axes.plot(x, middle, color=colour, linestyle=dash, linewidth=2, marker=marker)
        if name in heldout:
            steps, losses = heldout[name].T
            marks += axes.plot(
                steps, losses, color=colour, linestyle="none", marker="D", markersize=6,
                markeredgecolor=INK, markeredgewidth=0.8, zorder=4, clip_on=False,
            )  # fmt: skip
    log_axis(axes)
    axes.set(xlabel="training step of the module", ylabel="reconstruction loss", title="Loss in training")
    axes.margins(x=0.01)
    names = [*map(_short, curves), *(["held-out"] if marks else [])]
    legend(axes, [*lines, *marks[:1]], names, loc="upper left", bbox_to_anchor=(1.01, 1))
    caption = (
        "Each line is the mean of neighbouring steps, the band their lowest and highest value. Log scale. "
        "Losses of different modules are sums over different layers: compare shapes, not heights."
    )
    if marks:
        caption += " Diamonds: the same loss on held-out sentences, on which nothing is trained."
    return "loss", "Loss of every module", caption + shaded, figure


def _loss_of_many(curves: Mapping[str, np.ndarray], forcing_steps: float) -> _Parts:
    from matplotlib import colormaps

    figure, (left, right) = new_figure(3.6, columns=2)
    shaded = shade_forcing(left, forcing_steps)
    colours = colormaps["viridis"](np.linspace(0.15, 0.95, len(curves)))  # its darkest end is lost on black
    starts, finals = np.array([ends(points) for points in curves.values()]).T
    for points, start, colour in zip(curves.values(), starts, colours, strict=True):
        x, middle, _, _ = binned(points, 40)
        left.plot(x, middle / start, color=colour, linewidth=0.9, alpha=0.65)
    left.axhline(1, color=INK, linewidth=0.8, alpha=0.5)
    numbers = np.arange(1, len(curves) + 1)
    right.vlines(numbers, starts, finals, color=INK, linewidth=0.8, alpha=0.35)
    before = right.scatter(numbers, starts, s=14, color=ORANGE, marker="D", zorder=2)
    after = right.scatter(numbers, finals, s=16, color=BLUE, marker="o", zorder=3)
    legend(right, [before, after], ["start", "end"], loc="lower right", ncols=2, bbox_to_anchor=(1, 0.98))
    for axes in (left, right):
        log_axis(axes)
    left.set(
        xlabel="training step of the unit", ylabel="loss relative to its start", title="Loss in training"
    )
    right.set(xlabel="unit, from input to output", ylabel="loss", title="Start and end")
    caption = (
        f"{len(curves)} units, each trained on its own output; the lines run from dark (near the input) to "
        f"yellow (near the output). Median loss at the end: {np.median(finals / starts):.2g} of the loss at "
        "the start. Start and end are means over the first and last tenth of the steps. Log scales."
    )
    return "loss", "Loss of every unit", caption + shaded, figure


def _ages(ages: Mapping[str, Sequence[tuple[int, int]]]) -> _Parts | None:
    """How old the inputs were: [(age, times used), …] of every module that reads from a queue."""
    usable = {name: dict(counted) for name, counted in ages.items() if counted}
    if not usable:
        return None
    oldest = max(max(counted) for counted in usable.values())
    figure, axes = new_figure(3.0)
    width = 0.84 / len(usable)
    colours = [_PALETTE[index % len(_PALETTE)] for index in range(len(usable))]
    bars = []
    for index, (counted, colour) in enumerate(zip(usable.values(), colours, strict=True)):
        share = np.array([counted.get(age, 0) for age in range(oldest + 1)], dtype=float)
        at = np.arange(oldest + 1) + (index - (len(usable) - 1) / 2) * width
        bars.append(axes.bar(at, 100 * share / share.sum(), width, color=colour))
    axes.set(
        xlabel="age of the input used, in steps of the module before",
        ylabel="share of steps (%)",
        title="How stale the inputs were",
    )
    axes.grid(visible=False, axis="x")
    if len(usable) <= FEW_UNITS:
        names = [_short(name) for name in usable]
        legend(axes, bars, names, loc="upper left", bbox_to_anchor=(1.01, 1))
    caption = (
        "A module samples its input from the last outputs of the module before it. Age 0 is the newest "
        "one that had arrived; each step of that module adds one, whether its output was sent or dropped."
    )
    return "ages", "Age of the inputs", caption, figure


def _layer_errors(errors: LayerErrors, trained: bool) -> _Parts | None:
    names = list(errors.layers)
    before, after = (_numbers(values, len(names)) for values in (errors.before, errors.after))
    series = [
        ("after initialisation, before training", before, ORANGE, "D"),
        ("after training", after, BLUE, "o"),
    ]
    if not trained:
        series = [
            ("after initialisation (nothing was trained)", after if _any(after) else before, ORANGE, "D")
        ]
    series = [entry for entry in series if _any(entry[1])]
    if not series:
        return None
    figure, axes = new_figure(3.7)
    positive = np.concatenate([values[values > 0] for _, values, _, _ in series])
    floor = (positive.min() if len(positive) else 1.0) / 2
    at, handles = np.arange(len(names)), []
    for _, values, colour, marker in series:
        shown = np.where(values > 0, values, np.nan)
        handles += axes.plot(at, shown, color=colour, marker=marker, markersize=6, linewidth=1.6)
        for index in np.flatnonzero(values == 0):  # a log scale has no zero: a hollow mark that says so
            axes.plot(index, floor, color=colour, marker=marker, markersize=6, fillstyle="none")
            axes.annotate("0", (index, floor), xytext=(0, 7), textcoords="offset points", ha="center")
    log_axis(axes)
    axes.set(ylabel=_short(errors.unit), title="Reconstruction error per layer")
    labels, meaning = layer_labels(names)
    room = 100 / len(labels)  # characters; neighbouring labels share the space between their ticks
    crowded = any(len(a) + len(b) > 2 * room for a, b in pairwise([*labels, ""]))
    axes.set_xticks(at, labels, rotation=45 if crowded else 0, ha="right" if crowded else "center")
    axes.set_xlabel(meaning)
    axes.grid(visible=False, axis="x")
    axes.set_xlim(-0.5, len(names) - 0.5)
    labels = [label for label, _, _, _ in series]
    legend(axes, handles, labels, loc="lower left", ncols=2, bbox_to_anchor=(0.38, 1.0))
    caption = (
        "How far each layer's output is from that of the full-precision model on the same text, "
        "with all layers before it quantized as well. Log scale; lower is better."
    )
    return "layer_errors", "Error per layer", caption, figure


def _size(size: Sizes) -> _Parts | None:
    known = [
        ("full precision", size.full_precision_mb, ORANGE),
        ("quantized, on disk", size.quantized_mb, BLUE),
        ("quantized, by the formula", size.formula_mb, SKY),
    ]
    rows = [(label, value, colour) for label, value, colour in known if is_number(value) and value > 0]
    if not rows:
        return None
    figure, axes = new_figure(0.75 + 0.42 * len(rows))
    values = [value for _, value, _ in rows]
    bars = axes.barh(range(len(rows)), values, color=[colour for _, _, colour in rows], height=0.62)
    axes.bar_label(bars, [mib(value) for value in values], padding=5)
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.14)
    axes.set(xlabel="size (MiB)", title="Size of the model")
    caption = (
        "On disk: the packed file as written, with its scales. By the formula: embeddings and Linear layers "
        "at their bits and the rest in 32 bits, as the paper counts."
    )
    return "size", "Size", caption, figure


def new_figure(height: float, columns: int = 1) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure as MatplotlibFigure  # no pyplot: no global state, no display

    figure = MatplotlibFigure(figsize=(_WIDTH, height))
    return figure, figure.subplots(1, columns)


@contextmanager
def plot_style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # A name in a script the bundled font lacks shows boxes in the PNG; the page's own font has it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def render(name: str, title: str, caption: str, figure: Figure) -> Plot:
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    figure.set_layout_engine("none")  # the layout is found: keep it, and save the search for it
    figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    return Plot(name, title, caption, png.getvalue(), _inline(svg.getvalue(), name))


def _inline(svg: str, name: str) -> str:
    """Make matplotlib's document fit into a page next to others of its kind."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r'<style type="text/css">.*?</style>', "", svg, flags=re.DOTALL
    )  # would style the whole page
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    # Ids are per document: two figures in one page must not share "axes_1" or a clip path.
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    return svg.replace(INK, "currentColor").strip()


def legend(axes: Axes, handles: Sequence[Any], labels: Sequence[str], **where: Any) -> None:
    """A legend that also shows names beginning with an underscore, which matplotlib would hide."""
    drawn = axes.legend(handles, [f"series {index}" for index in range(len(labels))], **where)
    for text, label in zip(drawn.get_texts(), labels, strict=True):
        text.set_text(label)


def log_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = math.log10(high / low)
    # Less than two decades hold too few powers of ten to read a value from.
    subs = (1.0,) if decades > 2.6 else (1.0, 2.0, 5.0) if decades > 0.8 else tuple(np.arange(1.0, 10.0))
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def binned(points: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Step, mean, lowest and highest loss of at most `bins` runs of neighbouring points."""
    groups = np.array_split(points, min(bins, max(1, len(points) // 5)) if len(points) > 30 else len(points))
    x = np.array([group[:, 0].mean() for group in groups])
    loss = [group[:, 1] for group in groups]
    return x, *(np.array([statistic(part) for part in loss]) for statistic in (np.mean, np.min, np.max))  # type: ignore[return-value]


def layer_labels(names: list[str]) -> tuple[list[str], str]:
    """ "block 7" becomes "7" under an axis named "block": twenty-four long names do not fit."""
    short = [re.sub(r"^block\s+(\d+)$", r"\1", name) for name in names]
    return [_short(name, 24) for name in short], "block" if short != names else "layer"


def _short(name: str, limit: int = 32) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _number(value: float | None) -> float:
    """A value from a file, in which a number may be null."""
    return math.nan if value is None else float(value)


def _numbers(values: Sequence[float], length: int) -> np.ndarray:
    """`length` values; NaN where there are none."""
    numbers = np.array([_number(value) for value in values][:length], dtype=np.float64)
    return np.concatenate([numbers, np.full(length - len(numbers), np.nan)])


def _any(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).any())
