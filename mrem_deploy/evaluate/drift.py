"""How far the scores moved that users compare with a threshold: |p̂ − p|, and how many change sides.

The score of a prediction, by kind of task:

classes             the probability of the last of two classes; of the likeliest one, where there are more
tags                the probability of the likeliest tag, of every token
pairs               the sigmoid of a reranker's output
scores              a regression's score itself
answers             the highest product of the probabilities of a start and an end
embeddings          the cosine similarity of two sentences: of pairs, or of a query and what it finds
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mrem_deploy.base.errors import UserError
from mrem_deploy.evaluate.clusters import Values, clustered_mean, in_percent

Outputs = Sequence[np.ndarray]
PAIRED_ROWS = 1000  # embeddings whose pairs are looked at: half a million
# The open range of a score, by kind of task; scores of a regression have none.
RANGES = {
    "classification": (0.0, 1.0),
    "token-classification": (0.0, 1.0),
    "question-answering": (0.0, 1.0),
    "reranking": (0.0, 1.0),
    "embedding": (-1.0, 1.0),
}


@dataclass(frozen=True)
class Drift:
    """|score − full precision's score| over all predictions, and the share that crosses a threshold."""

    mean: float = math.nan
    error: float | None = None
    median: float = math.nan
    p95: float = math.nan
    largest: float = math.nan
    threshold: float | None = None
    crossed: float | None = None  # percent of predictions on the other side of it
    crossed_error: float | None = None

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.4f}"
        text = f"scores move by {self.mean:.4f}{error} (95% by less than {self.p95:.4f})"
        if self.crossed is None:
            return text
        error = "" if self.crossed_error is None else f" ± {self.crossed_error:.2f}"
        return f"{text}, {self.crossed:.2f}%{error} cross {self.threshold:g}"

    def to_dict(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Drift:
        names = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in content.items() if name in names})


def drift_of(reference: Values, model: Values, threshold: float | None = None) -> Drift | None:
    """From the scores of every example, of full precision and of the model; None without any."""
    moved = [np.abs(np.ravel(b) - np.ravel(a)) for a, b in zip(reference, model, strict=True)]
    every = np.concatenate(moved) if moved else np.zeros(0)
    mean, error = clustered_mean(moved)
    if mean is None:
        return None
    middle, high = (float(value) for value in np.quantile(every, (0.5, 0.95)))
    crossed: tuple[float | None, float | None] = (None, None)
    if threshold is not None:
        crossed = in_percent(
            [
                (np.ravel(a) >= threshold) != (np.ravel(b) >= threshold)
                for a, b in zip(reference, model, strict=True)
            ]
        )
    return Drift(mean, error, middle, high, float(every.max()), threshold, *crossed)


def check_range(threshold: float | None, kind: str) -> None:
    """Refuse a threshold that no score of such a task can have."""
    if threshold is None:
        return
    low, high = RANGES.get(kind, (-math.inf, math.inf))
    if not low < threshold < high:
        between = f"between {low:g} and {high:g}" if math.isfinite(low) else "a number"
        raise UserError(
            f"--threshold must be {between}, as the scores of this task are; got {threshold:g}",
            "give the threshold that your program compares with, or leave it out",
        )


def check_scores(threshold: float, scores: Values) -> None:
    """Refuse a threshold that lies outside of full precision's scores: nothing could cross it."""
    every = np.concatenate([np.ravel(own) for own in scores])
    low, high = float(every.min()), float(every.max())
    if not low < threshold <= high:
        raise UserError(
            f"--threshold {threshold:.10g} is outside of the full-precision model's scores on the evaluation "
            f"split, {low:.4g} to {high:.4g}",
            "give one that divides them, or leave it out",
        )


# -- the scores of one model, by kind: an array for every example ------------------------------------------


def probabilities(logits: np.ndarray) -> np.ndarray:
    shifted = np.asarray(logits, dtype=np.float64)
    powers = np.exp(shifted - shifted.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    values = np.asarray(logits, dtype=np.float64)
    return np.where(values >= 0, 1.0, np.exp(-np.abs(values))) / (1.0 + np.exp(-np.abs(values)))


def class_scores(rows: Outputs, positive: int = 1) -> list[np.ndarray]:
    found = probabilities(np.stack(list(rows)))
    return list(found[:, positive] if found.shape[1] == 2 else found.max(axis=1))


def tag_scores(rows: Outputs) -> list[np.ndarray]:
    return [probabilities(row).max(axis=-1) for row in rows]


def pair_scores(rows: Outputs) -> list[np.ndarray]:
    return [sigmoid(row) for row in rows]


def plain_scores(rows: Outputs) -> list[np.ndarray]:
    return [np.asarray(row, dtype=np.float64) for row in rows]


def span_scores(rows: Outputs) -> list[np.ndarray]:
    return [probabilities(row.T).max(axis=-1).prod(keepdims=True) for row in rows]


def similarity_scores(rows: Outputs) -> list[np.ndarray]:
    """Of every embedding with those after it; of a fixed sample, if there are many."""
    vectors = np.stack(list(rows)).astype(np.float64)
    if len(vectors) > PAIRED_ROWS:
        vectors = vectors[np.random.default_rng(0).choice(len(vectors), PAIRED_ROWS, replace=False)]
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(lengths > 0, lengths, 1.0)
    similar = unit @ unit.T
    return [similar[i, i + 1 :] for i in range(len(similar) - 1)]


SCORES: dict[str, Callable[[Outputs], list[np.ndarray]]] = {
    "classification": class_scores,
    "regression": plain_scores,
    "reranking": pair_scores,
    "embedding": similarity_scores,
    "token-classification": tag_scores,
    "question-answering": span_scores,
}
