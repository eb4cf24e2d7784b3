"""Saved = loaded, truly packed, and a broken folder is refused with what to do."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, HEAD_NAMES, heads_of, state_of, tiny_batch, tiny_pair
from torch import nn

import mrem_deploy
from mrem_deploy.base.errors import UserError
from mrem_deploy.kernels import unpack
from mrem_deploy.models.architectures import model_outputs
from mrem_deploy.numerics import from_stored
from mrem_deploy.quant import artifact
from mrem_deploy.quant.frozen import FrozenModel, freeze
from mrem_deploy.quant.spec import QuantSpec

SPECS = [
    QuantSpec(2, 2, 8),
    QuantSpec(3, 8, 4, per_channel=True),  # 3-bit codes cross byte borders
    QuantSpec(4, 4, 8, symmetric=True, keep_fp=("*.1.*",)),
    QuantSpec(8, 32, 32),
    QuantSpec(2, 2, 8, weight_quantizer="midrise"),
]


def outputs_of(model: nn.Module, kind: str = "bert") -> list[torch.Tensor]:
    with torch.no_grad():
        return model_outputs(model(**tiny_batch(kind)))


def saved(
    folder: Path, kind: str = "bert", spec: QuantSpec = SPECS[0], head: str = HEAD_NAMES[0]
) -> nn.Module:
    _, student = tiny_pair(kind, head, spec)
    frozen = freeze(student, head)
    frozen.notes = {"bits": "2-2-8"}
    frozen.save(folder)
    return student


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_saved_equals_loaded(tmp_path: Path, kind: str, spec: QuantSpec) -> None:
    student = saved(tmp_path / "model", kind, spec, heads_of(kind)[0])
    loaded = mrem_deploy.load(tmp_path / "model")
    for came, expected in zip(outputs_of(loaded, kind), outputs_of(student, kind), strict=True):
        assert torch.equal(came, expected)
    assert not loaded.training


@pytest.mark.parametrize("head", HEAD_NAMES[1:])
def test_every_head_is_loaded_as_itself(tmp_path: Path, head: str) -> None:
    student = saved(tmp_path, head=head)
    loaded = mrem_deploy.load(str(tmp_path))
    assert type(loaded).__name__ == type(student).__name__
    for came, expected in zip(outputs_of(loaded), outputs_of(student), strict=True):
        assert torch.equal(came, expected)


@pytest.mark.parametrize("spec", [QuantSpec(3, 4, 8), QuantSpec(2, 8, 8, weight_quantizer="midrise")])
def test_read_gives_back_every_tensor(tmp_path: Path, spec: QuantSpec) -> None:
    frozen = freeze(tiny_pair(spec=spec)[1], "sequence-classification")
    frozen.notes = {"recipe_digest": "abc", "steps": 3}
    frozen.save(tmp_path)
    came = FrozenModel.read(tmp_path)
    assert came.head == frozen.head
    assert came.notes == frozen.notes
    assert came.config.to_dict()["num_hidden_layers"] == 3
    assert came.weights.keys() == frozen.weights.keys()
    for name, weight in frozen.weights.items():
        assert torch.equal(came.weights[name].codes, weight.codes)
        assert came.weights[name].codes.dtype == torch.int8
        assert torch.equal(came.weights[name].scale, weight.scale)
        assert (came.weights[name].bits, came.weights[name].spacing) == (weight.bits, weight.spacing)
    assert came.scales.keys() == frozen.scales.keys()
    for name, step in frozen.scales.items():
        assert torch.equal(came.scales[name].scale, step.scale)
        assert came.scales[name].grid == step.grid
    assert came.full.keys() == frozen.full.keys()
    for name, value in frozen.full.items():
        assert torch.equal(came.full[name], value)


def test_integers_are_truly_packed_under_names_of_their_own(tmp_path: Path) -> None:
    _, student = tiny_pair(spec=QuantSpec(3, 2, 8))
    frozen = freeze(student, "sequence-classification")
    frozen.save(tmp_path)
    tensors = load_file(tmp_path / artifact.TENSORS)
    assert {name.partition("/")[0] for name in tensors} == {"codes", "scale", "step", "full"}
    for name, weight in frozen.weights.items():
        stored = tensors[f"codes/{name}"]
        assert stored.dtype == torch.uint8
        assert stored.numel() == -(-weight.codes.numel() * weight.bits // 8)
        codes = unpack(stored.numpy(), weight.bits, weight.codes.numel())
        assert np.array_equal(from_stored(codes, weight.spacing), weight.codes.numpy().reshape(-1))
    # No Hugging Face name, so nothing mistakes the file for ordinary weights.
    assert not set(tensors) & set(student.state_dict())
    payload = sum(value.numel() * value.element_size() for value in tensors.values())
    scales = sum(4 * v.numel() for name, v in tensors.items() if name.startswith(("scale/", "step/")))
    assert payload - scales == pytest.approx(
        frozen.formula_mb() * 2**20, abs=len(frozen.weights)
    )  # whole bytes


def test_odd_codes_take_two_bits_and_are_named_in_the_manifest(tmp_path: Path) -> None:
    spec = QuantSpec(2, 2, 8, weight_quantizer="midrise", layer_bits=(("bert.pooler.dense", 4),))
    frozen = freeze(tiny_pair(spec=spec)[1], "sequence-classification")
    frozen.save(tmp_path)
    entries = json.loads((tmp_path / artifact.MANIFEST).read_text())["weights"]
    tensors = load_file(tmp_path / artifact.TENSORS)
    for name, weight in frozen.weights.items():
        if name == "bert.pooler.dense":
            assert entries[name] == {"bits": 4, "shape": [16, 16]}
            continue
        assert entries[name] == {"bits": 2, "shape": list(weight.codes.shape), "grid": "midrise"}
        assert set(weight.codes.unique().tolist()) == {-3, -1, 1, 3}
        stored = unpack(tensors[f"codes/{name}"].numpy(), 2, weight.codes.numel())
        assert np.array_equal(2 * stored + 1, weight.codes.numpy().reshape(-1))


def test_the_folder_holds_no_pickle(tmp_path: Path) -> None:
    saved(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", artifact.MANIFEST, artifact.TENSORS}
    manifest = json.loads((tmp_path / artifact.MANIFEST).read_text())
    assert (manifest["format"], manifest["format_version"]) == (artifact.FORMAT, artifact.FORMAT_VERSION)
    assert manifest["weights"]["bert.pooler.dense"] == {"bits": 2, "shape": [16, 16], "grid": "midrise"}


def test_saving_over_an_older_result_replaces_it(tmp_path: Path) -> None:
    saved(tmp_path, spec=SPECS[3])
    student = saved(tmp_path, spec=SPECS[0])
    assert torch.equal(outputs_of(mrem_deploy.load(tmp_path))[0], outputs_of(student)[0])


def test_a_loaded_model_is_saved_nowhere_by_accident(tmp_path: Path) -> None:
    """Two loads are independent: changing one does not change the other or the folder."""
    saved(tmp_path)
    first, second = mrem_deploy.load(tmp_path), mrem_deploy.load(tmp_path)
    before = state_of(second)
    with torch.no_grad():
        for value in first.parameters():
            value.zero_()
    assert all(torch.equal(second.state_dict()[name], value) for name, value in before.items())


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def rewrite(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / artifact.MANIFEST
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def lose_tensor(folder: Path) -> None:
    tensors = load_file(folder / artifact.TENSORS)
    del tensors["codes/bert.pooler.dense"]
    save_file(tensors, folder / artifact.TENSORS)


def name_another_grid(folder: Path) -> None:
    path = folder / artifact.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["weights"]["bert.pooler.dense"]["grid"] = "cubic"
    path.write_text(json.dumps(manifest))


def cut_short(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-40])

    return change


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (drop(artifact.MANIFEST), artifact.MANIFEST),
        (drop(artifact.TENSORS), artifact.TENSORS),
        (drop("config.json"), "config.json"),
        (cut_short(artifact.MANIFEST), "json"),
        (cut_short(artifact.TENSORS), artifact.TENSORS),
        (cut_short("config.json"), "config.json"),
        (rewrite(format_version=99), "99"),
        (rewrite(format="other"), "other"),
        (lose_tensor, "bert.pooler.dense"),
        (name_another_grid, "cubic"),
    ],
    ids=[
        "no manifest",
        "no tensors",
        "no config",
        "cut manifest",
        "cut tensors",
        "cut config",
        "later",
        "other",
        "lost",
        "unknown grid",
    ],
)
def test_a_broken_folder_is_refused(tmp_path: Path, damage: Callable[[Path], None], named: str) -> None:
    saved(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError) as caught:
        mrem_deploy.load(tmp_path)
    assert named in caught.value.problem
    assert caught.value.remedy


def test_a_full_disk_leaves_the_older_result_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = saved(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(artifact, "save_file", full)
        with pytest.raises(UserError, match="no space"):
            saved(tmp_path, spec=SPECS[3])
    assert torch.equal(outputs_of(mrem_deploy.load(tmp_path))[0], outputs_of(student)[0])
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", artifact.MANIFEST, artifact.TENSORS}
