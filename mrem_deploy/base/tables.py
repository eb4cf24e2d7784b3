"""Tables of plain cells, and Markdown that shows text literally. All pages of a result are made of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Plain cells. The first `text_columns` are words, the others numbers; a `long` table may be folded."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""
    long: bool = False
    text_columns: int = 1


def short(value: float) -> str:
    """Three significant digits, whatever the size: times and sizes span many orders of magnitude."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def md(text: str) -> str:
    """`text` as it is: nothing in it becomes markup, a link or a table cell."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]|#~$])", r"\\\1", text)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\_", text)


def md_table(table: Table) -> str:
    """A Markdown table: words to the left, numbers to the right."""
    figures = 0 if len(table.header) == 2 else len(table.header) - table.text_columns
    rules = [" --- "] * (len(table.header) - figures) + [" ---: "] * figures
    lines = ["| " + " | ".join(md(cell) or " " for cell in row) + " |" for row in (table.header, *table.rows)]
    lines.insert(1, "|" + "|".join(rules) + "|")
    return "\n".join(lines) + (f"\n\n{md(table.note)}" if table.note else "")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, for the terminal: names left, numbers right."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join([first, *rest]) + " |"

    rule = (
        "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    )
    return "\n".join([line(head), rule, *map(line, rows)])
