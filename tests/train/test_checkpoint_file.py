"""A checkpoint that has changed, or does not fit, is refused with one message."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import tiny_encoded, tiny_pair, train_job

from mrem_deploy.base import digests
from mrem_deploy.base.errors import UserError
from mrem_deploy.train.checkpoint import CheckpointStore
from mrem_deploy.train.checkpoint_file import fitting, read_checkpoint, read_header
from mrem_deploy.train.mrem_s import train_mrem_s

FLIPS = 200
TENSORS = {"model/a": torch.arange(12.0).reshape(3, 4), "optimizer/0/0/step": torch.tensor(3.0)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    CheckpointStore(tmp_path / "work", {"bits": "4-4-8"}, resume=False).save("module-0", TENSORS, {"step": 3})
    return tmp_path / "work" / "module-0.safetensors"


def test_what_was_saved_comes_back(saved: Path) -> None:
    tensors, metadata = read_checkpoint(saved)
    assert tensors.keys() == TENSORS.keys()
    assert json.loads(metadata["notes"])["step"] == 3
    assert read_header(saved) == metadata


def test_every_flipped_bit_is_reported(saved: Path) -> None:
    whole, draw = saved.read_bytes(), random.Random(0)
    for bit in [draw.randrange(8 * len(whole)) for _ in range(FLIPS)]:
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        saved.write_bytes(data)
        with pytest.raises(UserError, match="module-0"):
            read_checkpoint(saved)
    saved.write_bytes(whole)
    read_checkpoint(saved)


def test_the_bookkeeping_alone_is_checked_as_well(saved: Path) -> None:
    data = saved.read_bytes()
    assert data.count(b'\\"step\\": 3') == 1
    saved.write_bytes(data.replace(b'\\"step\\": 3', b'\\"step\\": 4'))
    with pytest.raises(UserError, match="header has changed"):
        CheckpointStore(saved.parent, {"bits": "4-4-8"}, resume=True).notes("module-0")


def test_a_checkpoint_of_an_earlier_release_is_read(saved: Path) -> None:
    """By `read_checkpoint`; the store then asks which run wrote it."""
    save_file(TENSORS, saved, metadata={"notes": json.dumps({"step": 3, "elapsed": 1.0})})
    tensors, metadata = read_checkpoint(saved)
    assert tensors.keys() == TENSORS.keys()
    assert not digests.has_digests(metadata)


def test_a_link_out_of_the_work_folder_is_not_followed(saved: Path, tmp_path: Path) -> None:
    saved.rename(tmp_path / "elsewhere.safetensors")
    saved.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(UserError, match="leads out of its folder"):
        read_checkpoint(saved)


@pytest.mark.parametrize("data", [b"{", b"[]", b"\xff", b'{"a":' * 5000])
def test_an_unreadable_identity_is_refused(saved: Path, data: bytes) -> None:
    (saved.parent / "run.json").write_bytes(data)
    with pytest.raises(UserError, match=r"run\.json"):
        CheckpointStore(saved.parent, {"bits": "4-4-8"}, resume=True)


@pytest.mark.parametrize("error", [KeyError("curve"), ValueError(), TypeError("x"), RuntimeError("a\nb")])
def test_what_does_not_fit_is_the_files_fault(error: Exception) -> None:
    with pytest.raises(UserError, match=r"cannot be used: ."), fitting(Path("module-0")):
        raise error


def test_a_refusal_inside_keeps_its_words() -> None:
    with pytest.raises(UserError, match="no space"), fitting(Path("module-0")):
        raise UserError("no space")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work folder of a run of one module."""
    store = CheckpointStore(tmp_path_factory.mktemp("run") / "work", {}, resume=False)
    train_mrem_s(train_job(*tiny_pair(), tiny_encoded(), [0, 3], steps=2, store=store))
    return store.folder


def foreign(notes: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if name.startswith("model/"))
    tensors[name] = torch.ones(1)


def lost(notes: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del tensors[next(name for name in tensors if name.startswith("model/"))]


def without(key: str) -> Any:
    return lambda notes, tensors: notes.pop(key)


def with_words(notes: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    notes["step"] = "three"


@pytest.mark.parametrize(
    "change", [foreign, lost, without("step"), without("curve"), without("elapsed"), with_words]
)
def test_a_checkpoint_of_another_model_is_refused(trained: Path, tmp_path: Path, change: Any) -> None:
    """With digests of its own: only what is in it can give it away."""
    path = Path(shutil.copytree(trained, tmp_path / "work")) / "module-0.safetensors"
    store = CheckpointStore(path.parent, {}, resume=True)
    tensors, metadata = read_checkpoint(path)
    notes = json.loads(metadata["notes"])
    change(notes, tensors)
    save_file(
        tensors,
        path,
        metadata=digests.sealed_metadata({**own(metadata), "notes": json.dumps(notes)}, tensors),
    )
    with pytest.raises(UserError, match="module-0"):
        train_mrem_s(train_job(*tiny_pair(), tiny_encoded(), [0, 3], steps=2, store=store))


def own(metadata: dict[str, str]) -> dict[str, str]:
    """Without what `sealed_metadata` adds."""
    return {key: value for key, value in metadata.items() if key not in (digests.SEAL, digests.TENSORS)}
