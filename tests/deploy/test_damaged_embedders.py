"""`sentence_transformer` opens a result only as it was written."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny_embedder import save_embedder, texts
from tiny_job import job_in, workshop_in, write_jsonl

import mrem_deploy
from mrem_deploy.base.errors import UserError
from mrem_deploy.export.origin import FILE, seal


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An embedder with cls and mean pooling, a Dense module, and prompts."""
    with workshop_in(tmp_path_factory.mktemp("shop")) as shop:
        prompts = {"query": "very good ", "passage": "the film "}
        source = save_embedder(shop / "embedder", ["cls", "mean"], dense=12, settings={"prompts": prompts})
        data = write_jsonl(shop / "sentences.jsonl", [{"text": text} for text in texts(40)])
        options = {"task": "feature-extraction", "model": source, "data": data, "method": "ptq"}
        job = job_in(shop, "embedded", export="ort-cpu", steps=None, lr=None, bits="4-4-8", **options)
        assert job.run() == 0
        yield shop / "embedded"


def _flip(name: str, place: int) -> Callable[[Path], None]:
    def flip(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[place] ^= 1
        (folder / name).write_bytes(data)

    return flip


def _foreign_file(folder: Path) -> None:
    """The digest of another result, and of the file with it."""
    graph = onnx.load(folder / "model.onnx")
    entries = {entry.key: entry for entry in graph.metadata_props}
    entries["result_digest"].value, entries[FILE].value = "1" * 64, "0" * 64
    (folder / "model.onnx").write_bytes(seal(graph.SerializeToString()))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "ONNX file": (_flip("model.onnx", 5000), "has changed since it was exported"),
    "ONNX file of another result": (_foreign_file, "was exported from another result"),
    "manifest": (_flip("mrem.json", -20), "mrem.json"),
    "config": (_flip("config.json", -3), "config.json"),
    "tokenizer": (_flip("tokenizer.json", -30), "tokenizer"),
    "no tokenizer settings": (lambda folder: (folder / "tokenizer_config.json").unlink(), "is missing"),
    "pooling": (_flip("1_Pooling/config.json", -3), "1_Pooling/config.json"),
    "weights of Dense": (_flip("2_Dense/model.safetensors", -1), "2_Dense/model.safetensors has changed"),
    "prompts": (_flip("config_sentence_transformers.json", 20), "config_sentence_transformers.json"),
    "a module less": (lambda folder: (folder / "modules.json").unlink(), "modules.json"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_embedder_is_not_opened(what: str, result: Path, tmp_path: Path) -> None:
    damage, says = DAMAGE[what]
    folder = Path(shutil.copytree(result, tmp_path / "copy"))
    mrem_deploy.sentence_transformer(folder)
    damage(folder)
    with pytest.raises(UserError, match=says):
        mrem_deploy.sentence_transformer(folder)


def test_what_onnxruntime_needs_is_enough(result: Path, tmp_path: Path) -> None:
    """A copy without the tensors has digests of all the rest; one without the manifest, of the ONNX file."""
    folder = Path(shutil.copytree(result, tmp_path / "copy"))
    expected = mrem_deploy.sentence_transformer(result).encode("a film")
    for name in ("mrem.safetensors", "mrem.json"):
        (folder / name).unlink()
        np.testing.assert_array_equal(mrem_deploy.sentence_transformer(folder).encode("a film"), expected)
    _flip("model.onnx", 5000)(folder)
    with pytest.raises(UserError, match="has changed since it was exported"):
        mrem_deploy.sentence_transformer(folder)
