"""Sentences of mixed lengths, as a service gets them: read from a file, put into batches in two orders.

A file of sentences or pairs is tokenized as the result tokenizes them. lengths.json has only the numbers of
tokens; the tokens are then random, and nobody's sentences have to leave their machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import write_json
from mrem_deploy.benchmarks.latency.messages import Sentences
from mrem_deploy.benchmarks.latency.standings import ARRIVAL
from mrem_deploy.data.cells import texts_in
from mrem_deploy.data.table_files import Layout, Naming, Table, Wanted, read_table
from mrem_deploy.data.tasks import TASKS
from mrem_deploy.data.texts import Texts, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LENGTHS_FORMAT = 'a file like {"lengths": [12, 31, 9]}, the tokens of each sentence in order of arrival'


@dataclass(frozen=True)
class Workload:
    """The sentences in order of arrival; `types` says which part of a pair a token belongs to."""

    title: str
    ids: list[list[int]]
    types: list[list[int]]
    pad: int  # the id that fills up shorter sentences

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.ids]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def batches(self, size: int, order: str) -> Iterator[Sentences]:
        """Sorted: the shortest sentences first, so that a batch has little padding."""
        rows = range(len(self)) if order == ARRIVAL else np.argsort(self.lengths, kind="stable").tolist()
        for start in range(0, len(self), size):
            part = rows[start : start + size]
            yield {
                "ids": [self.ids[row] for row in part],
                "types": [self.types[row] for row in part],
                "pad": self.pad,
            }

    def padded_tokens(self, size: int, order: str) -> int:
        """Real tokens and padding, where every sentence is filled up to the longest of its batch."""
        return sum(len(batch["ids"]) * max(map(len, batch["ids"])) for batch in self.batches(size, order))

    def describe(self) -> str:
        lengths = np.array(self.lengths)
        return (
            f"{self.title}: {len(self):,} sentences of {lengths.min()} to {lengths.max()} tokens, "
            f"{lengths.mean():.1f} on average"
        )

    def save_lengths(self, path: Path) -> None:
        """What another machine needs for the same lengths."""
        write_json(path, {"lengths": self.lengths})


@dataclass(frozen=True)
class RandomTokens:
    """What stands in for sentences whose lengths alone are known."""

    vocabulary: int
    pad: int
    seed: int


def read_lengths(path: Path, longest: int, count: int, tokens: RandomTokens) -> Workload | None:
    """Random tokens in the lengths of a lengths.json; None if the file holds something else."""
    if path.suffix.lower() != ".json":
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--workload {path} cannot be read: {error}", f"give {LENGTHS_FORMAT}") from error
    lengths = content.get("lengths") if isinstance(content, dict) else content
    if not isinstance(lengths, list) or not all(type(length) is int for length in lengths):
        return None
    if not lengths or min(lengths) < 1:
        raise UserError(f"--workload {path}: lengths must be 1 or more", f"give {LENGTHS_FORMAT}")
    taken = [min(length, longest) for length in lengths[:count]]
    draw = np.random.default_rng(tokens.seed)
    ids = [draw.integers(0, tokens.vocabulary, size=length).tolist() for length in taken]
    return Workload(path.name, ids, [[0] * length for length in taken], tokens.pad)


def read_sentences(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    count: int,
    columns: tuple[str, ...] | None,
) -> Workload:
    """The first `count` sentences or pairs of a file, tokenized."""
    table = read_table(path, Naming((Layout("train", {}),)), Wanted(rows=count))
    first, second = columns_of(table, columns)
    pairs = None if second is None else texts_in(table, second)
    encoded = encode(tokenizer, Texts(texts_in(table, first), pairs, None, ()), max_length)
    ids = [row.tolist() for row in encoded.columns["input_ids"]]
    types = encoded.columns.get("token_type_ids")
    rows = [[0] * len(row) for row in ids] if types is None else [row.tolist() for row in types]
    return Workload(path.name, ids, rows, encoded.pad["input_ids"])


def columns_of(table: Table, asked: tuple[str, ...] | None) -> tuple[str, str | None]:
    """The column of the sentences and, of pairs, the second: as asked, else by the names that tasks use."""
    if asked is not None:
        missing = [name for name in asked if name not in table.columns]
        if missing or len(asked) > 2:
            raise UserError(
                f"--workload-columns {','.join(asked)}: {table.origin} has {', '.join(table.columns)}",
                "name its column of sentences, or two columns of pairs",
            )
        return asked[0], asked[1] if len(asked) == 2 else None
    usual = [(task.text_columns, task.pair_columns) for task in TASKS.values()]
    # Pairs first: the first column of a pair is the only column of other tasks.
    for texts, pairs in sorted(usual, key=lambda names: not names[1]):
        first = next((name for name in texts if name in table.columns), None)
        second = next((name for name in pairs if name in table.columns), None)
        if first is not None and (second is not None or not pairs):
            return first, second
    raise UserError(
        f"--workload: no column of {table.origin} has a usual name; it has {', '.join(table.columns)}",
        "name the column of sentences, or two of pairs, with --workload-columns",
    )


def read_workload(
    path: Path,
    tokenizer: Any,
    limits: tuple[int, int],
    tokens: RandomTokens,
    columns: tuple[str, ...] | None = None,
) -> Workload:
    """`limits`: the longest sentence in tokens, and the most sentences."""
    longest, count = limits
    if not path.is_file():
        raise UserError(f"--workload: there is no file {path}", f"give {LENGTHS_FORMAT}, or one of sentences")
    found = read_lengths(path, longest, count, tokens)
    if found is not None:
        return found
    if tokenizer is None:
        raise UserError(
            f"--workload {path}: without a result folder there is no tokenizer for sentences",
            f"give --tokenizer DIR, the folder of a model, or {LENGTHS_FORMAT}",
        )
    return read_sentences(path, tokenizer, longest, count, columns)
