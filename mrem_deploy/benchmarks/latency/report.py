"""The report of the measurement: what goes into the json file, the sentences under the tables, the plot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mrem_deploy.benchmarks.latency.settings import RaceSettings, SessionOptions
from mrem_deploy.benchmarks.latency.standings import Standing, case_name, running
from mrem_deploy.benchmarks.latency.tables import Sections, against, cells_at, count, pairs, thread_counts
from mrem_deploy.benchmarks.timing import Comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mrem_deploy.benchmarks.latency.serving import ServingSettings


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
        for standing, plain in pairs(running(standings)):
            row = next(r for r in found if r["device"] == device and r["name"] == standing.contender.name)
            row["times_faster_than"][plain.contender.name] = against(standing, plain)
    return found


def summary(
    sections: Sections,
    title: str,
    settings: RaceSettings,
    tuned: SessionOptions | None,
    skipped: str,
    serving: ServingSettings | None = None,
) -> str:
    lines = [
        f"{title}; medians of {settings.rounds} interleaved rounds after {settings.warmup} of warm-up; each "
        f"model in a separate process, load time the median of {settings.loads}; random tokens, no padding."
    ]
    if settings.memory_shapes:
        lines.append(
            "Memory: resident MiB over those of the same process before it loaded the model; every number "
            "from a new process."
        )
    if settings.together:
        lines.append(
            f"{settings.together} sessions at once: in one process, each in a thread of its own and with the "
            f"same input; all of them together against one alone."
        )
    if serving is not None:
        lines += _about(serving)
    for standings in sections.values():
        lines += [f"Failed: {s.contender.name}: {s.failed}" for s in standings if s.failed is not None]
    if tuned is not None:
        lines.append(f'Entries "with --options" have {tuned}; all others onnxruntime\'s defaults.')
    if skipped:
        lines.append(skipped)
    return "\n".join(lines)


def _about(serving: ServingSettings) -> list[str]:
    work = serving.workload
    shares = [
        f"{case_name(size, order)} {work.padded_tokens(size, order) / work.tokens - 1:.0%}"
        for size, order in serving.cases
        if size > 1
    ]
    passes = f"the medians of {count(serving.passes, 'pass', 'passes')} after one of warm-up"
    padding = f" Padding, where it is done, adds to the real tokens: {', '.join(shares)}." if shares else ""
    return [
        f"Workload {work.describe()}; {passes}, the models taking turns at every batch. Tokens per second "
        f"are real ones.{padding}"
    ]


PANEL_INCHES = 4.5


@dataclass(frozen=True)
class Panel:
    """A row per model, a mark per case: how many times faster than the first model."""

    title: str
    legend: str
    standings: list[Standing]
    marks: list[list[tuple[str, Comparison]]]  # of every standing


def panels(sections: Sections, title: str) -> list[Panel]:
    """One per device and number of threads, then one per number of threads of the workload."""
    found = []
    for device, standings in sections.items():
        left = running(standings)
        for threads in thread_counts(left):
            marks = [[(str(cell.shape), cell.faster) for cell in cells_at(s, threads)] for s in left]
            label = f"{title}: {device}, {count(threads, 'thread')}"
            found.append(Panel(label, "batch x tokens", left, marks))
        for threads in dict.fromkeys(served.threads for served in left[0].served):
            marks = [[(at.case, at.faster) for at in s.served if at.threads == threads] for s in left]
            label = f"workload: {device}, {count(threads, 'thread')}"
            found.append(Panel(label, "batches, order", left, marks))
    return found


def draw(sections: Sections, title: str) -> Figure:
    from mrem_deploy.report.plots import INK, new_figure

    drawn = panels(sections, title)
    most = max(len(panel.standings) for panel in drawn)
    figure, places = new_figure(1.6 + 0.46 * most, columns=len(drawn))
    if len(drawn) > 1:
        figure.set_figwidth(PANEL_INCHES * (len(drawn) + 1))  # one more for names and legends
    shown: list[str] = []
    for number, (axes, panel) in enumerate(zip([places] if len(drawn) == 1 else places, drawn, strict=True)):
        _draw_panel(axes, panel)
        axes.axvline(1.0, color=INK, linewidth=1, alpha=0.5)
        axes.set_xlim(left=0)
        axes.set_ylim(len(panel.standings) - 0.5, -0.5)
        names = [standing.contender.name for standing in panel.standings]
        # Panels of one device have the same rows: their names are written once.
        axes.set_yticks(range(len(names)), names if names != shown else [""] * len(names))
        shown = names
        axes.grid(visible=False, axis="y")
        base = panel.standings[0].contender.name
        axes.set(xlabel=f"times faster than {base} (median, quartiles)", title=panel.title)
        # Once for neighbours with the same marks.
        if number + 1 == len(drawn) or drawn[number + 1].legend != panel.legend:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), title=panel.legend)
    return figure


def _draw_panel(axes: Any, panel: Panel) -> None:
    from mrem_deploy.report.plots import BLUE, GREEN, INK, ORANGE, PINK, SKY, YELLOW

    looks = list(zip((BLUE, ORANGE, GREEN, PINK, YELLOW, SKY), "oDs^vP", strict=True))
    named: set[str] = set()
    for row, standing in enumerate(panel.standings):
        if standing.contender.ours:
            axes.axhspan(row - 0.5, row + 0.5, color=INK, alpha=0.05, linewidth=0)
        marks = panel.marks[row]
        for number, (case, faster) in enumerate(marks):
            colour, marker = looks[number % len(looks)]
            y = row + 0.5 * ((number + 0.5) / len(marks) - 0.5)
            axes.plot(faster.ratio_quartiles, [y, y], color=colour, linewidth=2, alpha=0.6)
            fill = "none" if standing.contender.tuned else "full"
            label = None if case in named else case
            axes.plot(faster.ratio, y, color=colour, marker=marker, fillstyle=fill, ls="", label=label)
            named.add(case)
