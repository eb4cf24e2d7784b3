"""How alike two models predict, in percent. Tasks without labels have no other metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mrem_deploy.base.errors import UserError
from mrem_deploy.evaluate.metrics import pearson, spearman

PAIRWISE_ROWS = 2000  # rows whose pairs are compared: two million pairs take a second
Outputs = Sequence[np.ndarray]


def embedding_agreement(
    reference: Outputs | np.ndarray, quantized: Outputs | np.ndarray, seed: int = 0
) -> dict[str, float]:
    """How alike two sets of embeddings (N, d) are.

    cosine: the mean over rows of cos(reference, quantized).
    spearman: whether the quantized model ranks the similarities of all pairs of rows as the original does.
    """
    reference, quantized = np.asarray(reference), np.asarray(quantized)
    if reference.shape != quantized.shape:
        raise ValueError(
            f"expected two arrays of the same shape, got {reference.shape} and {quantized.shape}"
        )
    if len(reference) < 3:
        raise UserError(
            f"Expected at least 3 sentences to compare similarities; got {len(reference)}.",
            "Give more sentences for evaluation.",
        )
    one, two = unit_rows(reference), unit_rows(quantized)
    cosine = float((one * two).sum(axis=1).mean())
    if len(one) > PAIRWISE_ROWS:
        rows = np.random.default_rng(seed).choice(len(one), size=PAIRWISE_ROWS, replace=False)
        one, two = one[rows], two[rows]
    pairs = np.triu_indices(len(one), k=1)
    ranked = spearman((one @ one.T)[pairs], (two @ two.T)[pairs])
    return {"cosine": 100.0 * cosine, "spearman": 100.0 * ranked}


def class_agreement(reference: Outputs, quantized: Outputs) -> dict[str, float]:
    """The share of texts that both models give the same class; one (C,) array of logits per text."""
    return share(same_classes(reference, quantized))


def score_agreement(reference: Outputs, quantized: Outputs) -> dict[str, float]:
    """The correlations between the scores of two regressions, one score per text."""
    pairs = twins(reference, quantized)
    one, two = (np.concatenate([np.ravel(pair[i]) for pair in pairs]).astype(np.float64) for i in (0, 1))
    return {"spearman": 100.0 * spearman(one, two), "pearson": 100.0 * pearson(one, two)}


def pair_logits(outputs: Outputs) -> list[np.ndarray]:
    """The single outputs of a reranker as logits of two classes, irrelevant and relevant."""
    values = np.stack([np.ravel(row) for row in outputs])
    return list(np.concatenate([np.zeros_like(values), values], axis=1))


def pair_agreement(reference: Outputs, quantized: Outputs) -> dict[str, float]:
    """The share of pairs that both models take for relevant, or both not; the correlation of their scores."""
    decided = class_agreement(pair_logits(reference), pair_logits(quantized))
    return decided | score_agreement(reference, quantized)


def token_agreement(reference: Outputs, quantized: Outputs) -> dict[str, float]:
    """The share of all tokens that both models give the same class; one (T, C) array of logits per text."""
    return share(same_tags(reference, quantized))


def span_agreement(reference: Outputs, quantized: Outputs) -> dict[str, float]:
    """The share of texts whose most likely start and end are both the same; start and end logits (T, 2)."""
    return share(same_spans(reference, quantized))


def share(same: Sequence[np.ndarray]) -> dict[str, float]:
    """Of all predictions of all texts."""
    return {"agreement": 100.0 * float(np.concatenate([np.ravel(own) for own in same]).mean())}


# Text by text: which of its predictions are the same.


def same_classes(reference: Outputs, quantized: Outputs) -> list[np.ndarray]:
    return [a.argmax() == b.argmax() for a, b in twins(reference, quantized)]


def same_tags(reference: Outputs, quantized: Outputs) -> list[np.ndarray]:
    return [a.argmax(axis=1) == b.argmax(axis=1) for a, b in twins(reference, quantized)]


def same_spans(reference: Outputs, quantized: Outputs) -> list[np.ndarray]:
    return [(a.argmax(axis=0) == b.argmax(axis=0)).all() for a, b in twins(reference, quantized)]


def twins(reference: Outputs, quantized: Outputs) -> list[tuple[np.ndarray, np.ndarray]]:
    """Outputs of both models, text by text; refuses outputs that do not belong together."""
    shapes, others = [a.shape for a in reference], [b.shape for b in quantized]
    if shapes != others or not shapes:
        raise ValueError(f"expected outputs of the same shapes, got {shapes} and {others}")
    if not all(np.isfinite(values).all() for values in (*reference, *quantized)):
        raise ValueError("some outputs are not finite numbers")
    return list(zip(reference, quantized, strict=True))


def unit_rows(rows: np.ndarray) -> np.ndarray:
    rows = np.asarray(rows, dtype=np.float64)
    if not np.isfinite(rows).all():
        raise ValueError(f"{int((~np.isfinite(rows)).sum())} values of the embeddings are not finite numbers")
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms > 0, norms, 1.0)


# By kind of task; the first number of each is the one to quote.
AGREEMENTS: dict[str, Callable[[Outputs, Outputs], dict[str, float]]] = {
    "classification": class_agreement,
    "regression": score_agreement,
    "embedding": embedding_agreement,
    "reranking": pair_agreement,
    "token-classification": token_agreement,
    "question-answering": span_agreement,
}
