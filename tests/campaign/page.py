"""The table of a campaign, for the terminal and for docs/reliability.md."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

from tests.campaign.cases import FAULTS, KINDS, Outcome

BEGIN, END = "<!-- campaign: begin -->", "<!-- campaign: end -->"
HEADER = ("what", "tried", "survived", *FAULTS)


def rows(outcomes: Iterable[Outcome]) -> list[list[str]]:
    """A row for every kind that was tried, and their sum."""
    by_kind: dict[str, list[Outcome]] = {kind: [] for kind in KINDS}
    for outcome in outcomes:
        by_kind[outcome.case.rpartition("-")[0]].append(outcome)
    found = [_row(KINDS[kind].title, tried) for kind, tried in by_kind.items() if tried]
    return [*found, _row("all", [outcome for tried in by_kind.values() for outcome in tried])]


def _row(title: str, tried: list[Outcome]) -> list[str]:
    faults = [sum(fault in outcome.faults for outcome in tried) for fault in FAULTS]
    return [title, *map(str, (len(tried), sum(outcome.survived for outcome in tried), *faults))]


def terminal(outcomes: list[Outcome]) -> str:
    lines = [HEADER, *rows(outcomes)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not place else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def leaving(outcomes: Iterable[Outcome]) -> str | None:
    """How long processes took to leave after a signal."""
    seconds = sorted(outcome.leave_seconds for outcome in outcomes if outcome.leave_seconds is not None)
    if not seconds:
        return None
    middle, most = statistics.median(seconds), seconds[-1]
    return f"After a signal the process had left within {middle:.1f} s (median) and {most:.1f} s (longest)."


def markdown(outcomes: list[Outcome], command: str, seed: int) -> str:
    """The generated part of docs/reliability.md."""
    lines = [f"| {' | '.join(HEADER)} |", f"|---|{'---:|' * (len(HEADER) - 1)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows(outcomes)]
    failed = [outcome for outcome in outcomes if not outcome.survived]
    about = f"`{command}`, seed {seed}, {time.strftime('%Y-%m-%d', time.gmtime())}, {processor()}."
    planned = sum(kind.count for kind in KINDS.values())
    if len(outcomes) < planned:
        about += (
            f" A part of the campaign: {len(outcomes):,} of {planned:,} cases; the others were not tried."
        )
    text = [*lines, "", about]
    if (sentence := leaving(outcomes)) is not None:
        text.append(sentence)
    if failed:
        text += ["", "Not survived:", ""]
        for outcome in failed:
            (fault, reason), *_ = outcome.faults.items()
            text.append(f"- `{outcome.case}`: {fault}: {_plain(reason)}")
    return "\n".join(text)


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")[:160]


def write(path: Path, generated: str) -> None:
    """Put the generated part between its markers."""
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no place for the table: {BEGIN} … {END}")
    path.write_text(f"{before}{BEGIN}\n\n{generated}\n\n{END}{after}", encoding="utf-8")


def processor() -> str:
    """The name of the CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
