"""The splits of a task: their texts and labels.

No function here knows a task by name: what differs between tasks is in the table of `tasks`. The training
split is for calibration and needs no labels. Only `TaskData.evaluation()` reads the texts of the evaluation
split. What could fail after hours of training is checked early: opening looks at one row for missing
columns, and `evaluation_label_names` reads the column of labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import shown
from mrem_deploy.data.cells import indices_of, label_texts, names_of, place_of, scores_in, texts_in
from mrem_deploy.data.labels import CLASSES, SCORED
from mrem_deploy.data.sources import Source
from mrem_deploy.data.squad import read_questions
from mrem_deploy.data.table_files import Table, Wanted
from mrem_deploy.data.tagging import TaggedTexts, check_tag_names, check_tags, check_words
from mrem_deploy.data.tasks import Task
from mrem_deploy.data.texts import Texts


@dataclass(frozen=True)
class Columns:
    """Columns the user named; None means the task's own."""

    text: str | None = None
    text_pair: str | None = None
    label: str | None = None


def open_pairs(task: Task, columns: Columns, source: Source) -> TaskData:
    """Pairs of texts to train or calibrate a reranker with, which need no labels for the latter."""
    return TaskData(row_for(task, columns, source, of_evaluation=False), columns, source, source)


def row_for(task: Task, columns: Columns, source: Source, of_evaluation: bool = True) -> Task:
    """The task itself, or the one that it is without labels."""
    if task.without_labels is None:
        return task
    has_labels = _has_words if task.kind == "token-classification" else _has_label
    tables = source.first_rows(of_evaluation)
    return task if all(has_labels(table, task, columns) for table in tables) else task.without_labels


def _has_label(table: Table, task: Task, columns: Columns) -> bool:
    return columns.label is not None or bool(set(task.label_columns) & set(table.columns))


def _has_words(table: Table, task: Task, columns: Columns) -> bool:
    """Whether texts are lists of words, which tags can belong to, and not sentences."""
    if columns.text:
        return isinstance(table.columns.get(columns.text, [None])[0], list)
    return bool(set(task.text_columns) & set(table.columns))


class TaskData:
    """The training and the evaluation split of one task, each read when it is needed."""

    def __init__(self, task: Task, columns: Columns, source: Source, evaluation: Source) -> None:
        self.task = task
        self._columns = columns
        self._source = source
        self._evaluation_source = evaluation
        named = filter(None, (columns.text, columns.text_pair, columns.label))
        self._wanted = Wanted(
            frozenset(
                (*task.text_columns, *task.pair_columns, *task.label_columns, *task.more_columns, *named)
            )
        )
        self.description = source.description
        if evaluation is not source:
            self.description += f"; evaluated on {evaluation.description}"
        for table in source.first_rows(of_evaluation=False):
            _text_columns(table, task, columns)
        for table in evaluation.first_rows(of_evaluation=True):
            _text_columns(table, task, columns)
            _label_column(table, task, columns, required=True)

    def train(self, needs_labels: bool = False) -> Texts:
        """The training split. Labels are None if the data has none; with `needs_labels` that is an error."""
        if needs_labels and not self._train.labelled and self.task.label_columns:
            raise UserError(
                f"Expected a label in every training row of {self._source.description}; some have none.",
                f"Give labelled data, or name the column with --label-column "
                f"(looked for {', '.join(self.task.label_columns)}).",
            )
        return self._train

    def evaluation(self) -> dict[str, Texts]:
        """The evaluation splits the data has, by name: matched and mismatched for MNLI, else dev."""
        tables = self._evaluation_source.evaluation(self._wanted)
        known = self._known_labels()
        return {
            split: _texts(table, self.task, self._columns, known, True) for split, table in tables.items()
        }

    def inputs(self, texts: int | None) -> int | None:
        """How many examples a model reads to predict so many texts of the evaluation split; None: all of
        them. It gives None where that is known only when the split is read."""
        return texts

    def evaluation_label_names(self) -> dict[str, tuple[str, ...]]:
        """By split, the names of its labels or tags. Reads the column of the labels and no texts.

        Refuses labels that `evaluation` would refuse. Empty for tasks whose labels have no names.
        """
        task = self.task
        if task.label_free or task.kind not in (*CLASSES, *SCORED):
            return {}
        wanted = Wanted(frozenset(filter(None, (*task.label_columns, self._columns.label))))
        found = {}
        for split, table in self._evaluation_source.evaluation(wanted).items():
            column = _label_column(table, task, self._columns, required=True)
            if task.kind == "token-classification":
                found[split] = _tags(table, column, self._known_labels(), labelled=True)[1]
            else:
                table = _agreed(table, task, column)
                found[split] = _labels(table, column, task, self._known_labels(), labelled=True)[1]
        return {} if task.kind in SCORED else found

    def _known_labels(self) -> tuple[str, ...]:
        """Labels of the training split, for tasks that take the names from the data."""
        from_data = self.task.kind in CLASSES and not self.task.labels and not self.task.label_free
        return self._train.label_names if from_data else ()

    @cached_property
    def _train(self) -> Texts:
        return _texts(self._source.train(self._wanted), self.task, self._columns, (), False)


def _texts(table: Table, task: Task, columns: Columns, known: tuple[str, ...], labelled: bool) -> Texts:
    """Pick the columns and read the labels; `labelled`: a row without a label is an error."""
    first, second = _text_columns(table, task, columns)
    label = _label_column(table, task, columns, required=labelled)
    if task.kind == "question-answering" and not task.label_free:
        questions, contexts = texts_in(table, first), texts_in(table, str(second))
        return read_questions(table, questions, contexts, label, task.unanswerable, labelled)
    if task.kind == "token-classification" and not task.label_free:
        return _tagged(table, first, label, known, labelled)
    table = _agreed(table, task, label)
    labels, names = _labels(table, label, task, known, labelled)
    return Texts(texts_in(table, first), texts_in(table, second) if second else None, labels, names)


def _agreed(table: Table, task: Task, label: str | None) -> Table:
    """Without the rows whose label says that the annotators did not agree."""
    if label is None or task.skip_label is None:
        return table
    rows = np.flatnonzero([cell != task.skip_label for cell in table.columns[label]])
    if len(rows) == 0:
        raise UserError(
            f"Expected labels in {table.origin}; every row has {task.skip_label!r} in column {label!r}.",
            "Give a labelled file.",
        )
    return table if len(rows) == len(table) else table.take(rows)


def _labels(
    table: Table, label: str | None, task: Task, known: tuple[str, ...], labelled: bool
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Labels as indices into their names, or scores; None if some row has none and `labelled` is False."""
    if label is None:
        return None, task.labels
    regression = task.kind in SCORED
    found: Sequence[str | float | None] = (scores_in if regression else label_texts)(table, label)
    cells = [cell for cell in found if cell is not None]
    if len(cells) != len(found):
        if labelled:
            raise UserError(
                f"Expected a label in every row; {len(found) - len(cells)} of {len(found)} in "
                f"{place_of(table, label)} have none (empty or -1), the first is row "
                f"{table.row(found.index(None))}.",
                "Evaluate on a labelled split (the test sets of GLUE are not), or remove these rows.",
            )
        return None, task.labels
    if regression:
        scores = np.array(cells, dtype=np.float32)
        if task.kind == "reranking" and not ((scores >= 0) & (scores <= 1)).all():
            odd = int(np.flatnonzero((scores < 0) | (scores > 1))[0])
            raise UserError(
                f"Expected labels from 0 (irrelevant) to 1 (relevant) in {place_of(table, label)}; row "
                f"{table.row(odd)} has {shown(found[odd])}.",
                "Divide graded labels by the highest grade.",
            )
        return scores, task.labels
    labels = [str(cell) for cell in cells]
    names = task.labels or table.classes.get(label) or names_of({*labels, *known})
    return indices_of(table, label, labels, names), names


def _tagged(
    table: Table, column: str, label: str | None, known: tuple[str, ...], labelled: bool
) -> TaggedTexts:
    words = check_words(table, column)
    texts, names = _tags(table, label, known, labelled)
    tags = None
    if texts is not None:
        check_tags(table, str(label), texts, words)
        index = {name: i for i, name in enumerate(names)}
        tags = [np.array([index[tag] for tag in own], dtype=np.int64) for own in texts]
    return TaggedTexts([" ".join(sentence) for sentence in words], None, None, names, words, tags)


def _tags(
    table: Table, label: str | None, known: tuple[str, ...], labelled: bool
) -> tuple[list[list[str]] | None, tuple[str, ...]]:
    """The tags of every sentence and their names; unlike classes, a sentence has all of its tags or none."""
    cells = [] if label is None else table.columns[label]
    missing = [i for i, cell in enumerate(cells) if not isinstance(cell, list) or None in cell]
    if missing and labelled:
        raise UserError(
            f"Expected a list of tags in every row of {table.origin}; row {table.row(missing[0])} has "
            f"{shown(cells[missing[0]])} in column {label!r}.",
            "Evaluate on a labelled split, or name the column of the tags with --label-column.",
        )
    if label is None or missing:
        return None, known
    texts = [[str(tag) for tag in cell] for cell in cells]
    check_tag_names(texts, place_of(table, label))
    return texts, table.classes.get(label) or names_of({tag for own in texts for tag in own} | {*known})


def _text_columns(table: Table, task: Task, columns: Columns) -> tuple[str, str | None]:
    first = _pick(table, columns.text, task.text_columns, "--text-column")
    if columns.text_pair or task.pair_columns:
        return first, _pick(table, columns.text_pair, task.pair_columns, "--text-pair-column")
    return first, None


def _label_column(table: Table, task: Task, columns: Columns, required: bool) -> str | None:
    if not task.label_columns:
        return None
    if not required and columns.label is None and not set(task.label_columns) & set(table.columns):
        return None
    return _pick(table, columns.label, task.label_columns, "--label-column")


def _pick(table: Table, named: str | None, usual: tuple[str, ...], option: str) -> str:
    wanted = (named,) if named else usual
    for name in wanted:
        if name in table.columns:
            return name
    raise UserError(
        f"Expected a column {' or '.join(map(repr, wanted))} in {table.origin}; "
        f"it has {', '.join(map(repr, table.columns))}.",
        f"Name the right one with {option}.",
    )
