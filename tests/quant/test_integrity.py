"""A damaged result is noticed: by digests every single bit, by ranges what digests cannot know."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_bert import save_tiny_bert
from tiny_models import HEAD_NAMES, tiny_pair
from transformers import AutoConfig, AutoTokenizer

import mrem_deploy
from mrem_deploy.base.errors import UserError
from mrem_deploy.kernels import pack
from mrem_deploy.models import packed
from mrem_deploy.quant import artifact
from mrem_deploy.quant.artifact import CONFIG, DIGESTS, MANIFEST, TENSORS, Artifact
from mrem_deploy.quant.frozen import FrozenModel, freeze, inspect, with_hot_rows
from mrem_deploy.quant.hot_rows import HotRows
from mrem_deploy.quant.spec import QuantSpec

POOLER, WORDS = "bert.pooler.dense", "bert.embeddings.word_embeddings"
SOFTMAX = "bert.encoder.layer.0.attention.self.context.left"
FLIPS = 40  # of each file


def with_everything() -> FrozenModel:
    """Per-channel scales, midrise and 4-bit weights, asymmetric activations, hot rows and a shift."""
    spec = QuantSpec(4, 2, 8, per_channel=True, weight_quantizer="midrise", layer_bits=((POOLER, 3),))
    frozen = freeze(tiny_pair(spec=spec)[1], HEAD_NAMES[0])
    table = frozen.weights[WORDS]
    hot = HotRows(
        torch.tensor([2, 7], dtype=torch.int32), torch.ones(2, 16, dtype=torch.int8), torch.ones(2, 1)
    )
    frozen.weights[WORDS] = with_hot_rows(table, hot)
    frozen.shifts = {0: torch.zeros(16)}
    frozen.notes = {"recipe_digest": "abc", "bits": "4-2-8", "seconds": 1e-05}
    return frozen


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_everything().save(tmp_path_factory.mktemp("result"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "result"))


def findings(folder: Path) -> list[str]:
    """What is reported, by whichever way."""
    try:
        return list(inspect(folder).findings)
    except UserError as error:
        return [error.problem]


def test_a_whole_folder_has_no_findings(folder: Path) -> None:
    found = inspect(folder)
    assert (found.findings, found.has_digests) == ((), True)
    assert found.frozen is not None
    assert found.frozen.digest == with_everything().digest


# -- digests -----------------------------------------------------------------------------------------------


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("name", [TENSORS, "header", MANIFEST, CONFIG])
def test_every_flipped_bit_is_reported(original: Path, tmp_path: Path, name: str) -> None:
    draw = random.Random(f"flips of {name}")
    path = tmp_path / (TENSORS if name == "header" else name)
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    whole = path.read_bytes()
    first = 8 + int.from_bytes(whole[:8], "little")  # safetensors: the length of the header, the header, data
    low, high = {TENSORS: (first, len(whole)), "header": (0, first)}.get(name, (0, len(whole)))
    for _ in range(FLIPS):
        bit = draw.randrange(8 * low, 8 * high)
        flip(path, bit)
        assert findings(tmp_path), f"bit {bit} of {path.name} went unnoticed"
        path.write_bytes(whole)
    assert inspect(tmp_path).findings == ()


def test_a_changed_tensor_is_named_and_the_folder_refused(folder: Path) -> None:
    flip(folder / TENSORS, 8 * ((folder / TENSORS).stat().st_size - 1))
    with pytest.raises(UserError, match=r"is damaged: the tensor .* has changed") as caught:
        mrem_deploy.load(folder)
    assert "mrem verify" in caught.value.remedy
    assert any("the tensor" in found and "has changed since" in found for found in findings(folder))


def test_a_file_of_another_result_is_noticed(original: Path, folder: Path, tmp_path: Path) -> None:
    other = freeze(tiny_pair(spec=QuantSpec(8, 8, 8))[1], HEAD_NAMES[0]).save(tmp_path / "other")
    for name in (TENSORS, MANIFEST):
        shutil.copy(other / name, folder / name)
        assert findings(folder)
        shutil.copytree(original, folder, dirs_exist_ok=True)
    assert findings(folder) == []


def without_digests(folder: Path) -> None:
    """As an earlier release wrote it."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest[DIGESTS]
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def test_a_folder_of_an_earlier_release_loads_and_is_checked_for_ranges(folder: Path) -> None:
    without_digests(folder)
    found = inspect(folder)
    assert (found.findings, found.has_digests) == ((), False)
    mrem_deploy.load(folder)
    tensors = load_file(folder / TENSORS)
    tensors[f"scale/{POOLER}"][0] = float("nan")
    save_file(tensors, folder / TENSORS, metadata=artifact.HEADER)
    assert "not finite and above 0" in findings(folder)[0]


def test_digests_cannot_be_left_out_by_damage(folder: Path) -> None:
    """A key that is misspelt is no sign of an earlier release."""
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"digests"', '"dig3sts"'))
    assert "unknown key 'dig3sts'" in findings(folder)[0]


# -- ranges: the digests are computed anew, so only the content can give it away ---------------------------


class Plain(dict[str, Any]):
    """A configuration that is saved as it is, also if transformers would refuse it."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / CONFIG).write_text(json.dumps(self))


def rewritten(folder: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor], Any], Any]) -> None:
    stored = artifact.read(folder).artifact
    manifest = {key: value for key, value in stored.manifest.items() if key != DIGESTS}
    tensors = {name: value.clone() for name, value in stored.tensors.items()}
    config = Plain(json.loads((folder / CONFIG).read_text()))
    change(manifest, tensors, config)
    artifact.write(Artifact(manifest, tensors, config), folder)


def tensor(name: str, value: float, place: Any = ...) -> Callable[..., None]:
    def change(manifest: Any, tensors: dict[str, torch.Tensor], config: Any) -> None:
        tensors[name][place] = value

    return change


def drop(name: str) -> Callable[..., None]:
    return lambda manifest, tensors, config: tensors.pop(name)


def add(name: str, value: torch.Tensor) -> Callable[..., None]:
    return lambda manifest, tensors, config: tensors.update({name: value})


def weight(name: str, **changes: Any) -> Callable[..., None]:
    return lambda manifest, tensors, config: manifest["weights"][name].update(changes)


def step(**changes: Any) -> Callable[..., None]:
    return lambda manifest, tensors, config: manifest["steps"][SOFTMAX].update(changes)


def top(**changes: Any) -> Callable[..., None]:
    return lambda manifest, tensors, config: manifest.update(changes)


def configured(**changes: Any) -> Callable[..., None]:
    return lambda manifest, tensors, config: config.update(changes)


def code_outside(manifest: Any, tensors: dict[str, torch.Tensor], config: Any) -> None:
    codes = torch.zeros(16 * 16, dtype=torch.int8)
    codes[5] = -4  # three bits hold it, the grid −3..3 does not
    tensors[f"codes/{POOLER}"] = torch.from_numpy(pack(codes.numpy(), 3))


def without_weight(manifest: Any, tensors: dict[str, torch.Tensor], config: Any) -> None:
    del manifest["weights"][POOLER]
    tensors.pop(f"codes/{POOLER}")
    tensors.pop(f"scale/{POOLER}")


def foreign_weight(manifest: Any, tensors: dict[str, torch.Tensor], config: Any) -> None:
    manifest["weights"]["stranger"] = manifest["weights"][POOLER]
    tensors["codes/stranger"] = tensors[f"codes/{POOLER}"].clone()
    tensors["scale/stranger"] = tensors[f"scale/{POOLER}"].clone()


def foreign_step(manifest: Any, tensors: dict[str, torch.Tensor], config: Any) -> None:
    manifest["steps"]["stranger"] = manifest["steps"][SOFTMAX]
    tensors["step/stranger"] = tensors[f"step/{SOFTMAX}"].clone()


HOT = f"hot/{WORDS}"
NAN, INF = float("nan"), float("inf")
DAMAGE: dict[str, tuple[Callable[..., None], str]] = {
    **{
        f"{value} in {name}": (tensor(name, value, place), "not finite and above 0")
        for value in (NAN, 0.0, INF, -1.0)
        for name, place in (
            (f"scale/{POOLER}", (3, 0)),
            (f"scale/{WORDS}", (0, 0)),
            (f"{HOT}/scale", (1, 0)),
            (f"step/{SOFTMAX}", ...),
        )
    },
    "NaN in a bias": (tensor(f"full/{POOLER}.bias", NAN, 2), "1 NaN or Inf among 16"),
    "inf in a norm": (tensor("full/bert.embeddings.LayerNorm.weight", -INF, 0), "NaN or Inf"),
    "NaN in a shift": (tensor("shift/0", NAN, 0), "NaN or Inf"),
    "a hot row with a scale": (tensor(f"scale/{WORDS}", 1.0, (2, 0)), "must be 0 in its hot rows"),
    "hot rows that fall": (tensor(f"{HOT}/rows", 9, 0), "rising rows"),
    "hot row beyond the table": (tensor(f"{HOT}/rows", 60, 1), "rising rows from 0 to 59"),
    "hot code outside": (tensor(f"{HOT}/codes", -128, (0, 0)), "outside -127..127"),
    "code outside": (code_outside, "1 codes outside -3..3"),
    "zero point above": (step(zero_point=256), "zero point 256; it must be in 0..255"),
    "zero point below": (step(zero_point=-1), "zero point -1"),
    "zero point with signs": (step(low=-128, high=127, zero_point=3), "it must be 0"),
    "zero point in words": (step(zero_point="3"), "no grid of whole numbers"),
    "codes of no grid": (step(low=-7), "has codes -7..255"),
    "activation bits": (step(bits=5), "has 5 bits"),
    "grid without an end": (lambda m, t, c: m["steps"][SOFTMAX].pop("high"), "no grid"),
    "grid with spacing": (step(spacing=2), "no grid"),
    "a step that is a list": (lambda m, t, c: m["steps"].update({SOFTMAX: []}), "no grid"),
    "weight bits": (weight(POOLER, bits=5), "has 5 bits"),
    "weight bits that are true": (weight(POOLER, bits=True), "has True bits"),
    "other weight bits": (weight(POOLER, bits=4), f"codes/{POOLER} has the shape"),
    "unknown grid": (weight(POOLER, grid="cubic"), "'cubic'"),
    "midrise of three bits": (weight(POOLER, grid="midrise"), "midrise grid of 3 bits"),
    "shape of one number": (weight(POOLER, shape=[256]), "two whole numbers"),
    "shape that is turned": (weight(WORDS, shape=[16, 60]), "shape"),
    "huge shape": (weight(POOLER, shape=[2**40, 2**40]), "two whole numbers"),
    "negative shape": (weight(POOLER, shape=[-16, -16]), "two whole numbers"),
    "more hot rows": (weight(WORDS, hot_rows=3), "has the shape (2,)"),
    "hot rows in words": (weight(WORDS, hot_rows="2"), "hot rows"),
    "forgotten hot rows": (lambda m, t, c: m["weights"][WORDS].pop("hot_rows"), "belongs to nothing"),
    "unknown head": (top(head="speech"), "'speech'"),
    "head that is a list": (top(head=["x"]), "is not one of"),
    "another head": (top(head="question-answering"), "qa_outputs"),
    "no weights": (top(weights=None), "no table of weights"),
    "steps that are a list": (top(steps=[]), "no table of steps"),
    "notes that are text": (top(notes="x"), "no table of notes"),
    "dropped codes": (drop(f"codes/{POOLER}"), f"codes/{POOLER} is missing"),
    "dropped scale": (drop(f"scale/{POOLER}"), f"scale/{POOLER} is missing"),
    "dropped step": (drop(f"step/{SOFTMAX}"), f"step/{SOFTMAX} is missing"),
    "dropped bias": (drop(f"full/{POOLER}.bias"), f"full/{POOLER}.bias is missing"),
    "dropped weight": (without_weight, f"full/{POOLER}.weight is missing"),
    "added tensor": (add("stranger", torch.ones(1)), "stranger belongs to nothing"),
    "added full tensor": (add("full/stranger", torch.ones(1)), "full/stranger belongs to no layer"),
    "added shift": (add("shift/3", torch.ones(16)), "belongs to no block"),
    "shift without a number": (add("shift/x", torch.ones(16)), "belongs to no block"),
    "shift of another width": (add("shift/1", torch.ones(15)), "must hold 16 numbers"),
    "added weight": (foreign_weight, "weight stranger belongs to no layer"),
    "added activation": (foreign_step, "activation stranger belongs to no layer"),
    "both full and packed": (add(f"full/{POOLER}.weight", torch.ones(16, 16)), "belongs to no layer"),
    "codes of another type": (add(f"codes/{POOLER}", torch.zeros(96, dtype=torch.int8)), "type int8"),
    "scale of integers": (add(f"scale/{POOLER}", torch.ones(16, 1, dtype=torch.int64)), "type int64"),
    "bias of integers": (add(f"full/{POOLER}.bias", torch.ones(16, dtype=torch.int32)), "type int32"),
    "a bias of 8 bits": (add(f"full/{POOLER}.bias", torch.ones(16).to(torch.float8_e4m3fn)), "float8"),
    "one tensor of float64": (add(f"full/{POOLER}.bias", torch.ones(16).double()), "several types"),
    "scale of another shape": (add(f"scale/{POOLER}", torch.ones(15, 1)), "has the shape (15, 1)"),
    "bias of another shape": (add(f"full/{POOLER}.bias", torch.ones(15)), "has the shape (15,)"),
    "one layer more": (configured(num_hidden_layers=4), "layer.3"),
    "one layer less": (configured(num_hidden_layers=2), "belongs to no layer"),
    "a wider model": (configured(hidden_size=32), "shape"),
    "more labels": (configured(id2label={str(i): f"L{i}" for i in range(7)}), "full/classifier"),
    "heads that do not divide": (configured(num_attention_heads=3), "heads"),
    "an unknown activation": (configured(hidden_act="hum"), "hum"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_wrong_content_is_reported(folder: Path, what: str) -> None:
    change, says = DAMAGE[what]
    rewritten(folder, change)
    found = findings(folder)
    assert any(says in finding for finding in found), found
    assert not any("since it was written" in finding for finding in found)


def test_rewriting_alone_is_no_damage(folder: Path) -> None:
    rewritten(folder, lambda *_: None)
    assert findings(folder) == []


# -- config.json through the gate --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"auto_map": {"AutoConfig": "own.C"}, "model_type": "abacus"}, "its own code"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers"),
        ({"num_hidden_layers": 300}, "do not fit"),
        ({"_attn_implementation": "someone/kernel"}, "someone/kernel"),
        ({"model_type": "gpt2"}, "'gpt2'"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"pad_token_id": 10**6}, "no model that can be built"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps"),
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_the_gate_is_in_front_of_a_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str, old: bool
) -> None:
    """Without trust_remote_code=False transformers asks, and `yes |` says yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    if old:
        without_digests(folder)
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError) as caught:
        mrem_deploy.load(folder)
    assert says in caught.value.problem
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("name", [MANIFEST, TENSORS, CONFIG])
def test_links_out_of_the_folder_are_not_followed(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(UserError, match="leads out of its folder"):
        mrem_deploy.load(folder)


@pytest.mark.parametrize("name", [MANIFEST, CONFIG])
@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b'{"a":' * 5000, b'{"x": "\\udcff"}', b"null"])
def test_json_that_is_none(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    (found,) = findings(folder)
    assert "cannot be read" in found


def test_the_config_that_comes_back_is_the_one_that_was_saved(folder: Path) -> None:
    ours = FrozenModel.read(folder).config
    theirs = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    assert ours.to_dict() == packed.without_keys(theirs.to_dict())
    assert (type(ours), ours.name_or_path) == (type(theirs), theirs.name_or_path)


def test_a_changed_tokenizer_is_noticed(tmp_path: Path) -> None:
    """Another vocabulary gives other ids, and so other predictions, without a word."""
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_bert(tmp_path / "other"))
    folder = freeze(tiny_pair()[1], HEAD_NAMES[0]).save(tmp_path / "result", tokenizer)
    mrem_deploy.load(folder)
    path = folder / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"good"', '"goon"'), encoding="utf-8")
    with pytest.raises(UserError, match=r"damaged: tokenizer\.json has changed since it was written"):
        mrem_deploy.load(folder)
    path.unlink()
    mrem_deploy.load(folder)  # the model alone is complete
