"""The eight tasks of GLUE in the columns, the order and the spelling of the official files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from task_files import check, jsonl, tsv

from mrem_deploy.data.task_data import (
    TASKS,
    encode,
    find_task,
    open_task,
    sample,
)

# --- GLUE in its official layout ---------------------------------------------------------------

_TREES = "sentence1_binary_parse|sentence2_binary_parse|sentence1_parse|sentence2_parse"
_MNLI = f"index|promptID|pairID|genre|{_TREES}|sentence1|sentence2|label1"
_STSB = "index|genre|filename|year|old_index|source1|source2|sentence1|sentence2|score"
_MRPC = "\ufeffQuality|#1 ID|#2 ID|#1 String|#2 String"
_BINARY: dict[str, float] = {"0": 0, "1": 1}
_ENTAILS: dict[str, float] = {"not_entailment": 1, "entailment": 0}

# task -> folder, header, a row (a and b: the sentences, y: the label), labels as written -> as read
OFFICIAL: dict[str, tuple[str, str, str, dict[str, float]]] = {
    "cola": ("CoLA", "", "gj04|{y}|*|{a}", _BINARY),  # no header
    "sst2": ("SST-2", "sentence|label", "{a}|{y}", _BINARY),
    "mrpc": ("MRPC", _MRPC, "{y}|702876|702977|{a}|{b}", _BINARY),
    "qqp": (
        "QQP",
        "id|qid1|qid2|question1|question2|is_duplicate",
        "133273|213221|213222|{a}|{b}|{y}",
        _BINARY,
    ),
    "qnli": ("QNLI", "index|question|sentence|label", "0|{a}|{b}|{y}", _ENTAILS),
    "rte": ("RTE", "index|sentence1|sentence2|label", "0|{a}|{b}|{y}", _ENTAILS),
    "stsb": ("STS-B", _STSB, "1|main|MSRvid|2012test|04|none|none|{a}|{b}|{y}", {"5.000": 5.0, "3.800": 3.8}),
    "mnli": (
        "MNLI",
        f"{_MNLI}|gold_label",
        "0|31193|31193n|government|( t )|( t )|(ROOT t)|(ROOT t)|{a}|{b}|neutral|{y}",
        {"contradiction": 2, "entailment": 0, "neutral": 1},
    ),
}
SINGLE = ("cola", "sst2")
STEMS = {"train": "train", "dev": "dev", "matched": "dev_matched", "mismatched": "dev_mismatched"}


def sentences(split: str, count: int) -> tuple[list[str], list[str]]:
    """A quote that is never closed, spaces at the end and an empty second text: all are in the real files."""
    return [f'{split} " {i} ' for i in range(count)], ["", *(f"{split} b{i}" for i in range(1, count))]


@pytest.mark.parametrize("form", ["official", "hub"])
@pytest.mark.parametrize("task", OFFICIAL)
def test_glue(tmp_path: Path, task: str, form: str) -> None:
    """The official files; and json lines with the hub's columns, numbers for labels, validation for dev."""
    folder, header, row, labels = OFFICIAL[task]
    pairs = {
        "qqp": ("question1", "question2"),
        "qnli": ("question", "sentence"),
        "mnli": ("premise", "hypothesis"),
    }
    one, two = ("sentence", "-") if task in SINGLE else pairs.get(task, ("sentence1", "sentence2"))
    for split in ("train", *TASKS[task].eval_splits):
        rows = list(zip(*sentences(split, len(labels)), labels, strict=True))
        if form == "official":
            lines = [row.format(a=a, b=b, y=y) for a, b, y in rows]
            tsv(tmp_path / folder / f"{STEMS[split]}.tsv", *([header] if header else []), *lines)
        else:
            stem = STEMS[split].replace("dev", "validation")
            jsonl(tmp_path / f"{stem}.jsonl", *({one: a, two: b, "label": labels[y]} for a, b, y in rows))
    data = open_task(task, str(tmp_path))
    evaluation = data.evaluation()
    assert list(evaluation) == (["matched", "mismatched"] if task == "mnli" else ["dev"])
    for split, texts in {"train": data.train(), **evaluation}.items():
        first, second = sentences(split, len(labels))
        check(texts, first, None if task in SINGLE else second, list(labels.values()))
        assert texts.label_names == TASKS[task].labels
        assert texts.labels is not None
        assert texts.labels.dtype == (np.float32 if task == "stsb" else np.int64)


def test_mnli_dev_has_five_votes_and_rows_without_agreement(tmp_path: Path) -> None:
    row = "0|63735|63735n|slate|( t )|( t )|(ROOT t)|(ROOT t)|{}|{}|neutral|entailment|neutral|neutral||{}"
    tsv(tmp_path / "train.tsv", f"{_MNLI}|gold_label", "0|1|1e|x|t|t|t|t|A|B|entailment|entailment")
    tsv(
        tmp_path / "dev_matched.tsv",
        f"{_MNLI}|label2|label3|label4|label5|gold_label",
        row.format("The new rights", "Everyone", "neutral"),
        row.format("No agreement", "At all", "-"),
        row.format("Third", "Row", "contradiction"),
    )
    found = open_task("mnli", str(tmp_path)).evaluation()["matched"]
    check(found, ["The new rights", "Third"], ["Everyone", "Row"], [1, 2])


def test_microsofts_own_release_of_mrpc(tmp_path: Path) -> None:
    tsv(tmp_path / "MRPC" / "msr_paraphrase_train.txt", _MRPC, "1|1|2|A|B")
    tsv(tmp_path / "MRPC" / "msr_paraphrase_test.txt", _MRPC, "0|3|4|C|D")
    data = open_task("MRPC", str(tmp_path))
    check(data.train(), ["A"], ["B"], [1])
    check(data.evaluation()["dev"], ["C"], ["D"], [0])


def test_the_original_release_of_mnli(tmp_path: Path) -> None:
    for name in ("train", "dev_matched", "dev_mismatched"):
        tsv(tmp_path / f"multinli_1.0_{name}.txt", "gold_label|sentence1|sentence2", "neutral|A|B", "-|C|D")
    data = open_task("mnli", str(tmp_path))
    check(data.train(), ["A"], ["B"], [1])
    assert {split: len(texts) for split, texts in data.evaluation().items()} == {
        "matched": 1,
        "mismatched": 1,
    }


def test_official_metrics_of_the_paper() -> None:
    others = {name: task.metric for name, task in TASKS.items() if task.metric != "accuracy"}
    assert others == {
        "cola": "matthews",
        "stsb": "spearman",
        "feature-extraction": "cosine",
        "token-classification": "f1",
        "question-answering": "agreement",
        "squad": "f1",
        "squad_v2": "f1",
        "retrieval": "ndcg_at_10",
        "reranking": "average_precision",
    }
    bare = TASKS["token-classification"].without_labels
    assert bare is not None
    assert (bare.metric, bare.label_free) == ("agreement", True)
    assert len(TASKS) == 16


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("SST-2", "sst2"), ("sst-2", "sst2"), ("MNLI", "mnli"), ("STS-B", "stsb"), ("CoLA", "cola"),
     ("text_classification", "text-classification"), ("feature-extraction", "feature-extraction")],
)  # fmt: skip
def test_spellings(spelling: str, name: str) -> None:
    assert find_task(spelling).name == name


# --- the real files ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "train", "evaluation"),
    [
        ("sst2", 67_349, {"dev": 872}),
        ("rte", 2_490, {"dev": 277}),
        ("stsb", 5_749, {"dev": 1_500}),
        ("mnli", 40_001, {"matched": 9_815}),
    ],
)
def test_real_files(shared: Path, task: str, train: int, evaluation: dict[str, int]) -> None:
    from transformers import AutoTokenizer

    data = open_task(task, str(shared / "data" / "glue"))
    assert len(data.train(needs_labels=True)) == train
    splits = data.evaluation()
    assert {split: len(texts) for split, texts in splits.items()} == evaluation
    tokenizer = AutoTokenizer.from_pretrained(str(shared / "models" / "minilm-l6-sst2"))
    texts = sample(data.train(), 200, seed=0)
    encoded = encode(tokenizer, texts, max_length=128)
    assert encoded.lengths.max() <= 128
    batch = encoded.batch(np.arange(200))
    plain = tokenizer(
        texts.first, texts.second, truncation=True, max_length=128, padding=True, return_tensors="pt"
    )
    assert set(batch) == set(plain)
    assert all((batch[name] == plain[name]).all() for name in batch)
