"""Small files in the layouts of SQuAD and CoNLL, of the words that the tiny model knows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tiny_bert import NEGATIVE, POSITIVE

CONTEXT = "the film was very good and the plot was a dull plot"


def question(name: str, answer: str, context: str = CONTEXT) -> dict[str, Any]:
    start = context.index(answer)
    return {
        "id": name,
        "question": f"was the film {name}",
        "answers": [{"text": answer, "answer_start": start}],
    }


def official(questions: list[dict[str, Any]], context: str = CONTEXT) -> dict[str, Any]:
    return {
        "version": "1.1",
        "data": [{"title": "T", "paragraphs": [{"context": context, "qas": questions}]}],
    }


def write_squad(path: Path, questions: list[dict[str, Any]], context: str = CONTEXT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(official(questions, context)), encoding="utf-8")
    return path


def write_reading(folder: Path, version: str = "1.1", train: int = 60, dev: int = 30) -> Path:
    """The answer is the only judgement in a context of 8 to 40 words; of v2.0 a third have none."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for split, count in (("train", train), ("dev", dev)):
        paragraphs = []
        for i in range(count):
            words = draw.choices(["the", "film", "plot", "actor", "and", "a"], k=draw.randint(8, 40))
            place, answer = draw.randrange(len(words)), draw.choice([*POSITIVE, *NEGATIVE])
            found = version == "1.1" or i % 3 > 0
            words[place] = answer if found else "very"
            start = len(" ".join([*words[:place], ""]))
            entry: dict[str, Any] = {"id": f"{split}{i}", "question": "the film was"}
            entry["answers"] = [{"text": answer, "answer_start": start}] if found else []
            if version != "1.1":
                entry["is_impossible"] = not found
            paragraphs.append({"context": " ".join(words), "qas": [entry]})
        content = {"version": version, "data": [{"title": split, "paragraphs": paragraphs}]}
        (folder / f"{split}-v{version}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


TAGS = ("B-NEG", "B-POS", "I-POS", "O")


def write_conll(folder: Path, train: int = 60, dev: int = 30) -> Path:
    """Judgements are entities; "very" before a good one begins it."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for split, count in (("train", train), ("dev", dev)):
        lines = ["-DOCSTART- -X- O", ""]
        for _ in range(count):
            lines += [
                f"{word} X O" for word in draw.choices(["the", "film", "plot", "and"], k=draw.randint(1, 6))
            ]
            if draw.random() < 0.5:
                lines += ["very X B-POS", f"{draw.choice(POSITIVE)} X I-POS"]
            else:
                lines += [f"{draw.choice(NEGATIVE)} X B-NEG"]
            lines += ["film X O", ""]
        (folder / f"{split}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder
