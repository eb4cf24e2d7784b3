"""The report of the measurement: tables, verdicts and the plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mrem_deploy.benchmarks.latency.race import Cell, Standing, running
from mrem_deploy.benchmarks.latency.settings import RaceSettings, SessionOptions, Shape
from mrem_deploy.benchmarks.output import table
from mrem_deploy.benchmarks.timing import Comparison, geometric_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Sections = Mapping[str, list[Standing]]  # by device; the first of each is what the others are compared with

MOST_KINDS = 6  # operator kinds named per model; the rest is added up


def tables(sections: Sections, settings: RaceSettings) -> str:
    """For each device: speed, spread and throughput, size and memory, and on request where the time goes."""
    parts = []
    for device, standings in sections.items():
        left = running(standings)
        for threads in _threads(left):
            label = f"{device}, {_count(threads, 'thread')}"
            parts.append(_speeds(f"{label}: median ms (× faster)", left, threads, settings))
            parts.append(_spreads(f"{label}: p95 ms · sentences/s", left, threads, settings))
        parts.append(_verdicts(left))
        parts.append(_weights(device, standings))
        if settings.profile_nodes:
            parts += [_nodes(left, shape) for shape in settings.shapes]
    return "\n\n".join(parts)


def _speeds(label: str, standings: Sequence[Standing], threads: int, settings: RaceSettings) -> str:
    rows = []
    for index, standing in enumerate(standings):
        cells = _cells(standing, threads)
        mean = geometric_mean([cell.faster.ratio for cell in cells])
        rows.append(
            [
                standing.contender.name,
                *(f"{_ms(c.p50_ms)} ({c.faster.ratio:.2f}×)" if index else _ms(c.p50_ms) for c in cells),
                f"{mean:.2f}×" if index else "1×",
            ]
        )
    return table([label, *map(str, settings.shapes), "geometric mean"], rows)


def _spreads(label: str, standings: Sequence[Standing], threads: int, settings: RaceSettings) -> str:
    rows = [
        [
            standing.contender.name,
            *(f"{_ms(c.p95_ms)} · {c.sentences_per_second:,.1f}" for c in _cells(standing, threads)),
        ]
        for standing in standings
    ]
    return table([label, *map(str, settings.shapes)], rows)


def _weights(device: str, standings: Sequence[Standing]) -> str:
    rows = []
    for standing in standings:
        weight = standing.weight
        measured = ["failed", "–", "–", "–"]
        if standing.failed is None and weight.memory is not None:
            measured = [
                f"{weight.load_seconds:.2f}",
                f"{weight.memory.loaded_mb:,.0f}",
                f"{weight.memory.resident_mb:,.0f}",
                f"{weight.memory.empty_mb:,.0f}",
            ]
        rows.append([standing.contender.name, f"{weight.file_mb:,.1f}", *measured])
    head = [device, "file, MiB", "load, s", "memory loaded, MiB", "after runs, MiB", "of it runtime, MiB"]
    return table(head, rows)


def _nodes(standings: Sequence[Standing], shape: Shape) -> str:
    lines = [f"Share of the time by operator kind, {shape}:"]
    for standing in standings:
        found = next(c.node_shares for c in standing.cells if c.shape == shape and c.node_shares is not None)
        lines.append(f"- {standing.contender.name}: {describe_shares(found)}")
    return "\n".join(lines)


def describe_shares(shares: Mapping[str, float]) -> str:
    """The largest by name, the rest added up."""
    kinds = list(shares.items())
    named = [f"{kind} {share:.0%}" for kind, share in kinds[:MOST_KINDS]]
    rest = sum(share for _, share in kinds[MOST_KINDS:])
    return ", ".join([*named, f"others {rest:.0%}"] if rest else named)


def _verdicts(standings: Sequence[Standing]) -> str:
    """Each of ours at default options against every rival."""
    rivals = [s for s in standings if not s.contender.ours]
    rows = []
    for standing in standings:
        if standing.contender.ours and not standing.contender.tuned:
            found = [against(standing, rival) for rival in rivals]
            rows.append(
                [
                    standing.contender.name,
                    *(f"{geometric_mean(ratios):.2f}× ({min(ratios):.2f}×)" for ratios in found),
                ]
            )
    return table(["times faster: geometric mean (lowest)", *(rival.contender.name for rival in rivals)], rows)


def against(standing: Standing, rival: Standing) -> list[float]:
    """How many times faster, cell by cell: medians of the ratios within a round."""
    return [
        Comparison(base=tuple(own.rounds_ms), other=tuple(other.rounds_ms)).ratio
        for own, other in zip(standing.cells, rival.cells, strict=True)
    ]


def rows(sections: Sections) -> list[dict[str, Any]]:
    """For the json file: every contender; ours also with their speed against each rival."""
    found = []
    for device, standings in sections.items():
        rivals = [s for s in running(standings) if not s.contender.ours]
        for standing in standings:
            row = {"device": device, **standing.to_dict()}
            if standing.contender.ours and standing.failed is None:
                row["times_faster_than"] = {r.contender.name: against(standing, r) for r in rivals}
            found.append(row)
    return found


def summary(
    sections: Sections, title: str, settings: RaceSettings, tuned: SessionOptions | None, skipped: str
) -> str:
    lines = [
        f"{title}; medians of {settings.rounds} interleaved rounds after {settings.warmup} of warm-up; each "
        f"model in a separate process, load time the median of {settings.loads}; random tokens, no padding."
    ]
    for standings in sections.values():
        lines += [f"Failed: {s.contender.name}: {s.failed}" for s in standings if s.failed is not None]
    if tuned is not None:
        lines.append(f'Entries "with --options" have {tuned}; all others onnxruntime\'s defaults.')
    if skipped:
        lines.append(skipped)
    return "\n".join(lines)


def draw(sections: Sections, title: str, settings: RaceSettings) -> Figure:
    """One panel per device and number of threads: a row per model, a mark per shape."""
    from mrem_deploy.report.plots import BLUE, GREEN, INK, ORANGE, PINK, SKY, YELLOW, new_figure

    panels = [
        (device, threads, running(standings))
        for device, standings in sections.items()
        for threads in _threads(running(standings))
    ]
    most = max(len(standings) for _, _, standings in panels)
    figure, drawn = new_figure(1.6 + 0.46 * most, columns=len(panels))
    looks = list(zip((BLUE, ORANGE, GREEN, PINK, YELLOW, SKY), "oDs^vP", strict=True))
    shown: list[str] = []
    for axes, (device, threads, standings) in zip(
        [drawn] if len(panels) == 1 else drawn, panels, strict=True
    ):
        for row, standing in enumerate(standings):
            if standing.contender.ours:
                axes.axhspan(row - 0.5, row + 0.5, color=INK, alpha=0.05, linewidth=0)
            for number, cell in enumerate(_cells(standing, threads)):
                colour, marker = looks[number % len(looks)]
                y = row + 0.5 * ((number + 0.5) / len(settings.shapes) - 0.5)
                axes.plot(cell.faster.ratio_quartiles, [y, y], color=colour, linewidth=2, alpha=0.6)
                label = str(cell.shape) if row == 0 else None
                fill = "none" if standing.contender.tuned else "full"
                axes.plot(
                    cell.faster.ratio, y, color=colour, marker=marker, fillstyle=fill, ls="", label=label
                )
        axes.axvline(1.0, color=INK, linewidth=1, alpha=0.5)
        axes.set_xlim(left=0)
        axes.set_ylim(len(standings) - 0.5, -0.5)
        names = [standing.contender.name for standing in standings]
        # Panels of one device have the same rows: their names are written once.
        axes.set_yticks(range(len(names)), names if names != shown else [""] * len(names))
        shown = names
        axes.grid(visible=False, axis="y")
        base = standings[0].contender.name
        axes.set(
            xlabel=f"times faster than {base} (median, quartiles)",
            title=f"{title}: {device}, {_count(threads, 'thread')}",
        )
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), title="batch x tokens")  # of the last panel
    return figure


def _threads(standings: Sequence[Standing]) -> list[int]:
    return list(dict.fromkeys(cell.threads for cell in standings[0].cells))


def _cells(standing: Standing, threads: int) -> list[Cell]:
    return [cell for cell in standing.cells if cell.threads == threads]


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
