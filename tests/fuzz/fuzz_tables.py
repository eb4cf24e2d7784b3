"""Any bytes as a data file: rows and texts, or a UserError. `make fuzz` runs it; needs atheris.

The first byte of an input chooses the suffix of the file, the second the task, the others are its content.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["mrem_deploy.data", "mrem_deploy.base", "json"]):
    from mrem_deploy.base import progress
    from mrem_deploy.base.errors import UserError
    from mrem_deploy.data.task_data import open_task
    from mrem_deploy.data.tasks import TASKS

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".txt", ".conll")
NAMES = tuple(TASKS)
FOLDER = Path(tempfile.mkdtemp(prefix="mrem-fuzz-"))
CONTENTS = (
    'text,label\n"a, b",1\nc,0\nd,1\n',
    "sentence\tlabel\nfilm\t1\nbad\t0\n",
    "sentence1\tsentence2\tscore\na\tb\t3.5\nc\td\t0\n",
    json.dumps({"text": "a \U0001f600", "label": 1}) + "\n" + json.dumps({"text": "b", "label": None}),
    json.dumps([{"tokens": ["EU", "x"], "ner_tags": ["B-ORG", "O"]}] * 3),
    json.dumps([{"id": 1, "question": "a", "context": "b", "answers": {"text": ["b"], "answer_start": [0]}}]),
    json.dumps({"data": [{"paragraphs": [{"context": "b", "qas": [{"id": "1", "question": "a",
                "answers": [{"text": "b", "answer_start": 0}]}]}]}]}),
    "EU NNP B-ORG\nrejects VBZ O\n\n-DOCSTART- -X- O\n\nno DT O\n",
    "one sentence\nanother\n",
)  # fmt: skip


def seeds() -> list[bytes]:
    """Every content under every suffix, for every task once."""
    inputs = [
        bytes([suffix, (suffix + place) % len(NAMES)]) + content.encode()
        for suffix in range(len(SUFFIXES))
        for place, content in enumerate(CONTENTS)
    ]
    return inputs + [bytes([2, task]) + CONTENTS[3].encode() for task in range(len(NAMES))]


def one_input(data: bytes) -> None:
    if len(data) < 2:
        return
    path = FOLDER / f"train{SUFFIXES[data[0] % len(SUFFIXES)]}"
    path.write_bytes(data[2:])
    try:
        found = open_task(NAMES[data[1] % len(NAMES)], str(path))
        found.evaluation_label_names()
        parts = [found.train(), *found.evaluation().values()]
    except UserError:
        return
    for part in parts:
        "".join([*part.first, *(part.second or ()), *part.label_names]).encode()


if __name__ == "__main__":
    progress.silence(True)
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
