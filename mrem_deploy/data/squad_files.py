"""SQuAD's official files, and the checks of questions and answers. Imports nothing heavy for `tasks`."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import shown
from mrem_deploy.base.progress import say
from mrem_deploy.data.table_files import Malformed, Table, parse_json

LAYOUT = '{"data": [{"paragraphs": [{"context": …, "qas": [{"id": …, "question": …, "answers": […]}]}]}]}'


@dataclass(frozen=True)
class Span:
    """An answer as the annotators marked it; `start` counts characters of the context, −1: not given."""

    text: str
    start: int


def read_official(path: Path, unanswerable: bool) -> dict[str, list[Any]] | None:
    """Columns of train-v1.1.json and its like; None for json lines or an array of rows.

    The first row needs the entire file anyway, so all of it is checked, before hours of training.
    """
    if path.suffix.lower() != ".json":
        return None
    text = path.read_text(encoding="utf-8-sig")
    try:
        content = parse_json(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and error.lineno > 1:  # one object per line
            return None
        place = f"line {error.lineno}, column {error.colno}"
        raise Malformed(f"{place} is not valid JSON ({error.msg}); is the file cut short?") from error
    if isinstance(content, list) or (isinstance(content, dict) and "question" in content):
        return None
    if not isinstance(content, dict) or "data" not in content:
        keys = shown(list(content)) if isinstance(content, dict) else shown(content)
        raise Malformed(f"expected SQuAD's layout, {LAYOUT}; it holds {keys}")
    rows: dict[str, list[Any]] = {"id": [], "question": [], "context": [], "answers": []}
    for a, article in enumerate(_listed(content, "data", "")):
        for p, paragraph in enumerate(_listed(article, "paragraphs", f"data[{a}]")):
            place = f"data[{a}].paragraphs[{p}]"
            context = _text(paragraph, "context", place)
            for q, question in enumerate(_listed(paragraph, "qas", place)):
                inner = f"{place}.qas[{q}]"
                rows["id"].append(_text(question, "id", inner))
                rows["question"].append(_text(question, "question", inner))
                rows["context"].append(context)
                # v2.0 marks unanswerable questions, and keeps plausible wrong answers separate.
                rows["answers"].append([] if question.get("is_impossible") else question.get("answers"))
    table = Table(rows, str(path))
    check_questions(table, rows["context"], "answers", unanswerable, labelled=False)
    return rows


def _listed(parent: Any, key: str, place: str) -> list[dict[str, Any]]:
    items = parent.get(key)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        where = f"{place}.{key}".lstrip(".")
        raise Malformed(f"expected a list of objects as {where}; the layout is {LAYOUT}")
    return items


def _text(parent: dict[str, Any], key: str, place: str) -> str:
    if not isinstance(parent.get(key), str):
        raise Malformed(
            f"expected text as {place}.{key}, it has {shown(parent.get(key))}; the layout is {LAYOUT}"
        )
    return parent[key]


def check_questions(
    table: Table, contexts: list[str], answer_column: str | None, unanswerable: bool, labelled: bool
) -> tuple[list[str], list[list[Span]] | None]:
    """The ids and answers in the rows of a table, checked; no answers if some question lacks them.

    unanswerable: the rules of v2.0 hold, where a question may have no answer.
    labelled: every question must have an entry of answers.
    """
    ids = [str(cell) for cell in table.columns.get("id") or range(1, len(table) + 1)]
    twice = [name for name, times in Counter(ids).items() if times > 1]
    if twice:
        raise UserError(
            f"Expected every question of {table.origin} to have its own id; "
            f"{len(twice)} ids occur more than once, the first is {twice[0]!r}.",
            "Remove the copies: each question must be scored once.",
        )
    empty = [name for name, context in zip(ids, contexts, strict=True) if not context.strip()]
    if empty:
        raise UserError(
            f"Expected a context for every question of {table.origin}; {len(empty)} have an empty one, "
            f"the first is {empty[0]!r}.",
            "Remove these questions or fill in their contexts.",
        )
    cells = [None] * len(ids) if answer_column is None else table.columns[answer_column]
    found = [_spans(cell, name, table.origin) for cell, name in zip(cells, ids, strict=True)]
    missing = [name for name, spans in zip(ids, found, strict=True) if spans is None]
    if missing and labelled:
        raise UserError(
            f"Expected answers to every question of {table.origin}; {len(missing)} have none, "
            f"the first is {missing[0]!r}.",
            "Evaluate on a file with answers (SQuAD's test sets have none), such as dev-v1.1.json.",
        )
    answers = None if missing else [spans for spans in found if spans is not None]
    without = [name for name, spans in zip(ids, answers or [], strict=False) if not spans]
    if without and not unanswerable:
        raise UserError(
            f"Every question of SQuAD v1.1 has an answer; {len(without)} of {len(ids)} in {table.origin} "
            f"have none, the first is {without[0]!r}.",
            "If this is v2.0, whose questions may have no answer, use --task squad_v2.",
        )
    if labelled and unanswerable and not without:
        say(f"note: every question of {table.origin} has an answer; the rules of v2.0 apply anyway")
    return ids, answers


def _spans(cell: Any, name: str, origin: str) -> list[Span] | None:
    """Answers as the official files list them or as the hub's columns do; None: not given."""
    if cell is None:
        return None
    if isinstance(cell, dict):
        starts = cell.get("answer_start") or []
        texts = cell.get("text")
        if isinstance(texts, list) and isinstance(starts, list) and len(starts) in (0, len(texts)):
            pairs = zip(texts, starts or [-1] * len(texts), strict=True)
            cell = [{"text": text, "answer_start": start} for text, start in pairs]
    if not isinstance(cell, list) or not all(
        isinstance(item, dict)
        and isinstance(item.get("text"), str)
        and isinstance(item.get("answer_start", -1), int)
        for item in cell
    ):
        raise UserError(
            f"Expected answers with text and answer_start in {origin}; question {name!r} has {shown(cell)}.",
            'Write them as [{"text": "…", "answer_start": 17}], [] if the context has no answer.',
        )
    return [Span(item["text"], item.get("answer_start", -1)) for item in cell]
