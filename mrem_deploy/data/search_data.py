"""The data of the tasks retrieval and reranking, where queries are judged in BEIR's layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import path_of
from mrem_deploy.data import beir
from mrem_deploy.data.cells import texts_in
from mrem_deploy.data.generated import open_texts
from mrem_deploy.data.searching import CANDIDATES, Searches, Sides
from mrem_deploy.data.sources import Source, files_of
from mrem_deploy.data.splits import Columns, TaskData, open_pairs
from mrem_deploy.data.table_files import Table, Wanted, listing
from mrem_deploy.data.tasks import Task, searching
from mrem_deploy.data.texts import Texts

PAIRS = '{"query": "…", "passage": "…", "label": 1}'


def open_search(task: Task, data: str, columns: Columns, eval_data: str | None) -> SearchData | None:
    """The data of a task that searches; None if a reranker is to be judged by plain pairs."""
    option = "--eval-data" if eval_data else "--data"
    place = path_of(option, eval_data or data)
    if beir.is_collection(place):
        return SearchData(task, data, columns, place)
    if task.kind == "reranking":
        return None
    raise UserError(
        f"Expected a folder with {beir.LAYOUT} as {option}; {place} is none.",
        "Give a folder in BEIR's layout (mrem beir makes one from SQuAD); for sentences alone use "
        "--task feature-extraction.",
    )


class SearchData(TaskData):
    """Queries of a collection to evaluate by, and texts to calibrate and train with.

    `data` is a file or folder of texts (of pairs, for a reranker) or a collection with train.jsonl beside
    it. Without one, an embedder is calibrated with the corpus and with the queries of qrels/train.tsv.
    """

    def __init__(self, task: Task, data: str, columns: Columns, place: Path) -> None:
        self._collection = collection = beir.read_collection(place)
        qrels = beir.qrels_of(place, *beir.TEST)
        relevant = None if qrels is None else beir.read_qrels(qrels, collection)
        self.task = searching(task, judged=relevant is not None)
        self._split = beir.TEST[0] if qrels is None else qrels.stem
        self._searches = _searches(collection, relevant, pairs=task.kind == "reranking")
        self._pairs: TaskData | None = None  # what a reranker is trained and calibrated with
        self._texts: Source | None = None  # and an embedder; None: the collection itself
        own = beir.is_collection(Path(data).expanduser())
        judged = "judged" if relevant is not None else "not judged"
        self.description = f"{place}: {judged} queries of {self._split}"
        if task.kind == "reranking":
            if own and not files_of(Path(data).expanduser(), "train"):
                raise UserError(
                    f"Expected pairs of texts to calibrate with; {data} has no train.jsonl.",
                    f"Write one with lines {PAIRS}, or give such a file as --data and the folder as "
                    "--eval-data; mrem beir writes both.",
                )
            source = open_texts(task, data, "train", columns)
            self._pairs = open_pairs(task, columns, source)
        elif not own or files_of(Path(data).expanduser(), "train"):
            source = self._texts = open_texts(task, data, "train", columns)
            self._columns = columns
            for table in source.first_rows(of_evaluation=False):
                self._sides(table)
        else:
            return
        self.description = f"{source.description}; evaluated on {self.description}"

    def train(self, needs_labels: bool = False) -> Texts:
        """Texts to calibrate with; pairs with labels for the training of a reranker."""
        if self._pairs is not None:
            return self._pairs.train(needs_labels)
        if self._texts is not None:
            return self._sides(self._texts.train(Wanted()))
        collection = self._collection
        training = beir.qrels_of(collection.folder, beir.TRAIN)
        queries = [] if training is None else [*beir.read_qrels(training, collection)]
        return _both([collection.queries.texts[i] for i in queries], collection.corpus.texts)

    def evaluation(self) -> dict[str, Texts]:
        return {self._split: self._searches}

    def inputs(self, texts: int | None) -> int:
        """The corpus is read for any number of queries; a reranker reads candidates for each of them."""
        queries = min(texts or len(self._searches), len(self._searches))
        corpus = len(self._searches.corpus)
        return queries * min(CANDIDATES, corpus) if self._searches.pairs else queries + corpus

    def evaluation_label_names(self) -> dict[str, tuple[str, ...]]:
        return {}

    def _sides(self, table: Table) -> Sides:
        """Texts of one column, or the distinct queries and passages of two."""
        task, columns = self.task, self._columns
        single = next((c for c in (columns.text, *task.text_columns) if c in table.columns), None)
        if single is not None and (columns.text or task.pair_columns[0] not in table.columns):
            return _both([], texts_in(table, single))
        query, passage = task.pair_columns[:2]
        if not {query, passage} <= table.columns.keys():
            raise UserError(
                f"Expected a column {' or '.join(map(repr, task.text_columns))}, or {query!r} and "
                f"{passage!r}, in {table.origin}; it has {listing(list(table.columns))}.",
                "Name the column of the texts with --text-column.",
            )
        return _both(*(list(dict.fromkeys(texts_in(table, column))) for column in (query, passage)))


def _both(queries: Sequence[str], documents: Sequence[str]) -> Sides:
    side = np.arange(len(queries) + len(documents)) < len(queries)
    return Sides([*queries, *documents], None, None, (), side)


def _searches(
    collection: beir.Collection, relevant: dict[int, beir.Relevant] | None, pairs: bool
) -> Searches:
    """The queries that are judged; all of them, if none is."""
    queries = collection.queries
    chosen = range(len(queries)) if relevant is None else relevant
    ids = tuple(queries.ids[i] for i in chosen)
    texts = [queries.texts[i] for i in chosen]
    judged = None if relevant is None else list(relevant.values())
    return Searches(texts, None, None, (), ids, collection.corpus, judged, pairs)
