"""Whole runs of retrieval and reranking on tiny models, with a threshold; a reranker is fine-tuned."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_beir import DOCUMENTS, QUERIES, write_collection
from tiny_embedder import save_embedder
from tiny_job import Job, job_in, save_model, workshop_in

import mrem_deploy
from mrem_deploy import finetune
from mrem_deploy.base import cli
from mrem_deploy.evaluate.examples import read_examples


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop_in(tmp_path_factory.mktemp("shop")) as root:
        write_collection(root / "set")
        prompts = {"prompts": {"query": "good ", "document": "a "}}
        save_embedder(root / "embedder", normalize=False, settings=prompts)
        save_model(root / "encoder", "BertModel")
        yield root


def searching(shop: Path, out: str, task: str, **options: Any) -> Job:
    usual = {"method": "ptq", "steps": None, "lr": None, "task": task, "data": shop / "set", "bits": "4-4-8"}
    return job_in(shop, out, **usual | options)


def metrics_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return content


def test_retrieval(shop: Path) -> None:
    job = searching(shop, "found", "retrieval", model=shop / "embedder", threshold=0.9)
    assert job.run() == 0
    accuracy = metrics_of(shop / "found")["accuracy"]
    split = accuracy["splits"]["test"]
    assert split["examples"] == QUERIES
    assert accuracy["metric"] == "ndcg_at_10"
    assert set(split["full_precision"]) == {"ndcg_at_10", "recall_at_100", "mrr_at_10"}
    assert split["full_precision"]["recall_at_100"] == pytest.approx(100.0)  # there are fewer documents
    assert set(split["change"]) == set(split["full_precision"])
    found = split["fidelity"]["quantized"]
    assert 90 < found["cosine"] <= 100
    assert {"overlap", "overlap_error", "rank", "rank_error", "drift"} <= found.keys()
    assert found["drift"]["threshold"] == 0.9
    assert 0 <= found["drift"]["crossed"] <= 100
    examples = read_examples(shop / "found")["test"]
    assert examples.metric == "mean"
    quantized = examples.predictions["quantized"]
    assert 100 * quantized.mean() == pytest.approx(split["quantized"]["ndcg_at_10"])
    for page in ("report.md", "README.md"):
        text = (shop / "found" / page).read_text()
        assert all(words in text for words in ("nDCG@10", "MRR@10", "Score drift", "Cross the threshold 0.9"))
    read = mrem_deploy.open_result(shop / "found").metrics.accuracy
    assert read.fidelity.drift is not None
    assert read.to_dict() == accuracy


def test_retrieval_without_judgements(shop: Path) -> None:
    bare = shutil.copytree(shop / "set", shop / "bare", ignore=shutil.ignore_patterns("qrels"))
    assert searching(shop, "alike", "retrieval", model=shop / "embedder", data=bare).run() == 0
    accuracy = metrics_of(shop / "alike")["accuracy"]
    assert accuracy["metric"] == "overlap_at_10"
    assert accuracy["full_precision"] == 100.0
    assert set(accuracy["splits"]["test"]["quantized"]) == {"cosine", "overlap_at_10", "spearman"}


@pytest.fixture(scope="module")
def reranker(shop: Path) -> Path:
    argv = ["--model", shop / "encoder", "--task", "reranking", "--data", shop / "set", "--out",
            shop / "reranker", "--epochs", "1", "--max-length", "32", "--batch-size", "8"]  # fmt: skip
    assert cli.run(finetune.main, [str(part) for part in argv]) == 0
    return shop / "reranker"


def test_a_reranker_is_fine_tuned(reranker: Path) -> None:
    record = json.loads((reranker / "finetune.json").read_text())
    assert record["metric"] == "ndcg_at_10"
    assert set(record["splits"]["test"]) == {"ndcg_at_10", "mrr_at_10", "examples"}
    assert json.loads((reranker / "config.json").read_text())["id2label"] == {"0": "LABEL_0"}
    assert 0.1 < record["loss"] < 3  # cross-entropy, about log 2


def test_reranking(shop: Path, reranker: Path) -> None:
    assert searching(shop, "ordered", "reranking", model=reranker, eval_size=7).run() == 0
    accuracy = metrics_of(shop / "ordered")["accuracy"]
    split = accuracy["splits"]["test"]
    assert split["examples"] == 7
    assert set(split["quantized"]) == {"ndcg_at_10", "mrr_at_10"}
    found = split["fidelity"]["quantized"]
    assert {"kl", "flips", "overlap", "rank", "drift"} <= found.keys()


def test_reranking_of_labelled_pairs(shop: Path, reranker: Path) -> None:
    data = shop / "set" / "train.jsonl"
    assert searching(shop, "paired", "reranking", model=reranker, data=data).run() == 0
    accuracy = metrics_of(shop / "paired")["accuracy"]
    assert accuracy["metric"] == "average_precision"
    assert "average_precision" in accuracy["splits"]["dev"]["change"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"threshold": 1.5}, "--threshold must be between -1 and 1"),
        ({"threshold": -0.99}, "outside of the full-precision model"),
        ({"data": "model"}, "Expected a folder with corpus.jsonl"),
        ({"text_pair_column": "passage"}, "reads single sentences"),
    ],
)
def test_a_mistake(options: dict[str, Any], said: str, shop: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if "data" in options:
        options = {"data": shop / options["data"]}
    before = sorted(shop.iterdir())
    job = searching(shop, "never", "retrieval", model=shop / "embedder", **options)
    assert job.run() == cli.EXIT_USER_ERROR
    assert said in capfd.readouterr().err
    assert sorted(shop.iterdir()) == before


def test_a_task_for_the_wrong_model(shop: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = searching(shop, "never", "reranking", model=shop / "model")  # a classifier of two labels
    assert job.run() == cli.EXIT_USER_ERROR
    assert "one output" in capfd.readouterr().err
    assert not (shop / "never").exists()
    assert DOCUMENTS > QUERIES
