"""Files, folders and hub ids, each written small in a temporary folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from mrem_deploy.base.errors import UserError
from mrem_deploy.data.sources import files_of, open_source
from mrem_deploy.data.table_files import FIRST_ROW, Layout, Naming, Wanted, listing, read_table, squeeze

ALL = Wanted()
GLUE = Naming(folder="SST-2")
OWN = Naming((Layout("train", {"dev": ("dev", "validation", "eval", "test")}),))
MNLI = Naming(
    (Layout("train", {"matched": ("dev_matched",), "mismatched": ("dev_mismatched",)}),), folder="MNLI"
)


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def write_parquet(path: Path, **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(pa.table(columns), path)
    return path


def numbers(count: int) -> str:
    return "".join(json.dumps({"text": str(i)}) + "\n" for i in range(count))


# --- one file ----------------------------------------------------------------------------------


def test_quotes_in_tsv_are_characters(tmp_path: Path) -> None:
    # A reader that honours quotes joins the two rows: the quote opens in one and closes in the next.
    path = write(tmp_path / "x.tsv", 'sentence\tlabel\n"never closed\t1\nhere" it is\t0\n')
    table = read_table(path, GLUE, ALL)
    assert table.columns == {"sentence": ['"never closed', 'here" it is'], "label": ["1", "0"]}


def test_tsv_splits_lines_at_newlines_only(tmp_path: Path) -> None:
    text = (
        "sentence\tlabel\r\none\x85line\u2028still\rhere\t1\r\n\r\n two \t0"  # hostile line ends, no last one
    )
    table = read_table(write(tmp_path / "x.tsv", text), GLUE, ALL)
    assert table.columns == {"sentence": ["one\x85line\u2028still\rhere", " two "], "label": ["1", "0"]}


def test_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tsv", b"\xef\xbb\xbfQuality\tother\n1\tx\n")  # as MRPC was published
    assert list(read_table(path, GLUE, ALL).columns) == ["Quality", "other"]


def test_a_file_without_header_gets_its_names(tmp_path: Path) -> None:
    naming = Naming(folder="CoLA", header=("source", "label", "star", "sentence"))
    bare = write(tmp_path / "bare.tsv", "gj04\t1\t\tOne.\ngj04\t0\t*\tTwo.\n")
    assert read_table(bare, naming, ALL).columns["sentence"] == ["One.", "Two."]
    headed = write(tmp_path / "headed.tsv", "label\tsentence\n1\tOne.\n")
    assert read_table(headed, naming, ALL).columns == {"label": ["1"], "sentence": ["One."]}


def test_csv_is_quoted(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", 'text,label\n"a, ""b""\nc",yes\n' + "d" * 200_000 + ",no\n")
    table = read_table(path, OWN, ALL)
    assert table.columns["text"][0] == 'a, "b"\nc'
    assert len(table.columns["text"][1]) == 200_000  # longer than csv's own limit
    assert table.columns["label"] == ["yes", "no"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.jsonl", '{"text": "a", "label": 1}\n\n{"text": "b", "label": 0}\n'),
        ("x.json", '\n[{"text": "a", "label": 1},\n {"text": "b", "label": 0}]'),
        ("x.json", '{"text": "a", "label": 1}\n{"text": "b", "label": 0}'),
    ],
)
def test_json_lines_and_arrays(tmp_path: Path, name: str, text: str) -> None:
    path = write(tmp_path / name, text)
    assert read_table(path, OWN, ALL).columns == {"text": ["a", "b"], "label": [1, 0]}
    assert read_table(path, OWN, FIRST_ROW).columns == {"text": ["a"], "label": [1]}


def test_a_field_absent_in_one_json_row_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '{"text": "a"}\n{"text": "b", "label": 0}\n')
    assert read_table(path, OWN, ALL).columns == {"text": ["a", "b"], "label": [None, 0]}


def test_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", text=["a", "b"], label=[1, None])
    assert read_table(path, OWN, ALL).columns == {"text": ["a", "b"], "label": [1, None]}
    assert read_table(path, OWN, FIRST_ROW).columns == {"text": ["a"], "label": [1]}


def test_plain_text_is_a_sentence_per_line(tmp_path: Path) -> None:
    path = write(tmp_path / "x.txt", "one\tsentence\n\n  two  \n")
    assert read_table(path, OWN, ALL).columns == {"text": ["one\tsentence", "two"]}
    table = write(tmp_path / "y.txt", "a\tb\n1\t2\n")  # GLUE's .txt are tables
    assert read_table(table, GLUE, ALL).columns == {"a": ["1"], "b": ["2"]}


@pytest.mark.parametrize("suffix", ["tsv", "csv", "jsonl", "json", "parquet"])
def test_only_wanted_columns_are_kept(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    texts = {
        "tsv": "text\ttree\nhello\tlong\n",
        "csv": "text,tree\nhello,long\n",
        "jsonl": '{"text": "hello", "tree": "long"}\n',
        "json": '[{"text": "hello", "tree": "long"}]',
    }
    if suffix == "parquet":
        write_parquet(path, text=["hello"], tree=["long"])
    else:
        write(path, texts[suffix])
    assert read_table(path, OWN, Wanted(frozenset({"text", "label"}))).columns == {"text": ["hello"]}


def test_a_few_broken_rows_among_many_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # QQP's official training file has rows torn in two by a newline.
    rows = [f"q{i}\tr{i}\t0" for i in range(3000)]
    rows[1500] = "a question torn"
    path = write(tmp_path / "train.tsv", "question1\tquestion2\tis_duplicate\n" + "\n".join(rows) + "\n")
    table = read_table(path, GLUE, ALL)
    assert [len(cells) for cells in table.columns.values()] == [2999] * 3
    assert table.columns["question2"][1500] == "r1501"
    assert "left out 1 broken rows of 3000" in capsys.readouterr().err


def fails(path: Path, naming: Naming = OWN) -> str:
    with pytest.raises(UserError) as caught:
        read_table(path, naming, ALL)
    assert str(path) in caught.value.problem
    assert caught.value.remedy
    return caught.value.problem


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.tsv", "", "empty"),
        ("x.tsv", "text\tlabel\n", "empty"),
        ("x.tsv", "\n\n", "empty"),
        ("x.csv", "", "empty"),
        ("x.jsonl", "", "empty"),
        ("x.json", "[]", "empty"),
        ("x.txt", " \n", "empty"),
        ("x.tsv", "text\tlabel\na\t1\nb\n", "expected 2 fields in every row (text, label), but 1 of 2"),
        ("x.csv", "text,label\na,1\nb\n", "the first is row 3"),
        ("x.csv", "text,label\na,1\nb, c,0\n", "row 3 (the header is row 1) with 3; a text with a comma"),
        ("x.tsv", "text\tlabel\na\t1\nb\tc\t0\n", "row 3 (the header is row 1) with 3"),
        ("x.csv", "text,label,text\na,1,b\n", "'text' is the name of columns 1 and 3"),
        ("x.tsv", "a\ta\ta\n1\t2\t3\n", "'a' is the name of columns 1, 2 and 3"),
        ("x.jsonl", '{"a": 1}\n{"a": ' + "[" * 100_000 + "\n", "line 2: it is nested too deeply"),
        ("x.json", "[" * 100_000, "nested too deeply"),
        ("x.jsonl", '{"a": "b"}\n{"a": "\\udc00"}\n', "line 2: '\\udc00' is a lone surrogate"),
        ("x.json", '[{"a": {"\\ud800": 1}}]', "lone surrogate"),
        ("x.jsonl", '{"a": ' + "1" * 5000 + "}\n", "line 1: Exceeds the limit"),
        ("x.jsonl", '{"text": "a"}\n\n{"text": \n', "line 3 is not valid JSON"),
        ("x.json", '[{"text": "a"},\n{"text" 1}]', "line 2 is not valid JSON"),
        ("x.jsonl", '"a"\n', "named fields"),
        ("x.json", '["a"]', "named fields"),
        ("x.tsv", b"text\n\xff\xfe\n", "UTF-8"),
        ("x.jsonl", '{"text": "é"}\n'.encode("latin-1"), "UTF-8"),
        ("x.parquet", b"not parquet at all", "cannot be read"),
        ("x.parquet", b"", "cannot be read"),
        ("x.pkl", b"anything", "ending in .tsv"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: str | bytes, said: str) -> None:
    assert said in fails(write(tmp_path / name, content))


def test_two_halves_are_one_character(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '{"text": "\\ud83d\\ude00 \\\\ud800"}\n')
    assert read_table(path, OWN, ALL).columns == {"text": ["\U0001f600 \\ud800"]}


def test_empty_fields_beyond_the_header_do_not_count(tmp_path: Path) -> None:
    """Spreadsheets end rows, and the header, with commas."""
    path = write(tmp_path / "x.csv", "text,label,,\na,1,,,,\nb,0,,\n")
    assert read_table(path, OWN, ALL).columns == {"text": ["a", "b"], "label": ["1", "0"]}


def test_a_few_rows_with_too_many_fields_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"q{i},0" for i in range(3000)]
    rows[1500] = "a, b,0"
    table = read_table(write(tmp_path / "train.csv", "text,label\n" + "\n".join(rows) + "\n"), OWN, ALL)
    assert table.columns["label"] == ["0"] * 2999
    assert "left out 1 broken rows of 3000" in capsys.readouterr().err


def test_parquet_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pa.parquet.write_table(table, tmp_path / "x.parquet")
    assert "'text' is the name of columns 1 and 2" in fails(tmp_path / "x.parquet")


def test_parquet_dates_that_python_does_not_have(tmp_path: Path) -> None:
    far = pa.array([2**40], pa.timestamp("s"))
    pa.parquet.write_table(pa.table({"text": far}), tmp_path / "x.parquet")
    assert "cannot be read" in fails(tmp_path / "x.parquet")


def test_empty_parquet_is_named(tmp_path: Path) -> None:
    assert "empty" in fails(write_parquet(tmp_path / "x.parquet", text=[]))
    with pytest.raises(UserError, match="empty"):
        read_table(tmp_path / "x.parquet", OWN, FIRST_ROW)


# --- folders -----------------------------------------------------------------------------------


def test_glue_folder_is_found_in_its_parent(tmp_path: Path) -> None:
    for folder in ("SST-2", "RTE"):
        for split in ("train", "dev"):
            write(tmp_path / folder / f"{split}.tsv", f"sentence\tlabel\n{folder} {split}\t1\n")
    for data in (tmp_path, tmp_path / "SST-2"):
        source = open_source(str(data), GLUE)
        assert source.train(ALL).columns["sentence"] == ["SST-2 train"]
        assert source.evaluation(ALL)["dev"].columns["sentence"] == ["SST-2 dev"]


def test_opening_reads_no_more_than_first_rows(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", "sentence\tlabel\na\t1\n")
    dev = write(tmp_path / "dev.tsv", "sentence\tlabel\nb\t1\nbroken\n")
    source = open_source(str(tmp_path), GLUE)
    assert source.first_rows(of_evaluation=True)[0].columns == {"sentence": ["b"], "label": ["1"]}
    assert source.train(ALL).columns["sentence"] == ["a"]
    with pytest.raises(UserError, match=r"dev\.tsv"):
        source.evaluation(ALL)
    dev.unlink()
    assert source.train(ALL).columns["sentence"] == ["a"]


def test_mismatched_may_be_absent(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", '{"a": 1}')
    write(tmp_path / "dev_matched.jsonl", '{"a": 2}')
    assert list(open_source(str(tmp_path), MNLI).evaluation(ALL)) == ["matched"]
    write(tmp_path / "dev_mismatched.jsonl", '{"a": 3}')
    found = open_source(str(tmp_path), MNLI).evaluation(ALL)
    assert {split: table.columns["a"] for split, table in found.items()} == {
        "matched": [2],
        "mismatched": [3],
    }


def test_layouts_are_not_mixed(tmp_path: Path) -> None:
    """The second release's training file holds the first one's dev rows."""
    naming = Naming((*GLUE.layouts, Layout("msr_train", {"dev": ("msr_test",)})), folder="MRPC")
    write(tmp_path / "dev.tsv", "a\n1\n")
    write(tmp_path / "msr_train.txt", "a\n2\n")
    with pytest.raises(UserError, match="msr_train and msr_test"):
        open_source(str(tmp_path), naming)
    write(tmp_path / "msr_test.txt", "a\n3\n")
    source = open_source(str(tmp_path), naming)
    assert source.train(ALL).columns == {"a": ["2"]}
    assert source.evaluation(ALL)["dev"].columns == {"a": ["3"]}


def test_a_copy_of_a_hub_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "sst2"
    write_parquet(folder / "train-00000-of-00002.parquet", sentence=["a", "b"], label=[0, 1])
    write_parquet(folder / "train-00001-of-00002.parquet", sentence=["c"], label=[1])
    write_parquet(folder / "validation-00000-of-00001.parquet", sentence=["d"], label=[1])
    source = open_source(str(tmp_path), GLUE)
    assert source.train(ALL).columns == {"sentence": ["a", "b", "c"], "label": [0, 1, 1]}
    assert source.train(FIRST_ROW).columns == {"sentence": ["a"], "label": [0]}
    assert source.evaluation(ALL)["dev"].columns["sentence"] == ["d"]
    assert files_of(folder, "validation_matched") == []


def test_a_missing_split_lists_what_is_there(tmp_path: Path) -> None:
    write(tmp_path / "SST-2" / "train.tsv", "sentence\tlabel\na\t1\n")
    write(tmp_path / "SST-2" / "notes.md", "x")
    with pytest.raises(
        UserError, match=r"train and dev or validation in .*SST-2; it holds notes.md, train.tsv"
    ):
        open_source(str(tmp_path), GLUE)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="it holds nothing"):
        open_source(str(tmp_path / "empty"), OWN)


def test_missing_paths_are_told_from_hub_ids(tmp_path: Path) -> None:
    for data in (str(tmp_path / "nowhere"), "./nowhere", "../nowhere", "reviews.csv", "a/b/c"):
        with pytest.raises(UserError, match="no such file or folder"):
            open_source(data, OWN)


# --- single files and the fixed split ----------------------------------------------------------


@pytest.mark.parametrize("form", ["file", "folder"])
def test_without_evaluation_data_a_fixed_fifth_is_kept(tmp_path: Path, form: str) -> None:
    path = write(tmp_path / "train.jsonl", numbers(50))
    source = open_source(str(path if form == "file" else tmp_path), OWN)
    train, dev = source.train(ALL).columns["text"], source.evaluation(ALL)["dev"].columns["text"]
    assert (len(train), len(dev)) == (40, 10)
    assert sorted(train + dev, key=int) == [str(i) for i in range(50)]
    assert dev != [str(i) for i in range(40, 50)]  # at random: files are often sorted by label
    again = open_source(str(path), OWN)
    assert again.evaluation(ALL)["dev"].columns["text"] == dev
    assert "fifth" in source.description


def test_glue_is_never_split_from_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", numbers(50))
    with pytest.raises(UserError, match="dev or validation"):
        open_source(str(tmp_path), GLUE)


@pytest.mark.parametrize(("count", "expected"), [(2, (1, 1)), (3, (2, 1)), (5, (4, 1))])
def test_small_files_leave_something_on_both_sides(
    tmp_path: Path, count: int, expected: tuple[int, int]
) -> None:
    source = open_source(str(write(tmp_path / "x.jsonl", numbers(count))), OWN)
    assert (len(source.train(ALL)), len(source.evaluation(ALL)["dev"])) == expected


def test_one_row_cannot_be_split(tmp_path: Path) -> None:
    source = open_source(str(write(tmp_path / "x.jsonl", numbers(1))), OWN)
    with pytest.raises(UserError, match=r"at least 2 rows.*it has 1"):
        source.train(ALL)


def test_with_the_other_split_given_elsewhere_nothing_is_kept_back(tmp_path: Path) -> None:
    path = write(tmp_path / "dev_mismatched.jsonl", numbers(50))
    assert len(open_source(str(path), MNLI, role="train").train(ALL)) == 50
    evaluation = open_source(str(path), MNLI, role="evaluation").evaluation(ALL)
    assert {split: len(table) for split, table in evaluation.items()} == {"mismatched": 50}  # by its name
    other = write(tmp_path / "mine.jsonl", numbers(5))
    assert list(open_source(str(other), MNLI, role="evaluation").evaluation(ALL)) == ["matched"]
    assert list(open_source(str(tmp_path), MNLI, role="evaluation").evaluation(ALL)) == ["mismatched"]


# --- the hub -----------------------------------------------------------------------------------


def hub(monkeypatch: pytest.MonkeyPatch, **splits: dict[str, list[Any]]) -> list[tuple[str, str | None]]:
    """Stands for the hub, which a test cannot reach: the same objects that `load_dataset` gives."""
    asked: list[tuple[str, str | None]] = []
    labels = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["zebra", "ant"])}
    )

    def load(name: str, config: str | None = None) -> datasets.DatasetDict:
        asked.append((name, config))
        found = {split: datasets.Dataset.from_dict(rows, features=labels) for split, rows in splits.items()}
        return datasets.DatasetDict(found)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


ROWS: dict[str, list[Any]] = {"sentence": ["a", "b", "c"], "label": [0, 1, 1]}


def test_hub_labels_become_names_in_the_hubs_order(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(monkeypatch, train=ROWS, validation=ROWS, test={"sentence": ["d"], "label": [-1]})
    source = open_source("nyu-mll/glue", GLUE)
    assert asked == [("nyu-mll/glue", "sst2")]
    table = source.train(ALL)
    assert table.columns == {"sentence": ["a", "b", "c"], "label": ["zebra", "ant", "ant"]}
    assert table.classes == {"label": ("zebra", "ant")}  # sorted they would be the other way round
    assert source.first_rows(of_evaluation=True)[0].columns == {"sentence": ["a"], "label": ["zebra"]}
    assert source.train(Wanted(frozenset({"sentence"}))).columns == {"sentence": ["a", "b", "c"]}


@pytest.mark.parametrize(
    ("data", "naming", "expected"),
    [
        ("glue", GLUE, ("nyu-mll/glue", "sst2")),
        ("glue", MNLI, ("nyu-mll/glue", "mnli")),
        ("nyu-mll/glue:qqp", GLUE, ("nyu-mll/glue", "qqp")),
        ("someone/reviews", OWN, ("someone/reviews", None)),
        ("someone/reviews:german", OWN, ("someone/reviews", "german")),
    ],
)
def test_hub_names(
    monkeypatch: pytest.MonkeyPatch, data: str, naming: Naming, expected: tuple[str, str | None]
) -> None:
    asked = hub(monkeypatch, train=ROWS, validation=ROWS, dev_matched=ROWS)
    open_source(data, naming)
    assert asked == [expected]


def test_unlabelled_hub_rows_have_no_label(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, train=ROWS, test={"sentence": ["d"], "label": [-1]})
    assert open_source("someone/x", OWN).evaluation(ALL)["dev"].columns["label"] == [None]


def test_hub_without_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, train=ROWS, extra=ROWS)
    source = open_source("someone/x", OWN)
    assert (len(source.train(ALL)), len(source.evaluation(ALL)["dev"])) == (2, 1)
    with pytest.raises(UserError, match="it holds train, extra"):
        open_source("someone/x", GLUE)


def test_without_network_the_way_out_is_told() -> None:
    with pytest.raises(UserError) as caught:  # the tests run with HF_HUB_OFFLINE=1
        open_source("nyu-mll/glue", GLUE)
    assert "nyu-mll/glue (sst2)" in caught.value.problem
    assert "train.tsv and dev.tsv" in caught.value.remedy


def test_names_in_messages() -> None:
    assert listing([]) == "nothing"
    assert listing(["a", "b", "c"], most=2) == "a, b and 1 more"
    assert {squeeze(name) for name in ("SST-2", "sst_2", "sst2", "Sst 2")} == {"sst2"}
