"""Result folders, whatever is in them: saved is read again, and damage is refused with a message."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import HOWS, changed_json, small_result
from hypothesis import given
from hypothesis import strategies as st
from properties import fewer, made, texts, writable

from mrem_deploy.quant.artifact import MANIFEST, TENSORS
from mrem_deploy.quant.frozen import FrozenModel

CONFIG = "config.json"
notes = st.dictionaries(
    texts.filter(writable),
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | texts.filter(writable),
    max_size=4,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_result(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def spoiled(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to damage; each test writes what it damages from scratch."""
    return Path(shutil.copytree(whole, tmp_path_factory.mktemp("spoiled") / "result"))


def built(folder: Path) -> FrozenModel:
    frozen = FrozenModel.read(folder)
    frozen.build()
    return frozen


def without_digests(whole: Path) -> bytes:
    """The manifest as earlier releases wrote it. With digests nearly every change is found by them alone."""
    manifest = json.loads((whole / MANIFEST).read_bytes())
    manifest.pop("digests", None)
    return json.dumps(manifest).encode()


@fewer
@given(st.integers(0, 2**32), notes)
def test_saved_is_read_again(whole: Path, spoiled: Path, seed: int, given_notes: dict[str, Any]) -> None:
    frozen = FrozenModel.read(whole)
    frozen.notes = given_notes
    draw = torch.Generator().manual_seed(seed)
    for weight in frozen.weights.values():
        signs = torch.randint(0, 2, weight.codes.shape, generator=draw, dtype=torch.int8) * 2 - 1
        weight.codes = weight.codes * signs
        weight.scale = weight.scale * torch.rand(weight.scale.shape, generator=draw).clamp(min=1e-3)
    expected = copy.deepcopy(frozen)
    frozen.save(spoiled)
    found = FrozenModel.read(spoiled)
    assert found.notes == given_notes
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name].codes, weight.codes)
        assert torch.equal(found.weights[name].scale, weight.scale)
    assert found.scales == expected.scales


@given(st.sampled_from([MANIFEST, CONFIG]), st.integers(0, 2000), st.integers(0, HOWS - 1), st.booleans())
def test_changed_json_is_read_or_refused(
    whole: Path, spoiled: Path, name: str, place: int, how: int, digests: bool
) -> None:
    shutil.copytree(whole, spoiled, dirs_exist_ok=True)
    if not digests:
        (spoiled / MANIFEST).write_bytes(without_digests(whole))
    (spoiled / name).write_bytes(changed_json((spoiled / name).read_bytes(), place, how))
    made(lambda: built(spoiled))


@given(
    st.sampled_from([MANIFEST, CONFIG, TENSORS]),
    st.floats(0, 1),
    st.integers(0, 40),
    st.binary(max_size=40),
    st.booleans(),
)
def test_changed_bytes_are_read_or_refused(
    whole: Path, spoiled: Path, name: str, at: float, removed: int, added: bytes, digests: bool
) -> None:
    shutil.copytree(whole, spoiled, dirs_exist_ok=True)
    if not digests:
        (spoiled / MANIFEST).write_bytes(without_digests(whole))
    content = (spoiled / name).read_bytes()
    place = round(at * len(content))
    (spoiled / name).write_bytes(content[:place] + added + content[place + removed :])
    made(lambda: built(spoiled))


anything = st.binary(max_size=100) | st.text(max_size=50).map(str.encode)


@given(st.sampled_from([MANIFEST, CONFIG, TENSORS]), anything)
def test_other_content_is_refused(whole: Path, spoiled: Path, name: str, content: bytes) -> None:
    shutil.copytree(whole, spoiled, dirs_exist_ok=True)
    (spoiled / name).write_bytes(content)
    assert made(lambda: built(spoiled)) is None
