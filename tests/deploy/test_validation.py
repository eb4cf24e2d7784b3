"""The end of `quantize` and the verb `validate`, on a tiny model that is really exported, once."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tiny_job import DEV, job_in, sentences, workshop_in, write_jsonl
from tiny_models import tiny_encoded, tiny_pair
from transformers import AutoTokenizer

import mrem_deploy
from mrem_deploy import __main__, preflight, validate
from mrem_deploy.base.errors import UserError
from mrem_deploy.data.task_data import TaskData
from mrem_deploy.data.tasks import find_task
from mrem_deploy.deploy import own_runtime, runtime, validation
from mrem_deploy.evaluate import evaluation
from mrem_deploy.evaluate import predict as predicting
from mrem_deploy.evaluate.predict import Predictor
from mrem_deploy.export import export_onnx
from mrem_deploy.models.loading import load_model
from mrem_deploy.quant import artifact
from mrem_deploy.quant.frozen import build, freeze
from mrem_deploy.recipe import Recipe
from mrem_deploy.report import card
from mrem_deploy.walk import scoring

ROOT = Path(__file__).resolve().parents[2]
FILE = "model.onnx"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the model, its data, and `result`, made by the whole walk; also what that walk did."""
    events: list[str] = []
    read, ask = TaskData.evaluation, predicting.torch_predictor

    def counted(model: Any) -> Predictor:
        predictor = ask(model)
        return lambda batch: events.append(f"torch {len(batch['input_ids'])}") or predictor(batch)

    with workshop_in(tmp_path_factory.mktemp("workshop")) as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskData, "evaluation", lambda data: events.append("read") or read(data))
        for module in (evaluation, scoring, validation):
            patch.setattr(module, "torch_predictor", counted)
        assert job_in(root, "result", bits="4-4-8", export="auto").run() == 0
        (root / "events").write_text(", ".join(events))
        yield root


@pytest.fixture
def result(workshop: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(workshop / "result", tmp_path / "result"))


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def run(*arguments: object) -> int:
    return __main__.main(["validate", *map(str, arguments)])


def labels_by_hand(folder: Path, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Classes that plain onnxruntime and torch give, one sentence at a time."""
    session, tokenizer = onnxruntime.InferenceSession(folder / FILE), AutoTokenizer.from_pretrained(folder)
    model, found = mrem_deploy.load(folder), []
    for text in texts:
        tokens = tokenizer(text, return_tensors="pt")
        inputs = {entry.name: tokens[entry.name].numpy() for entry in session.get_inputs()}
        found.append((session.run(["logits"], inputs)[0].argmax(), model(**tokens).logits.argmax().item()))
    one, two = zip(*found, strict=True)
    return np.array(one), np.array(two)


# --- the end of quantize -----------------------------------------------------------------------


def test_quantize_ends_with_a_validated_onnx_model(workshop: Path) -> None:
    found, folder = read(workshop / "result" / "metrics.json"), workshop / "result"
    rows = sentences(DEV, seed=2)
    onnx_labels, torch_labels = labels_by_hand(folder, [row["text"] for row in rows])
    assert found["accuracy"]["onnx"] == pytest.approx(
        100 * np.mean(onnx_labels == [row["label"] for row in rows])
    )
    told = found["onnx"]
    assert (told["profile"], told["file"], told["metric"]) == ("ort-cpu", FILE, found["accuracy"]["onnx"])
    assert told["agreement"] == pytest.approx(100 * np.mean(onnx_labels == torch_labels))
    assert told["size_mb"] == found["size"]["onnx_mb"] == (folder / FILE).stat().st_size / 2**20
    assert told["integer_products"] > told["float_products"]
    assert told["providers"] == ["CPUExecutionProvider"]
    assert read(folder / validation.RESULT)["accuracy"] == found["accuracy"]


def test_the_figures_are_those_of_the_onnx_model(workshop: Path) -> None:
    """Flips by hand, and both runtimes by name, as torch predicted all of so few examples."""
    found, folder = read(workshop / "result" / "metrics.json"), workshop / "result"
    accuracy, texts = found["accuracy"], [row["text"] for row in sentences(DEV, seed=2)]
    assert accuracy["scored_by"] == "onnxruntime"
    assert accuracy["quantized"] == accuracy["onnx"]
    assert found["onnx"]["torch_examples"] == DEV
    onnx_labels, torch_labels = labels_by_hand(folder, texts)
    right = [row["label"] for row in sentences(DEV, seed=2)]
    assert accuracy["torch"] == pytest.approx(100 * np.mean(torch_labels == right))
    full, tokenizer = load_model(workshop / "model", "sequence-classification")
    before = np.array([full(**tokenizer(text, return_tensors="pt")).logits.argmax().item() for text in texts])
    assert accuracy["flips"] == pytest.approx(100 * np.mean(before != onnx_labels))
    assert accuracy["kl"] > accuracy["kl_error"] > 0
    record = read(folder / validation.RESULT)["onnx"]
    assert record["torch_examples"] == {"dev": DEV}
    assert record["fidelity"]["full_precision"]["dev"]["kl"] == accuracy["kl"]
    assert record["fidelity"]["quantized"]["dev"]["kl"] < accuracy["kl"]  # torch is nearer
    assert record["fidelity"]["quantized"]["dev"]["flips"] == pytest.approx(
        100 - record["agreement"]["quantized"]["dev"]["agreement"]
    )


def test_the_evaluation_is_read_once_and_each_torch_model_asked_once(workshop: Path) -> None:
    assert (workshop / "events").read_text() == "read, torch 32, torch 8, torch 32, torch 8"


def test_the_pages_show_the_onnx_model(workshop: Path) -> None:
    found, folder = read(workshop / "result" / "metrics.json"), workshop / "result"
    report = (folder / "report.md").read_text(encoding="utf-8")
    agreement = f"{found['onnx']['agreement']:.2f}% of {DEV} examples"
    assert f"| Agreement with the model in torch | {agreement} |" in report
    assert re.search(r"\| Full precision \| Quantized \| Torch \| Change \|", report)
    assert re.search(r"\| dev \| Flips \|   \| \d", report)
    assert re.search(r"\| dev \| KL \|   \| 0\.\d+ ± 0\.\d+ \|", report)
    assert f"{found['onnx']['integer_products']} run on integers" in report
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "ONNX model" in page


def test_the_snippet_of_the_card_runs(workshop: Path) -> None:
    card = (workshop / "result" / "README.md").read_text(encoding="utf-8")
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", card, re.DOTALL) if "onnxruntime" in c)
    assert len(code.strip().splitlines()) == 10
    code = code.replace("path/to/this/folder", str(workshop / "result"))
    with redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    assert printed.getvalue().startswith("{'logits': array([[")


def test_the_readme_has_the_same_snippet() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "InferenceSession" in c)
    ours = card.ONNX_USE.replace("FILE", FILE).replace("path/to/this/folder", "result")
    assert code == ours


def test_export_without_validation(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the first run stands in for the export, which is not what is looked at here."""
    monkeypatch.setattr(
        "mrem_deploy.export.export_all",
        lambda _, folder, profiles: [Path(shutil.copy(workshop / "result" / FILE, folder / FILE))],
    )
    assert job_in(workshop, "bare", method="ptq", export="ort-cpu").run("--no-validate") == 0
    found = read(workshop / "bare" / "metrics.json")
    assert found["onnx"].keys() == {"file", "profile", "recipe_digest", "opset", "size_mb"}
    assert "onnx" not in found["accuracy"]
    assert not (workshop / "bare" / validation.RESULT).exists()


def test_packages_that_are_missing_are_an_error_only_if_a_profile_was_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own_runtime, "problem", lambda: "mrem-runtime is not installed")
    assert preflight.export_profiles(Recipe()) == ("ort-cpu",)
    monkeypatch.setattr(own_runtime, "problem", lambda: "")
    assert preflight.export_profiles(Recipe()) == ("ort-cpu", "mrem-cpu")
    assert preflight.export_profiles(Recipe(bits="auto", budget_mb=1.0)) == ("ort-cpu", "mrem-cpu")
    for bits in ("4-4-32", "32-4-8"):  # nothing that its operators could multiply
        assert preflight.export_profiles(Recipe(bits=bits)) == ("ort-cpu",)
    assert preflight.export_profiles(Recipe(export="none")) == ()
    assert preflight.export_profiles(Recipe(export="int8, qdq,int8")) == ("int8", "qdq")
    monkeypatch.setattr(runtime, "find_spec", lambda name: None if name == "onnxscript" else object())
    assert preflight.export_profiles(Recipe()) == ()
    assert "onnxscript not installed" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"needs onnxscript(.|\n)*--export none"):
        preflight.export_profiles(Recipe(export="ort-cpu"))


# --- validate ----------------------------------------------------------------------------------


def assert_same(now: Any, was: Any) -> None:
    """Everything equal, floats but for last bits: next to other work, torch's have moved between two runs."""
    if isinstance(was, dict):
        assert now.keys() == was.keys()
        for key in was:
            assert_same(now[key], was[key])
    elif isinstance(was, float):
        assert now == pytest.approx(was, rel=1e-5, abs=1e-7)
    else:
        assert now == was


def test_validate_repeats_what_quantize_found(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    was = read(result / validation.RESULT)
    (result / validation.RESULT).unlink()
    assert run(result, "--max-drop", 100) == 0
    now = read(result / validation.RESULT)
    assert_same(now["accuracy"], was["accuracy"])
    assert now["onnx"]["agreement"] == was["onnx"]["agreement"]
    assert now["onnx"]["nodes"] == was["onnx"]["nodes"]
    assert (now["passed"], now["max_drop"], now["full_precision_from"]) == (True, 100.0, "measured")
    table = capsys.readouterr().out
    assert f"{now['accuracy']['onnx']:.2f}" in table
    assert all(layer in table for layer in ("embeddings", "block 1", "block 2", "output"))
    assert "CPUExecutionProvider" in table
    assert "verdict: passed" in table
    assert f"ONNX against full precision, dev: {now['accuracy']['flips']:.2f}% ± " in table
    assert "ONNX against torch quantized, dev: " in table


def test_answers_that_depend_on_the_batch_are_noticed(
    result: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(result, "--max-drop", 100) == 0
    assert read(result / validation.RESULT)["onnx"]["steady"] == {
        "examples": DEV,
        "alone": 100,
        "padded": 100,
    }
    assert (
        f"same prediction as in a batch, of {DEV} examples: 100.00% alone, 100.00% with more"
        in capsys.readouterr().out
    )

    def padding_counts(session: Any) -> Callable[[dict[str, torch.Tensor]], list[np.ndarray]]:
        def ask(batch: dict[str, torch.Tensor]) -> list[np.ndarray]:
            mask = batch["attention_mask"].numpy()
            return [np.where((mask == 0).sum(axis=1, keepdims=True) > 8, [[1.0, 0.0]], [[0.0, 1.0]])]

        return ask

    monkeypatch.setattr(validation, "onnx_predictor", padding_counts)
    assert run(result, "--max-drop", 100, "--batch-size", 1) == 0
    found = read(result / validation.RESULT)
    assert (found["onnx"]["steady"]["alone"], found["onnx"]["steady"]["padded"]) == (100, 0)
    assert any("with more padding as in a batch" in remark for remark in found["remarks"])


def spoil(path: Path) -> None:
    """Turn the answers around: the scores of the two classes change places."""
    model = onnx.load(path)
    (output,) = model.graph.output
    last = next(node for node in model.graph.node if output.name in node.output)
    last.output[list(last.output).index(output.name)] = "logits.before"
    model.graph.node.append(onnx.helper.make_node("Neg", ["logits.before"], [output.name]))
    onnx.save(model, path)


def test_a_model_that_lost_too_much_fails(
    result: Path, workshop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels as torch's quantized model gives them: the file as exported is right, the spoiled one wrong."""
    texts = [row["text"] for row in sentences(DEV, seed=2)]
    labels = labels_by_hand(result, texts)[1]
    rows = [{"text": text, "label": int(label)} for text, label in zip(texts, labels, strict=True)]
    data = write_jsonl(workshop / "own.jsonl", rows)
    options = ("--eval-data", data, "--max-drop", 5, "--batch-size", 7, "--threads", 1)
    assert run(result, *options) == 0
    good = read(result / validation.RESULT)
    assert good["accuracy"]["torch"] == 100
    spoil(result / FILE)
    assert run(result, *options) == 1
    bad = read(result / validation.RESULT)
    assert bad["accuracy"]["onnx"] == pytest.approx(100 - good["accuracy"]["onnx"])
    assert bad["drop"] == pytest.approx(good["accuracy"]["full_precision"] - bad["accuracy"]["onnx"])
    assert not bad["passed"]
    assert bad["onnx"]["layer_errors"]["block 1"] < 0.1 < bad["onnx"]["layer_errors"]["output"]
    assert "FAILED" in capsys.readouterr().out


def test_a_file_of_another_result_is_noticed(result: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.onnx"
    model = onnx.load(result / FILE)
    next(entry for entry in model.metadata_props if entry.key == "recipe_digest").value = "another"
    onnx.save(model, other)
    for file, noticed in ((other, True), (result / FILE, False)):
        assert run(result, "--model-file", file, "--max-drop", 100, "--eval-size", 5) == 0
        remarks = read(result / validation.RESULT)["remarks"]
        assert any("exported from another result" in remark for remark in remarks) == noticed


def test_full_precision_is_quoted_where_the_model_is_gone(
    result: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = ("--model", tmp_path / "gone", "--max-drop", 100)
    assert run(result, *gone) == 0
    now = read(result / validation.RESULT)
    assert now["full_precision_from"] == "metrics.json"
    assert now["accuracy"]["full_precision"] == read(result / "metrics.json")["accuracy"]["full_precision"]
    assert list(now["onnx"]["agreement"]) == ["quantized"]
    assert "quoted from metrics.json" in capsys.readouterr().out
    assert run(result, *gone, "--eval-size", 10) == 2  # not the examples that the number belongs to
    assert "other examples" in capsys.readouterr().err


@pytest.mark.parametrize("head", ["question-answering"])
def test_layers_of_a_head_with_two_outputs(head: str, tmp_path: Path) -> None:
    """Near the model it was exported from, far from another. 0.05: a rounding flip is a step of 1/256."""
    _, student = tiny_pair("bert", head)
    frozen = freeze(student, head)
    path = export_onnx(frozen, tmp_path / FILE)
    encoded, batches = tiny_encoded(count=6), [np.arange(3), np.arange(3, 6)]
    errors = validation.onnx_layer_errors(path, build(frozen), encoded, batches)
    assert list(errors) == ["embeddings", "block 1", "block 2", "block 3", "output"]
    assert errors["embeddings"] < 1e-6
    assert max(errors.values()) < 0.05
    for name in frozen.weights:
        frozen.weights[name].codes = torch.flip(frozen.weights[name].codes, (0,))
    other = validation.onnx_layer_errors(path, build(frozen), encoded, batches)
    assert min(other.values()) > 0.1


# --- what a user can get wrong -----------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def newer(folder: Path) -> None:
    manifest = read(folder / artifact.MANIFEST) | {"format_version": 99}
    (folder / artifact.MANIFEST).write_text(json.dumps(manifest))


def forget_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "vocab.txt"):
        (folder / name).unlink(missing_ok=True)


MISTAKES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...], tuple[str, ...]]] = {
    "not ours": (
        lambda folder: (folder / artifact.MANIFEST).unlink(),
        (),
        ("not a quantized model", "--out"),
    ),
    "no file": (
        lambda folder: (folder / FILE).unlink(),
        (),
        (f"has no {FILE}", "python -m mrem_deploy.export", "--profile ort-cpu"),
    ),
    "no file of that profile": (lambda _: None, ("--profile", "int8"), ("model_int8.onnx", "--profile int8")),
    "truncated onnx": (lambda folder: cut(folder / FILE), (), (FILE, "cannot be loaded", "copy it again")),
    "unknown profile": (lambda _: None, ("--profile", "gpu"), ("no export profile 'gpu'", "mrem-cpu")),
    "no such model file": (lambda _: None, ("--model-file", "x.onnx"), ("no ONNX file x.onnx",)),
    "truncated safetensors": (
        lambda folder: cut(folder / artifact.TENSORS),
        (),
        (artifact.TENSORS, "cannot be read", "copy the entire result folder again"),
    ),
    "newer format": (newer, (), ("version 99", "the release of mrem_deploy that wrote it")),
    "no recipe": (
        lambda folder: (folder / "recipe.yaml").unlink(),
        (),
        ("no recipe.yaml", "copy the whole"),
    ),
    "no tokenizer": (forget_tokenizer, (), ("no tokenizer",)),
    "data gone": (lambda _: None, ("--data", "/gone/data.jsonl"), ("/gone/data.jsonl", "--data PATH")),
    "negative drop": (lambda _: None, ("--max-drop", "-1"), ("--max-drop must be", "'-1'")),
    "no number": (lambda _: None, ("--eval-size", "many"), ("--eval-size must be", "'many'")),
    "unknown provider": (lambda _: None, ("--provider", "abacus"), ("abacus", "CPUExecutionProvider")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_explained_and_leaves_nothing(
    mistake: str, result: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrange, options, told = MISTAKES[mistake]
    arrange(result)
    before = {path: path.read_bytes() for path in result.rglob("*") if path.is_file()}
    assert run(result, *options) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert message.count("error:") == 1
    position = 0
    for part in told:
        position = message.find(part, position)
        assert position >= 0, f"{part!r} is missing, or comes too early, in: {message}"
    assert {path: path.read_bytes() for path in result.rglob("*") if path.is_file()} == before


def test_agreement_is_not_measured_against_a_model_that_is_gone(workshop: Path) -> None:
    """Embeddings have no other truth than the original's."""
    evaluation = type("Fake", (), {"task": find_task("feature-extraction")})()
    with pytest.raises(UserError, match=r"measured against the full-precision model(.|\n)*--model PATH"):
        validate.add_original(evaluation, Recipe(model=str(workshop / "gone")), "feature-extraction")
