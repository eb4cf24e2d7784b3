"""`benchmark latency --keep`: models made once are found again, and nothing else is taken for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrem_deploy.base.errors import UserError
from mrem_deploy.benchmarks.latency import kept
from mrem_deploy.benchmarks.latency.contenders import Contender
from mrem_deploy.benchmarks.latency.kept import Traits

TRAITS = Traits("tiny", ("4-4-8",), 50, 0, 512, 128)
ASKED: dict[str, Any] = {"geometry": "16x1x2x32x50", "bits": ["4-4-8"], "per_channel": False, "model": None}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a file made there, a folder, and one that belongs to a result."""
    made, result = tmp_path / "kept", tmp_path / "result"
    for each in (made, made / "ct2", result):
        each.mkdir()
    for path in (made / "fp32.onnx", made / "ct2" / "model.bin", result / "model.onnx"):
        path.write_bytes(path.name.encode())
    lineup = [
        Contender("ORT fp32", made / "fp32.onnx"),
        Contender("CTranslate2 int8", made / "ct2", "ctranslate2"),
        Contender("ours", result / "model.onnx", ours=True),
        Contender("ours, tuned", result / "model.onnx", disabled_optimizers=("X",), config={"a": "b"}),
        Contender("ours, mrem-runtime", made / "fp32.onnx", "mrem_runtime", ours=True, beside="ours"),
    ]
    kept.save(made, ASKED, TRAITS, lineup)
    return made


def test_what_was_kept_is_found_again(folder: Path) -> None:
    found = kept.read(folder, ASKED)
    assert found is not None
    traits, lineup = found
    assert traits == TRAITS
    assert [contender.name for contender in lineup] == [
        "ORT fp32",
        "CTranslate2 int8",
        "ours",
        "ours, tuned",
        "ours, mrem-runtime",
    ]
    assert all(contender.path.is_relative_to(folder) for contender in lineup)
    assert lineup[1].path.is_dir()
    assert lineup[2].path.read_bytes() == b"model.onnx"  # a copy: the result folder may change
    assert (lineup[3].disabled_optimizers, lineup[3].config, lineup[3].tuned) == (("X",), {"a": "b"}, True)
    assert (lineup[4].runtime, lineup[4].beside, lineup[4].ours) == ("mrem_runtime", "ours", True)
    assert kept.read(folder.parent, ASKED) is None  # nothing was made there


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bits": ["2-2-8"]}, "were made with --bits"),
        ({"per_channel": True}, "were made with --per-channel"),
        ({"model": "elsewhere"}, "were made with --model"),
    ],
)
def test_models_made_with_other_options_are_refused(
    changed: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(UserError, match=message):
        kept.read(folder, ASKED | changed)


def changed_row(content: dict[str, Any], **values: Any) -> dict[str, Any]:
    first, *others = content["lineup"]
    return content | {"lineup": [first | values, *others]}


DAMAGES: list[tuple[str, Any, str]] = [
    ("no JSON", lambda content: "{", "not valid JSON"),
    ("another format", lambda content: content | {"format": 2}, "has the format 2"),
    ("no lineup", lambda content: content | {"lineup": []}, "names no models"),
    ("no title", lambda content: {k: v for k, v in content.items() if k != "title"}, "'title'"),
    ("a number as text", lambda content: content | {"vocabulary": "50"}, "is not int"),
    (
        "a path outside",
        lambda content: changed_row(content, path="../result/model.onnx"),
        "not in the folder",
    ),
    ("a path from the root", lambda content: changed_row(content, path="/etc/hostname"), "not in the folder"),
    ("a file that is gone", lambda content: changed_row(content, path="gone.onnx"), "not in the folder"),
    ("a runtime unknown", lambda content: changed_row(content, runtime="os"), "there is no runtime"),
]


@pytest.mark.parametrize(("damage", "message"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES])
def test_a_damaged_folder_is_refused(damage: Any, message: str, folder: Path) -> None:
    path = folder / kept.FILE
    content = damage(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        kept.read(folder, ASKED)
