"""`benchmark latency`: sentences of mixed lengths, memory by shape, sessions at once; with given clocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tiny_job import save_model
from tiny_onnx import save_tiny_onnx

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import write_text
from mrem_deploy.benchmarks.latency import resources, serving, tables
from mrem_deploy.benchmarks.latency.contenders import Contender, ContenderFailed, Worker
from mrem_deploy.benchmarks.latency.messages import Sentences
from mrem_deploy.benchmarks.latency.report import summary
from mrem_deploy.benchmarks.latency.runtimes import padded
from mrem_deploy.benchmarks.latency.serving import ServingSettings
from mrem_deploy.benchmarks.latency.settings import RaceSettings, Shape
from mrem_deploy.benchmarks.latency.standings import ARRIVAL, SORTED, Standing, Weight
from mrem_deploy.benchmarks.latency.workload import RandomTokens, Workload, read_workload
from mrem_deploy.models.loading import load_tokenizer

TOKENS = RandomTokens(vocabulary=50, pad=1, seed=3)
LIMITS = (16, 100)  # tokens of a sentence, sentences


# -- the sentences -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save_model(tmp_path_factory.mktemp("model") / "model"))


def work(*lengths: int) -> Workload:
    return Workload("x", [[7] * length for length in lengths], [[0] * length for length in lengths], 1)


@pytest.mark.parametrize("content", ['{"lengths": [4, 30, 1]}', "[4, 30, 1]"])
def test_lengths_become_random_tokens(content: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    write_text(path, content)
    found = read_workload(path, None, LIMITS, TOKENS)
    assert found.lengths == [4, 16, 1]  # the second is cut
    assert all(0 <= token < 50 for row in found.ids for token in row)
    assert found.pad == 1
    assert read_workload(path, None, (16, 2), TOKENS).lengths == [4, 16]
    assert read_workload(path, None, LIMITS, TOKENS) == found  # the same seed, the same tokens
    found.save_lengths(tmp_path / "again.json")
    assert read_workload(tmp_path / "again.json", None, LIMITS, TOKENS).lengths == [4, 16, 1]


def test_sentences_and_pairs_are_tokenized(tokenizer: Any, tmp_path: Path) -> None:
    text, pairs = tmp_path / "a.txt", tmp_path / "b.jsonl"
    write_text(text, "good film\nbad\n")
    found = read_workload(text, tokenizer, LIMITS, TOKENS)
    assert found.ids == [tokenizer("good film").input_ids, tokenizer("bad").input_ids]
    assert found.pad == tokenizer.pad_token_id
    rows = [{"premise": "good film", "hypothesis": "bad", "label": "neutral", "other": "film"}]
    write_text(pairs, "".join(json.dumps(row) + "\n" for row in rows))
    expected = tokenizer("good film", "bad")
    found = read_workload(pairs, tokenizer, LIMITS, TOKENS)
    assert (found.ids, found.types) == ([expected.input_ids], [expected.token_type_ids])
    alone = read_workload(pairs, tokenizer, LIMITS, TOKENS, ("other",))
    assert alone.ids == [tokenizer("film").input_ids]
    swapped = read_workload(pairs, tokenizer, LIMITS, TOKENS, ("hypothesis", "premise"))
    assert swapped.ids == [tokenizer("bad", "good film").input_ids]


BAD = [
    ("gone.txt", None, None, "there is no file"),
    ("a.json", '{"lengths": []}', None, "lengths must be 1 or more"),
    ("a.json", '{"lengths": [3, 0]}', None, "lengths must be 1 or more"),
    ("a.json", '{"lengths": [3, ', None, "cannot be read"),
    ("a.json", '[{"text": "good"}]', None, "without a result folder there is no tokenizer"),
    ("a.txt", "good", None, "without a result folder there is no tokenizer"),
    ("a.bin", "good", "with", "Expected a file ending in"),
    ("a.jsonl", '{"speech": "good"}', "with", "no column of"),
    ("a.jsonl", '{"speech": "good"}', ("text",), "has speech"),
    ("a.jsonl", '{"a": "x", "b": "y", "c": "z"}', ("a", "b", "c"), "two columns of pairs"),
]


@pytest.mark.parametrize(("name", "content", "columns", "message"), BAD, ids=[f"{b[0]}-{b[3]}" for b in BAD])
def test_what_cannot_be_read_is_explained(
    name: str, content: str | None, columns: Any, message: str, tokenizer: Any, tmp_path: Path
) -> None:
    if content is not None:
        write_text(tmp_path / name, content)
    with pytest.raises(UserError, match=message):
        read_workload(
            tmp_path / name,
            None if columns is None else tokenizer,
            LIMITS,
            TOKENS,
            columns if isinstance(columns, tuple) else None,
        )


def test_batches_in_both_orders_hold_every_sentence_once() -> None:
    found = work(5, 1, 9, 2, 6)
    assert [[len(row) for row in b["ids"]] for b in found.batches(2, ARRIVAL)] == [[5, 1], [9, 2], [6]]
    assert [[len(row) for row in b["ids"]] for b in found.batches(2, SORTED)] == [[1, 2], [5, 6], [9]]
    assert found.tokens == 23
    assert found.padded_tokens(2, ARRIVAL) == 10 + 18 + 6
    assert found.padded_tokens(2, SORTED) == 4 + 12 + 9
    assert found.padded_tokens(1, ARRIVAL) == 23


def test_padding_has_the_pad_id_and_no_mask() -> None:
    batch: Sentences = {"ids": [[5, 6, 7], [8]], "types": [[0, 1, 1], [0]], "pad": 4}
    made = padded(["attention_mask", "input_ids", "token_type_ids"], batch)
    assert list(made) == ["attention_mask", "input_ids", "token_type_ids"]
    assert made["input_ids"].tolist() == [[5, 6, 7], [8, 4, 4]]
    assert made["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert made["token_type_ids"].tolist() == [[0, 1, 1], [0, 0, 0]]


# -- measured with given clocks ----------------------------------------------------------------------------


class FakeWorker:
    """Its time for a batch is its own factor times the padded tokens, the first pass ten times that."""

    factors: ClassVar[dict[str, float]] = {"fp32": 4.0, "rival": 2.0, "ours": 1.0, "ours, mrem-runtime": 0.5}
    broken: set[str]
    order: list[tuple[str, int]]

    def __init__(self, contender: Contender, threads: int, profile: Path | None = None) -> None:
        self.name, self.runs = contender.name, 0
        self.load = {"load_seconds": 0.5, "empty_mb": 40.0, "loaded_mb": 60.0}

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *_: object) -> None: ...

    def serve(self, batches: list[Sentences]) -> None:
        self.batches, self.runs = batches, 0

    def run_batch(self, number: int) -> float:
        if self.name in self.broken:
            raise ContenderFailed(self.name, "died")
        self.order.append((self.name, number))
        self.runs += 1
        ids = self.batches[number]["ids"]
        warming = 10 if self.runs <= len(self.batches) else 1
        return warming * self.factors[self.name] * len(ids) * max(map(len, ids))

    def feed(self, batch: int, sequence: int, vocabulary: int, seed: int) -> None:
        self.tokens = batch * sequence

    def memory(self) -> dict[str, float]:
        return {"seconds": 1.0, "resident_mb": 70.0 + self.tokens, "peak_mb": 75.0 + self.tokens}

    def crowd(self, sessions: int, seconds: float) -> list[float]:
        assert seconds == resources.CROWD_SECONDS
        return [10.0] if sessions == 1 else [9.0, 8.0]


@pytest.fixture
def standings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Standing]:
    for module in (serving, resources):
        monkeypatch.setattr(module, "Worker", FakeWorker)
    FakeWorker.broken, FakeWorker.order = set(), []
    entries = [
        Contender("fp32", tmp_path),
        Contender("rival", tmp_path),
        Contender("ours", tmp_path, ours=True),
        Contender("ours, mrem-runtime", tmp_path, "mrem_runtime", ours=True, beside="ours"),
        Contender("tuned", tmp_path, disabled_optimizers=("X",), ours=True),
    ]
    return [Standing(contender, Weight(1.0)) for contender in entries]


def settings(**changes: Any) -> RaceSettings:
    return RaceSettings(
        **{"shapes": (Shape(2, 8),), "threads": (1,), "rounds": 1, "warmup": 1, "loads": 1}
        | {"vocabulary": 50, "seed": 0}
        | changes
    )


def test_a_workload_by_hand(standings: list[Standing]) -> None:
    plan = ServingSettings(work(5, 1, 9, 2, 6), (1, 2), 2, (1,))
    assert plan.cases == [(1, ARRIVAL), (2, ARRIVAL), (2, SORTED)]
    serving.serve_all(standings, plan)
    assert FakeWorker.order[:8] == [
        *(("fp32", 0), ("rival", 0), ("ours", 0), ("ours, mrem-runtime", 0)),
        *(("rival", 1), ("ours", 1), ("ours, mrem-runtime", 1), ("fp32", 1)),
    ]
    first, rival, ours, runtime, tuned = standings
    assert [served.seconds for served in first.served] == [(92.0, 92.0), (136.0, 136.0), (100.0, 100.0)]
    assert [served.case for served in ours.served] == ["batch 1", "batch 2, arrival", "batch 2, sorted"]
    assert ours.served[1].sentences_per_second == pytest.approx(5 / 34)
    assert ours.served[1].tokens_per_second == pytest.approx(23 / 34)  # real ones
    assert ours.served[1].faster.ratio == pytest.approx(4)
    assert rival.served[0].faster.ratio == pytest.approx(2)
    assert ours.served[0].faster_than_beside is None
    assert runtime.served[0].to_dict()["ratio_to_same_weights_in_onnxruntime"] == pytest.approx(2)
    assert tuned.served == []
    shown = tables._served(standings, 1)
    assert "batch 2, arrival" in shown
    assert "0.3 · 1 (8.00×; 2.00×)" in shown
    notes = summary({"CPU": standings}, "title", settings(), None, "", plan)
    assert "x: 5 sentences of 1 to 9 tokens, 4.6 on average" in notes
    assert "batch 2, arrival 48%, batch 2, sorted 9%" in notes


def test_one_that_dies_in_a_workload_is_left_out(standings: list[Standing]) -> None:
    FakeWorker.broken = {"rival"}
    serving.serve_all(standings, ServingSettings(work(5, 1), (1,), 1, (1, 2)))
    assert [standing.failed for standing in standings] == [None, "died", None, None, None]
    assert [len(standing.served) for standing in standings] == [2, 0, 2, 2, 0]  # one and two threads


def test_memory_counts_from_the_bare_process(standings: list[Standing]) -> None:
    plan = settings(memory_shapes=(Shape(1, 4), Shape(2, 8)))
    resources.measure_memory(standings, plan)
    rows = standings[2].weight.to_dict()["memory_over_bare_process"]
    assert rows == [
        {"shape": "1x4", "loaded_mb": 20.0, "peak_mb": 39.0, "after_mb": 34.0},
        {"shape": "2x8", "loaded_mb": 20.0, "peak_mb": 51.0, "after_mb": 46.0},
    ]
    assert standings[4].weight.by_shape == []
    assert "| ours, mrem-runtime        |     20 |          39 |          51 |" in tables._memory(
        standings, plan
    )


def test_sessions_at_once_against_one_alone(standings: list[Standing]) -> None:
    plan = settings(together=2)
    resources.crowd(standings, plan)
    (row,) = standings[3].to_dict()["together"]
    assert row == {
        "threads": 1,
        "shape": "2x8",
        "alone": 20.0,
        "together": [18.0, 16.0],
        "gain": pytest.approx(1.7),
    }
    assert "20.0 → 34.0 (1.70×)" in tables._crowds(standings, plan)


# -- the real process --------------------------------------------------------------------------------------


def test_batches_and_several_sessions_in_a_process(tmp_path: Path) -> None:
    path = save_tiny_onnx(tmp_path / "model.onnx")
    with Worker(Contender("tiny", path), 1) as worker:
        worker.serve([{"ids": [[1, 2, 3], [4]], "types": [[0, 0, 0], [0]], "pad": 0}] * 2)
        assert worker.run_batch(1) > 0
        with pytest.raises(ContenderFailed, match="IndexError"):
            worker.run_batch(2)
        worker.feed(2, 4, 10, 0)
        speeds = worker.crowd(3, 0.05)
        assert len(speeds) == 3
        assert all(speed > 0 for speed in speeds)
        assert np.isfinite(speeds).all()
