"""Candidates by words alone (BM25): what a first stage hands to a reranker."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

K1, B = 1.2, 0.75  # Lucene's
QUERIES_AT_A_TIME = 256
_WORD = re.compile(r"\w+")


class BM25:
    """score(q, d) = Σ over words w of q: idf(w) · f·(k₁ + 1) / (f + k₁·(1 − b + b·|d| / mean |d|)).

    f: how often w is in d; idf(w) = log(1 + (N − n + ½) / (n + ½)) for a word in n of N documents.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        from scipy.sparse import csr_matrix

        self._words: dict[str, int] = {}
        counts = [Counter(_words(text)) for text in documents]
        rows, columns, values = [], [], []
        for row, counted in enumerate(counts):
            for word, times in counted.items():
                rows.append(row)
                columns.append(self._words.setdefault(word, len(self._words)))
                values.append(float(times))
        shape = (len(documents), max(1, len(self._words)))
        found = csr_matrix((values, (rows, columns)), shape=shape)
        lengths = np.asarray(found.sum(axis=1)).ravel()
        with_word = np.bincount(found.indices, minlength=shape[1])
        idf = np.log1p((len(documents) - with_word + 0.5) / (with_word + 0.5))
        norm = K1 * (1 - B + B * lengths / max(lengths.mean(), 1e-9))
        each = np.repeat(norm, np.diff(found.indptr))
        found.data = idf[found.indices] * found.data * (K1 + 1) / (found.data + each)
        self._weights = found.T.tocsr()  # (words, documents)

    def best(self, queries: Sequence[str], count: int) -> list[np.ndarray]:
        """The documents with the highest scores, the best first; ties in the order of the corpus."""
        from scipy.sparse import csr_matrix

        found: list[np.ndarray] = []
        for start in range(0, len(queries), QUERIES_AT_A_TIME):
            words = [
                [self._words[word] for word in set(_words(text)) if word in self._words]
                for text in queries[start : start + QUERIES_AT_A_TIME]
            ]
            ends = np.cumsum([0, *map(len, words)])
            columns = np.concatenate([np.array(own, dtype=np.int64) for own in words])
            marks = csr_matrix((np.ones(len(columns)), columns, ends), (len(words), self._weights.shape[0]))
            scores = (marks @ self._weights).toarray()
            found += list(np.argsort(-scores, axis=1, kind="stable")[:, :count])
        return found


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
