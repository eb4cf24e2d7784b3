"""The classifier's head next to a peer's model: two small matmuls that its format has no place for.

CTranslate2 ends with the pooler, llama.cpp with the last block. numpy does the rest, so that every model of a
comparison gives the same outputs. This module is part of the worker's process: only numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

FILE = "head.npz"
PARTS = ("pooler_weight", "pooler_bias", "weight", "bias")


@dataclass(frozen=True)
class Head:
    """logits = tanh(first · pooler_weightᵀ + pooler_bias) · weightᵀ + bias."""

    pooler_weight: np.ndarray
    pooler_bias: np.ndarray
    weight: np.ndarray
    bias: np.ndarray

    def of_first(self, first: np.ndarray) -> np.ndarray:
        """`first`: the last block's output for the first token of each sentence."""
        return self.of_pooled(np.tanh(first @ self.pooler_weight.T + self.pooler_bias))

    def of_pooled(self, pooled: np.ndarray) -> np.ndarray:
        logits: np.ndarray = pooled @ self.weight.T + self.bias
        return logits

    def save(self, folder: Path) -> None:
        np.savez(folder / FILE, **{name: getattr(self, name) for name in PARTS})


def read_head(folder: Path) -> Head:
    with np.load(folder / FILE, allow_pickle=False) as content:
        return Head(**{name: content[name] for name in PARTS})
