"""`mrem verify`: what it looks at, what it says, and its exit codes."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_bert import save_tiny_bert
from tiny_models import tiny_pair
from tiny_onnx import save_tiny_onnx

from mrem_deploy import __main__ as command
from mrem_deploy.base.digests import UNSEALED
from mrem_deploy.export.origin import FILE, RESULT, origin_of, seal
from mrem_deploy.quant.artifact import CONFIG, MANIFEST, TENSORS
from mrem_deploy.quant.frozen import FrozenModel, freeze
from mrem_deploy.quant.spec import QuantSpec
from mrem_deploy.recipe import Recipe, from_yaml, make_recipe
from mrem_deploy.result import RECIPE, Metrics, Onnx, verification
from mrem_deploy.result.recipe_file import write_recipe
from mrem_deploy.train.checkpoint import CheckpointStore

HEAD = "sequence-classification"
FLIPS = 60
Verify = Callable[[Path], tuple[int, str]]


@pytest.fixture(scope="module")
def frozen() -> FrozenModel:
    return freeze(tiny_pair(spec=QuantSpec(4, 4, 8))[1], HEAD)


@pytest.fixture(scope="module")
def original(frozen: FrozenModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result with a tokenizer and an ONNX file."""
    folder = tmp_path_factory.mktemp("verify")
    tokenizer = save_tiny_bert(folder / "other")
    frozen.save(folder / "result")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / "result" / name)
    write_onnx(folder / "result" / "model.onnx", frozen.digest)
    return folder / "result"


def write_onnx(path: Path, result_digest: str) -> None:
    """Any graph with the metadata of an export, which takes seconds; tests/export shows that it has them."""
    save_tiny_onnx(path)
    model = onnx.load(path)
    onnx.helper.set_model_props(model, {RESULT: result_digest, FILE: UNSEALED})
    path.write_bytes(seal(model.SerializeToString()))


@pytest.fixture
def result(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "result"))


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Verify:
    def run(folder: Path) -> tuple[int, str]:
        code = command.main(["verify", str(folder)])
        told = capsys.readouterr()
        return code, told.out + told.err

    return run


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_a_whole_result(result: Path, verify: Verify) -> None:
    before = {path.name: path.read_bytes() for path in result.iterdir()}
    code, told = verify(result)
    assert code == 0
    for word in (TENSORS, MANIFEST, CONFIG, "model.onnx", "tokenizer", "SHA-256", "as it was written"):
        assert word in told
    assert "DAMAGED" not in told
    assert {path.name: path.read_bytes() for path in result.iterdir()} == before


@pytest.mark.parametrize("missing", ["model.onnx", "model_int8.onnx"])
def test_an_onnx_file_that_the_run_wrote_is_missing(result: Path, verify: Verify, missing: str) -> None:
    Metrics(onnx=Onnx(file="model.onnx", profile="ort-cpu")).write(result)
    (result / RECIPE).write_text("model: m\ntask: t\ndata: d\nout: o\nexport: ort-cpu, int8\n")
    shutil.copy(result / "model.onnx", result / "model_int8.onnx")
    assert verify(result)[0] == 0
    (result / missing).unlink()
    code, told = verify(result)
    assert code == 1
    assert f"{missing} is missing" in told


def test_a_result_that_never_had_an_onnx_file(result: Path, verify: Verify) -> None:
    Metrics().write(result)
    (result / "model.onnx").unlink()
    assert verify(result)[0] == 0


@pytest.mark.parametrize("file", [5, ["model.onnx"], "../model.onnx", "", "\ud800"])
def test_metrics_that_name_no_file_of_ours(result: Path, verify: Verify, file: object) -> None:
    (result / "metrics.json").write_text(json.dumps({"onnx": {"file": file}}))
    code, told = verify(result)
    assert code in (0, 1)
    assert "is missing" not in told


@pytest.mark.parametrize("name", [TENSORS, MANIFEST, CONFIG, "model.onnx", "tokenizer.json"])
@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_a_file_that_is_cut_short(result: Path, verify: Verify, name: str, kept: float) -> None:
    data = (result / name).read_bytes()
    (result / name).write_bytes(data[: int(kept * len(data))])
    code, told = verify(result)
    assert code == 1
    assert "DAMAGED" in told
    assert name.partition(".")[0] in told


def test_findings_are_all_listed(result: Path, verify: Verify) -> None:
    flip(result / TENSORS, 8 * ((result / TENSORS).stat().st_size - 1))
    flip(result / CONFIG, 8 * 100)
    flip(result / "model.onnx", 8 * 1000)
    code, told = verify(result)
    assert code == 1
    assert told.count("\n         - ") >= 2
    assert "model.onnx has changed since it was exported" in told


def test_a_result_of_an_earlier_release_is_said_to_be_one(result: Path, verify: Verify) -> None:
    manifest = json.loads((result / MANIFEST).read_text())
    del manifest["digests"]
    (result / MANIFEST).write_text(json.dumps(manifest))
    code, told = verify(result)
    assert code == 0
    assert "an earlier release wrote it, without SHA-256" in told


@pytest.mark.parametrize(
    ("place", "says"),
    [("gone", "does not exist"), (f"result/{MANIFEST}", "is a file"), ("empty", "neither a result")],
)
def test_a_users_mistake(result: Path, verify: Verify, place: str, says: str) -> None:
    (result.parent / "empty").mkdir()
    code, told = verify(result.parent / place)
    assert code == 2
    assert says in told
    assert "→" in told


def test_every_flipped_bit_of_the_recipe_is_reported(result: Path, verify: Verify) -> None:
    path, draw = result / RECIPE, random.Random(2)
    write_recipe(path, Recipe(model="m", task="sst2", data="d", out="o"))
    assert verify(result)[0] == 0
    assert make_recipe(from_yaml(path)) == Recipe(model="m", task="sst2", data="d", out="o")
    whole = path.read_bytes()
    bits = [
        *range(8 * 80),
        *(draw.randrange(8 * len(whole)) for _ in range(FLIPS)),
    ]
    for bit in bits:
        flip(path, bit)
        assert verification._recipe_check(result).findings, f"bit {bit} went unnoticed"
        path.write_bytes(whole)
    for kept in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:kept])
        assert verify(result)[0] == 1, f"the cut after {kept} bytes went unnoticed"


def test_a_recipe_of_an_earlier_release(result: Path, verify: Verify) -> None:
    (result / RECIPE).write_text(Recipe(model="m", task="sst2", data="d", out="o").to_yaml())
    assert verify(result)[0] == 0


# -- ONNX --------------------------------------------------------------------------------------------------


def test_every_flipped_bit_of_an_onnx_file_is_reported(result: Path) -> None:
    path, draw = result / "model.onnx", random.Random(1)
    whole = path.read_bytes()
    metadata = whole.rfind(RESULT.encode()) - 10  # and some in the digests themselves
    bits = [draw.randrange(8 * len(whole)) for _ in range(FLIPS)]
    bits += [draw.randrange(8 * metadata, 8 * len(whole)) for _ in range(FLIPS)]
    for bit in bits:
        flip(path, bit)
        assert origin_of(path).changed, f"bit {bit} went unnoticed"
        path.write_bytes(whole)
    assert origin_of(path).changed is False


def test_an_onnx_file_of_another_result(
    result: Path, verify: Verify, frozen: FrozenModel, tmp_path: Path
) -> None:
    other = FrozenModel.read(result)
    other.full["classifier.bias"] = other.full["classifier.bias"] + 1
    other.save(result)
    code, told = verify(result)
    assert code == 1
    assert "exported from another result" in told


def forget_digests(path: Path) -> None:
    model = onnx.load(path)
    kept = [entry for entry in model.metadata_props if entry.key not in (RESULT, FILE)]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    onnx.save(model, path)


def test_an_onnx_file_of_another_tool(result: Path, verify: Verify) -> None:
    forget_digests(result / "model.onnx")
    code, told = verify(result)
    assert code == 0
    assert "model.onnx (nothing: an earlier release or another tool wrote it" in told


def test_an_onnx_file_that_has_lost_its_digests(result: Path, verify: Verify) -> None:
    """The run exported it, and everything that it wrote has digests: so this is another file by now."""
    Metrics(onnx=Onnx(file="model.onnx", profile="ort-cpu")).write(result)
    assert verify(result)[0] == 0
    forget_digests(result / "model.onnx")
    code, told = verify(result)
    assert code == 1
    assert "model.onnx lacks its SHA-256" in told


def test_an_onnx_file_of_an_earlier_release(result: Path, verify: Verify) -> None:
    Metrics(onnx=Onnx(file="model.onnx", profile="ort-cpu")).write(result)
    forget_digests(result / "model.onnx")
    manifest = json.loads((result / MANIFEST).read_text())
    (result / MANIFEST).write_text(json.dumps({k: v for k, v in manifest.items() if k != "digests"}))
    assert verify(result)[0] == 0


def test_export_refuses_a_damaged_folder(
    result: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(result / TENSORS, 8 * ((result / TENSORS).stat().st_size - 1))
    assert command.main(["export", str(result), "--out", str(tmp_path / "new.onnx")]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / "new.onnx").exists()


# -- checkpoints -------------------------------------------------------------------------------------------


@pytest.fixture
def work(tmp_path: Path) -> Path:
    store = CheckpointStore(tmp_path / ".out.work", {"bits": "4-4-8"}, resume=False)
    for name in ("module-0", "module-1"):
        store.save(name, {"a": torch.ones(3)}, {"step": 1})
    return tmp_path / ".out.work"


@pytest.mark.parametrize("name", ["out", ".out.work"])
def test_checkpoints_of_an_interrupted_run(work: Path, verify: Verify, name: str) -> None:
    code, told = verify(work.parent / name)
    assert code == 0
    assert ".out.work/module-1.safetensors (1 tensors: SHA-256" in told
    path = work / "module-1.safetensors"
    flip(path, 8 * (path.stat().st_size - 1))
    code, told = verify(work.parent / name)
    assert code == 1
    assert "the tensor a has changed" in told
    assert "ok       .out.work/module-0.safetensors" in told


def test_a_checkpoint_of_another_run(work: Path, verify: Verify) -> None:
    other = CheckpointStore(work.parent / "other", {"bits": "2-2-8"}, resume=False)
    other.save("module-1", {"a": torch.ones(3)}, {"step": 1})
    shutil.copy(work.parent / "other" / "module-1.safetensors", work)
    code, told = verify(work)
    assert code == 1
    assert "module-1.safetensors was written by another run than run.json names" in told


@pytest.mark.parametrize("dropped", [("identity",), ("sha256", "tensors"), ("identity", "sha256", "tensors")])
def test_a_checkpoint_without_its_digests(work: Path, verify: Verify, dropped: tuple[str, ...]) -> None:
    path = work / "module-1.safetensors"
    with safe_open(path, "pt") as file:
        about = {key: value for key, value in file.metadata().items() if key not in dropped}
    save_file({"a": torch.zeros(3)}, path, metadata=about)
    code, told = verify(work)
    assert code == 1
    assert "module-1.safetensors" in told.split("DAMAGED")[1]


def test_checkpoints_next_to_a_result(result: Path, work: Path, verify: Verify) -> None:
    work.rename(result.parent / ".result.work")
    (result.parent / ".result.work" / "run.json").write_text("{")
    code, told = verify(result)
    assert code == 1
    assert "run.json cannot be read" in told
