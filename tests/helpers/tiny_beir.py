"""A tiny retrieval set in BEIR's layout, in the words of the tiny model; queries are parts of passages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tiny_embedder import texts

DOCUMENTS, QUERIES = 30, 12


def lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_collection(folder: Path, judged: bool = True, training: bool = True) -> Path:
    """Query i is a part of document i; some queries have a second relevant document with a lower score."""
    passages = texts(DOCUMENTS, seed=1, longest=14)
    draw = np.random.default_rng(2)
    lines(folder / "corpus.jsonl", [{"_id": f"d{i}", "title": "", "text": t} for i, t in enumerate(passages)])
    queries = []
    for i in range(QUERIES):
        words = passages[i].split()
        start = int(draw.integers(0, max(1, len(words) - 4)))
        queries.append({"_id": f"q{i}", "text": " ".join(words[start : start + 4])})
    lines(folder / "queries.jsonl", queries)
    if judged:
        rows = ["query-id\tcorpus-id\tscore"]
        for i in range(QUERIES):
            rows.append(f"q{i}\td{i}\t2")
            rows += [f"q{i}\td{i + 15}\t1"] if i % 3 == 0 else []
        (folder / "qrels").mkdir(exist_ok=True)
        (folder / "qrels" / "test.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    if training:
        first, second = texts(40, seed=5, longest=6), texts(40, seed=6, longest=14)
        pairs = zip(first, second, strict=True)
        lines(
            folder / "train.jsonl",
            [{"query": q, "passage": p, "label": i % 2} for i, (q, p) in enumerate(pairs)],
        )
    return folder
