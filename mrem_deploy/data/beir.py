"""Retrieval sets in BEIR's layout: corpus.jsonl, queries.jsonl and qrels/*.tsv, read and checked.

corpus.jsonl    {"_id": "d1", "title": "…", "text": "…"}    a document per line
queries.jsonl   {"_id": "q1", "text": "…"}                   a query per line
qrels/test.tsv  query-id <tab> corpus-id <tab> score         which documents are relevant; a score above 0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import shown
from mrem_deploy.data.cells import is_missing, texts_in
from mrem_deploy.data.table_files import Naming, Table, Wanted, listing, read_table

CORPUS, QUERIES, QRELS = "corpus.jsonl", "queries.jsonl", "qrels"
TEST, TRAIN = ("test", "dev", "validation"), "train"  # names of qrels: to evaluate by, and of other queries
COLUMNS = ("query-id", "corpus-id", "score")
LAYOUT = f"{CORPUS}, {QUERIES} and {QRELS}/test.tsv"
Relevant = dict[int, float]  # of one query: document → score above 0


@dataclass(frozen=True)
class Named:
    """Texts with their ids."""

    ids: tuple[str, ...]
    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Collection:
    """The texts of one folder."""

    folder: Path
    corpus: Named
    queries: Named


def is_collection(folder: Path) -> bool:
    return (folder / CORPUS).is_file()


def read_collection(folder: Path) -> Collection:
    """Both files, with their texts checked: a text that is empty has no meaning to search for."""
    missing = [name for name in (CORPUS, QUERIES) if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"Expected a retrieval set in {folder}: {LAYOUT}. There is no {missing[0]}.",
            "Give a folder in BEIR's layout; mrem beir makes one from SQuAD.",
        )
    return Collection(folder, _named(folder / CORPUS), _named(folder / QUERIES))


def _named(path: Path) -> Named:
    table = read_table(path, Naming(), Wanted(frozenset(("_id", "title", "text"))))
    for column in ("_id", "text"):
        if column not in table.columns:
            raise UserError(
                f"Expected {column!r} in every line of {path}; it has {listing(list(table.columns))}.",
                f"The layout is {LAYOUT}, as in BEIR.",
            )
    nameless = next((place for place, cell in enumerate(table.columns["_id"]) if not _is_id(cell)), None)
    if nameless is not None:
        raise UserError(
            f"Expected an _id, a text or a whole number, in every line of {path}; row {table.row(nameless)} "
            f"has {shown(table.columns['_id'][nameless])}.",
            "Give every line its own _id, the one that the qrels name.",
        )
    ids = [str(cell) for cell in table.columns["_id"]]
    twice = [name for name, times in Counter(ids).items() if times > 1]
    if twice:
        raise UserError(
            f"Expected every line of {path} to have its own _id; {shown(twice[0])} occurs more than once "
            f"({len(twice)} ids do).",
            "Remove the copies.",
        )
    bodies = texts_in(table, "text")
    titles = [""] * len(ids)
    if "title" in table.columns:
        cells = ["" if is_missing(cell) else cell for cell in table.columns["title"]]
        titles = texts_in(replace(table, columns={**table.columns, "title": cells}), "title")
    texts = [f"{title} {text}".strip() for title, text in zip(titles, bodies, strict=True)]  # as BEIR does
    empty = [name for name, text in zip(ids, texts, strict=True) if not text]
    if empty:
        raise UserError(
            f"Expected a text in every line of {path}; {len(empty)} are empty, the first is "
            f"{shown(empty[0])}.",
            "Remove these lines, and their lines in the qrels.",
        )
    return Named(tuple(ids), tuple(texts))


def _is_id(cell: object) -> bool:
    return bool(cell.strip()) if isinstance(cell, str) else type(cell) is int


def qrels_of(folder: Path, *names: str) -> Path | None:
    """The first of these files of qrels that the folder has."""
    choices = (folder / QRELS / f"{name}.tsv" for name in names)
    return next((path for path in choices if path.is_file()), None)


def read_qrels(path: Path, collection: Collection) -> dict[int, Relevant]:
    """By query, its relevant documents. Refuses ids that no text has, scores that are no numbers, and two
    scores of one document for the same query."""
    table = read_table(path, Naming(folder=" ", header=COLUMNS), Wanted())
    if not set(COLUMNS) <= table.columns.keys():
        raise UserError(
            f"Expected the columns {', '.join(COLUMNS)} in {path}; it has {listing(list(table.columns))}.",
            "Separate them by tabs, with this header or none.",
        )
    queries = _places(table, "query-id", collection.queries, QUERIES)
    documents = _places(table, "corpus-id", collection.corpus, CORPUS)
    found: dict[int, Relevant] = {}
    scores: dict[tuple[int, int], float] = {}
    for place, (query, document, cell) in enumerate(
        zip(queries, documents, table.columns["score"], strict=True)
    ):
        score = _score(cell, table, place)
        if scores.setdefault((query, document), score) != score:
            raise UserError(
                f"Expected one score of a document for a query in {path}; row {table.row(place)} has "
                f"{score:g} for {shown(collection.queries.ids[query])} and "
                f"{shown(collection.corpus.ids[document])}, an earlier row has "
                f"{scores[query, document]:g}.",
                "Remove the row that is wrong.",
            )
        if score > 0:
            found.setdefault(query, {})[document] = score
    if not found:
        raise UserError(
            f"Expected a score above 0 in {path}; it has none.", "Give the qrels of the test split."
        )
    return dict(sorted(found.items()))


def _places(table: Table, column: str, named: Named, file: str) -> Sequence[int]:
    index = {name: place for place, name in enumerate(named.ids)}
    cells = [str(cell) for cell in table.columns[column]]
    unknown = [place for place, cell in enumerate(cells) if cell not in index]
    if unknown:
        raise UserError(
            f"Expected every {column} of {table.origin} in {file}; row {table.row(unknown[0])} has "
            f"{shown(cells[unknown[0]])}, which is not there ({len(unknown)} of {len(cells)} rows are like "
            "this).",
            "Give the files of one collection, or remove these rows.",
        )
    return [index[cell] for cell in cells]


def _score(cell: object, table: Table, place: int) -> float:
    try:
        score = float(str(cell))
    except ValueError:
        score = float("nan")
    if not -1e9 < score < 1e9:
        raise UserError(
            f"Expected a number as score in {table.origin}; row {table.row(place)} has {shown(cell)}.",
            "Correct the row: a score above 0 means relevant.",
        )
    return score
