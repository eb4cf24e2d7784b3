"""transformers reads a result folder as `mrem_deploy.load` does, and refuses clearly what it cannot do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_bert import WORDS
from tiny_job import save_model
from tiny_models import EVERY_MODEL, quantized_twin, tiny_batch, tiny_pair
from torch import nn

import mrem_deploy
from mrem_deploy.base.errors import UserError
from mrem_deploy.models import packed
from mrem_deploy.models.architectures import model_outputs
from mrem_deploy.models.loading import HEADS, auto_class, load_model
from mrem_deploy.models.parts import HIDDEN_SHIFTS
from mrem_deploy.quant import from_pretrained
from mrem_deploy.quant.frozen import FrozenModel, freeze, with_hot_rows
from mrem_deploy.quant.hot_rows import HotRows
from mrem_deploy.quant.spec import QuantSpec
from mrem_deploy.result.verification import verify

SEQUENCE = "sequence-classification"
TEXTS = [" ".join(WORDS[:5]), WORDS[7], " ".join(WORDS[3:20])]


def read(folder: Path | str, head: str = SEQUENCE, **options: Any) -> Any:
    kind = transformers.AutoConfig.from_pretrained(folder, cache_dir=options.get("cache_dir")).model_type
    return auto_class(head, kind).from_pretrained(folder, **options)


def outputs_of(model: nn.Module, kind: str = "bert") -> list[torch.Tensor]:
    batch = tiny_batch(kind)
    batch["input_ids"] = batch["input_ids"] % model.config.vocab_size
    with torch.no_grad():
        return model_outputs(model(**batch))


def assert_same(came: nn.Module, expected: nn.Module, kind: str = "bert") -> None:
    ours, theirs = came.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for one, other in zip(outputs_of(came, kind), outputs_of(expected, kind), strict=True):
        assert torch.equal(one, other)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized classifier with its tokenizer."""
    root = tmp_path_factory.mktemp("quantizer")
    model, tokenizer = load_model(save_model(root / "model"), SEQUENCE)
    freeze(quantized_twin(model, QuantSpec(2, 2, 8))[1], SEQUENCE).save(root / "result", tokenizer)
    return root / "result"


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "result"))


@pytest.mark.parametrize(("kind", "head"), EVERY_MODEL)
def test_the_same_model_as_load_gives(tmp_path: Path, kind: str, head: str) -> None:
    freeze(tiny_pair(kind, head, QuantSpec(2, 2, 8))[1], head).save(tmp_path)
    came, expected = read(tmp_path, head), mrem_deploy.load(tmp_path)
    assert type(came) is type(expected)
    assert not came.training
    assert came.is_quantized
    assert_same(came, expected, kind)


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec(3, 8, 4, per_channel=True),
        QuantSpec(4, 32, 8, symmetric=True, keep_fp=("*.1.*",)),
        QuantSpec(8, 8, 32),
        QuantSpec(2, 2, 8, weight_quantizer="midrise"),
    ],
)
def test_any_bits(tmp_path: Path, spec: QuantSpec) -> None:
    freeze(tiny_pair(spec=spec)[1], SEQUENCE).save(tmp_path)
    assert_same(read(tmp_path), mrem_deploy.load(tmp_path))


def test_hot_rows_and_shifts(tmp_path: Path) -> None:
    """Rows with 8 bits, and the means that parts of the model add back, which are not in its state."""
    frozen = freeze(tiny_pair(spec=QuantSpec(2, 2, 8))[1], SEQUENCE)
    name = "bert.embeddings.word_embeddings"
    codes = torch.arange(32, dtype=torch.int8).reshape(2, 16)
    hot = HotRows(torch.tensor([7, 11], dtype=torch.int32), codes, torch.tensor([[0.02], [0.03]]))
    frozen.weights[name] = with_hot_rows(frozen.weights[name], hot)
    frozen.shifts = {1: torch.linspace(-1, 1, 16)}
    frozen.save(tmp_path)
    came, expected = read(tmp_path), mrem_deploy.load(tmp_path)
    assert_same(came, expected)
    assert torch.equal(getattr(came, HIDDEN_SHIFTS)[1], frozen.shifts[1])


def test_a_pipeline(original: Path) -> None:
    answers = transformers.pipeline("text-classification", model=str(original), device="cpu")(TEXTS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(original)
    model = mrem_deploy.load(original)
    for text, answer in zip(TEXTS, answers, strict=True):
        with torch.no_grad():
            likely = model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(0)
        assert answer["label"] == model.config.id2label[int(likely.argmax())]
        # The pipeline takes its softmax in numpy.
        assert answer["score"] == pytest.approx(float(likely.max()), abs=1e-6)


def test_harmless_settings(original: Path) -> None:
    model = read(original, output_hidden_states=True, dtype="auto", device_map=None)
    assert model.config.output_hidden_states
    assert_same(model, mrem_deploy.load(original))
    assert read(original, dtype=torch.float32).dtype == torch.float32
    assert json.loads(model.config.to_json_string())[packed.QUANTIZATION] == packed.KEYS[packed.QUANTIZATION]


def test_no_report_about_weights(original: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    try:
        read(original)
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records


WITHOUT = """
import sys
from transformers import AutoModelForSequenceClassification as Auto
try:
    Auto.from_pretrained(sys.argv[1])
except ValueError as error:
    print(error)
import mrem_deploy  # after transformers: registered at once
print(type(Auto.from_pretrained(sys.argv[1])).__name__, "mrem_deploy.quant.frozen" in sys.modules)
"""


def test_without_the_package_transformers_says_what_is_missing(original: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(original)],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    refusal, loaded = done.stdout.splitlines()
    assert refusal.endswith(packed.KEYS[packed.WEIGHTS])
    assert "import mrem_deploy" in refusal
    assert loaded == "BertForSequenceClassification True"


@pytest.mark.parametrize(
    ("head", "options", "says"),
    [
        ("token-classification", {}, ("BertForTokenClassification was asked for", HEADS[SEQUENCE])),
        ("feature-extraction", {}, ("BertModel was asked for", HEADS[SEQUENCE])),
        (SEQUENCE, {"num_labels": 7}, ("changes the shape of classifier.", "num_labels")),
        (SEQUENCE, {"dtype": torch.float16}, ("torch.float16", "Leave out dtype")),
        (SEQUENCE, {"dtype": "bfloat16"}, ("torch.bfloat16", "Leave out dtype")),
        (SEQUENCE, {"attn_implementation": "eager"}, ("'eager'", "Leave out attn_implementation")),
    ],
)
def test_what_is_refused(original: Path, head: str, options: dict[str, Any], says: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        read(original, head, **options)
    assert all(words in str(caught.value) for words in says), str(caught.value)


@pytest.mark.parametrize("device", ["auto", {"": "cuda:0"}, {"": 0}, {"bert": "cpu", "classifier": "disk"}])
def test_other_devices(device: Any) -> None:
    """Asked directly: transformers wants accelerate before it asks the quantizer."""
    config = from_pretrained.MremConfig(**packed.KEYS[packed.QUANTIZATION])
    quantizer = from_pretrained.MremQuantizer(config)
    for fine in (None, "cpu", {"": "cpu"}, {"": torch.device("cpu")}):
        quantizer.validate_environment(device_map=fine, weights_only=True)
    with pytest.raises(UserError, match="on the CPU"):
        quantizer.validate_environment(device_map=device)


def test_damage_is_refused(folder: Path) -> None:
    path = folder / "mrem.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="damaged"):
        read(folder)


def test_another_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"gelu"', '"relu"'))
    with pytest.raises(UserError, match=r"config\.json has changed"):
        read(folder)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"quant_method": "mrem", "format_version": 2}, "the quantization_config"),
        ({"quant_method": "mrem"}, "the quantization_config"),
    ],
)
def test_a_later_format(folder: Path, value: dict[str, Any], says: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {packed.QUANTIZATION: value}))
    with pytest.raises(UserError, match=says):
        read(folder)
    with pytest.raises(UserError, match="has a quantization_config"):
        mrem_deploy.load(folder)


def test_a_missing_manifest(folder: Path) -> None:
    (folder / "mrem.json").unlink()
    with pytest.raises(UserError, match=r"no mrem\.json"):
        read(folder)


@pytest.mark.parametrize("way", [read, mrem_deploy.load])
def test_it_cannot_be_saved_as_plain_weights(original: Path, tmp_path: Path, way: Any) -> None:
    model = way(original)
    with pytest.raises(UserError, match="save_pretrained cannot write"):
        model.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_it_cannot_become_full_precision(original: Path) -> None:
    with pytest.raises(UserError, match="cannot be dequantized"):
        read(original).dequantize()


def test_a_full_precision_model_is_not_quantized_on_the_way(original: Path) -> None:
    config = from_pretrained.MremConfig(**packed.KEYS[packed.QUANTIZATION])
    with pytest.raises(ValueError, match="pre-quantized"):
        read(original.parent / "model", quantization_config=config)


def test_a_result_is_no_source(original: Path) -> None:
    with pytest.raises(UserError, match="quantized already"):
        load_model(original, SEQUENCE)


def test_a_result_of_an_earlier_release(
    tmp_path: Path, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config.json says nothing to transformers, which finds no weights; it loads and verifies here."""
    frozen = FrozenModel.read(original)
    with monkeypatch.context() as patch:
        patch.setattr(packed, "KEYS", {})
        frozen.save(tmp_path)
    assert packed.QUANTIZATION not in (tmp_path / "config.json").read_text()
    assert_same(mrem_deploy.load(tmp_path), mrem_deploy.load(original))
    assert not [finding for check in verify(tmp_path)[:1] for finding in check.findings]
    with pytest.raises(OSError, match=r"model\.safetensors"):
        read(tmp_path)


def test_registered_once() -> None:
    from_pretrained.register()
    from_pretrained.register()


# -- the hub -----------------------------------------------------------------------------------------------


@pytest.fixture
def cache(original: Path, tmp_path: Path) -> Path:
    """The cache of the hub, as it is after a download of everything."""
    repository, commit = tmp_path / "models--me--mine", "a" * 40
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for number, path in enumerate(original.iterdir()):
        shutil.copy(path, repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def test_a_model_of_the_hub(original: Path, cache: Path, tmp_path: Path) -> None:
    assert_same(read("me/mine", cache_dir=tmp_path), mrem_deploy.load(original))


def test_the_manifest_is_fetched(
    original: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers itself asks only for config.json and the weights."""
    (cache / "mrem.json").unlink()
    fetched = []

    def fetch(name: str, file: str, revision: str, cache_dir: Path) -> str:
        assert (name, revision, cache_dir) == ("me/mine", "a" * 40, tmp_path)
        fetched.append(file)
        return str(shutil.copy(original / file, cache / file))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    assert_same(read("me/mine", cache_dir=tmp_path), mrem_deploy.load(original))
    assert fetched == ["mrem.json"]
