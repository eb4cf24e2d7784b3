"""Hostile data files: rows of text and labels come of them, or a message."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.campaign import forked, judge
from tests.campaign.cases import SILENT, Outcome
from tests.campaign.forked import Place
from tests.campaign.jobs import OUT, TASKS
from tests.campaign.workshop import Workshop, run_command

ROWS = [("the film was good", "0"), ("a dull plot", "1"), ("very fine", "0"), ("the actor was poor", "1")] * 4
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, 0, 1.5, -1, 10**400, float("nan"), float("inf"), "", " ", "\ud800", "\0", "\u202e", "é"),
    *([], {}, ["a"], {"a": 1}, [[1]], "x" * 300_000, "\n", "a\rb", '"', "1e400", "0.5"),
)
CONTEXT = "the film was very good"
DEEP = 60_000
WALL = 90.0  # seconds: reading a few rows


def hostile(shop: Workshop, place: Place, draw: random.Random, outcome: Outcome) -> None:
    """Read a hostile file as the data of a task, alone or as a part of a plan."""
    make = draw.choice((table, table, lines, lines, one_json, squad, conll, odd_place, *[collection] * 2))
    task, path, options, words, wrong = make(place.work, draw)
    outcome.what = f"{task}, {words}"
    if task == "squad" and draw.random() < 0.3:
        ended = run_command(["beir", path, "--out", str(place.work / OUT)], place, wall=WALL)
        outcome.what = f"beir of {outcome.what}"
        if judge.check_end(outcome, ended, (judge.DONE, judge.REFUSED)):
            outcome.result = "refused" if ended.code else "made"
        return
    head = task if task in TASKS else "text-classification"
    if draw.random() < 0.3:
        places = [
            "--model",
            f"{shop.root}/model-{head}",
            "--out",
            str(place.work / OUT),
            "--max-length",
            "32",
        ]
        argv = ["quantize", "--plan", *places, "--task", task, "--data", path, *options]
        ended = run_command(argv, place, wall=WALL)
        outcome.what = f"plan of {outcome.what}"
    else:
        from mrem_deploy.base import cli

        ended = forked.run(lambda: cli.run(rows_command, [task, path, *options]), place, wall=WALL)
    if judge.check_end(outcome, ended, (judge.DONE, judge.REFUSED)):
        outcome.result = "refused" if ended.code else "read"
        if wrong and ended.code == judge.DONE:
            outcome.blame(SILENT, "what nobody could read rightly was read")
        if "not text:" in ended.out:
            outcome.blame(SILENT, ended.out.strip()[-300:])


def rows_command(argv: list[str] | None) -> int:
    """Read all splits of a task's data, and look at every row."""
    from mrem_deploy.data.task_data import Columns, open_task

    assert argv is not None
    task, path, *options = argv
    given = dict(zip(options[::2], options[1::2], strict=True))
    columns = Columns(
        given.get("--text-column"), given.get("--text-pair-column"), given.get("--label-column")
    )
    data = open_task(task, path, columns, given.get("--eval-data"))
    for texts in (data.train(), *data.evaluation().values()):
        found = getattr(texts, "corpus", None)
        for text in (*texts.first, *(texts.second or ()), *(found.texts if found is not None else ())):
            if not isinstance(text, str) or text.encode("utf-8", "replace").decode() != text:
                print(f"not text: {text!r}"[:300])
        print(f"{len(texts)} rows")
    return 0


class Made(NamedTuple):
    """A hostile file: the task that reads it, the options for it, and in words what is hostile."""

    task: str
    path: str
    options: list[str]
    words: str
    wrong: bool = False  # nobody could read it rightly


def _finish(path: Path, data: bytes, words: str, draw: random.Random, wrong: str = "") -> Made:
    """The file, as training and as evaluation data. wrong: the column whose values nobody could read."""
    data, more = _spoil_bytes(data, draw)
    path.write_bytes(data)
    task = draw.choice(("text-classification", "text-classification", "feature-extraction", "stsb"))
    read = wrong == "text" or (wrong == "label" and task != "feature-extraction")
    words = f"{path.name[:30]!r}: {words}{more}"
    return Made(task, str(path), ["--eval-data", str(path)], words, read and not more)


def _spoil_bytes(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    """In half of the cases the bytes themselves are hostile, too."""
    if draw.random() < 0.5 or not data:
        return data, ""
    how = draw.choice(
        ("utf-16", "latin-1", "bom", "noise", "zeros", "cut", "carriage returns", "empty", "doubled", "utf-7")
    )
    place = draw.randrange(len(data))
    text = data.decode("utf-8", "replace")
    spoiled: dict[str, Callable[[], bytes]] = {
        "utf-16": lambda: text.encode("utf-16", "replace"),
        "latin-1": lambda: text.replace("o", "\xf6").encode("latin-1", "replace"),
        "bom": lambda: b"\xef\xbb\xbf" + data,
        "noise": lambda: data[:place] + draw.randbytes(40) + data[place:],
        "zeros": lambda: data[:place] + bytes(3) + data[place:],
        "cut": lambda: data[:place],
        "carriage returns": lambda: data.replace(b"\n", b"\r"),
        "empty": lambda: draw.choice((b"", b"\n", b"\n\n  \n", b"\xef\xbb\xbf")),
        "doubled": lambda: data + data,
        "utf-7": lambda: text.replace("a", "\xe4").encode("utf-7", "replace"),
    }
    return spoiled[how](), f", {how}"


# -- kinds of files ----------------------------------------------------------------------------------------


def table(folder: Path, draw: random.Random) -> Made:
    """csv and tsv."""
    kind = draw.choice(("csv", "tsv"))
    separator = "," if kind == "csv" else "\t"
    rows: list[list[str]] = [["text", "label"], *(list(row) for row in ROWS)]
    how = draw.choice(
        (
            *(
                "as it should be",
                "more fields",
                "fewer fields",
                "same column twice",
                "no header",
                "no column",
            ),
            *("open quote", "long field", "odd value", "odd label", "wide", "empty rows", "only a header"),
        )
    )
    place = draw.randrange(1, len(rows))
    if how == "more fields":
        rows[place] += ["x"] * draw.choice((1, 1000))
    elif how == "fewer fields":
        rows[place] = rows[place][: draw.randrange(2)]
    elif how == "same column twice":
        rows = [[*row, row[draw.randrange(2)]] for row in rows]
    elif how == "no header":
        rows = rows[1:]
    elif how == "no column":
        rows[0] = draw.choice((["", ""], ["a", "b"], ["text", ""], ["TEXT", "Label"], ["text\n", "label"]))
    elif how == "open quote":
        rows[place][0] = '"' + rows[place][0]
    elif how == "long field":
        rows[place][draw.randrange(2)] = "x" * 400_000
    elif how in ("odd value", "odd label"):
        value = str(draw.choice([v for v in ODD_VALUES if not isinstance(v, int) or v < 10**300]))
        rows[place][int(how == "odd label")] = value.replace("\ud800", "?")
    elif how == "wide":
        rows = [row + ["x"] * 3000 for row in rows]
    elif how == "empty rows":
        rows[place:place] = [[""]] * 5
    elif how == "only a header":
        rows = rows[:1]
    text = "\n".join(separator.join(row) for row in rows) + "\n"
    wrong = "text" if how in ("more fields", "same column twice") else ""
    return _finish(folder / f"data.{kind}", text.encode("utf-8", "replace"), how, draw, wrong)


def lines(folder: Path, draw: random.Random) -> Made:
    """jsonl."""
    wrong = ""
    rows: list[Any] = [{"text": text, "label": int(label)} for text, label in ROWS]
    how, place = (
        draw.choice(("value", "value", "value", "row", "deep", "key", "many")),
        draw.randrange(len(ROWS)),
    )
    if how == "value":
        key, value = draw.choice(("text", "label")), draw.choice(ODD_VALUES)
        rows[place][key] = value
        if not isinstance(value, str) and (key == "text" or isinstance(value, list | dict)):
            wrong = key
        how = (
            f"{key} is {str(value)[:20]!r}"
            if not isinstance(value, int) or abs(value) < 99
            else f"huge {key}"
        )
    elif how == "row":
        rows[place] = draw.choice(ODD_VALUES)
        how = "a row is not an object"
    elif how == "key":
        rows[place] = draw.choice(
            ({"text": "a"}, {"label": 1}, {"text": "a", "label": 1, "more": 2}, {}, {"": 1})
        )
    elif how == "many":
        rows = [{f"c{i}": 1 for i in range(2000)} | row for row in rows]
    parts = [dumped(row) for row in rows]
    if how == "deep":
        parts[place] = '{"text": ' + "[" * DEEP + "]" * DEEP + ', "label": 0}'
    return _finish(folder / "data.jsonl", "\n".join(parts).encode("utf-8", "surrogatepass"), how, draw, wrong)


def one_json(folder: Path, draw: random.Random) -> Made:
    """A file of one JSON value: a list of rows, columns, or something else."""
    rows = [{"text": text, "label": int(label)} for text, label in ROWS]
    columns: dict[str, Any] = {"text": [row["text"] for row in rows], "label": [row["label"] for row in rows]}
    how = draw.choice(("rows", "columns", "ragged columns", "odd", "deep", "odd row", "numbers"))
    value: Any = {"rows": rows, "columns": columns, "numbers": [1, 2, 3]}.get(how, draw.choice(ODD_VALUES))
    if how == "ragged columns":
        value = columns | {"label": [0, 1]}
    elif how == "odd row":
        value = [*rows, draw.choice(ODD_VALUES)]
    text = "[" * DEEP + "]" * DEEP if how == "deep" else dumped(value)
    return _finish(folder / "data.json", text.encode("utf-8", "surrogatepass"), how, draw)


def squad(folder: Path, draw: random.Random) -> Made:
    """The official nesting with one odd value somewhere."""
    question: dict[str, Any] = {
        "id": "q1",
        "question": "was the film good",
        "answers": [{"text": "good", "answer_start": CONTEXT.index("good")}],
    }
    content: Any = {
        "version": "1.1",
        "data": [
            {"title": "t", "paragraphs": [{"context": CONTEXT, "qas": [dict(question, id=f"q{i}")]}]}
            for i in range(4)
        ],
    }
    from tests.campaign.mutations import _holders

    holder = draw.choice([holder for holder in _holders(content) if holder])
    key = draw.choice(sorted(holder) if isinstance(holder, dict) else range(len(holder)))
    how = draw.choice(("odd", "odd", "odd", "dropped", "start"))
    if how == "start":
        content["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] = draw.choice(
            (-1, 10**9, 1.5, "3", None, True)
        )
    elif how == "dropped" and isinstance(holder, dict):
        del holder[key]
    else:
        holder[key] = draw.choice(ODD_VALUES)
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        (folder / name).write_bytes(_spoil_bytes(dumped(content).encode("utf-8", "surrogatepass"), draw)[0])
    return Made("squad", str(folder), [], f"{key} {how}")


def conll(folder: Path, draw: random.Random) -> Made:
    """Words and tags in columns."""
    rows = ["-DOCSTART- O", "", *("the O|film B-POS|was O|good I-POS||" * 4).split("|")]
    how = draw.choice(("as it should be", "one column", "odd tag", "no blank line", "many columns", "long"))
    place = draw.randrange(2, len(rows))
    if how == "one column":
        rows[place] = "word"
    elif how == "odd tag":
        rows[place] = f"word {draw.choice(('', 'X-', 'B', 'I-', '-POS', 'é', '0', 'B-' + 'x' * 5000))}"
    elif how == "no blank line":
        rows = [row for row in rows if row] * 50
    elif how == "many columns":
        rows[place] = "word " + "x " * 5000 + "O"
    elif how == "long":
        rows[place] = "w" * 300_000 + " O"
    data = "\n".join(rows).encode()
    for name in ("train.txt", "dev.txt"):
        (folder / name).write_bytes(_spoil_bytes(data, draw)[0])
    return Made("token-classification", str(folder), [], how)


def odd_place(folder: Path, draw: random.Random) -> Made:
    """Not an ordinary file, or not an ordinary name."""
    path, how = (
        folder / "data.csv",
        draw.choice(("loop", "nowhere", "folder", "pipe", "device", "name", "text")),
    )
    good = b"text,label\na,0\nb,1\n"
    if how == "loop":
        path.symlink_to(path.name)
    elif how == "nowhere":
        path.symlink_to("/nowhere/at/all.csv")
    elif how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "device":
        path.symlink_to(draw.choice(("/dev/zero", "/dev/null", "/proc/self/mem")))
    elif how == "name":
        name = draw.choice(
            (b"\xff.csv", b"a\nb.csv", b"x" * 250 + b".csv", b" .csv", b"-.csv", b"*.csv", b"a.CSV")
        )
        path = Path(os.fsdecode(os.path.join(os.fsencode(folder), name)))
        path.write_bytes(good)
    else:
        path = folder / draw.choice(
            ("data", "data.txt", "data.pkl", "data.parquet", "data.csv.gz", "x" * 300)
        )
        if len(path.name) < 255:
            path.write_bytes(good)
    return Made("text-classification", str(path), ["--eval-data", str(path)], f"{how}: {path.name[:40]!r}")


def collection(folder: Path, draw: random.Random) -> Made:
    """A retrieval set in BEIR's layout with one hostile row, file or name."""
    task = draw.choice(("retrieval", "reranking"))
    rows = {
        "corpus": [{"_id": f"d{i}", "title": "", "text": text} for i, (text, _) in enumerate(ROWS)],
        "queries": [{"_id": f"q{i}", "text": text} for i, (text, _) in enumerate(ROWS[:6])],
        "train": [{"query": one, "passage": one, "label": int(label)} for one, label in ROWS],
    }
    judged: list[list[Any]] = [["query-id", "corpus-id", "score"], *([f"q{i}", f"d{i}", 1] for i in range(6))]
    name, how = draw.choice(tuple(rows)), draw.choice(("value", "key", "twice", "row", "empty", "file"))
    place, wrong = draw.randrange(len(rows[name])), False
    if draw.random() < 0.35:
        name, how = "qrels", draw.choice(("value", "fields", "header", "twice", "empty", "huge"))
        spot = judged[1 + place % 6]
        if how == "value":
            spot[draw.randrange(3)] = str(draw.choice(ODD_VALUES[:2] + ODD_VALUES[8:20])).replace(
                "\ud800", "?"
            )
        elif how == "fields":
            spot[draw.randrange(3) :] = ["x"] * draw.choice((0, 1, 3000))
        elif how == "huge":
            spot[2] = draw.choice(("1e400", "-1e400", "nan", "9" * 6000, "0x10", "1_0"))
        else:
            judged = {"header": judged[1:], "twice": judged + judged[1:], "empty": judged[:1]}[how]
    elif how == "value":
        key = draw.choice(sorted(rows[name][place]))
        rows[name][place][key] = value = draw.choice(ODD_VALUES)
        wrong = isinstance(value, list | dict) and name != "train"
        how = f"{key} is {str(value)[:20]!r}" if not isinstance(value, int) else f"{key} is a number"
    elif how == "key":
        rows[name][place] = draw.choice(
            ({}, {"": 1}, {"_id": "d0"}, {"text": "a"}, {"id": "d1", "text": "a"})
        )
    elif how == "twice":
        rows[name] += [dict(rows[name][place], text="another")]
    elif how == "row":
        rows[name][place] = draw.choice(ODD_VALUES)
    elif how == "empty":
        rows[name] = []
    (folder / "qrels").mkdir()
    table = "\n".join("\t".join(map(str, row)) for row in judged) + "\n"
    (folder / "qrels" / "test.tsv").write_text(table, encoding="utf-8")
    for file, content in rows.items():
        data = "\n".join(map(dumped, content)).encode("utf-8", "surrogatepass")
        if file == name and how == "file":
            data, how = _spoil_bytes(data, draw)
            how = f"bytes{how}"
            wrong = False
        (folder / f"{file}.jsonl").write_bytes(data)
    return Made(task, str(folder), [], f"{name}: {how}", wrong)


def dumped(value: Any) -> str:
    """As JSON, also numbers with more digits than Python prints."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {dumped(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(dumped, value)) + "]"
    if isinstance(value, int) and abs(value) > 10**300:
        return "9" * 6000
    return json.dumps(value, ensure_ascii=isinstance(value, str) and "\ud800" in value)
