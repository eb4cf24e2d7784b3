"""What the cells of a table may hold: texts, labels and scores. What is refused is named with its row."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import shown
from mrem_deploy.data.labels import is_number, spelling
from mrem_deploy.data.table_files import Table, listing

LARGEST_SCORE = 1e38  # of float32
_SHARE = re.compile(r"[+-]?0*[.,]0*[1-9]\d*")  # a number between 0 and 1, such as 0.5


def texts_in(table: Table, column: str) -> list[str]:
    """The texts of a column; anything but text is refused, numbers and lists of words as well."""
    cells = table.columns[column]
    odd = next((i for i, cell in enumerate(cells) if not isinstance(cell, str)), None)
    if odd is None:
        return list(cells)
    where = f"Expected text in every row of {table.origin}; row {table.row(odd)} has"
    if is_missing(cells[odd]):
        raise UserError(f"{where} none in column {column!r}.", "Fill the cell or remove the row.")
    raise UserError(
        f"{where} {shown(cells[odd])} in column {column!r}, which is not text.",
        "Write it as text, in quotes, or name the column of the texts with --text-column.",
    )


def place_of(table: Table, column: str) -> str:
    return f"column {column!r} of {table.origin}"


def is_missing(cell: Any) -> bool:
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def label_texts(table: Table, column: str) -> list[str | None]:
    """Labels of classes as text: 1, 1.0, "1" and True are all "1"; None, NaN, "" and -1 are no label.

    A number that is not whole is a score and no class, and a list is no label at all. Of texts only shares
    such as 0.5 are refused: 401.9 may be the code of a class.
    """
    found: list[str | None] = []
    for i, cell in enumerate(table.columns[column]):
        if isinstance(cell, bool) or (isinstance(cell, float) and cell.is_integer()):
            cell = int(cell)
        if is_missing(cell):
            found.append(None)
            continue
        if not isinstance(cell, str | int) or (isinstance(cell, str) and _SHARE.fullmatch(cell.strip())):
            raise UserError(
                f"Expected a class, a name or a whole number, in {place_of(table, column)}; "
                f"row {table.row(i)} has {shown(cell)}.",
                "Write a name for every class, or name the column of the classes with --label-column.",
            )
        text = str(cell).strip()
        found.append(None if text in ("", "-1") else text)
    return found


def scores_in(table: Table, column: str) -> list[float | None]:
    """Labels of a regression: numbers, or text that is one. None, NaN, "" and -1 are no label."""
    found: list[float | None] = []
    for i, cell in enumerate(table.columns[column]):
        if is_missing(cell) or (isinstance(cell, str) and cell.strip() in ("", "-1")) or cell in (-1, -1.0):
            found.append(None)
            continue
        try:
            score = float(cell) if isinstance(cell, str | int | float) else math.nan
        except (ValueError, OverflowError):
            score = math.nan
        if not abs(score) < LARGEST_SCORE:
            raise UserError(
                f"Expected a number in {place_of(table, column)}; row {table.row(i)} has {shown(cell)}.",
                "Correct the row, or name the column of the scores with --label-column.",
            )
        found.append(score)
    return found


def names_of(values: set[str]) -> tuple[str, ...]:
    """Label names found in the data, in an order that does not depend on the order of the rows."""
    return tuple(sorted(values, key=int if all(map(is_number, values)) else str))


def indices_of(table: Table, column: str, labels: list[str], names: tuple[str, ...]) -> np.ndarray:
    """The labels of a column as indices; the data may have names or, if the names are words, numbers."""
    index = {spelling(name): i for i, name in enumerate(names)}
    if not any(name.isdecimal() for name in names):
        index.update({str(i): i for i in range(len(names))})
    found = [index.get(spelling(label)) for label in labels]
    if None in found:
        odd = found.index(None)
        raise UserError(
            f"Expected one of the labels {listing(names)} in {place_of(table, column)}; "
            f"row {table.row(odd)} has {shown(labels[odd])}.",
            "Check the task and --label-column, or correct the row.",
        )
    return np.array(found, dtype=np.int64)
