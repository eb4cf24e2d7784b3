"""Queries over a corpus: what embedders and rerankers are measured by.

An embedder reads every query and every document once. A reranker reads pairs: of each query, the candidates
that BM25 finds and the relevant documents, so that only its own order is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mrem_deploy.data.beir import Named, Relevant
from mrem_deploy.data.bm25 import BM25
from mrem_deploy.data.encoded import Encoded
from mrem_deploy.data.texts import Texts

CANDIDATES = 20  # of a query, for a reranker
PASSAGES = ("document", "passage", "corpus")  # names of the prompt of documents
NO_DOCUMENT = -1


@dataclass
class Sides(Texts):
    """Single texts to calibrate an embedder with, some of them queries."""

    is_query: np.ndarray

    def take(self, rows: np.ndarray) -> Sides:
        return Sides([self.first[i] for i in rows], None, None, (), self.is_query[rows])

    def prompted(self, prompt: Callable[..., str]) -> Sides:
        fronts = prompt(*PASSAGES), prompt("query")
        first = [
            fronts[side] + text for text, side in zip(self.first, self.is_query.astype(int), strict=True)
        ]
        return replace(self, first=first)


@dataclass
class Searches(Texts):
    """Queries (`first`), and the corpus that is searched. An example is a query."""

    ids: tuple[str, ...]
    corpus: Named
    relevant: list[Relevant] | None  # of every query; None: nobody has judged
    pairs: bool  # whether a model reads a query together with a document

    @property
    def labelled(self) -> bool:
        return self.relevant is not None

    def take(self, rows: np.ndarray) -> Searches:
        relevant = None if self.relevant is None else [self.relevant[i] for i in rows]
        first, ids = [self.first[i] for i in rows], tuple(self.ids[i] for i in rows)
        return replace(self, first=first, ids=ids, relevant=relevant)

    def prompted(self, prompt: Callable[..., str]) -> Searches:
        fronts = prompt("query"), prompt(*PASSAGES)
        corpus = Named(self.corpus.ids, tuple(fronts[1] + text for text in self.corpus.texts))
        return replace(self, first=[fronts[0] + text for text in self.first], corpus=corpus)

    def tokenize(self, tokenizer: Any, max_length: int) -> SearchTokens:
        if not self.pairs:
            texts = Texts([*self.first, *self.corpus.texts], None, None, ())
            query = np.arange(len(texts))
            query[len(self.first) :] = NO_DOCUMENT
            document = np.arange(len(texts)) - len(self.first)
            return _of(texts.tokenize(tokenizer, max_length), query, np.maximum(document, NO_DOCUMENT))
        query, document = self._candidates()
        second = [self.corpus.texts[i] for i in document]
        texts = Texts([self.first[i] for i in query], second, None, ())
        return _of(texts.tokenize(tokenizer, max_length), query, document)

    def _candidates(self) -> tuple[np.ndarray, np.ndarray]:
        """(query, document) of every pair, the pairs of a query next to each other."""
        found = BM25(self.corpus.texts).best(self.first, CANDIDATES)
        relevant = self.relevant or [{} for _ in found]
        chosen = [
            np.union1d(best, np.array([*own], dtype=np.int64))
            for best, own in zip(found, relevant, strict=True)
        ]
        return np.repeat(np.arange(len(chosen)), list(map(len, chosen))), np.concatenate(chosen)


@dataclass
class SearchTokens(Encoded):
    """Tokens of queries and documents, or of pairs of both."""

    query: np.ndarray  # (E,) which query an example is, or belongs to; NO_DOCUMENT: it is a document
    document: np.ndarray  # (E,) the same for documents

    def places(self, texts: np.ndarray) -> np.ndarray:
        """The examples of these queries; documents that all queries share are always among them."""
        return np.flatnonzero(np.isin(self.query, texts) | (self.query == NO_DOCUMENT))

    def take(self, indices: np.ndarray) -> SearchTokens:
        """Only these, in this order; queries keep their order and are counted anew."""
        query = self.query[indices]
        known = np.unique(query[query != NO_DOCUMENT])
        counted = np.where(query == NO_DOCUMENT, NO_DOCUMENT, np.searchsorted(known, query))
        return _of(super().take(indices), counted, self.document[indices])


def _of(encoded: Encoded, query: np.ndarray, document: np.ndarray) -> SearchTokens:
    return SearchTokens(encoded.columns, encoded.lengths, encoded.pad, None, query, document)
