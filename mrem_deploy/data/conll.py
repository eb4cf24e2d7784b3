"""CoNLL files: a word per line with its tag in the last column. Imports nothing heavy: `tasks` needs it."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from typing import Any

from mrem_deploy.data.table_files import Malformed

SUFFIXES = (".conll", "")  # besides .txt; eng.train has none
SNIFFED_LINES = 5
TAG = re.compile(r"O|[BIESLU]-\S+")
_DOCUMENT = "-DOCSTART-"


def read_conll(path: Path) -> dict[str, list[Any]] | None:
    """Sentences of a CoNLL file; empty lines separate them.

    None for other formats, and for a .txt whose first lines do not end in tags: that is plain text.
    """
    if path.suffix.lower() in (".jsonl", ".json", ".csv", ".tsv", ".parquet"):
        return None
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    rows = [(number, line.split()) for number, line in enumerate(lines, start=1)]
    rows = [(number, cells) for number, cells in rows if not cells or cells[0] != _DOCUMENT]
    filled = [(number, cells) for number, cells in rows if cells]
    if path.suffix.lower() == ".txt" and not all(_tagged(cells) for _, cells in filled[:SNIFFED_LINES]):
        return None
    for number, cells in filled:
        if len(cells) < 2:
            raise Malformed(f"line {number} has one column, {cells[0]!r}; expected a word and its tag")
        if len(cells) != len(filled[0][1]):
            raise Malformed(
                f"line {number} has {len(cells)} columns, {' '.join(cells)!r}; "
                f"the first has {len(filled[0][1])}"
            )
    sentences = [
        [cells for _, cells in group] for full, group in groupby(rows, key=lambda row: bool(row[1])) if full
    ]
    return {
        "tokens": [[cells[0] for cells in sentence] for sentence in sentences],
        "ner_tags": [[cells[-1] for cells in sentence] for sentence in sentences],
    }


def _tagged(cells: list[str]) -> bool:
    return len(cells) >= 2 and TAG.fullmatch(cells[-1]) is not None
