"""The scorer of retrieval and reranking: how models rank the documents of every query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from mrem_deploy.base import interrupt
from mrem_deploy.data.searching import NO_DOCUMENT, Searches, SearchTokens
from mrem_deploy.data.tasks import Task
from mrem_deploy.evaluate.accuracy import MODELS
from mrem_deploy.evaluate.agreement import Outputs, pair_logits, same_classes, unit_rows
from mrem_deploy.evaluate.clusters import clustered_mean, in_percent
from mrem_deploy.evaluate.drift import sigmoid
from mrem_deploy.evaluate.fidelity import Fidelity, fidelity_of, kl_divergence
from mrem_deploy.evaluate.metrics import MEAN
from mrem_deploy.evaluate.ranking import (
    DEPTH,
    RANKED,
    ROWS,
    TOP,
    best,
    overlap,
    rank_correlation,
    similarities,
)
from mrem_deploy.evaluate.uncertainty import paired_bootstrap

Changes = dict[str, dict[str, float]]


class SearchScorer:
    """One ranking per query: of the entire corpus by similarity, or of candidates by a reranker's scores."""

    paired = ""

    def __init__(self, task: Task, searches: Searches, encoded: SearchTokens, similarity: str) -> None:
        self._task, self._searches, self._encoded = task, searches, encoded
        self._similarity = similarity
        names = {name: place for place, name in enumerate(searches.corpus.ids)}
        # A query that is itself a document of the corpus does not find itself, as in BEIR.
        self._itself = [names.get(name, NO_DOCUMENT) for name in searches.ids]
        self._ranked: dict[int, tuple[Outputs, list[list[int]]]] = {}
        order = np.argsort(encoded.query, kind="stable")
        edges = np.searchsorted(encoded.query[order], np.arange(len(searches) + 1))
        self._own = [order[start:end] for start, end in pairwise(edges)]  # the examples of every query

    # -- rankings ------------------------------------------------------------------------------------------

    def rankings(self, rows: Outputs) -> list[list[int]]:
        """By query, the first documents. Kept by the identity of the outputs, only the newest."""
        if id(rows) not in self._ranked:
            if not all(np.isfinite(row).all() for row in rows):
                raise ValueError("some outputs are not finite numbers")
            if len(self._ranked) == len(MODELS):
                del self._ranked[next(iter(self._ranked))]
            found = self._by_pairs(rows) if self._searches.pairs else self._by_similarity(rows)
            self._ranked[id(rows)] = rows, found
        return self._ranked[id(rows)][1]

    def _sides(self, rows: Outputs) -> tuple[np.ndarray, np.ndarray]:
        """(vectors of the queries, vectors of the documents)."""
        stacked = np.stack(list(rows))
        queries = self._encoded.query != NO_DOCUMENT
        return stacked[queries], stacked[~queries]

    def _by_similarity(self, rows: Outputs) -> list[list[int]]:
        queries, documents = self._sides(rows)
        found: list[list[int]] = []
        for start in interrupt.steps(range(0, len(queries), ROWS)):
            scores = similarities(self._similarity, queries[start : start + ROWS], documents)
            for row, itself in enumerate(self._itself[start : start + ROWS]):
                if itself != NO_DOCUMENT:
                    scores[row, itself] = -np.inf
            found += best(scores, DEPTH).tolist()
        return found

    def _by_pairs(self, rows: Outputs) -> list[list[int]]:
        scores = np.stack(list(rows)).reshape(len(rows))
        found = []
        for own, itself in zip(self._own, self._itself, strict=True):
            order = own[np.argsort(-scores[own], kind="stable")]
            documents = self._encoded.document[order]
            found.append(documents[documents != itself].tolist()[:DEPTH])
        return found

    # -- one model -----------------------------------------------------------------------------------------

    def per_query(self, rows: Outputs) -> dict[str, np.ndarray]:
        """By metric, a number from 0 to 1 for every query."""
        assert self._searches.relevant is not None, "nobody has judged the queries"
        pairs = list(zip(self.rankings(rows), self._searches.relevant, strict=True))
        return {
            name: np.array([RANKED[name](found, relevant) for found, relevant in pairs])
            for name in (self._task.metric, *self._task.also)
        }

    def score(self, rows: Outputs) -> dict[str, float]:
        return {name: 100.0 * float(values.mean()) for name, values in self.per_query(rows).items()}

    def right(self, rows: Outputs) -> np.ndarray | None:
        return None

    # -- two models ----------------------------------------------------------------------------------------

    def change(self, was: Outputs, now: Outputs) -> Changes:
        if len(self._searches) < 2:
            return {}
        before, after = self.per_query(was), self.per_query(now)
        return {name: paired_bootstrap(MEAN, before[name], after[name]).in_points() for name in before}

    def agreement(self, one: Outputs, other: Outputs) -> dict[str, float]:
        """The measure to quote first: mean cosine of the vectors, or pairs with the same decision."""
        overlaps, ranks = self._compared(one, other)
        first: dict[str, float]
        if self._searches.pairs:
            same = np.array(same_classes(pair_logits(one), pair_logits(other)))
            first = {"agreement": 100.0 * float(same.mean())}
        else:
            first = {"cosine": 100.0 * float(self._cosines(one, other).mean())}
        return {
            **first,
            "overlap_at_10": 100.0 * float(overlaps.mean()),
            "spearman": 100.0 * float(ranks.mean()),
        }

    def fidelity(self, reference: Outputs, model: Outputs) -> Fidelity:
        overlaps, ranks = self._compared(reference, model)
        found = Fidelity()
        if self._searches.pairs:
            one, other = pair_logits(reference), pair_logits(model)
            divergence = kl_divergence(np.stack(one), np.stack(other))
            same = np.array(same_classes(one, other))
            found = fidelity_of(self._by_query(divergence), self._by_query(same))
        else:
            mean, error = in_percent(self._cosines(reference, model))
            found = replace(found, cosine=mean, cosine_error=error)
        (shared, shared_error), (rank, rank_error) = in_percent(overlaps), clustered_mean(ranks)
        return replace(found, overlap=shared, overlap_error=shared_error, rank=rank, rank_error=rank_error)

    def thresholded(self, reference: Outputs, model: Outputs) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The scores of both: of all pairs, or of queries with the ten documents that the reference finds."""
        if self._searches.pairs:
            one, other = (sigmoid(np.stack(list(rows)).ravel()) for rows in (reference, model))
            return self._by_query(one), self._by_query(other)
        chosen = [found[:TOP] for found in self.rankings(reference)]
        return self._similar(reference, chosen), self._similar(model, chosen)

    def _by_query(self, values: np.ndarray) -> list[np.ndarray]:
        return [values[own] for own in self._own]

    def _cosines(self, one: Outputs, other: Outputs) -> np.ndarray:
        return (unit_rows(np.stack(list(one))) * unit_rows(np.stack(list(other)))).sum(axis=1)

    def _compared(self, one: Outputs, other: Outputs) -> tuple[np.ndarray, np.ndarray]:
        """By query, the share of the first ten in common, and the rank correlation over what `one` finds."""
        first, second = self.rankings(one), self.rankings(other)
        overlaps = np.array([overlap(a, b) for a, b in zip(first, second, strict=True)])
        scores = [self._scores(rows, first) for rows in (one, other)]
        ranks = np.array([rank_correlation(a, b) for a, b in zip(*scores, strict=True)])
        return overlaps, ranks

    def _scores(self, rows: Outputs, chosen: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """By query, the scores of these documents."""
        if not self._searches.pairs:
            return self._similar(rows, chosen)
        values = np.stack(list(rows)).ravel()
        found = []
        for own, documents in zip(self._own, chosen, strict=True):
            place = dict(zip(self._encoded.document[own].tolist(), own, strict=True))
            found.append(values[[place[document] for document in documents]])
        return found

    def _similar(self, rows: Outputs, chosen: Sequence[Sequence[int]]) -> list[np.ndarray]:
        queries, documents = self._sides(rows)
        return [
            similarities(self._similarity, queries[i : i + 1], documents[list(own)])[0]
            for i, own in enumerate(chosen)
        ]
