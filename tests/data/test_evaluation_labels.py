"""Labels of the evaluation split, checked before the training and without its texts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import BertConfig

from mrem_deploy.base.errors import UserError
from mrem_deploy.data import sources
from mrem_deploy.data.table_files import Naming, Table, Wanted
from mrem_deploy.data.task_data import open_task
from mrem_deploy.preflight import check_evaluation_labels


def test_label_names_are_known_without_reading_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, labels in (("train", "ab"), ("dev", "ac")):
        rows = [json.dumps({"text": f"{name} {label}", "label": label}) for label in labels]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    read, columns = sources.read_files, []

    def watched(paths: list[Path], naming: Naming, wanted: Wanted) -> Table:
        table = read(paths, naming, wanted)
        columns.append(list(table.columns))
        return table

    monkeypatch.setattr(sources, "read_files", watched)
    data = open_task("text-classification", str(tmp_path))
    data.train()
    columns.clear()
    assert data.evaluation_label_names() == {"dev": ("a", "b", "c")}  # b is known from the training split
    assert columns == [["label"]]


def test_tags_of_the_evaluation_split(tmp_path: Path) -> None:
    (tmp_path / "train.conll").write_text("EU B-ORG\nsays O\n", encoding="utf-8")
    (tmp_path / "dev.conll").write_text("Bonn B-LOC\nsays O\n", encoding="utf-8")
    data = open_task("token-classification", str(tmp_path))
    assert data.evaluation_label_names() == {"dev": ("B-LOC", "B-ORG", "O")}
    config = BertConfig(id2label={0: "O", 1: "B-ORG"}, label2id={"O": 0, "B-ORG": 1})
    with pytest.raises(UserError, match=r"labels do not fit.*B-LOC"):
        check_evaluation_labels(data, SimpleNamespace(config=config))


def test_labels_that_evaluation_would_refuse_are_refused_early(tmp_path: Path) -> None:
    for name, label in (("train", "positive"), ("dev", "lukewarm")):
        (tmp_path / f"{name}.tsv").write_text(f"sentence\tlabel\ngood\t{label}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"one of the labels negative, positive.*row 1 has 'lukewarm'"):
        open_task("sst2", str(tmp_path)).evaluation_label_names()


@pytest.mark.parametrize("task", ["feature-extraction", "question-answering"])
def test_tasks_without_named_labels_have_none_to_check(task: str, tmp_path: Path) -> None:
    row = json.dumps({"text": "a", "question": "b", "context": "c"})
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text(row, encoding="utf-8")
    assert open_task(task, str(tmp_path)).evaluation_label_names() == {}
