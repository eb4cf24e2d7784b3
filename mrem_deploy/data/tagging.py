"""Token classification on labelled words: the tag of a word belongs to its first token.

Note: words cut off at --max-length are not left out of the score, which would make long sentences look too
good. They count as predicted O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import shown
from mrem_deploy.base.progress import say
from mrem_deploy.data.conll import TAG
from mrem_deploy.data.encoded import Encoded, chunks, lengths_of, padding_of
from mrem_deploy.data.table_files import Table, listing
from mrem_deploy.data.texts import Texts

OUTSIDE = "O"
IGNORED = -100  # what torch's cross-entropy leaves out


@dataclass
class TaggedTexts(Texts):
    """Sentences as words; `first` has them joined by spaces. Tags are indices into `label_names`."""

    words: list[list[str]]
    tags: list[np.ndarray] | None

    @property
    def labelled(self) -> bool:
        return self.tags is not None

    def take(self, rows: np.ndarray) -> TaggedTexts:
        tags = None if self.tags is None else [self.tags[i] for i in rows]
        words = [self.words[i] for i in rows]
        return TaggedTexts([self.first[i] for i in rows], None, None, self.label_names, words, tags)

    def tokenize(self, tokenizer: Any, max_length: int) -> TaggedTokens:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                "Tags are put on the first token of each word, found by the characters under the tokens; "
                f"this tokenizer ({type(tokenizer).__name__}) does not give these.",
                "Give a model folder with a fast tokenizer (tokenizer.json).",
            )
        columns: dict[str, list[np.ndarray]] = {}
        heads: list[np.ndarray] = []
        for part in chunks(len(self)):
            tokens = tokenizer(
                self.first[part],
                truncation=True,
                max_length=max_length,
                return_offsets_mapping=True,
                return_attention_mask=False,
            )
            offsets = tokens.pop("offset_mapping")
            heads += [
                first_tokens(words, np.asarray(pairs))
                for words, pairs in zip(self.words[part], offsets, strict=True)
            ]
            for name, rows in tokens.items():
                columns.setdefault(name, []).extend(np.asarray(row, dtype=np.int32) for row in rows)
        cut = sum(int((positions < 0).sum()) for positions in heads)
        if cut:
            of = sum(map(len, self.words))
            say(
                f"note: {cut} of {of:,} words have no token within --max-length {max_length}; they count as O"
            )
        return TaggedTokens(columns, lengths_of(columns), padding_of(tokenizer, columns), None, heads)


@dataclass
class TaggedTokens(Encoded):
    """Tokens, and the position of the first token of every word; −1: the word was cut off."""

    heads: list[np.ndarray]

    def take(self, indices: np.ndarray) -> TaggedTokens:
        some = super().take(indices)
        heads = [self.heads[i] for i in indices]
        return TaggedTokens(some.columns, some.lengths, some.pad, some.labels, heads)

    def targets(self, tags: list[np.ndarray], order: np.ndarray) -> np.ndarray:
        """The model's index of the tag on every word's first token, (N, T); IGNORED everywhere else."""
        targets = np.full((len(self), int(self.lengths.max())), IGNORED, dtype=np.int64)
        for row, positions, own in zip(targets, self.heads, tags, strict=True):
            row[positions[positions >= 0]] = order[own[positions >= 0]]
        return targets


def first_tokens(words: list[str], offsets: np.ndarray) -> np.ndarray:
    """The first token of each word of a sentence joined by spaces; offsets (T, 2) in its characters.

    A token belongs to the word in which it ends: for some tokenizers a word includes the space before it.
    """
    begins = np.cumsum([0, *(len(word) + 1 for word in words[:-1])])
    real = np.flatnonzero(offsets[:, 1] > offsets[:, 0])  # special tokens cover nothing
    owners = np.searchsorted(begins, offsets[real, 1] - 1, side="right") - 1
    found, at = np.unique(owners, return_index=True)
    heads = np.full(len(words), -1)
    heads[found] = real[at]
    return heads


def check_words(table: Table, column: str) -> list[list[str]]:
    sentences = table.columns[column]
    for i, words in enumerate(sentences):
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            raise UserError(
                f"Expected a list of words in every row of {table.origin}; row {table.row(i)} has "
                f"{shown(words)} in column {column!r}.",
                'Write them as ["EU", "rejects", …], or name another column with --text-column.',
            )
    return list(sentences)


def check_tags(table: Table, column: str, tags: list[list[str]], words: list[list[str]]) -> None:
    """As many tags as words."""
    for i, (own, sentence) in enumerate(zip(tags, words, strict=True)):
        if len(own) != len(sentence):
            raise UserError(
                f"Expected a tag for every word in column {column!r} of {table.origin}; row {table.row(i)} "
                f"has {len(own)} tags for {len(sentence)} words.",
                "Correct the row.",
            )


def check_tag_names(tags: list[list[str]], where: str) -> None:
    """Tags that mark entities, or numbers, which stand for the labels of the model."""
    names = sorted({tag for own in tags for tag in own})
    strange = [name for name in names if not TAG.fullmatch(name) and not name.isdecimal()]
    if strange:
        raise UserError(
            f"Expected tags such as B-PER, I-PER and O in {where}; it has {listing(strange)}.",
            "Entities cannot be counted without them: name the column of the tags with --label-column.",
        )


def read_tags(rows: Sequence[np.ndarray], tokens: TaggedTokens, names: Sequence[str]) -> list[list[str]]:
    """The tag a model gives each word; logits (T, C) per sentence, `names` in the order of its outputs."""
    read = []
    for logits, heads in zip(rows, tokens.heads, strict=True):
        guesses = logits.argmax(axis=1)
        read.append([names[guesses[head]] if head >= 0 else OUTSIDE for head in heads])
    return read
