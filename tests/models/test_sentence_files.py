"""The files of sentence-transformers: what is read, what is refused, and the vectors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_embedder import add_modules, save_embedder, texts, write_json
from tiny_models import HEAD_NAMES

from mrem_deploy.base.errors import UserError
from mrem_deploy.models.loading import load_model
from mrem_deploy.models.sentence_files import (
    MODULES,
    SETTINGS,
    SentenceFiles,
    read_sentence_files,
    sentence_files,
)
from mrem_deploy.models.sentence_head import POOLINGS, Pooling

TYPES = "sentence_transformers."
POOLING, ENCODER = "1_Pooling/config.json", "sentence_bert_config.json"


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedder(tmp_path_factory.mktemp("embedder") / "model")


@pytest.fixture
def folder(embedder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(embedder, tmp_path / "model")


def vectors_of(folder: Path, sentences: list[str]) -> np.ndarray:
    """By torch's encoder and our head, all in one batch."""
    model, tokenizer = load_model(folder, "feature-extraction")
    found = sentence_files(folder)
    sentences = [found.prompt() + sentence for sentence in sentences]
    tokens = tokenizer(sentences, padding=True, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**tokens).last_hidden_state.numpy()
    return found.head(hidden, tokens["attention_mask"].numpy())


def test_what_is_read(folder: Path) -> None:
    settings = {"prompts": {"query": "Q: ", "passage": "P: "}, "default_prompt_name": "query"}
    write_json(folder / SETTINGS, settings | {"similarity_fn_name": "dot", "truncate_dim": 8})
    found = read_sentence_files(folder)
    assert found is not None
    assert (found.max_seq_length, found.similarity, found.head.truncate_dim) == (32, "dot", 8)
    assert found.head.pooling == Pooling(("mean",))
    assert found.prompt() == "Q: "
    assert found.prompt("document", "passage") == ""  # which sentence-transformers fills in
    assert set(found.files) == {MODULES, SETTINGS, "sentence_bert_config.json", "1_Pooling/config.json"}
    assert found.files[MODULES] == (folder / MODULES).read_bytes()
    assert found.head.width(16) == 8


@pytest.mark.parametrize("names", ["models.{}", "sentence_transformer.modules.{}", "base.modules.x.{}"])
def test_the_names_of_all_releases(names: str, folder: Path) -> None:
    kinds = ("Transformer", "Pooling", "Normalize")
    write_json(folder / MODULES, [{"type": TYPES + names.format(kind), "path": f"{i}_{kind}" if i else ""}
                                  for i, kind in enumerate(kinds)])  # fmt: skip
    found = read_sentence_files(folder)
    assert found is not None
    assert len(found.head.after) == 1


def test_a_plain_encoder_has_the_mean(tmp_path: Path) -> None:
    assert read_sentence_files(tmp_path) is None
    assert sentence_files(tmp_path, tmp_path / "nowhere") == SentenceFiles()
    assert sentence_files(tmp_path).head.pooling.modes == ("mean",)


def test_pooling_without_modules(tmp_path: Path) -> None:
    path = tmp_path / "1_Pooling" / "config.json"
    for key, expected in (("cls_token", "cls"), ("mean_tokens", "mean"), ("lasttoken", "lasttoken")):
        write_json(path, {f"pooling_mode_{key}": True, "word_embedding_dimension": 16})
        found = sentence_files(tmp_path)
        assert found.head.pooling.modes == (expected,)
        assert found.files == {"1_Pooling/config.json": path.read_bytes()}


def test_a_link_of_the_cache_of_the_hub(folder: Path, tmp_path: Path) -> None:
    """Its files are links to blobs beside the snapshots, those of inner folders too."""
    home = tmp_path / "models--a--b"
    snapshot = home / "snapshots" / "c0ffee"
    shutil.copytree(folder, snapshot)
    (home / "blobs").mkdir()
    inner = snapshot / "1_Pooling" / "config.json"
    inner.rename(home / "blobs" / "1")
    inner.symlink_to(home / "blobs" / "1")
    assert sentence_files(snapshot).head.pooling.modes == ("mean",)


# -- vectors by hand ---------------------------------------------------------------------------------------

HIDDEN = np.array([[[1.0, 10.0], [3.0, 20.0], [99.0, -99.0]], [[-7.0, 7.0], [2.0, 4.0], [4.0, 5.0]]])
MASK = np.array([[1, 1, 0], [0, 1, 1]])  # padding on the right, and on the left
BY_HAND = {
    "cls": [[1, 10], [2, 4]],
    "max": [[3, 20], [4, 5]],
    "mean": [[2, 15], [3, 4.5]],
    "mean_sqrt_len_tokens": [[4 / 2**0.5, 30 / 2**0.5], [6 / 2**0.5, 9 / 2**0.5]],
    "weightedmean": [[7 / 3, 50 / 3], [10 / 3, 14 / 3]],
    "lasttoken": [[3, 20], [4, 5]],
}


@pytest.mark.parametrize("mode", POOLINGS)
def test_pooling_by_hand(mode: str) -> None:
    np.testing.assert_allclose(Pooling((mode,))(HIDDEN, MASK), BY_HAND[mode], rtol=1e-12)


def test_poolings_are_joined_in_the_order_of_the_file() -> None:
    both = Pooling(("mean", "cls"))(HIDDEN, MASK)
    np.testing.assert_allclose(both, np.hstack([BY_HAND["mean"], BY_HAND["cls"]]), rtol=1e-12)


def test_a_prompt_can_be_left_out() -> None:
    pooled = Pooling(("mean",), include_prompt=False)(HIDDEN, MASK, prompt_length=1)
    np.testing.assert_allclose(pooled, [[3, 20], [4, 5]])
    np.testing.assert_allclose(Pooling()(HIDDEN, MASK, prompt_length=1), BY_HAND["mean"])


# -- the same vectors as the library -----------------------------------------------------------------------

EMBEDDERS: dict[str, dict[str, Any]] = {
    "mean": {},
    "cls": {"pooling": "cls"},
    "max and lasttoken": {"pooling": ["max", "lasttoken"]},
    "weightedmean": {"pooling": "weightedmean", "normalize": False},
    "mean_sqrt_len_tokens": {"pooling": "mean_sqrt_len_tokens", "normalize": False},
    "dense": {"dense": 5},
    "dense of two poolings": {"pooling": ["cls", "mean"], "dense": 7, "normalize": False},
    "dense without activation": {"dense": 5, "activation": "torch.nn.modules.linear.Identity"},
    "gelu": {"dense": 5, "activation": "torch.nn.modules.activation.GELU"},
    "truncated": {"settings": {"truncate_dim": 6}},
    "prompt": {"settings": {"prompts": {"x": "very good "}, "default_prompt_name": "x"}},
    "short": {"encoder": {"max_seq_length": 7}},
}


@pytest.mark.parametrize("name", EMBEDDERS)
def test_the_vectors_are_those_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="the library to compare with")
    save_embedder(tmp_path / "model", **EMBEDDERS[name])
    theirs = library.SentenceTransformer(str(tmp_path / "model"), device="cpu").encode(texts(9))
    ours = vectors_of(tmp_path / "model", texts(9))
    assert ours.shape == theirs.shape
    # Float sums over at most 32 tokens and 32 channels, in another order.
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)


# -- what is refused ---------------------------------------------------------------------------------------


def edit(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def arrange(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        change(content)
        write_json(path, content)

    return arrange


def renamed(kind: str) -> Callable[[Path], None]:
    return edit(MODULES, lambda entries: entries[1].update(type=kind))


REFUSED: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "an unknown module": (lambda p: add_modules(p, "Pooling", "LSTM"), ("LSTM", "known are", "Transformer")),
    "a module of other code": (renamed("os.system"), ("'os.system'", "not known")),
    "a class of its own name": (renamed("evil.Pooling"), ("'evil.Pooling'", "not known")),
    "no pooling": (lambda p: add_modules(p, "Normalize"), ("Transformer, Normalize", "Pooling")),
    "two poolings": (lambda p: add_modules(p, "Pooling", "Pooling"), ("each of them once",)),
    "no modules at all": (edit(MODULES, lambda m: m.clear()), ("none",)),
    "modules that are no list": (lambda p: write_json(p / MODULES, {"a": 1}), ("array", "dict")),
    "a module without a path": (edit(MODULES, lambda m: m[1].pop("path")), ("type and path",)),
    "a module elsewhere": (edit(MODULES, lambda m: m[1].update(path="../x")), ("'..'",)),
    "an absolute path": (edit(MODULES, lambda m: m[1].update(path="/etc")), ("name of a file",)),
    "an encoder in a folder": (edit(MODULES, lambda m: m[0].update(path="0_T")), ("0_T", "of its own")),
    "settings that are missing": (lambda p: (p / POOLING).unlink(), ("1_Pooling/config.json",)),
    "an unknown pooling": (edit(POOLING, lambda c: c.update(pooling_mode="sum")), ("'sum'",)),
    "an unknown key of pooling": (edit(POOLING, lambda c: c.update(trick=1)), ("trick",)),
    "a length of 0": (edit(ENCODER, lambda c: c.update(max_seq_length=0)), ("max_seq",)),
    "a length in words": (edit(ENCODER, lambda c: c.update(max_seq_length="9")), ("'9'",)),
    "processing": (edit(ENCODER, lambda c: c.update(processing_kwargs={"text": {"a": 1}})),
                   ("processing_kwargs",)),
    "prompts in numbers": (edit(SETTINGS, lambda c: c.update(prompts={"query": 1})), ("prompts",)),
    "an unknown default prompt": (edit(SETTINGS, lambda c: c.update(default_prompt_name="z")), ("'z'",)),
    "an unknown similarity": (edit(SETTINGS, lambda c: c.update(similarity_fn_name="maxsim")), ("'maxsim'",)),
    "a sparse encoder": (edit(SETTINGS, lambda c: c.update(model_type="SparseEncoder")), ("SparseEncoder",)),
    "a cross-encoder": (edit(SETTINGS, lambda c: c.update(model_type="CrossEncoder")), ("CrossEncoder",)),
    "JSON that is none": (lambda p: (p / MODULES).write_text("[{"), ("not valid JSON",)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, folder: Path) -> None:
    arrange, said = REFUSED[name]
    arrange(folder)
    with pytest.raises(UserError) as raised:
        load_model(folder, "feature-extraction")
    assert all(word in str(raised.value) for word in said), raised.value


def break_dense(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    return edit("2_Dense/config.json", change)


DENSE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no weights": (lambda p: (p / "2_Dense/model.safetensors").unlink(), "model.safetensors"),
    "another size": (break_dense(lambda c: c.update(out_features=9)), "its settings call for"),
    "no size": (break_dense(lambda c: c.pop("in_features")), "in_features"),
    "an activation of its own": (break_dense(lambda c: c.update(activation_function="evil.Tanh")), "evil"),
    "another place": (break_dense(lambda c: c.update(module_input_name="tokens")), "module_input_name"),
    "another pooling before it": (
        edit("1_Pooling/config.json", lambda c: c.update(pooling_mode=["cls", "mean"])),
        "takes vectors of 16 numbers, but gets 32",
    ),
    "half a file": (lambda p: (p / "2_Dense/model.safetensors").write_bytes(b"abc"), "cannot be read"),
}


@pytest.mark.parametrize("name", DENSE)
def test_what_a_dense_module_may_not_be(name: str, tmp_path: Path) -> None:
    folder = save_embedder(tmp_path / "model", dense=4)
    arrange, said = DENSE[name]
    arrange(folder)
    with pytest.raises(UserError, match=said):
        read_sentence_files(folder)


@pytest.mark.parametrize("head", [name for name in HEAD_NAMES if name != "feature-extraction"])
def test_other_tasks_do_not_look_at_the_modules(head: str, folder: Path) -> None:
    """An embedder with modules of any kind can be fine-tuned to something else."""
    add_modules(folder, "LSTM")
    load_model(folder, head, allow_new_head=True)


def test_a_tokenizer_takes_the_length_and_the_case(folder: Path) -> None:
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 9, "do_lower_case": True})
    tokenizer = load_model(folder, "feature-extraction")[1]
    assert tokenizer.model_max_length == 9
    assert tokenizer.backend_tokenizer.normalizer is not None
    assert tokenizer(["GOOD Film"])["input_ids"] == tokenizer(["good film"])["input_ids"]
