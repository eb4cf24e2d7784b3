"""Rankings: what a query finds, and how good it is: nDCG, recall and the reciprocal rank, of every query.

Gains are the scores of the qrels, as in BEIR and trec_eval: DCG@k = Σᵢ gainᵢ / log₂(i + 1) over the first k,
and nDCG@k divides it by that of the best order. Ties are in the order of the corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

DEPTH = 100  # documents of a query that are looked at
TOP = 10
ROWS = 512  # queries at a time


def similarities(name: str, queries: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """(Q, D) and (N, D) → (Q, N); the larger the more alike."""
    if name in ("cosine", "dot"):
        if name == "cosine":
            queries, documents = _unit(queries), _unit(documents)
        return queries @ documents.T
    from scipy.spatial.distance import cdist

    return -cdist(queries, documents, "cityblock" if name == "manhattan" else "euclidean")


def _unit(rows: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1.0)


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """Of every row, the places of its highest scores, the highest first."""
    count = min(count, scores.shape[1])
    if count < scores.shape[1] // 4:
        # Only what is at least as high as the last one that counts is sorted.
        edge = np.partition(scores, -count, axis=1)[:, -count]
        places = [np.flatnonzero(row >= least) for row, least in zip(scores, edge, strict=True)]
        pairs = zip(scores, places, strict=True)
        return np.stack([own[np.argsort(-row[own], kind="stable")][:count] for row, own in pairs])
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


# -- of one query: the documents that it found, the best first, and the relevant ones ----------------------


def ndcg(found: Sequence[int], relevant: Mapping[int, float]) -> float:
    gains = [relevant.get(document, 0.0) for document in found[:TOP]]
    ideal = _dcg(sorted(relevant.values(), reverse=True)[:TOP])
    return _dcg(gains) / ideal if ideal > 0 else 0.0


def _dcg(gains: Sequence[float]) -> float:
    return float(sum(gain / np.log2(place + 2) for place, gain in enumerate(gains)))


def recall(found: Sequence[int], relevant: Mapping[int, float]) -> float:
    return len(set(found[:DEPTH]) & relevant.keys()) / len(relevant) if relevant else 0.0


def reciprocal_rank(found: Sequence[int], relevant: Mapping[int, float]) -> float:
    places = (place for place, document in enumerate(found[:TOP], start=1) if document in relevant)
    return 1.0 / next(places, np.inf)


# By metric of a task.
RANKED: dict[str, Callable[[Sequence[int], Mapping[int, float]], float]] = {
    "ndcg_at_10": ndcg,
    "recall_at_100": recall,
    "mrr_at_10": reciprocal_rank,
}


# -- two rankings of one query -----------------------------------------------------------------------------


def overlap(one: Sequence[int], other: Sequence[int]) -> float:
    """The share of the first ten that both found."""
    count = min(TOP, len(one))
    return len(set(one[:count]) & set(other[:count])) / count if count else 1.0


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's, of two rows of scores of the same documents; 1 where there is nothing to order."""
    from scipy.stats import rankdata

    if len(one) < 2:
        return 1.0
    a, b = (rankdata(row) - (len(row) + 1) / 2 for row in (one, other))
    norm = np.sqrt((a * a).sum() * (b * b).sum())
    return float((a * b).sum() / norm) if norm > 0 else 0.0
