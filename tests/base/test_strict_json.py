"""JSON from elsewhere: an object of plain text comes back, everything else is one message."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mrem_deploy.base import strict_json
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.strict_json import MOST_LEVELS, read_object


def nested(levels: int) -> bytes:
    return b'{"a": ' * levels + b"1" + b"}" * levels


def test_an_object_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    content = {"ä": [1, 2.5, None, {"b": "\U0001f600"}], "deep": json.loads(nested(MOST_LEVELS - 1))}
    path.write_text(json.dumps(content))  # ASCII: the smiley is a pair of surrogates in it
    assert read_object(path, "") == content


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff{}", "not UTF-8 text (byte 0)"),
        (b"[1]", "holds a list"),
        (b'"text"', "holds a str"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'{"a": [["\\ud83d!"]]}', "surrogate"),
        (nested(MOST_LEVELS + 1), "64 levels"),
        (nested(100_000), "64 levels"),
        (b'{"a": ' + b"[" * 100_000, "levels"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),  # more digits than Python reads
        (b'{"a": 1}' + b" " * 2**20, "too large"),
    ],
)
def test_anything_else_is_refused(
    tmp_path: Path, data: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strict_json, "MOST_BYTES", 2**20)
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        read_object(path, "copy it again")
    assert says in caught.value.problem
    assert str(path) in caught.value.problem
    assert caught.value.remedy == "copy it again"


def test_only_files_are_opened(tmp_path: Path) -> None:
    """A pipe would wait for a writer for ever."""
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path, tmp_path / "gone.json", tmp_path / "pipe.json", tmp_path / ("n" * 300)):
        with pytest.raises(UserError, match="cannot be read"):
            read_object(path, "")
