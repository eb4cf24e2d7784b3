"""The texts of a task: sentences or pairs of them, and how they become tokens.

Questions with a context (`squad`) and words with tags (`tagging`) are other kinds of texts. Each kind knows
how it is tokenized; `encode` calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from mrem_deploy.base.errors import UserError
from mrem_deploy.data.encoded import Encoded, chunks, lengths_of, padding_of


@dataclass
class Texts:
    """Sentences, or pairs of them. Labels are indices into `label_names`, or scores of a regression."""

    first: list[str]
    second: list[str] | None
    labels: np.ndarray | None
    label_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.first)

    @property
    def labelled(self) -> bool:
        return self.labels is not None

    def take(self, rows: np.ndarray) -> Texts:
        second = None if self.second is None else [self.second[i] for i in rows]
        labels = None if self.labels is None else self.labels[rows]
        return Texts([self.first[i] for i in rows], second, labels, self.label_names)

    def prompted(self, prompt: Callable[..., str]) -> Texts:
        """With the prompt that an embedder puts in front of every text; `prompt` gives it by its name."""
        front = prompt()
        return replace(self, first=[front + text for text in self.first]) if front else self

    def tokenize(self, tokenizer: Any, max_length: int) -> Encoded:
        """One example each; of a pair that is too long, the longer text is cut first."""
        columns: dict[str, list[np.ndarray]] = {}
        for part in chunks(len(self)):
            tokens = tokenizer(
                self.first[part],
                None if self.second is None else self.second[part],
                truncation="longest_first",
                max_length=max_length,
                return_attention_mask=False,
            )
            for name, rows in tokens.items():
                columns.setdefault(name, []).extend(np.asarray(row, dtype=np.int32) for row in rows)
        return Encoded(columns, lengths_of(columns), padding_of(tokenizer, columns), self.labels)


class Rows(Protocol):
    """Texts, or examples made of them: anything that `sample` can draw from."""

    def __len__(self) -> int: ...

    def take(self, rows: np.ndarray, /) -> Any: ...


R = TypeVar("R", bound=Rows)
HELD_OUT = 0x4E1D  # the draw of held-out rows has its own random numbers
FURTHER = 0x4E1E  # and so has that of rows to judge models by
MOST_HELD_OUT = 8  # at most one of so many rows is held out


def sample(examples: R, size: int, seed: int) -> R:
    """`size` rows drawn at random without replacement; all of them in order if there are no more."""
    if size >= len(examples):
        return examples
    return examples.take(drawn_rows(len(examples), size, seed))


def drawn_rows(count: int, size: int, seed: int) -> np.ndarray:
    """The rows that `sample` takes of `count`."""
    if size >= count:
        return np.arange(count)
    return np.random.default_rng(seed).choice(count, size=size, replace=False)


def split_rows(count: int, size: int, held: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows that `sample` takes, and up to `held` others that are set apart, drawn at random.

    At most an eighth of all rows is set apart. If too few are left for that, they are some of those
    that `sample` takes, and the first array is without them.
    """
    drawn = drawn_rows(count, size, seed)
    source = np.setdiff1d(np.arange(count), drawn)
    wanted = min(held, count // MOST_HELD_OUT)
    if len(source) < wanted:
        source, wanted = drawn, min(held, len(drawn) // MOST_HELD_OUT)
    apart = np.random.default_rng([seed, HELD_OUT]).choice(source, size=wanted, replace=False)
    return drawn[~np.isin(drawn, apart)], apart


def further_rows(count: int, taken: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Up to `size` rows that are not among those taken, drawn at random."""
    left = np.setdiff1d(np.arange(count), taken)
    draw = np.random.default_rng([seed, FURTHER])
    return np.sort(draw.choice(left, size=min(size, len(left)), replace=False))


def encode(tokenizer: Any, texts: Texts, max_length: int) -> Encoded:
    """Tokenize: one example per sentence or pair, one or more per question with a context."""
    _check_tokenizer(tokenizer, max_length, pair=texts.second is not None)
    return texts.tokenize(tokenizer, max_length)


def _check_tokenizer(tokenizer: Any, max_length: int, pair: bool) -> None:
    least = tokenizer.num_special_tokens_to_add(pair=pair) + 1 + pair
    if not least <= max_length <= tokenizer.model_max_length:
        raise UserError(
            f"Expected --max-length between {least} and {tokenizer.model_max_length} "
            f"for this tokenizer; got {max_length}.",
            f"Choose a length in this range, such as {min(128, tokenizer.model_max_length)}.",
        )
    if tokenizer.pad_token_id is None:
        raise UserError(
            "Expected a tokenizer with a padding token; this one has none.",
            "Set pad_token in the tokenizer_config.json of the model.",
        )
