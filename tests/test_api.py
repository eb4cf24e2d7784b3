"""The public API: light to import; quantize_model gives the integers of the command and writes nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_bert import save_tiny_bert
from tiny_job import DEV, TRAIN, job_in, save_model, sentences, workshop_in, write_jsonl
from tiny_models import tiny_model
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

import mrem_deploy as mrem
from mrem_deploy.quant.frozen import FrozenModel

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = {
    "Recipe",
    "run",
    "quantize_model",
    "open_result",
    "load",
    "export_onnx",
    "sentence_transformer",
    "cross_encoder",
    "UserError",
    "__version__",
}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop_in(tmp_path_factory.mktemp("api")) as root:
        yield root


def parts(workshop: Path) -> tuple[Any, Any, list[str]]:
    folder = workshop / "model"
    texts = [row["text"] for row in sentences(TRAIN, seed=1)]
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    return model, AutoTokenizer.from_pretrained(folder), texts


SMALL: dict[str, Any] = {
    "bits": "2-2-8",
    "modules": "2",
    "steps": 6,
    "calib_size": 32,
    "batch_size": 8,
    "max_length": 32,
    "init_batches": 2,
    "lr": 1e-3,
}


def test_the_public_names_and_a_light_import() -> None:
    assert set(mrem.__all__) == PUBLIC
    assert set(mrem.__all__) <= set(dir(mrem))
    code = (
        "import sys, mrem_deploy\n"
        "heavy = {'torch', 'transformers', 'onnx', 'onnxruntime', 'triton'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "mrem_deploy.Recipe, mrem_deploy.UserError\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})
    with pytest.raises(AttributeError, match="quantise"):
        _ = mrem.quantise


@pytest.mark.parametrize("method", ["mrem-s", "mrem-p", "rem", "ptq"])
def test_quantize_model_gives_the_integers_of_the_command(
    workshop: Path, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer, texts = parts(workshop)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.chdir(tmp_path)
    frozen = mrem.quantize_model(model, tokenizer, texts, mrem.Recipe(method=method, **SMALL))
    assert list(tmp_path.iterdir()) == []  # nothing is written
    assert isinstance(frozen, FrozenModel)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    more = ("--workers", "1") if method == "mrem-p" else ()
    assert job_in(workshop, f"by-{method}", method=method).run(*more) == 0
    frozen.save(tmp_path / "saved")
    mine, theirs = mrem.load(tmp_path / "saved"), mrem.load(workshop / f"by-{method}")
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    for name, value in mine.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name
    tokens = tokenizer(texts[:4], padding=True, return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(frozen.build()(**tokens).logits, theirs(**tokens).logits)


def test_bits_chosen_per_layer_and_pairs_of_sentences(workshop: Path) -> None:
    model, tokenizer, texts = parts(workshop)
    pairs = list(zip(texts, reversed(texts), strict=True))
    options = SMALL | {"bits": "auto", "budget_mb": 0.0165, "method": "ptq"}
    frozen = mrem.quantize_model(model, tokenizer, pairs, mrem.Recipe(**options))
    assert {weight.bits for weight in frozen.weights.values()} <= {2, 4, 8}


def test_what_cannot_be_quantized_is_refused(workshop: Path, tmp_path: Path) -> None:
    model, tokenizer, texts = parts(workshop)
    with pytest.raises(mrem.UserError, match="qat"):
        mrem.quantize_model(model, tokenizer, texts, mrem.Recipe(method="qat"))
    with pytest.raises(mrem.UserError, match="sentences is empty"):
        mrem.quantize_model(model, tokenizer, [])
    for odd in (1984, ["a", "b"], ("a", 5), None):
        with pytest.raises(mrem.UserError, match=r"got .* at place 2: "):
            mrem.quantize_model(model, tokenizer, ["a film", odd])
    with pytest.raises(mrem.UserError, match="sentence 1 must be text in UTF-8"):
        mrem.quantize_model(model, tokenizer, ["half \ud83d"])
    with pytest.raises(mrem.UserError, match="got dict"):
        mrem.quantize_model(model, tokenizer, [{"text": "a film"}])  # type: ignore[list-item]
    save_tiny_bert(tmp_path / "masked", "BertForMaskedLM")
    masked = AutoModelForMaskedLM.from_pretrained(tmp_path / "masked")
    with pytest.raises(mrem.UserError, match="BertForMaskedLM"):
        mrem.quantize_model(masked, tokenizer, texts)


@pytest.mark.parametrize("head", ["token-classification", "question-answering", "feature-extraction"])
def test_the_head_is_read_off_the_model(head: str) -> None:
    from mrem_deploy.api import head_of

    assert head_of(tiny_model("bert", head)) == head


@pytest.mark.slow
def test_the_examples_of_the_documentation_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block of docs/api.md, in order, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    save_model(tmp_path / "my-bert")
    write_jsonl(tmp_path / "reviews" / "train.jsonl", sentences(TRAIN, seed=1))
    write_jsonl(tmp_path / "reviews" / "dev.jsonl", sentences(DEV, seed=2))
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) >= 4
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/api.md", "exec"), namespace)
    metrics = json.loads((tmp_path / "result" / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["accuracy"]["quantized"] >= 0
