"""The files of `mrem reproduce`: csv, json and plots per experiment, and one page (index.md, index.html)."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from mrem_deploy.base.files import atomic_file, write_json, write_text
from mrem_deploy.base.tables import Table, md, md_table
from mrem_deploy.benchmarks.output import table as aligned
from mrem_deploy.report.html import figure_html, page_html, table_html
from mrem_deploy.report.page import environment_table
from mrem_deploy.reproduce.claims import summary
from mrem_deploy.reproduce.layout import Record, Shown

FORMAT = 1


@dataclass(frozen=True)
class Entry:
    """One experiment on one subject; `stem` names its files."""

    stem: str
    title: str
    source: str
    caption: str
    shown: Shown

    @property
    def where(self) -> str:
        return f"In the paper: {self.source}." if self.source else "Not in the paper."

    def table(self) -> Table:
        return self.shown.table(self.title)

    def text(self) -> str:
        """For the terminal: the table, how it differs from the paper's, and which orderings hold."""
        table = self.table()
        title = f"{self.title} ({self.source})" if self.source else self.title
        parts = [title, aligned(table.header, table.rows), self.caption]
        parts += [*self.shown.notes, *self._findings()]
        return "\n\n".join(part for part in parts if part)

    def _findings(self) -> list[str]:
        lines = [f"- {finding}" for finding in self.shown.findings]
        return [summary(self.shown.findings), "\n".join(lines)] if lines else []


@dataclass(frozen=True)
class Provenance:
    """Where the numbers come from."""

    command: str
    environment: Mapping[str, Any]  # of base/machine.py
    left_out: Sequence[str]  # sentences about what was not run

    @property
    def date(self) -> str:
        return str(self.environment["date"])


# Wider than a report, for tables of many runs.
STYLE = """
main { max-width: 1080px; } li { margin: 3px 0; font-size: 14px; } a { color: var(--accent); }
"""


def write_entry(entry: Entry, folder: Path, provenance: Provenance) -> list[Path]:
    """Write STEM.csv, STEM.json and plots/STEM*.png; returns their paths."""
    shown = entry.shown
    written = [folder / f"{entry.stem}.csv", folder / f"{entry.stem}.json"]
    write_text(written[0], to_csv(shown.records))
    write_json(
        written[1],
        {
            "format": FORMAT,
            "experiment": entry.title,
            "paper": entry.source,
            "caption": entry.caption,
            "notes": shown.notes,
            "rows": shown.records,
            "orderings": [finding.as_dict() for finding in shown.findings],
            "summary": summary(shown.findings),
            "left_out": list(provenance.left_out),
            "command": provenance.command,
            "date": provenance.date,
            "environment": dict(provenance.environment),
        },
    )
    for plot in shown.plots:
        path = _picture(folder, entry, plot.name)
        with atomic_file(path) as temporary:
            temporary.write_bytes(plot.png)
        written.append(path)
    return written


def to_csv(records: Sequence[Record]) -> str:
    """Every number in full precision; unknown ones are empty."""
    names = list(dict.fromkeys(name for record in records for name in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _picture(folder: Path, entry: Entry, name: str) -> Path:
    stem = entry.stem if name in entry.stem else f"{entry.stem}-{name}"
    return folder / "plots" / f"{stem}.png"


def write_page(entries: Sequence[Entry], folder: Path, title: str, provenance: Provenance) -> list[Path]:
    pages = [folder / "index.md", folder / "index.html"]
    write_text(pages[0], _markdown(entries, folder, title, provenance))
    write_text(pages[1], _html(entries, title, provenance))
    return pages


def _findings(entries: Sequence[Entry]) -> str:
    return summary([finding for entry in entries for finding in entry.shown.findings])


def _markdown(entries: Sequence[Entry], folder: Path, title: str, provenance: Provenance) -> str:
    parts = [f"# {md(title)}", md(_findings(entries)), f"```\n{provenance.command}\n```", md(provenance.date)]
    parts += [f"> {md(sentence)}" for sentence in provenance.left_out]
    for entry in entries:
        parts += [f"## {md(entry.title)}", md(entry.where), md(entry.caption)]
        for plot in entry.shown.plots:
            picture = _picture(folder, entry, plot.name).relative_to(folder)
            parts += [f"![{plot.title}]({picture.as_posix()})", md(plot.caption)]
        parts += [md_table(entry.table()), *map(md, entry.shown.notes)]
        if entry.shown.findings:
            parts.append(md(summary(entry.shown.findings)))
            parts.append("\n".join(f"- {md(str(finding))}" for finding in entry.shown.findings))
    parts += ["## Environment", md_table(environment_table(provenance.environment))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _own_ids(html: str, name: str, stem: str) -> str:
    """Ids that are unique on the page, which may show the same plot for two subjects."""
    for before in ('id="', "url(#", 'href="#'):
        html = html.replace(f"{before}{name}-", f"{before}{stem}-plot-{name}-")
    return html


def _section(entry: Entry) -> str:
    figures = "".join(_own_ids(figure_html(plot), plot.name, entry.stem) for plot in entry.shown.plots)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in (entry.caption, *entry.shown.notes))
    found = "".join(
        f"<li>{escape(f.claim)}: <b>{escape(f.verdict)}</b> ({escape(f.evidence)})</li>"
        for f in entry.shown.findings
    )
    verdicts = f"<p>{escape(summary(entry.shown.findings))}</p><ul>{found}</ul>" if found else ""
    anchor, source = escape(entry.stem, quote=True), escape(entry.where)
    body = f'{table_html(entry.table())}<p class="note">{source}</p>{notes}{verdicts}{figures}'
    return f'<div id="{anchor}">{body}</div>\n'


def _html(entries: Sequence[Entry], title: str, provenance: Provenance) -> str:
    links = " · ".join(
        f'<a href="#{escape(e.stem, quote=True)}">{escape(e.title)}</a>' for e in entries if len(entries) > 1
    )
    left_out = "".join(f'<p class="warning">{escape(sentence)}</p>' for sentence in provenance.left_out)
    sections = "".join(_section(entry) for entry in entries)
    main = f"""<header><div class="eyebrow">The paper's experiments</div>
<h1>{escape(title)}</h1>
<p class="lead">{escape(_findings(entries))}</p></header>
{left_out}
<p class="note">{links}</p>
{sections}
<div class="details">{table_html(environment_table(provenance.environment))}
<section><h2>Command</h2><pre>{escape(provenance.command)}</pre></section></div>
<footer>Every number is in the csv and json files next to this page. Made by mrem_deploy.</footer>"""
    return page_html(title, main, STYLE)
