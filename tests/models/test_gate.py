"""The gate: nothing in a folder decides which code runs, which files are read, or how much memory goes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_bert import save_tiny_bert
from tiny_models import ARCHITECTURES, tiny_model

from mrem_deploy.base.errors import UserError
from mrem_deploy.models import gate
from mrem_deploy.models.loading import load_config, load_model, load_tokenizer

SEQUENCE = "sequence-classification"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_bert(tmp_path_factory.mktemp("gate") / "model")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes whether transformers was asked to build anything."""
    calls: list[str] = []

    def build(*arguments: Any, **options: Any) -> Any:
        calls.append("from_pretrained")
        raise AssertionError("transformers must not see this folder")

    monkeypatch.setattr(transformers.AutoModelForSequenceClassification, "from_pretrained", build)
    return calls


def edit(folder: Path, name: str = "config.json", **changes: Any) -> None:
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_model(folder, SEQUENCE)
    assert caught.value.remedy
    return caught.value.problem


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"auto_map": {"AutoConfig": "own.Config"}}, "its own code"),
        ({"auto_map": {"AutoModelForSequenceClassification": "a/b--own.Model"}}, "its own code"),
        ({"auto_map": "own"}, "its own code"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized already"),
        ({"attn_implementation": "someone/kernel"}, "someone/kernel"),
        ({"_attn_implementation": "someone/kernel@v1:fn"}, "someone/kernel"),
        ({"_attn_implementation": "flash_attention_2"}, "flash_attention_2"),
        ({"_attn_implementation_internal": "someone/kernel"}, "someone/kernel"),
        ({"attn_implementation": {"": "someone/kernel"}}, "someone/kernel"),
        ({"transformers_weights": "adapter_model.bin"}, "transformers_weights"),
        ({"fusion_config": {"x": True}}, "fusion_config"),
        ({"per_layer_config": {"0": {"hidden_size": 5}}}, "per_layer_config"),
        ({"model_type": "gpt2"}, "'gpt2' is not supported"),
        ({"model_type": ["bert"]}, "is not supported"),
        ({"model_type": None}, "is not supported"),
        ({"num_hidden_layers": 10_000_000}, "num_hidden_layers to 10000000"),
        ({"num_hidden_layers": -1}, "num_hidden_layers to -1"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers to 2.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers to True"),
        ({"hidden_size": 10**9}, "hidden_size"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings"),
        ({"num_labels": 10**9}, "num_labels"),
        ({"id2label": {str(i): "x" for i in range(100_001)}}, "100,001 entries"),
        ({"num_hidden_layers": 400}, "do not fit"),  # plausible alone, but not in a file of 60 kB
        ({"hidden_size": 40_000}, "do not fit"),
        ({"vocab_size": 1_000_000}, "do not fit"),
        ({"to_dict": 1}, "'to_dict'"),
        ({"__class__": "x"}, "'__class__'"),
        ({"use_return_dict": True}, "'use_return_dict'"),
    ],
)
def test_what_config_json_may_not_say(
    folder: Path, built: list[str], changes: dict[str, Any], says: str
) -> None:
    edit(folder, **changes)
    assert says in refusal(folder)
    with pytest.raises(UserError):
        load_config(str(folder))
    assert not built


@pytest.mark.parametrize(
    "changes",
    [
        {"auto_map": {}},
        {"quantization_config": None},
        {"attn_implementation": "eager"},
        {"_attn_implementation": "sdpa"},
        {"_attn_implementation_autoset": True},
    ],
)
def test_what_it_may_say(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder, **changes)
    assert load_model(folder, SEQUENCE)[0].config._attn_implementation in ("eager", "sdpa")


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe{}", b"[]", b'{"a":' * 5000, b'{"x": "\\ud800"}'])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_json_that_is_none(folder: Path, built: list[str], name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    assert "cannot be read" in refusal(folder)
    assert not built


def shards(folder: Path, name: str) -> None:
    """An index that names one file."""
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / gate.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pytorch_model.bin", "not a safetensors file"),
        ("/etc/passwd", "not the name of a file in it"),
        ("../model/part.safetensors", "not the name of a file in it"),
        ("sub/part.safetensors", "not the name of a file in it"),
        ("..\\part.safetensors", "not the name of a file in it"),
        ("C:\\part.safetensors", "not the name of a file in it"),
        ("part.safetensors\0", "not the name of a file in it"),
        ("", "not the name of a file in it"),
        ("gone.safetensors", "has no gone.safetensors"),
    ],
)
def test_names_in_an_index(folder: Path, built: list[str], name: str, says: str) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    shards(folder, name)
    assert says in refusal(folder)
    assert not built


@pytest.mark.parametrize("content", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_an_index_without_names(folder: Path, built: list[str], content: dict[str, Any]) -> None:
    shards(folder, "part.safetensors")
    (folder / gate.INDEX).write_text(json.dumps(content))
    assert "weight_map" in refusal(folder)


def test_an_index_beside_the_whole_file_is_looked_at_too(folder: Path) -> None:
    (folder / gate.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": "x.bin"}}))
    assert "x.bin" in refusal(folder)


def test_a_sharded_model_loads(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(folder, SEQUENCE)
    model.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    tokenizer.save_pretrained(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    again, _ = load_model(tmp_path / "shards", SEQUENCE)
    for name, value in model.state_dict().items():
        assert again.state_dict()[name].equal(value)


def test_an_adapter_and_a_distributed_checkpoint(folder: Path, built: list[str]) -> None:
    (folder / "adapter_config.json").write_text("{}")
    assert "adapter" in refusal(folder)
    (folder / "adapter_config.json").unlink()
    shutil.copy(folder / "model.safetensors", folder / "shard-00000-model-00001-of-00001.safetensors")
    assert "distributed" in refusal(folder)
    assert not built


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"auto_map": {"AutoTokenizer": ["own.Slow", None]}}, "its own code"),
        ({"auto_map": ["own.Slow", None]}, "its own code"),
        ({"fast_tokenizer_files": ["../tokenizer.1.0.json"]}, "not the name of a file"),
    ],
)
def test_what_a_tokenizer_may_not_say(
    folder: Path, built: list[str], changes: dict[str, Any], says: str
) -> None:
    edit(folder, "tokenizer_config.json", **changes)
    assert says in refusal(folder)
    with pytest.raises(UserError):
        load_tokenizer(folder)
    assert not built


def test_code_beside_a_tokenizer_is_never_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when somebody at the terminal says yes: nobody is asked."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    edit(folder, auto_map={"AutoConfig": "own.C"}, model_type="abacus")
    with pytest.raises(UserError):
        load_tokenizer(folder)
    assert not (folder / "ran").exists()


# -- links -------------------------------------------------------------------------------------------------


def leads_out(folder: Path, name: str) -> None:
    outside = folder.parent / "outside"
    outside.mkdir(exist_ok=True)
    (folder / name).rename(outside / name)
    (folder / name).symlink_to(outside / name)


def leads_nowhere(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(folder / "gone")


def leads_to_itself(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(folder / name)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("link", [leads_out, leads_nowhere, leads_to_itself])
def test_a_link_out_of_the_folder(folder: Path, name: str, link: Callable[[Path, str], None]) -> None:
    link(folder, name)
    with pytest.raises(UserError):
        load_model(folder, SEQUENCE)


def test_links_that_stay_inside_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    (tmp_path / "alias").symlink_to(folder)  # the folder itself may be a link
    load_model(tmp_path / "alias", SEQUENCE)


def test_a_snapshot_in_the_cache_of_the_hub_loads(original: Path, tmp_path: Path) -> None:
    """There every file is a link to ../../blobs."""
    repository = tmp_path / "models--me--mine"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(original.iterdir()):
        shutil.copy(path, repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    load_model(snapshot, SEQUENCE)
    (snapshot / "config.json").unlink()
    shutil.copy(original / "config.json", tmp_path / "config.json")
    (snapshot / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(UserError, match="leads out of its folder"):
        load_model(snapshot, SEQUENCE)


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    os.mkfifo(folder / "tokenizer_config.json")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "no config.json" in refusal(folder)


# -- the hub -----------------------------------------------------------------------------------------------


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub whose one repository is the folder."""

    def fetched(name: str, file: str, **options: Any) -> str | None:
        assert name == "me/mine"
        if (folder / file).exists():
            return str(folder / file)
        assert options["_raise_exceptions_for_missing_entries"] is False, file
        return None

    monkeypatch.setattr("transformers.utils.cached_file", fetched)
    return folder


def test_a_hub_id_passes_the_same_gate(hub: Path) -> None:
    gate.check_hub_model("me/mine")
    edit(hub, auto_map={"AutoConfig": "own.C"})
    with pytest.raises(UserError, match="its own code"):
        gate.check_hub_model("me/mine")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", {"num_hidden_layers": 10**7}, "num_hidden_layers"),
        ("config.json", {"num_hidden_layers": 400}, "do not fit"),
        ("config.json", {"_attn_implementation": "a/b"}, "a/b"),
        (gate.INDEX, {"weight_map": {"a": "../x.safetensors"}}, "not the name of a file"),
        (gate.INDEX, {"weight_map": {"a": "x.bin"}}, "x.bin"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["own.T", None]}}, "its own code"),
        ("adapter_config.json", {}, "adapter"),
    ],
)
def test_what_a_repository_may_not_hold(hub: Path, name: str, content: dict[str, Any], says: str) -> None:
    edit(hub, name, **content)
    with pytest.raises(UserError, match=says):
        gate.check_hub_model("me/mine")


# -- sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind != "xlm-roberta"])
def test_the_least_number_of_parameters_is_one(kind: str) -> None:
    """At most as many as there are, and most of them: otherwise the check would be idle."""
    model = tiny_model(kind, "feature-extraction")
    least = gate.least_parameters(json.loads(model.config.to_json_string(use_diff=False)))
    assert 0.5 * model.num_parameters() < least <= model.num_parameters()
