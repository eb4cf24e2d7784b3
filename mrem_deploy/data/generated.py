"""Texts that the package makes itself, where no data is at hand: `--data none`.

A text is a few sentences, each a phrase (phrases.py) with its slots filled. Most texts are short, some as
long as a model reads. A pair is two texts, mostly about the same; a question comes with a paragraph that
names what it asks about. They are the same for every model, every --seed and every machine.

Note: they calibrate a model because they have what occurs in any English text: frequent words, names,
numbers, punctuation, natural lengths. They know nothing of the subject that a model was trained for;
docs/tasks.md says what that costs.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mrem_deploy.data.phrases import LINKS, OPENERS, QUESTIONS, REGISTERS, RELATED, WORDS
from mrem_deploy.data.sources import Part, Source, open_source
from mrem_deploy.data.splits import Columns
from mrem_deploy.data.table_files import Table, Wanted
from mrem_deploy.data.tasks import NO_DATA, Task

DESCRIPTION = f"generated text (--data {NO_DATA})"
SPLIT = "generated"  # the evaluation split, where no --eval-data is given
TRAINING, EVALUATION = 10_240, 1_000  # texts
TRAINING_SEED, EVALUATION_SEED = 0, 1

SLOT = re.compile(r"\{(a:)?(\w+)\}")
WORD = re.compile(r"\w+|[^\w\s]")  # as files of tagged words divide a sentence
OPENED, LINKED = 0.15, 0.25  # the share of sentences with a word in front, and of those with a second clause
LOWER = 0.25  # of texts without capitals
ABOUT_THE_SAME = 0.7  # of pairs
# Sentences in a text, on average. Their number has a geometric distribution: many short texts, few long ones.
SHORT, MEDIUM, PARAGRAPH = 1.4, 3.0, 8.0


def open_texts(task: Task, data: str, role: str, named: Columns) -> Source:
    """The source of a task's texts: files, or generated ones."""
    if data != NO_DATA:
        return open_source(data, task.naming, role)
    first = named.text or task.text_columns[0]
    second = named.text_pair or next(iter(task.pair_columns), None)
    if task.kind == "embedding" and second:  # retrieval: queries and passages
        first, second = task.pair_columns[:2]
    write = partial(_table, task, first, second, named.label)
    splits: dict[str, Part] = {SPLIT: partial(write, EVALUATION, EVALUATION_SEED)}
    return Source(DESCRIPTION, partial(write, TRAINING, TRAINING_SEED), splits, holdout="")


def unlabelled(task: Task) -> Task:
    """The task on texts that nobody has labelled: measured by how well two models agree."""
    if task.without_labels is not None or task.label_free:
        return task.without_labels or task
    metric = {"regression": "spearman", "embedding": "cosine"}.get(task.kind, "agreement")
    bare = replace(task, label_columns=(), labels=(), metric=metric, also=(), more_columns=())
    return replace(bare, skip_label=None, unanswerable=False)


def _table(
    task: Task, first: str, second: str | None, label: str | None, count: int, seed: int, wanted: Wanted
) -> Table:
    """Columns as a file of the task has them; that of the labels only where the user names it, and empty."""
    writer = Writer(seed)
    make = _maker(task, writer, paired=second is not None)
    rows = [make() for _ in range(min(count, wanted.rows or count))]
    columns: dict[str, list[Any]] = {first: [row[0] for row in rows]}
    if second is not None:
        columns[second] = [row[1] for row in rows]
    if label is not None:
        columns[label] = [None] * len(rows)
    if task.kind == "token-classification" and not task.label_free:
        columns[first] = [WORD.findall(text) for text in columns[first]]
    return Table({name: cells for name, cells in columns.items() if name in wanted}, DESCRIPTION)


def _maker(task: Task, writer: Writer, paired: bool) -> Callable[[], tuple[str, ...]]:
    """What kind of texts suits the task."""
    if not paired:
        return lambda: (writer.text(),)
    if task.kind in ("question-answering", "embedding", "reranking"):
        return writer.question
    return writer.pair


class Writer:
    """Draws texts, one after another."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random  # the only draw that Python promises never to change
        self._registers = list(REGISTERS.values())

    def text(self) -> str:
        """A few sentences of one register; one text in four is longer."""
        return self._text(MEDIUM if self._random() < 0.25 else SHORT)

    def pair(self) -> tuple[str, str]:
        """Two texts, the second mostly about the same."""
        if self._random() > ABOUT_THE_SAME:
            return self.text(), self._text(SHORT)
        first, second = self._one(RELATED)
        if self._random() < 0.3:
            first, second = second, first
        filled: dict[str, str] = {}
        one, other = (_capital(self._filled(phrase, filled)) for phrase in (first, second))
        chance, more = self._random(), self._text(SHORT)
        if chance < 0.5:
            one = f"{one} {more}" if chance < 0.25 else f"{more} {one}"
        return self._cased(one), self._cased(other)

    def question(self) -> tuple[str, str]:
        """A question, and a paragraph of which one sentence is about the same."""
        filled: dict[str, str] = {}
        asked = _capital(self._filled(self._one(QUESTIONS), filled))
        registers = (REGISTERS["facts"], REGISTERS["news"])
        sentences = [self._sentence(self._one(registers)) for _ in range(self._length(PARAGRAPH))]
        told = _capital(self._filled(self._one(RELATED)[0], filled))
        sentences.insert(int(self._random() * (len(sentences) + 1)), told)
        return self._cased(asked), " ".join(sentences)

    def _text(self, sentences: float) -> str:
        phrases = self._one(self._registers)
        return self._cased(" ".join(self._sentence(phrases) for _ in range(self._length(sentences))))

    def _length(self, mean: float) -> int:
        """From a geometric distribution, at least 1."""
        length = 1
        while self._random() > 1 / mean:
            length += 1
        return length

    def _sentence(self, phrases: Sequence[str]) -> str:
        chance = self._random()
        said = self._filled(self._one(phrases), {})
        if chance < OPENED:
            said = f"{self._filled(self._one(OPENERS), {})} {said}"
        elif chance < OPENED + LINKED:
            said = f"{said.rstrip(' .!?')} {self._one(LINKS)} {self._filled(self._one(phrases), {})}"
        return _capital(said)

    def _filled(self, phrase: str, known: dict[str, str]) -> str:
        """The first slot of a list takes the word that another phrase has made `known`, or makes its own
        known; later slots of that list draw again."""
        seen: set[str] = set()

        def word(found: re.Match[str]) -> str:
            article, name = found.groups()
            chosen = known[name] if name in known and name not in seen else self._one(WORDS[name])
            seen.add(name)
            known.setdefault(name, chosen)
            return f"{'an' if chosen[0] in 'aeiou' else 'a'} {chosen}" if article else chosen

        return SLOT.sub(word, phrase)

    def _cased(self, text: str) -> str:
        return text.lower() if self._random() < LOWER else text

    def _one(self, choices: Sequence[Any]) -> Any:
        return choices[int(self._random() * len(choices))]


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
