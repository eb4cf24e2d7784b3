"""Retrieval sets in BEIR's layout: reading, candidates, tokens, and the set made from SQuAD."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_beir import DOCUMENTS, QUERIES, lines, write_collection
from tiny_job import save_model
from tiny_squad import write_reading

from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError
from mrem_deploy.data import beir, from_squad
from mrem_deploy.data.bm25 import BM25
from mrem_deploy.data.search_data import SearchData
from mrem_deploy.data.searching import CANDIDATES, NO_DOCUMENT, Searches, Sides
from mrem_deploy.data.task_data import open_task
from mrem_deploy.models.loading import load_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(save_model(tmp_path_factory.mktemp("model")), "sequence-classification")[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_collection(tmp_path / "set")


def searches_in(data: SearchData) -> Searches:
    ((split, found),) = data.evaluation().items()
    assert split == "test"
    assert isinstance(found, Searches)
    return found


def test_what_is_read(folder: Path) -> None:
    data = open_task("retrieval", str(folder))
    assert data.task.metric == "ndcg_at_10"
    found = searches_in(data)
    assert (len(found), len(found.corpus)) == (QUERIES, DOCUMENTS)
    assert found.relevant is not None
    assert found.relevant[0] == {0: 2.0, 15: 1.0}
    assert found.relevant[1] == {1: 2.0}
    assert found.take(np.array([1])).relevant == [{1: 2.0}]
    assert len(found.take(np.array([1])).corpus) == DOCUMENTS


def test_texts_to_calibrate_with(folder: Path) -> None:
    """The pairs of train.jsonl, each text once; without it the corpus, and queries of other qrels."""
    texts = open_task("retrieval", str(folder)).train()
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    queries, passages = ({row[name] for row in rows} for name in ("query", "passage"))
    assert isinstance(texts, Sides)
    assert len(texts) == len(queries) + len(passages)
    prompted = texts.prompted(lambda *names: {"query": "Q ", "document": "D "}[names[0]])
    assert {text[:2] for text in prompted.first} == {"Q ", "D "}
    assert all((text[2:] in queries) or text.startswith("D") for text in prompted.first)
    (folder / "train.jsonl").unlink()
    assert len(open_task("retrieval", str(folder)).train()) == DOCUMENTS
    (folder / "qrels" / "train.tsv").write_text("q3\td1\t1\n")  # without a header
    assert (
        open_task("retrieval", str(folder)).train().first[0]
        == searches_in(
            open_task("retrieval", str(folder))  # type: ignore[arg-type]
        ).first[3]
    )


def test_sentences_beside_a_collection(folder: Path, tmp_path: Path) -> None:
    plain = tmp_path / "sentences.txt"
    plain.write_text("a film\nthe plot\n")
    data = open_task("retrieval", str(plain), eval_data=str(folder))
    assert data.train().first == ["a film", "the plot"]
    assert "evaluated on" in data.description


def test_tokens_of_an_embedder(folder: Path, tokenizer: Any) -> None:
    found = searches_in(open_task("retrieval", str(folder)))  # type: ignore[arg-type]
    found = found.prompted(lambda *names: {"query": "good ", "document": "bad "}[names[0]])
    encoded = found.tokenize(tokenizer, 32)
    assert len(encoded) == QUERIES + DOCUMENTS
    good, bad = tokenizer.convert_tokens_to_ids(["good", "bad"])
    firsts = np.array([row[1] for row in encoded.columns["input_ids"]])
    assert (firsts[encoded.query != NO_DOCUMENT] == good).all()
    assert (firsts[encoded.document != NO_DOCUMENT] == bad).all()
    some = encoded.take(encoded.places(np.array([2, 5])))
    assert len(some) == 2 + DOCUMENTS
    assert some.query[:2].tolist() == [0, 1]
    assert some.document[2:].tolist() == list(range(DOCUMENTS))


def test_pairs_of_a_reranker(folder: Path, tokenizer: Any) -> None:
    data = open_task("reranking", str(folder))
    assert data.task.metric == "ndcg_at_10"
    labels = data.train(needs_labels=True).labels
    assert labels is not None
    assert set(labels.tolist()) == {0.0, 1.0}
    found = searches_in(data)  # type: ignore[arg-type]
    encoded = found.tokenize(tokenizer, 32)
    assert found.relevant is not None
    for query, relevant in enumerate(found.relevant):
        documents = encoded.document[encoded.query == query].tolist()
        assert set(relevant) <= set(documents)
        assert 20 <= len(documents) <= 22
        assert len(set(documents)) == len(documents)
    some = encoded.take(encoded.places(np.array([4, 7])))
    assert set(some.query.tolist()) == {0, 1}


def test_candidates_by_words() -> None:
    """By hand: two documents hold "cat"; the shorter one comes first. "dog" is in one. Other words count for
    nothing, and what nothing distinguishes keeps the order of the corpus."""
    bm25 = BM25(["a cat and a mouse in the house", "the cat", "the dog", ""])
    assert bm25.best(["Cat!", "dog", "zebra"], 2)[0].tolist() == [1, 0]
    assert bm25.best(["Cat!", "dog", "zebra"], 2)[1].tolist()[0] == 2
    assert bm25.best(["zebra"], 3)[0].tolist() == [0, 1, 2]
    idf = np.log1p((4 - 2 + 0.5) / (2 + 0.5))
    mean = (8 + 2 + 2 + 0) / 4
    by_hand = idf * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 2 / mean))
    assert bm25._weights[bm25._words["cat"], 1] == pytest.approx(by_hand)


def edit(name: str, change: Callable[[list[str]], Any]) -> Callable[[Path], None]:
    def arrange(folder: Path) -> None:
        rows = (folder / name).read_text().splitlines()
        change(rows)
        (folder / name).write_text("\n".join(rows) + "\n")

    return arrange


QRELS = "qrels/test.tsv"
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an unknown query": (edit(QRELS, lambda r: r.append("q99\td1\t1")), "row 17 has 'q99', which is not"),
    "an unknown document": (edit(QRELS, lambda r: r.append("q1\td99\t1")), "'d99'.*1 of 17 rows"),
    "a score in words": (edit(QRELS, lambda r: r.append("q1\td1\tgood")), "number as score.*'good'"),
    "a document judged twice": (edit(QRELS, lambda r: r.append(r[1] + "5")), "one score.*row 17 has 25 for"),
    "nothing relevant": (edit(QRELS, lambda r: r.__setitem__(slice(1, None), ["q1\td1\t0"])), "above 0"),
    "other columns": (edit(QRELS, lambda r: r.__setitem__(0, "query-id\tdoc\tscore")), "columns query-id"),
    "an empty document": (edit("corpus.jsonl", lambda r: r.append('{"_id": "x", "text": " "}')),
                          "1 are empty.*'x'"),
    "an empty query": (edit("queries.jsonl", lambda r: r.append('{"_id": "x", "text": ""}')), "1 are empty"),
    "an id twice": (edit("corpus.jsonl", lambda r: r.append(r[0])), "'d0' occurs more than once"),
    "an id that is null": (edit("corpus.jsonl", lambda r: r.append('{"_id": null, "text": "a"}')),
                           "_id, a text or a whole number.*None"),
    "an id of spaces": (edit("queries.jsonl", lambda r: r.append('{"_id": " ", "text": "a"}')),
                        "its own _id"),
    "no ids": (lambda p: lines(p / "corpus.jsonl", [{"text": "a"}]), "'_id' in every line"),
    "no queries": (lambda p: (p / "queries.jsonl").unlink(), "no queries.jsonl"),
    "a number for a text": (edit("queries.jsonl", lambda r: r.append('{"_id": "x", "text": 5}')), "not text"),
    "a list for an id": (edit("corpus.jsonl", lambda r: r.append('{"_id": ["x"], "text": "a"}')),
                         "row 31 has .'x'."),
    "true for an id": (edit("queries.jsonl", lambda r: r.append('{"_id": true, "text": "a"}')), "has True"),
    "a list for a title": (edit("corpus.jsonl", lambda r: r.append('{"_id": "x", "title": [1], "text": ""}')),
                           "not text"),
    "no corpus": (lambda p: (p / "corpus.jsonl").unlink(), "Expected a folder with corpus.jsonl"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, folder: Path) -> None:
    arrange, said = REFUSED[name]
    arrange(folder)
    with pytest.raises(UserError, match=f"(?s){said}"):
        open_task("retrieval", str(folder))


def test_how_many_examples_a_model_reads(folder: Path) -> None:
    """For the plan: before anything is tokenized."""
    data = open_task("retrieval", str(folder))
    assert (data.inputs(None), data.inputs(5), data.inputs(99)) == (
        QUERIES + DOCUMENTS, 5 + DOCUMENTS, QUERIES + DOCUMENTS)  # fmt: skip
    assert open_task("reranking", str(folder)).inputs(5) == 5 * CANDIDATES


def test_a_title_is_a_text(folder: Path) -> None:
    edit("corpus.jsonl", lambda rows: rows.append('{"_id": "x", "title": "A film", "text": ""}'))(folder)
    assert searches_in(open_task("retrieval", str(folder))).corpus.texts[-1] == "A film"  # type: ignore[arg-type]


def test_without_judgements(folder: Path) -> None:
    shutil.rmtree(folder / "qrels")
    data = open_task("retrieval", str(folder))
    assert data.task.label_free
    assert data.task.metric == "overlap_at_10"
    assert searches_in(data).relevant is None  # type: ignore[arg-type]


def test_a_reranker_needs_pairs(folder: Path, tmp_path: Path) -> None:
    (folder / "train.jsonl").unlink()
    with pytest.raises(UserError, match=r"no train\.jsonl"):
        open_task("reranking", str(folder))
    pairs = lines(tmp_path / "pairs.jsonl", [{"query": "a", "passage": "the film"}] * 5)
    data = open_task("reranking", str(pairs), eval_data=str(folder))
    assert data.train().labels is None
    assert data.train().second == ["the film"] * 5


def test_pairs_with_and_without_labels(tmp_path: Path) -> None:
    rows = [{"query": "a", "passage": "the film", "label": i % 2} for i in range(10)]
    data = open_task("reranking", str(lines(tmp_path / "pairs.jsonl", rows)))
    assert (data.task.metric, data.task.label_free) == ("average_precision", False)
    bare = [{name: row[name] for name in ("query", "passage")} for row in rows]
    data = open_task("reranking", str(lines(tmp_path / "bare.jsonl", bare)))
    assert (data.task.metric, data.task.label_free) == ("agreement", True)
    wrong = lines(tmp_path / "wrong.jsonl", [*rows, {"query": "a", "passage": "b", "label": 3}] * 2)
    with pytest.raises(UserError, match=r"(?s)from 0 \(irrelevant\).*3\.0"):
        open_task("reranking", str(wrong)).train()


def test_a_set_from_squad(tmp_path: Path) -> None:
    source = tmp_path / "squad"
    write_reading(source)
    assert cli.run(from_squad.main, [str(source), "--out", str(tmp_path / "set"), "--negatives", "2"]) == 0
    collection = beir.read_collection(tmp_path / "set")
    dev = json.loads((source / "dev-v1.1.json").read_text())
    paragraphs = [p for article in dev["data"] for p in article["paragraphs"]]
    questions = {q["id"]: (q["question"], p["context"]) for p in paragraphs for q in p["qas"]}
    assert set(collection.corpus.texts) == {p["context"].strip() for p in paragraphs}
    qrels = beir.read_qrels(tmp_path / "set" / "qrels" / "test.tsv", collection)
    for query, relevant in qrels.items():
        (document,) = relevant
        text, context = questions[collection.queries.ids[query]]
        assert collection.queries.texts[query] == text.strip()
        assert collection.corpus.texts[document] == context.strip()
    data = open_task("reranking", str(tmp_path / "set"))
    assert set(data.train(needs_labels=True).labels.tolist()) == {0.0, 1.0}  # type: ignore[union-attr]
    again = tmp_path / "again"
    assert cli.run(from_squad.main, [str(source), "--out", str(again), "--negatives", "2"]) == 0
    for name in ("corpus.jsonl", "train.jsonl", "qrels/test.tsv"):
        assert (again / name).read_bytes() == (tmp_path / "set" / name).read_bytes()


def test_a_set_from_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "squad").mkdir()
    for argv in ([str(tmp_path / "squad"), "--out", str(tmp_path / "set")],
                 [str(tmp_path / "squad"), "--out", str(tmp_path)]):  # fmt: skip
        assert cli.run(from_squad.main, argv) == cli.EXIT_USER_ERROR
        assert "error: " in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["squad"]
    (tmp_path / "squad" / "dev-v1.1.json").write_text("{")
    assert cli.run(from_squad.main, [str(tmp_path / "squad"), "--out", str(tmp_path / "set")]) == 2
    assert not (tmp_path / "set").exists()
