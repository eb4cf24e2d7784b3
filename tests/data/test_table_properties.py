"""Data files with anything in them: rows of text, or a message. Never a traceback, never half a character."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from properties import fewer, made, texts, values, writable

from mrem_deploy.data.table_files import FIRST_ROW, Naming, Table, Wanted, read_table
from mrem_deploy.data.task_data import open_task
from mrem_deploy.data.tasks import TASKS
from mrem_deploy.data.texts import Texts

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".txt", ".conll", ".parquet", "")
NAMINGS: dict[str, Naming] = {name: TASKS[name].naming for name in ("text-classification", "sst2", "squad")}
NAMINGS["tags"] = TASKS["token-classification"].naming
COLUMNS = ["text", "label", "sentence", "tokens", "ner_tags", "question", "context", "answers", "id", ""]

delimited = st.text(st.sampled_from('text,label\t\r\n"01\\0 é-'), max_size=120)
records = st.dictionaries(st.sampled_from(COLUMNS) | texts, values, max_size=5)
lines = st.lists(records | values, max_size=4).map(lambda rows: "\n".join(map(json.dumps, rows)))
arrays = st.lists(records, max_size=4).map(json.dumps)
conll = st.text(st.sampled_from("ab \n\tBIO-PER"), max_size=80)
written = (delimited, lines, arrays, conll)
contents = st.one_of(st.binary(max_size=200), *(kind.map(str.encode) for kind in written))


def in_file(content: bytes, suffix: str, folder: str) -> Path:
    path = Path(folder, f"train{suffix}")
    path.write_bytes(content)
    return path


def is_readable(cell: Any) -> bool:
    """Whether all text in a cell can be written again; a NUL can."""
    if isinstance(cell, dict):
        return all(is_readable(key) and is_readable(value) for key, value in cell.items())
    if isinstance(cell, list):
        return all(map(is_readable, cell))
    return not isinstance(cell, str) or writable(cell.replace("\0", ""))


def check(table: Table) -> None:
    assert len(table) > 0
    assert {len(cells) for cells in table.columns.values()} == {len(table)}
    assert all(is_readable(cells) and is_readable(name) for name, cells in table.columns.items())


@given(contents, st.sampled_from(SUFFIXES), st.sampled_from(sorted(NAMINGS)))
def test_any_bytes_are_rows_or_refused(content: bytes, suffix: str, naming: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = in_file(content, suffix, folder)
        for wanted in (Wanted(), FIRST_ROW, Wanted(frozenset(COLUMNS))):
            table = made(partial(read_table, path, NAMINGS[naming], wanted))
            if table is not None:
                check(table)


rows_of_task = st.fixed_dictionaries(
    {
        "text": values | st.text(max_size=5),
        "label": values | st.integers(0, 2),
        "tokens": values | st.lists(st.text(max_size=3), max_size=3),
        "ner_tags": values | st.lists(st.sampled_from(["O", "B-X", "0", "1"]), max_size=3),
        "question": values | st.text(max_size=5),
        "context": values | st.text(min_size=1, max_size=9),
        "answers": values | st.just([{"text": "a", "answer_start": 0}]),
        "sentence1": st.text(max_size=5),
        "sentence2": st.text(max_size=5),
        "score": values | st.floats(0, 5),
    }
)
TASK_NAMES = (
    *("text-classification", "token-classification", "feature-extraction"),
    *("squad", "squad_v2", "stsb"),
)


def all_texts(task: str, folder: str) -> list[Texts]:
    data = open_task(task, folder)
    data.evaluation_label_names()
    return [data.train(), *data.evaluation().values()]


@fewer
@given(st.lists(rows_of_task, min_size=1, max_size=5), st.sampled_from(TASK_NAMES))
def test_any_cells_are_texts_and_labels_or_refused(rows: list[dict[str, Any]], task: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("train", "dev"):
            Path(folder, f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        found = made(partial(all_texts, task, folder))
    for part in found or ():
        assert len(part) == len(rows)
        texts_of_part = [*part.first, *(part.second or ())]
        assert all(isinstance(text, str) and is_readable(text) for text in texts_of_part)
