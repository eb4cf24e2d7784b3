"""How far the predictions of a model are from those of another, usually full precision: KL and flips.

A metric hides most of what quantization does. Two models can score the same and differ on every tenth
example, wrong for right as often as right for wrong. Flips count every prediction that changed. The
Kullback–Leibler divergence also sees the ones that nearly did, so it tells two runs apart with far fewer
examples than the metric.

Note: both are paired, example by example, so their errors are small. Predictions of one example (the tags of
a sentence) depend on each other; the errors count examples, not predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mrem_deploy.evaluate.agreement import (
    Outputs,
    pair_logits,
    same_classes,
    same_spans,
    same_tags,
    twins,
    unit_rows,
)
from mrem_deploy.evaluate.clusters import Values, clustered_mean, in_percent
from mrem_deploy.evaluate.drift import Drift
from mrem_deploy.evaluate.ranking import TOP, best, overlap

NEIGHBOURS_AMONG = 2000  # sentences whose nearest ones are compared


@dataclass(frozen=True)
class Fidelity:
    """One model against a reference, on the same examples, each number with its standard error.

    None: the task has no such number, or one example is too few for an error.
    """

    kl: float | None = None  # mean KL(reference ‖ model) of the predicted distributions, in nats
    kl_error: float | None = None
    flips: float | None = None  # percent of predictions that changed
    flips_error: float | None = None
    difference: float | None = None  # of a regression: the mean of |score − score|
    difference_error: float | None = None
    cosine: float | None = None  # of embeddings: the mean cosine with the reference's, times 100
    cosine_error: float | None = None
    overlap: float | None = None  # percent of the first ten that both find, of every query or sentence
    overlap_error: float | None = None
    rank: float | None = None  # the mean rank correlation over what the reference finds
    rank_error: float | None = None
    drift: Drift | None = None  # of the scores that are compared with thresholds

    def __bool__(self) -> bool:
        return any(value is not None for value in vars(self).values())

    def __str__(self) -> str:
        parts = []
        if self.flips is not None:
            parts.append(f"{self.flips:.2f}%{_error(self.flips_error, 2)} flips")
        if self.kl is not None:
            parts.append(f"KL {self.kl:.4f}{_error(self.kl_error, 4)}")
        if self.difference is not None:
            parts.append(f"mean difference {self.difference:.4f}{_error(self.difference_error, 4)}")
        if self.cosine is not None:
            parts.append(f"cosine {self.cosine:.2f}{_error(self.cosine_error, 2)}")
        if self.overlap is not None:
            parts.append(f"{self.overlap:.1f}%{_error(self.overlap_error, 1)} of the first ten the same")
        if self.rank is not None:
            parts.append(f"rank correlation {self.rank:.3f}{_error(self.rank_error, 3)}")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if value is not None}
        return own | ({"drift": self.drift.to_dict()} if self.drift else {})

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Fidelity:
        names = {item.name for item in fields(cls)} - {"drift"}
        drift = Drift.from_dict(content["drift"]) if content.get("drift") else None
        return cls(**{name: value for name, value in content.items() if name in names}, drift=drift)


def _error(value: float | None, digits: int) -> str:
    return "" if value is None else f" ± {value:.{digits}f}"


# -- of one example ----------------------------------------------------------------------------------------


def kl_divergence(reference: np.ndarray, other: np.ndarray, axis: int = -1) -> np.ndarray:
    """KL(p ‖ q) = Σ p·(log p − log q) in nats, of the softmax of two arrays of logits along one axis.

    A logit of −∞ is a probability of 0. Where p has one, the term is 0 whatever q is; where only q has one,
    the divergence is infinite.
    """
    log_p, log_q = log_softmax(reference, axis), log_softmax(other, axis)
    p = np.exp(log_p)
    with np.errstate(invalid="ignore"):  # −∞ − (−∞), which is not used
        terms = np.where(p > 0, p * (log_p - log_q), 0.0)
    return np.maximum(terms.sum(axis=axis), 0.0)  # rounding may leave −1e-17


def log_softmax(logits: np.ndarray, axis: int = -1) -> np.ndarray:
    logits = np.asarray(logits, dtype=np.float64)
    largest = logits.max(axis=axis, keepdims=True)
    if not np.isfinite(largest).all():
        raise ValueError("expected logits with a finite largest value, got NaN, +inf, or only −inf")
    shifted = logits - largest
    return shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))


# -- of all examples ---------------------------------------------------------------------------------------


def fidelity_of(divergence: Values, same: Values) -> Fidelity:
    """From the divergences of every example, and whether each of its predictions stayed the same."""
    flipped = in_percent([~np.asarray(own, dtype=bool) for own in same])
    return Fidelity(*clustered_mean(divergence), *flipped)


def class_fidelity(reference: Outputs, model: Outputs) -> Fidelity:
    """One (C,) array of logits per text."""
    same = same_classes(reference, model)
    divergence = kl_divergence(np.stack(list(reference)), np.stack(list(model)))
    return fidelity_of(divergence, same)


def tag_fidelity(reference: Outputs, model: Outputs) -> Fidelity:
    """One (T, C) array of logits per text: every token is a prediction."""
    return fidelity_of([kl_divergence(a, b) for a, b in twins(reference, model)], same_tags(reference, model))


def span_fidelity(reference: Outputs, model: Outputs) -> Fidelity:
    """Start and end logits (T, 2) per text."""
    return fidelity_of(span_divergence(reference, model), same_spans(reference, model))


def span_divergence(reference: Outputs, model: Outputs) -> np.ndarray:
    """The mean of the divergences of start and end, over the tokens of each text (or window)."""
    return np.array([kl_divergence(a, b, axis=0).mean() for a, b in twins(reference, model)])


def score_fidelity(reference: Outputs, model: Outputs) -> Fidelity:
    """Scores of a regression have no distribution, and nearly every one changes a little."""
    mean, error = clustered_mean([np.abs(np.ravel(a) - np.ravel(b)) for a, b in twins(reference, model)])
    return Fidelity(difference=mean, difference_error=error)


def pair_fidelity(reference: Outputs, model: Outputs) -> Fidelity:
    """One output per pair of texts: a decision between relevant and not."""
    return class_fidelity(pair_logits(reference), pair_logits(model))


def embedding_fidelity(reference: Outputs, model: Outputs) -> Fidelity:
    """One vector per sentence: its cosine with the reference's, and its ten nearest among the others."""
    one, two = (unit_rows(np.stack(list(rows))) for rows in (reference, model))
    if one.shape != two.shape:
        raise ValueError(f"expected vectors of the same shape, got {one.shape} and {two.shape}")
    mean, error = in_percent((one * two).sum(axis=1))
    if len(one) > NEIGHBOURS_AMONG:
        rows = np.random.default_rng(0).choice(len(one), NEIGHBOURS_AMONG, replace=False)
        one, two = one[rows], two[rows]
    near = [_nearest(rows) for rows in (one, two)]
    shared = in_percent(np.array([overlap(a, b) for a, b in zip(*near, strict=True)]))
    return Fidelity(None, None, None, None, None, None, mean, error, *shared)


def _nearest(rows: np.ndarray) -> list[list[int]]:
    similar = rows @ rows.T
    np.fill_diagonal(similar, -np.inf)
    return best(similar, min(TOP, len(rows) - 1)).tolist()


# By kind of task.
FIDELITIES: dict[str, Callable[[Outputs, Outputs], Fidelity]] = {
    "classification": class_fidelity,
    "regression": score_fidelity,
    "embedding": embedding_fidelity,
    "reranking": pair_fidelity,
    "token-classification": tag_fidelity,
    "question-answering": span_fidelity,
}
