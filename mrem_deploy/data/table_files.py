"""One table: csv, tsv, jsonl, json and parquet files as plain columns of the wanted names."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import shown
from mrem_deploy.base.progress import say

if TYPE_CHECKING:
    import numpy as np

SUFFIXES = (".tsv", ".jsonl", ".json", ".csv", ".parquet", ".txt")


MALFORMED_SHARE = 1e-3  # QQP's official file has a handful of broken lines among 360,000


@dataclass(frozen=True)
class Layout:
    """Names that belong together: the training split, and the choices for each evaluation split."""

    train: str
    evaluation: dict[str, tuple[str, ...]]


# Columns of a file in a format that only one task has; None: it is in a format that all tasks have.
Reader = Callable[[Path], "dict[str, list[Any]] | None"]


@dataclass
class Table:
    """Columns of equal length, and where they come from, for messages."""

    columns: dict[str, list[Any]]
    origin: str
    classes: dict[str, tuple[str, ...]] = field(default_factory=dict)  # label names in the data's own order
    rows: np.ndarray | None = None  # of the file, where only some of them are here

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def take(self, rows: np.ndarray) -> Table:
        columns = {name: [cells[i] for i in rows] for name, cells in self.columns.items()}
        return replace(self, columns=columns, rows=rows if self.rows is None else self.rows[rows])

    def row(self, place: int) -> int:
        """The number of a row in the file, for messages; the first one is 1, the header does not count."""
        return 1 + int(place if self.rows is None else self.rows[place])


@dataclass(frozen=True)
class Wanted:
    """How much of a split to read. MNLI's files carry parse trees, five times the size of the sentences."""

    columns: frozenset[str] | None = None  # None: all
    rows: int | None = None

    def __contains__(self, column: str) -> bool:
        return self.columns is None or column in self.columns


FIRST_ROW = Wanted(rows=1)


def read_files(files: list[Path], naming: Naming, wanted: Wanted) -> Table:
    """Read the files of one split, by their suffix."""
    tables = [read_table(path, naming, wanted) for path in (files if wanted.rows is None else files[:1])]
    if len(tables) == 1:
        return tables[0]
    columns = {name: [cell for table in tables for cell in table.columns[name]] for name in tables[0].columns}
    return Table(columns, f"{files[0]} and {len(files) - 1} more")


def read_table(path: Path, naming: Naming, wanted: Wanted) -> Table:
    """Read one file by its suffix."""
    suffix = path.suffix.lower()
    try:
        own = naming.read(path) if naming.read is not None else None
        if own is not None:
            columns = {name: cells[: wanted.rows] for name, cells in own.items() if name in wanted}
        elif suffix not in SUFFIXES:
            raise UserError(
                f"Expected a file ending in {', '.join(SUFFIXES)}; got {path}.", "Convert it to one of these."
            )
        elif suffix == ".parquet":
            columns = _read_parquet(path, wanted)
        else:
            with path.open(encoding="utf-8-sig", newline="" if suffix == ".csv" else "\n") as file:
                if suffix in (".jsonl", ".json"):
                    columns = _read_json(file, wanted)
                elif suffix == ".csv":
                    csv.field_size_limit(2**31 - 1)  # the default refuses texts of more than 128 kB
                    columns = _by_header(csv.reader(file), path, (), wanted)
                elif suffix == ".tsv" or naming.folder:
                    # Not csv.reader: even with QUOTE_NONE it stumbles over a lone carriage return.
                    rows = (line.rstrip("\r\n").split("\t") for line in file)
                    columns = _by_header(rows, path, naming.header, wanted)
                else:  # a user's text file: one sentence per line
                    columns = {"text": list(islice(filter(None, map(str.strip, file)), wanted.rows))}
    except UnicodeDecodeError as error:
        raise UserError(
            f"Expected UTF-8 text in {path}; it is not ({error.reason}).",
            "Convert the file to UTF-8, e.g. with iconv.",
        ) from error
    except (OSError, csv.Error, Malformed) as error:
        raise UserError(
            f"{path} cannot be read: {error}.",
            "Check that the file is complete, readable and in the format of its suffix.",
        ) from error
    return _not_empty(Table(columns, str(path)))


class Malformed(ValueError):
    """The content is not in the format of the file's suffix."""


def _by_header(
    rows: Iterable[list[str]], path: Path, header: tuple[str, ...], wanted: Wanted
) -> dict[str, list[Any]]:
    """Columns of delimited rows. A few rows with too few or too many fields are left out; more are an error.

    Fields beyond the header count only if something is in them: many programs end every row with commas.
    """
    numbered = ((number, row) for number, row in enumerate(rows, start=1) if any(row))
    first = next(numbered, None)
    if first is None:
        return {}
    names = [name.strip() for name in first[1]]
    body: Iterable[tuple[int, list[str]]] = numbered
    if header and not set(header) & set(names):  # the first line is a row already
        names, body = list(header), chain([first], numbered)
    times = _check_names(names)
    columns: dict[str, list[Any]] = {name: [] for name in names if name in wanted and times[name] == 1}
    cells = [(i, columns[name]) for i, name in enumerate(names) if name in columns]
    count, broken = 0, []
    for number, row in islice(body, wanted.rows):
        count += 1
        if len(row) < len(names) or any(row[len(names) :]):
            broken.append((number, len(row)))
            continue
        for i, column in cells:
            column.append(row[i])
    if len(broken) > MALFORMED_SHARE * count:
        number, found = broken[0]
        unquoted = found > len(names) and path.suffix.lower() == ".csv"
        raise Malformed(
            f"expected {len(names)} fields in every row ({listing(names)}), but {len(broken)} of {count} "
            f"rows have fewer or more, the first is row {number} (the header is row 1) with {found}"
            + ("; a text with a comma in it needs quotes" if unquoted else "")
        )
    if broken:
        say(f"{path.name}: left out {len(broken)} broken rows of {count}")
    return columns


def _check_names(names: list[str]) -> Counter[str]:
    """How often each name occurs. Refuses a name of several columns: which one is meant? "" is no name."""
    counts = Counter(names)
    twice = [name for name, times in counts.items() if times > 1 and name]
    if twice:
        places = [str(i) for i, name in enumerate(names, start=1) if name == twice[0]]
        raise Malformed(
            f"expected every column to have its own name, but {shown(twice[0])} is the name of columns "
            f"{listing(places[:-1])} and {places[-1]}"
        )
    return counts


# An escape of half a surrogate pair. Two halves in the right order are one character.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str) -> Any:
    """As `json.loads`, but `Malformed` for JSON that no one can use: nested too deeply, numbers of thousands
    of digits, halves of characters."""
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise Malformed("it is nested too deeply") from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise Malformed(f"{half!r} is a lone surrogate, half of a character") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise Malformed(str(error)) from error
    return value


def _read_json(file: TextIO, wanted: Wanted) -> dict[str, list[Any]]:
    """Lines of objects, or one array of objects."""
    is_array = next((line.lstrip()[0] for line in file if line.strip()), "") == "["
    file.seek(0)
    number = 0
    try:
        if is_array:
            records = parse_json(file.read())[: wanted.rows]
        else:
            records = []
            for number, line in enumerate(file):  # noqa: B007 (the message has it)
                if line.strip():
                    records.append(parse_json(line.strip()))
                if len(records) == wanted.rows:
                    break
    except json.JSONDecodeError as error:
        raise Malformed(
            f"line {number + error.lineno} is not valid JSON ({error.msg}); "
            "expected one object per line, or one array of objects"
        ) from error
    except Malformed as error:
        raise error if is_array else Malformed(f"line {number + 1}: {error}") from error
    if not all(isinstance(record, dict) for record in records):
        raise Malformed('expected rows with named fields, like {"text": "…", "label": "…"}')
    names = dict.fromkeys(name for record in records for name in record if name in wanted)
    return {name: [record.get(name) for record in records] for name in names}


def _read_parquet(path: Path, wanted: Wanted) -> dict[str, list[Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            _check_names(file.schema_arrow.names)
            names = [name for name in file.schema_arrow.names if name in wanted]
            if wanted.rows is None:
                return file.read(columns=names).to_pydict()
            batches = file.iter_batches(batch_size=wanted.rows, columns=names)
            return next(batches).to_pydict() if file.metadata.num_rows else {}
    except UnicodeDecodeError:
        raise
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # also dates beyond Python's
        raise Malformed(str(error)) from error


def _not_empty(table: Table) -> Table:
    if len(table) == 0:
        raise UserError(
            f"Expected rows in {table.origin}, but it is empty.",
            "Check that the download or copy is complete.",
        )
    return table


def squeeze(name: str) -> str:
    """Only letters and digits, in lower case: "SST-2", "sst_2" and "sst2" are the same."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def listing(names: Sequence[str], most: int = 12) -> str:
    """Names for a message, at most `most` of them."""
    some = ", ".join(name[:60] for name in names[:most])
    return some + (f" and {len(names) - most} more" if len(names) > most else "") or "nothing"


GLUE_LAYOUTS = (Layout("train", {"dev": ("dev", "validation")}),)


@dataclass(frozen=True)
class Naming:
    """How the data of one task is named, as files or as splits on the hub."""

    layouts: tuple[Layout, ...] = GLUE_LAYOUTS  # tried in order; the first has the task's evaluation splits
    folder: str = ""  # GLUE's own folder name; empty for the user's own data
    header: tuple[str, ...] = ()  # column names of tab-separated files that have none
    suffixes: tuple[str, ...] = ()  # of the task's own format, besides SUFFIXES
    read: Reader | None = None  # reads the task's own format

    @property
    def eval_splits(self) -> tuple[str, ...]:
        return tuple(self.layouts[0].evaluation)
