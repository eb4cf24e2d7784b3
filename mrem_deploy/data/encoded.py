"""From texts to padded batches: tokenizing, and which examples go together.

Sentences of similar length share a batch, which saves padding. Training stays random: only windows of
`WINDOW` batches are sorted, and the batches are shuffled afterwards. Everything follows from (seed, epoch),
so the number of the step is enough to resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mrem_deploy.base import interrupt
from mrem_deploy.base.progress import track

CHUNK = 1000  # texts tokenized in one call
SHOW_PROGRESS_FROM = 20_000  # rows; fewer are done before anyone reads a bar
WINDOW = 50  # batches sorted together: enough to pair similar lengths, few enough to stay random


@dataclass
class Encoded:
    """Token ids of every text, not padded; `columns` are the tokenizer's (input_ids, token_type_ids)."""

    columns: dict[str, list[np.ndarray]]
    lengths: np.ndarray
    pad: dict[str, int]  # column -> the value that fills it up
    labels: np.ndarray | None

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """These examples, padded on the right to the longest of them, with their attention mask."""
        lengths = self.lengths[indices]
        width = int(lengths.max())
        padded = {}
        for name, rows in self.columns.items():
            block = np.full((len(indices), width), self.pad[name], dtype=np.int64)  # (B, T)
            for line, i in zip(block, indices, strict=True):
                line[: len(rows[i])] = rows[i]
            padded[name] = torch.from_numpy(block)
        mask = np.arange(width) < lengths[:, None]  # (B, T)
        padded["attention_mask"] = torch.from_numpy(mask.astype(np.int64))
        return padded

    def places(self, texts: np.ndarray) -> np.ndarray:
        """Where the examples of these texts are."""
        return texts

    def take(self, indices: np.ndarray) -> Encoded:
        """Only these examples, in this order."""
        return Encoded(
            {name: [rows[i] for i in indices] for name, rows in self.columns.items()},
            self.lengths[indices],
            self.pad,
            None if self.labels is None else self.labels[indices],
        )

    def digest(self) -> str:
        """Identifies the tokens and their order."""
        hasher = hashlib.sha256(np.asarray(self.lengths, dtype="<i8").tobytes())
        for name in sorted(self.columns):
            hasher.update(f"{name}:{self.pad[name]};".encode())
            for row in self.columns[name]:
                hasher.update(np.asarray(row, dtype="<i4").tobytes())
        return hasher.hexdigest()


def chunks(count: int) -> Iterator[slice]:
    """The parts in which `count` texts are tokenized, with a progress bar if that takes a while."""
    starts = range(0, count, CHUNK)
    shown = count > SHOW_PROGRESS_FROM
    for start in track(starts, "tokenizing", unit="k texts") if shown else interrupt.steps(starts):
        yield slice(start, start + CHUNK)


def lengths_of(columns: dict[str, list[np.ndarray]]) -> np.ndarray:
    return np.array([len(row) for row in columns["input_ids"]], dtype=np.int64)


def padding_of(tokenizer: Any, columns: dict[str, list[np.ndarray]]) -> dict[str, int]:
    """The value that pads each of the tokenizer's columns."""
    fill = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
    return {name: fill[name] for name in columns}


def bucketed_batches(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """One epoch: every index once, in batches of similar length; the last, short batch is kept."""
    _check(lengths, batch_size)
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(lengths))
    window = WINDOW * batch_size
    batches: list[np.ndarray] = []
    for start in range(0, len(order), window):
        part = order[start : start + window]
        part = part[np.argsort(lengths[part], kind="stable")]
        batches += [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
    return [batches[i] for i in generator.permutation(len(batches))]


def sorted_batches(lengths: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """For evaluation: longest first, so that a batch too large for the memory fails at once."""
    _check(lengths, batch_size)
    order = np.argsort(-lengths, kind="stable")
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


class BatchSchedule:
    """The batch of any training step, counted over all epochs."""

    def __init__(self, lengths: np.ndarray, batch_size: int, seed: int) -> None:
        _check(lengths, batch_size)
        self.steps_per_epoch = -(-len(lengths) // batch_size)
        self._lengths = lengths
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = -1
        self._batches: list[np.ndarray] = []

    def at(self, step: int) -> np.ndarray:
        """The indices of step `step` (from 0), the same in whatever order the steps are read."""
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}")
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._batches = bucketed_batches(self._lengths, self._batch_size, self._seed, epoch)
            self._epoch = epoch
        return self._batches[position]


def _check(lengths: np.ndarray, batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if len(lengths) == 0:
        raise ValueError("there are no examples to put into batches")
