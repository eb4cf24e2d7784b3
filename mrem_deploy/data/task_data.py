"""The data of a task, found and opened; `splits` and `search_data` read it."""

from __future__ import annotations

from mrem_deploy.base.errors import UserError
from mrem_deploy.data.encoded import Encoded
from mrem_deploy.data.generated import open_texts, unlabelled
from mrem_deploy.data.labels import label_order
from mrem_deploy.data.search_data import open_search
from mrem_deploy.data.sources import open_source
from mrem_deploy.data.splits import Columns, TaskData, row_for
from mrem_deploy.data.tasks import NO_DATA, TASKS, Task, find_task
from mrem_deploy.data.texts import Texts, encode, sample

__all__ = [
    "TASKS",
    "Columns",
    "Encoded",
    "Task",
    "TaskData",
    "Texts",
    "encode",
    "find_task",
    "label_order",
    "open_task",
    "sample",
]


def open_task(task: str, data: str, columns: Columns | None = None, eval_data: str | None = None) -> TaskData:
    """Find the data of a task and check that its files and columns are there, without reading the rows."""
    row, columns = find_task(task), columns or Columns()
    if columns.text_pair and row.kind in ("embedding", "token-classification"):
        raise UserError(
            f"{row.name} reads single sentences; got --text-pair-column {columns.text_pair}.",
            "Leave the option out, and put all sentences into the text column.",
        )
    if row.searches:
        found = open_search(row, data, columns, eval_data)
        if found is not None:
            return found
    if eval_data:
        evaluation = open_source(eval_data, row.naming, "evaluation")
        row = row_for(row, columns, evaluation)
        return TaskData(row, columns, open_texts(row, data, "train", columns), evaluation)
    row = unlabelled(row) if data == NO_DATA else row
    source = open_texts(row, data, "both", columns)
    return TaskData(row_for(row, columns, source), columns, source, source)
