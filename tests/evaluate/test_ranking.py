"""Rankings: metrics by hand, ties, and the scorer of searches on vectors and scores made by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import ndcg_score
from transformers import PretrainedConfig

from mrem_deploy.data.beir import Named
from mrem_deploy.data.searching import NO_DOCUMENT, Searches, SearchTokens
from mrem_deploy.data.tasks import TASKS, searching
from mrem_deploy.evaluate.drift import drift_of
from mrem_deploy.evaluate.ranking import (
    best,
    ndcg,
    overlap,
    rank_correlation,
    recall,
    reciprocal_rank,
    similarities,
)
from mrem_deploy.evaluate.scorers import scorer_for
from mrem_deploy.evaluate.search_scorer import SearchScorer


def test_ndcg_by_hand() -> None:
    """A gain of 2 at the second place and one of 1 at the first; the best order has them the other way."""
    expected = (1 + 2 / math.log2(3)) / (2 + 1 / math.log2(3))
    assert ndcg([7, 3, 5], {3: 2.0, 7: 1.0}) == pytest.approx(expected)
    assert ndcg([3, 7], {3: 2.0, 7: 1.0}) == pytest.approx(1.0)
    assert ndcg([*range(10), 99], {99: 1.0}) == 0.0  # the eleventh place counts for nothing


def test_ndcg_is_that_of_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        gains, scores = draw.integers(0, 4, size=30).astype(float), draw.normal(size=30)
        relevant = {i: gain for i, gain in enumerate(gains) if gain > 0}
        found = best(scores[None], 30)[0].tolist()
        assert ndcg(found, relevant) == pytest.approx(ndcg_score([gains], [scores], k=10))


def test_recall_and_reciprocal_rank_by_hand() -> None:
    found = list(range(200))
    assert recall(found, {0: 1.0, 99: 1.0, 100: 1.0, 5000: 1.0}) == 0.5
    assert reciprocal_rank(found, {2: 1.0, 4: 1.0}) == pytest.approx(1 / 3)
    assert reciprocal_rank(found, {10: 1.0}) == 0.0
    assert reciprocal_rank([], {1: 1.0}) == 0.0


@pytest.mark.parametrize("documents", [3, 50, 1000])
def test_the_best_of_many_are_those_of_sorting(documents: int) -> None:
    """Many scores are equal: they keep the order of the corpus."""
    scores = np.random.default_rng(1).integers(0, 9, size=(7, documents)).astype(float)
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :10]
    np.testing.assert_array_equal(best(scores, 10), expected)


def test_similarities_by_hand() -> None:
    one, two = np.array([[3.0, 4.0]]), np.array([[6.0, 8.0], [-4.0, 3.0]])
    assert similarities("dot", one, two).tolist() == [[50.0, 0.0]]
    assert similarities("cosine", one, two) == pytest.approx(np.array([[1.0, 0.0]]))
    assert similarities("euclidean", one, two).tolist() == [[-5.0, -math.sqrt(50)]]
    assert similarities("manhattan", one, two).tolist() == [[-7.0, -8.0]]


def test_two_rankings() -> None:
    assert overlap(list(range(20)), list(range(5, 25))) == 0.5
    assert overlap([1, 2], [2, 1]) == 1.0
    assert rank_correlation(np.array([1.0, 2, 3]), np.array([10.0, 20, 30])) == pytest.approx(1.0)
    assert rank_correlation(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == pytest.approx(-1.0)
    assert rank_correlation(np.array([1.0, 2]), np.array([5.0, 5])) == 0.0


# -- the scorer --------------------------------------------------------------------------------------------

RELEVANT = [{0: 1.0}, {1: 1.0, 2: 1.0}]


def tokens(query: list[int], document: list[int]) -> SearchTokens:
    count = len(query)
    ids = [np.array([1]) for _ in range(count)]
    columns = {"input_ids": ids}
    lengths = np.ones(count, dtype=int)
    return SearchTokens(columns, lengths, {"input_ids": 0}, None, np.array(query), np.array(document))


def scorer(pairs: bool, judged: bool = True, ids: tuple[str, ...] = ("q0", "q1")) -> Any:
    corpus = Named(("d0", "d1", "d2"), ("a", "b", "c"))
    searches = Searches(["x", "y"], None, None, (), ids, corpus, RELEVANT if judged else None, pairs)
    if pairs:
        encoded = tokens([0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2])
    else:
        encoded = tokens([0, 1, *[NO_DOCUMENT] * 3], [NO_DOCUMENT, NO_DOCUMENT, 0, 1, 2])
    task = searching(TASKS["reranking" if pairs else "retrieval"], judged)
    return scorer_for(task, searches, encoded, PretrainedConfig())


# Queries, then documents; query 0 is like document 0, query 1 like 1 and less like 2.
VECTORS = [np.array(row, dtype=np.float64) for row in ([1, 0], [0, 2], [3, 1], [1, 5], [1, 1])]
LOGITS = [np.array([value], dtype=np.float64) for value in (2.0, -1.0, 0.5, -3.0, 1.0, 2.0)]


@pytest.mark.parametrize("pairs", [False, True])
def test_scores_by_hand(pairs: bool) -> None:
    found = scorer(pairs)
    assert isinstance(found, SearchScorer)
    rows = LOGITS if pairs else VECTORS
    assert found.rankings(rows) == ([[0, 2, 1], [2, 1, 0]] if pairs else [[0, 2, 1], [1, 2, 0]])
    scores = found.score(rows)
    assert scores["ndcg_at_10"] == pytest.approx(100.0)
    assert scores["mrr_at_10"] == pytest.approx(100.0)
    assert ("recall_at_100" in scores) == (not pairs)
    worse = [-row for row in LOGITS] if pairs else [VECTORS[1], VECTORS[0], *VECTORS[2:]]
    assert found.score(worse)["mrr_at_10"] < 70.0
    change = found.change(rows, worse)["ndcg_at_10"]
    assert change["difference"] == pytest.approx(found.score(worse)["ndcg_at_10"] - 100.0)
    assert change["standard_error"] >= 0.0


@pytest.mark.parametrize("pairs", [False, True])
def test_a_model_agrees_with_itself(pairs: bool) -> None:
    rows = LOGITS if pairs else VECTORS
    found = scorer(pairs, judged=False)
    assert list(found.agreement(rows, rows).values()) == pytest.approx([100.0] * 3)
    fidelity = found.fidelity(rows, rows)
    assert (fidelity.overlap, fidelity.rank) == (pytest.approx(100.0), pytest.approx(1.0))
    assert fidelity.flips == (0.0 if pairs else None)
    assert fidelity.cosine == (None if pairs else pytest.approx(100.0))
    drift = drift_of(*found.thresholded(rows, rows), threshold=0.5)
    assert drift is not None
    assert (drift.mean, drift.crossed) == (0.0, 0.0)


def test_a_reranker_that_changes_its_mind() -> None:
    """The third pair of query 0 turns from relevant to not: one flip in six, and another order."""
    other = [row.copy() for row in LOGITS]
    other[2][0] = -2.0
    fidelity = scorer(pairs=True).fidelity(LOGITS, other)
    assert fidelity.flips == pytest.approx(100 / 6)
    assert fidelity.rank == pytest.approx((0.5 + 1.0) / 2)
    assert fidelity.kl is not None
    assert fidelity.kl > 0
    one, two = scorer(pairs=True).thresholded(LOGITS, other)
    assert one[0][2] == pytest.approx(1 / (1 + math.exp(-0.5)))
    drift = drift_of(one, two, threshold=0.6)
    assert drift is not None
    assert drift.crossed == pytest.approx(100 / 6)
    assert drift.largest == pytest.approx(1 / (1 + math.exp(-0.5)) - 1 / (1 + math.exp(2.0)))


def test_a_query_does_not_find_itself() -> None:
    assert scorer(pairs=False, ids=("d0", "q1")).rankings(VECTORS)[0][:2] == [2, 1]
    assert scorer(pairs=True, ids=("d0", "q1")).rankings(LOGITS)[0] == [2, 1]


def test_outputs_that_are_not_finite() -> None:
    broken = [*VECTORS[:-1], np.array([np.nan, 1.0])]
    with pytest.raises(ValueError, match="finite"):
        scorer(pairs=False).score(broken)
