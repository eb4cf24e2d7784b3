"""Tasks on a user's own data: columns, labels, what is text and what is not, and mistakes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
from task_files import check, jsonl, tsv

from mrem_deploy.base.errors import UserError
from mrem_deploy.data.task_data import (
    TASKS,
    Columns,
    Texts,
    find_task,
    label_order,
    open_task,
    sample,
)

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
