"""The eight tasks in the layout their authors published, and tasks on a user's own data.

Every row below is in the columns, the order and the spelling of the official files.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest

from mrem_deploy.base.errors import UserError
from mrem_deploy.data.task_data import (
    TASKS,
    Columns,
    Texts,
    encode,
    find_task,
    label_order,
    open_task,
    sample,
)


def tsv(path: Path, *rows: str) -> Path:
    """Fields are separated by | here, for the eye."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row.replace("|", "\t") + "\n" for row in rows), encoding="utf-8")
    return path


def jsonl(path: Path, *rows: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


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


def check(found: Texts, first: list[str], second: list[str] | None, labels: list[float]) -> None:
    assert found.first == first
    assert found.second == second
    assert found.labels is not None
    assert found.labels == pytest.approx(np.array(labels))


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


# --- a user's own data -------------------------------------------------------------------------


def own(path: Path, *labels: object, name: str = "train") -> Path:
    return jsonl(path / f"{name}.jsonl", *({"text": f"{name} {i}", "label": y} for i, y in enumerate(labels)))


def test_own_columns(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("q,a,verdict\n" + "".join(f"q{i},a{i},{'yes' if i % 2 else 'no'}\n" for i in range(10)))
    data = open_task("text-classification", str(path), Columns("q", "a", "verdict"))
    train, dev = data.train(), data.evaluation()["dev"]
    assert (len(train), len(dev)) == (8, 2)
    for texts in (train, dev):
        assert texts.label_names == ("no", "yes")
        assert texts.second is not None
        assert texts.labels is not None
        for first, second, label in zip(texts.first, texts.second, texts.labels, strict=True):
            assert first[1:] == second[1:]
            assert label == int(first[1:]) % 2


def test_columns_can_be_named_for_glue_too(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", {"satz": "a", "urteil": "POSITIVE"})
    jsonl(tmp_path / "dev.jsonl", {"satz": "b", "urteil": "Negative"})
    data = open_task("sst2", str(tmp_path), Columns(text="satz", label="urteil"))
    check(data.train(), ["a"], None, [1])
    check(data.evaluation()["dev"], ["b"], None, [0])


@pytest.mark.parametrize(
    ("train", "dev", "names", "expected"),
    [
        (["b", "a", "c"], ["c", "a"], ("a", "b", "c"), [2, 0]),  # names in order, whatever the rows' order
        ([0, 1, 2], [2, 0], ("0", "1", "2"), [2, 0]),
        (["10", "9"], ["10"], ("9", "10"), [1]),  # numbers, not text
        ([1.0, 0.0], [1.0], ("0", "1"), [1]),  # as pandas writes integers of a column with gaps
        ([True, False], [True], ("0", "1"), [1]),
        ([None, None], ["x", "y"], ("x", "y"), [0, 1]),  # calibration needs no labels
        (["x", None], ["y", "x"], ("x", "y"), [1, 0]),
        (["a", "b"], ["b", "c"], ("a", "b", "c"), [1, 2]),  # whether the model knows c, label_order decides
    ],
)
def test_label_names_come_from_the_data(
    tmp_path: Path, train: list, dev: list, names: tuple[str, ...], expected: list[int]
) -> None:
    own(tmp_path, *train)
    own(tmp_path, *dev, name="dev")
    texts = open_task("text-classification", str(tmp_path)).evaluation()["dev"]
    assert texts.label_names == names
    assert texts.labels is not None
    assert texts.labels.tolist() == expected


def test_labels_of_the_hub_keep_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with LABEL_0, LABEL_1 was trained on the hub's numbers: sorting the names would swap them."""
    kinds = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["zebra", "ant"])}
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, datasets.Features(kinds))
    splits = datasets.DatasetDict({"train": rows, "test": rows})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: splits)
    data = open_task("text-classification", "someone/animals")
    for texts in (data.train(), data.evaluation()["dev"]):
        assert texts.label_names == ("zebra", "ant")
        check(texts, ["a", "b"], None, [0, 1])
    order = label_order(
        data.train().label_names, SimpleNamespace(id2label={0: "LABEL_0", 1: "LABEL_1"}), data.task
    )
    assert order.tolist() == [0, 1]


def test_training_without_labels(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", {"text": "a"}, {"text": "b"})
    own(tmp_path, "x", name="dev")
    data = open_task("text-classification", str(tmp_path))
    assert data.train().labels is None
    assert data.train().first == ["a", "b"]
    with pytest.raises(UserError, match="label in every training row"):
        data.train(needs_labels=True)
    own(tmp_path, "x", "y")
    labelled = open_task("text-classification", str(tmp_path)).train(needs_labels=True)
    check(labelled, ["train 0", "train 1"], None, [0, 1])


@pytest.mark.parametrize("task", ["feature-extraction", "token-classification", "text-classification"])
def test_a_task_without_labels_needs_only_text(tmp_path: Path, task: str) -> None:
    path = tmp_path / "x.txt"
    path.write_text("one\ntwo\nthree\nfour\nfive\n")
    data = open_task(task, str(path))
    texts = data.evaluation()["dev"]
    assert (len(data.train()), len(texts)) == (4, 1)
    assert texts.labels is None
    assert texts.label_names == ()
    assert data.evaluation_label_names() == {}
    if task == "text-classification":  # it also reads pairs
        assert (data.task.metric, data.task.lacks_labels) == ("agreement", True)
        return
    with pytest.raises(UserError, match="single sentences"):
        open_task(task, str(path), Columns(text_pair="other"))


def test_classes_of_texts_without_labels(tmp_path: Path) -> None:
    """csv without a column of labels; one that is named and missing, or has gaps, is still a mistake."""
    path = tmp_path / "x.csv"
    path.write_text("q,a\n" + "".join(f"q{i},a{i}\n" for i in range(10)))
    data = open_task("text-classification", str(path), Columns("q", "a"))
    assert (data.task.kind, data.task.metric, data.task.label_free) == ("classification", "agreement", True)
    texts = data.evaluation()["dev"]
    assert texts.second == [text.replace("q", "a") for text in texts.first]
    assert texts.labels is None
    with pytest.raises(UserError, match="'stars'"):
        open_task("text-classification", str(path), Columns("q", "a", "stars"))
    gaps = jsonl(tmp_path / "gaps.jsonl", *({"text": "a", "label": y} for y in ("x", None) * 5))
    with pytest.raises(UserError, match="label in every row"):
        open_task("text-classification", str(gaps)).evaluation()
    labelled = open_task("text-classification", str(own(tmp_path, *"xy" * 5)))
    assert (labelled.task.metric, labelled.task.lacks_labels) == ("accuracy", False)


def test_labels_of_the_evaluation_data_count(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("one\ntwo\n")
    other = own(tmp_path / "elsewhere", "b", "a", name="mine")
    data = open_task("text-classification", str(tmp_path / "x.txt"), eval_data=str(other))
    assert not data.task.label_free
    assert data.evaluation()["dev"].label_names == ("a", "b")


def test_evaluation_data_elsewhere(tmp_path: Path) -> None:
    train = own(tmp_path, *"ab" * 10)
    other = own(tmp_path / "elsewhere", "b", name="mine")
    data = open_task("text-classification", str(train), eval_data=str(other))
    assert len(data.train()) == 20  # nothing kept back
    check(data.evaluation()["dev"], ["mine 0"], None, [1])
    assert "mine.jsonl" in data.description


@pytest.mark.parametrize("cell", [1984, 0.5, True, ["a", "b"], {"a": "b"}, []])
def test_only_text_is_text(tmp_path: Path, cell: object) -> None:
    jsonl(tmp_path / "train.jsonl", {"text": "1984", "label": 0}, {"text": cell, "label": 1})
    own(tmp_path, 0, name="dev")
    with pytest.raises(UserError, match=r"row 2 has .* in column 'text', which is not text") as caught:
        open_task("text-classification", str(tmp_path)).train()
    assert repr(cell) in caught.value.problem
    assert "--text-column" in caught.value.remedy


@pytest.mark.parametrize("cell", [0.5, 2.5, float("inf"), "0.5", " .25", "-0,75", [0], {"a": 1}, []])
def test_scores_and_lists_are_no_classes(tmp_path: Path, cell: object) -> None:
    own(tmp_path, "a", "b")
    own(tmp_path, "a", cell, name="dev")
    data = open_task("text-classification", str(tmp_path))
    for read in (data.evaluation, data.evaluation_label_names):
        with pytest.raises(UserError, match=r"a class, a name or a whole number, .*; row 2 has ") as caught:
            read()
        assert repr(cell) in caught.value.problem


def test_codes_of_classes_may_have_a_point(tmp_path: Path) -> None:
    own(tmp_path, "401.9", "250.0", "1.0")
    own(tmp_path, "401.9", name="dev")
    assert open_task("text-classification", str(tmp_path)).train().label_names == ("1.0", "250.0", "401.9")


def test_labels_of_many_digits_are_names(tmp_path: Path) -> None:
    many = "9" * 5000
    own(tmp_path, many, "1")
    own(tmp_path, many, name="dev")
    names = open_task("text-classification", str(tmp_path)).evaluation()["dev"].label_names
    assert names == ("1", many)
    with pytest.raises(UserError, match="labels do not fit"):
        label_order(names, SimpleNamespace(id2label={0: "no", 1: "yes"}), find_task("text-classification"))


def test_a_refused_row_has_its_number_in_the_file(tmp_path: Path) -> None:
    """Also if the row is in the fifth of a single file that is kept for evaluation."""
    rows = [{"text": f"text {i}", "label": i % 2} for i in range(40)]
    rows[29]["text"] = 7
    path = jsonl(tmp_path / "x.jsonl", *rows)
    data = open_task("text-classification", str(path))
    with pytest.raises(UserError, match="row 30 has 7"):
        [data.train(), data.evaluation()]


def test_evaluation_is_read_only_when_asked(tmp_path: Path) -> None:
    own(tmp_path, "a", "b")
    own(tmp_path, "a", None, name="dev")  # a fault in a row that opening does not look at
    data = open_task("text-classification", str(tmp_path))
    assert len(data.train()) == 2
    with pytest.raises(UserError, match=r"1 of 2 .*the first is row 2"):
        data.evaluation()


def test_sample_is_seeded_and_without_replacement() -> None:
    texts = Texts([str(i) for i in range(100)], [f"{i}'" for i in range(100)], np.arange(100), ("x",))
    drawn = sample(texts, 30, seed=1)
    assert len(set(drawn.first)) == 30
    assert drawn.labels is not None
    assert drawn.second is not None
    for first, second, label in zip(drawn.first, drawn.second, drawn.labels, strict=True):
        assert (second, str(label)) == (f"{first}'", first)  # rows stay together
    assert sample(texts, 30, seed=1).first == drawn.first
    assert sample(texts, 30, seed=2).first != drawn.first
    assert sample(texts, 100, seed=1).first == sample(texts, 4096, seed=2).first == texts.first
    assert len(sample(texts, 99, seed=0)) == 99


# --- mistakes ----------------------------------------------------------------------------------


def test_unknown_task_lists_the_known() -> None:
    with pytest.raises(UserError) as caught:
        open_task("sst3", "anywhere")
    assert all(name in caught.value.problem for name in TASKS)
    assert "sst2" in caught.value.remedy


_PAIR_SCORE = "sentence1|sentence2|score"
MISTAKES: dict[str, Any] = {  # name -> task, rows, columns named by the user, what the message must say
    "text column": ("sst2", ["phrase|label", "a|1"], None, "'sentence' or 'text' .*'phrase', 'label'"),
    "pair column": ("rte", ["sentence1|s2|label", "a|b|entailment"], None, "'sentence2' or .*'s2', 'label'"),
    "label column": ("sst2", ["sentence|x", "a|1"], None, "'label' .*'sentence', 'x'"),
    "named column": ("sst2", ["sentence|label", "a|1"], Columns("body"), "'body' .*'sentence', 'label'"),
    "named label": ("sst2", ["sentence|label", "a|1"], Columns(label="y"), "'y' .*'sentence', 'label'"),
    "foreign label": ("sst2", ["sentence|label", "a|1", "b|neutral"], None, "negative, positive .*row 2"),
    "label out of range": ("sst2", ["sentence|label", "a|2"], None, "row 1 has '2'"),
    "score in words": ("stsb", [_PAIR_SCORE, "a|b|3.5", "c|d|high"], None, "number .*row 2 has 'high'"),
    "score not finite": ("stsb", [_PAIR_SCORE, "a|b|inf"], None, "number .*'inf'"),
    "unlabelled": ("sst2", ["sentence|label", "a|1", "b|-1", "c|-1"], None, "2 of 3 .*first is row 2"),
    "label empty": ("stsb", [_PAIR_SCORE, "a|b|"], None, "1 of 1"),
    "no agreed label": ("mnli", ["sentence1|sentence2|gold_label", "a|b|-"], None, "every row has '-'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_data_are_named(tmp_path: Path, mistake: str) -> None:
    task, rows, columns, said = MISTAKES[mistake]
    for name in ("train", "dev", "dev_matched"):
        tsv(tmp_path / f"{name}.tsv", *rows)
    with pytest.raises(UserError, match=said) as caught:
        open_task(task, str(tmp_path), columns).evaluation()
    assert caught.value.remedy


def test_missing_columns_are_found_on_opening(tmp_path: Path) -> None:
    """Not after the training, when the evaluation split is read."""
    tsv(tmp_path / "train.tsv", "sentence|label", "a|1")
    tsv(tmp_path / "dev.tsv", "sentence|x", "a|1")
    with pytest.raises(UserError, match=r"'label' in .*dev\.tsv.*'sentence', 'x'"):
        open_task("sst2", str(tmp_path))


def test_a_missing_text_is_named(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", {"text": "a", "label": 0}, {"text": None, "label": 1})
    own(tmp_path, 0, name="dev")
    with pytest.raises(UserError, match="row 2 has none in column 'text'"):
        open_task("text-classification", str(tmp_path)).train()


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
