"""`benchmark latency`: that each number belongs to the model it is said of, not how fast this machine is."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from tiny_job import save_model, write_reviews
from tiny_onnx import save_tiny_onnx

from mrem_deploy import benchmark
from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import write_text
from mrem_deploy.benchmarks.geometry import parse_geometry, random_model, random_tokens
from mrem_deploy.benchmarks.latency import lineup
from mrem_deploy.benchmarks.latency import rivals as rivals
from mrem_deploy.benchmarks.latency import subject as latency_subject
from mrem_deploy.models.loading import load_model
from mrem_deploy.quant.frozen import FrozenModel, freeze
from mrem_deploy.recipe import Recipe
from mrem_deploy.train.student import make_student

TINY = "16x1x2x32x50"  # hidden, layers, heads, intermediate, vocabulary
PNG = b"\x89PNG\r\n\x1a\n"


# -- rivals ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp32") / "fp32.onnx"
    geometry = parse_geometry(TINY)
    return rivals.export_fp32(random_model(geometry, 0), path)


def answer(path: Path, batch: dict[str, torch.Tensor]) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == list(rivals.INPUTS)
    logits: np.ndarray = session.run(None, {name: batch[name].numpy() for name in rivals.INPUTS})[0]
    return logits


def test_rivals_answer_like_the_model_and_are_really_quantized(fp32: Path, tmp_path: Path) -> None:
    geometry = parse_geometry(TINY)
    tokens = random_tokens(geometry, 6, 9, 1)
    batch = tokens.batch(np.arange(6))  # another batch and another length than the exporter saw
    with torch.no_grad():
        reference = random_model(geometry, 0)(**batch).logits.numpy()
    size = np.abs(reference).max()

    def error(path: Path) -> float:
        return float(np.abs(answer(path, batch) - reference).max() / size)

    assert error(fp32) < 1e-5  # float32 sums in another order
    assert rivals.node_kinds(fp32)["MatMul"] == 8  # six linears and two products of attention
    made = {
        "MatMulInteger": rivals.quantize_dynamically(fp32, tmp_path / "dynamic.onnx", per_channel=False),
        "DynamicQuantizeLinear": rivals.quantize_dynamically(
            fp32, tmp_path / "channel.onnx", per_channel=True
        ),
        "QuantizeLinear": rivals.quantize_statically(fp32, tmp_path / "static.onnx", tokens),
        "DequantizeLinear": rivals.quantize_statically(
            fp32, tmp_path / "unsigned.onnx", tokens, unsigned=True
        ),
    }
    for kind, path in made.items():
        assert rivals.node_kinds(fp32)[kind] == 0
        assert rivals.node_kinds(path)[kind] > 0
        assert 1e-3 < error(path) < 0.3, path  # not the same numbers, and not another answer
    half = rivals.convert_to_fp16(fp32, tmp_path / "half.onnx")
    assert half.stat().st_size < fp32.stat().st_size
    assert 1e-5 < error(half) < 0.01
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "channel.onnx",
        "dynamic.onnx",
        "half.onnx",
        "static.onnx",
        "unsigned.onnx",
    ]


def test_a_rival_that_stayed_in_full_precision_is_refused(fp32: Path) -> None:
    with pytest.raises(AssertionError, match="quantized nothing"):
        rivals._check_nodes(fp32, "a quantizer", "MatMulInteger")


# -- the whole ---------------------------------------------------------------------------------------------


def test_latency_writes_its_numbers_and_a_plot(
    fp32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The export of the same model, made once for all tests of this file.
    monkeypatch.setattr(rivals, "export_fp32", lambda model, path: Path(shutil.copy(fp32, path)))
    line = ["latency", "--geometry", TINY, "--bits", "2-2-8", "--shapes", "1x8,2x4", "--rounds", "2"]
    line += ["--memory-shapes", "1x8", "--warmup", "1", "--loads", "1", "--out", str(tmp_path)]
    keep = tmp_path.parent / f"{tmp_path.name}-kept"
    assert cli.run(benchmark.main, [*line, "--keep", str(keep)]) == 0
    shown = capsys.readouterr().out
    assert "| ours 2-2-8" in shown
    assert "GPU: skipped" in shown or "CUDA fp16" in shown
    written = json.loads((tmp_path / "latency.json").read_text(encoding="utf-8"))
    assert written["settings"]["shapes"] == ["1x8", "2x4"]
    assert written["settings"]["bits"] == ["2-2-8"]
    assert written["environment"]["onnxruntime"]
    rows = {row["name"]: row for row in written["rows"] if row["device"] == "CPU"}
    runtime = rows.pop("ours 2-2-8, mrem-runtime", None)  # where the package is installed
    assert runtime is None or runtime["times_faster_than"]["ours 2-2-8"][0] > 0
    assert list(rows) == [
        "ORT fp32",
        "quantize_dynamic",
        "quantize_dynamic, per channel",
        "quantize_static QDQ",
        "quantize_static QDQ, uint8",
        "ours 2-2-8",
        "ours 2-2-8, with --options",
    ]
    assert all(row["failed"] is None for row in rows.values())
    assert rows["ours 2-2-8"]["disabled_optimizers"] == []
    assert rows["ours 2-2-8, with --options"]["disabled_optimizers"] == ["SkipLayerNormFusion"]
    for row in rows.values():
        assert [(cell["threads"], cell["shape"]) for cell in row["cells"]] == [(1, "1x8"), (1, "2x4")]
        assert all(len(cell["rounds_ms"]) == 2 for cell in row["cells"])
        assert row["resident_mb"] >= row["empty_mb"] > 0
        measured = [memory["shape"] for memory in row["memory_over_bare_process"]]
        assert measured == ([] if row["disabled_optimizers"] else ["1x8"])
    assert 0 < rows["ours 2-2-8"]["cells"][0]["difference"] < 2
    assert set(rows["ours 2-2-8"]["times_faster_than"]) == set(list(rows)[:5])
    assert (tmp_path / "latency.png").read_bytes().startswith(PNG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latency.json", "latency.png"]
    # Again with what was kept: nothing is made.
    monkeypatch.setattr(lineup, "cpu_lineup", None)
    assert cli.run(benchmark.main, [*line, "--keep", str(keep)]) == 0
    again = json.loads((tmp_path / "latency.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in again["rows"]] == [row["name"] for row in written["rows"]]
    assert cli.run(benchmark.main, [*line, "--keep", str(keep), "--rivals", "dynamic"]) == cli.EXIT_USER_ERROR
    assert "were made with --rivals" in capsys.readouterr().err


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result folder with all that `from_folder` reads, its model and its data beside it."""
    root = tmp_path_factory.mktemp("workshop")
    save_model(root / "model")
    write_reviews(root / "data")
    recipe = Recipe(
        model=str(root / "model"),
        data=str(root / "data"),
        task="text-classification",
        max_length=16,
        batch_size=4,
        init_batches=1,
    )
    teacher, _ = load_model(root / "model", "sequence-classification")
    tokens = random_tokens(parse_geometry("16x2x2x32x20"), 4, 6, 0)
    frozen = freeze(make_student(teacher, recipe, tokens), "sequence-classification")
    frozen.notes = {"bits": "4-4-8", "recipe_digest": recipe.digest()}
    (root / "result").mkdir()
    frozen.save(root / "result")
    write_text(root / "result" / "recipe.yaml", recipe.to_yaml())
    return root


def test_a_result_folder_names_its_original_and_its_sentences(result: Path) -> None:
    subject = latency_subject.from_folder(result / "result", None, None, seed=0)
    assert (subject.title, list(subject.frozen), subject.longest) == ("result", ["4-4-8"], 32)
    assert subject.vocabulary == subject.model.config.vocab_size
    assert len(subject.tokens) == latency_subject.CALIBRATION_SENTENCES
    assert len({tuple(row) for row in subject.tokens.columns["input_ids"]}) > 20  # real, different sentences
    again = latency_subject.from_folder(
        result / "result", str(result / "model"), str(result / "data"), seed=0
    )
    assert again.tokens.digest() == subject.tokens.digest()


def test_what_is_gone_or_does_not_belong_is_explained(result: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(result / "result", folder)
    recipe = (folder / "recipe.yaml").read_text(encoding="utf-8")

    def refusal(**places: str) -> str:
        with pytest.raises(UserError) as caught:
            latency_subject.from_folder(folder, places.get("model"), places.get("data"), seed=0)
        return str(caught.value)

    (folder / "recipe.yaml").write_text(recipe.replace(str(result / "model"), "/nowhere"), encoding="utf-8")
    assert "cannot be loaded: There is no model folder /nowhere" in refusal()
    assert "--model" in refusal()
    other = save_model(tmp_path / "other", num_hidden_layers=1)
    assert "its num_hidden_layers is 1, not 2" in refusal(model=str(other))
    (folder / "recipe.yaml").write_text(recipe.replace(str(result / "data"), "/nothing"), encoding="utf-8")
    assert "--data" in refusal()
    (folder / "recipe.yaml").unlink()
    assert "has no recipe.yaml" in refusal()


def test_an_exported_file_of_another_run_is_not_taken_for_ours(
    result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(result / "result", folder)
    frozen = FrozenModel.read(folder)
    subject: Any = SimpleNamespace(folder=folder)
    monkeypatch.setattr("mrem_deploy.export.export_onnx", lambda frozen, path, profile: path)
    made = tmp_path / "4-4-8-ort-cpu.onnx"
    assert lineup.exported(subject, frozen, "4-4-8", "ort-cpu", tmp_path) == made
    other = save_tiny_onnx(folder / "model.onnx")
    assert lineup.exported(subject, frozen, "4-4-8", "ort-cpu", tmp_path) == made
    model = onnx.load(other)
    helper.set_model_props(model, {"recipe_digest": frozen.notes["recipe_digest"]})
    onnx.save(model, folder / "model.onnx")
    assert lineup.exported(subject, frozen, "4-4-8", "ort-cpu", tmp_path) == folder / "model.onnx"
    assert lineup.choose_profiles(None, folder) == ("ort-cpu",)
    save_tiny_onnx(folder / "model_int8.onnx")
    assert lineup.choose_profiles(None, folder) == ("ort-cpu", "int8")


def test_our_runtime_has_a_row_beside_the_same_weights_in_onnxruntime(
    fp32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[tuple[str, str]] = []

    def exported(
        subject: Any, frozen: Any, bits: str, profile: str, work: Path, attention: str = "int8"
    ) -> Path:
        made.append((bits, profile))
        return work / f"{bits}-{profile}.onnx"

    monkeypatch.setattr(rivals, "export_fp32", lambda model, path: Path(shutil.copy(fp32, path)))
    monkeypatch.setattr(lineup, "exported", exported)
    found = lineup.importlib.util.find_spec
    present = True
    monkeypatch.setattr(
        lineup.importlib.util,
        "find_spec",
        lambda name: (True if present else None) if name == "mrem_runtime" else found(name),
    )
    library = SimpleNamespace(target=lambda: "avx2")
    monkeypatch.setitem(sys.modules, "mrem_runtime", library)
    subject: Any = SimpleNamespace(model=None, frozen={"4-4-8": None, "2-2-8": None})

    def names(profiles: tuple[str, ...] = ("ort-cpu",)) -> dict[str, str | None]:
        lined = lineup.cpu_lineup(subject, profiles, None, (), tmp_path, chosen=())
        return {contender.name: contender.beside for contender in lined}

    assert names() == {
        "ORT fp32": None,
        "ours 4-4-8": None,
        "ours 4-4-8, mrem-runtime": "ours 4-4-8",
        "ours 2-2-8": None,
        "ours 2-2-8, mrem-runtime": "ours 2-2-8",
    }
    assert ("2-2-8", "mrem-cpu") in made
    both = lineup.cpu_lineup(subject, ("ort-cpu",), None, (), tmp_path, (), ("int8", "float"))
    assert [(c.name, c.beside) for c in both if c.runtime == "mrem_runtime"][:2] == [
        ("ours 4-4-8, mrem-runtime", "ours 4-4-8"),
        ("ours 4-4-8, mrem-runtime, float attention", "ours 4-4-8"),
    ]
    assert names(("int8",))["ours 2-2-8, mrem-runtime"] is None  # its plain file is not measured

    def broken() -> str:
        raise OSError("there is no library")

    library.target = broken
    assert "ours 2-2-8, mrem-runtime" not in names()
    assert "left out: ours, mrem-runtime: there is no library" in capsys.readouterr().err
    present = False
    assert "ours 2-2-8, mrem-runtime" not in names()
    assert "the package is not installed" in capsys.readouterr().err


BAD = [
    (["--shapes", "1by32"], "'1by32' is not a shape"),
    (["--shapes", "0x32"], "'0x32' is not a shape"),
    (["--geometry", TINY, "--shapes", "1x513"], "reads at most 512 tokens"),
    (["--peers", "abacus"], "there is no peer 'abacus'"),
    (["--profiles", "ort-gpu"], "there is no export profile 'ort-gpu'"),
    (["--options", "SkipLayerNormFusion"], "--options 'SkipLayerNormFusion' cannot be read"),
    (["--options", "disabled_optimizers=SkipLayerNormFusoin"], "'SkipLayerNormFusoin'"),
    (["--rivals", "dynamic,statics"], "--rivals: there is no rival 'statics'"),
    (["--memory-shapes", "1x32,8"], "'8' is not a shape"),
    (["--memory-shapes", "1x513", "--geometry", TINY], "reads at most 512 tokens"),
    (["--together", "1"], "--together must be a whole number, 2 to 64"),
    (["--workload", "gone.txt", "--geometry", TINY], "--workload: there is no file gone.txt"),
    (["somewhere", "--tokenizer", "elsewhere"], "--tokenizer is for random weights"),
    (["--attention", "int4"], "--attention: 'int4' is unknown"),
    (["--keep", "kept", "--device", "gpu"], "--keep is for models on the CPU"),
    (["--device", "tpu"], "--device must be auto, cpu, gpu; got 'tpu'"),
    (["--threads", "0"], "--threads must be a whole number, 1 to 1024"),
    (["--model", "elsewhere"], "--model belongs to a result folder"),
    (["somewhere", "--geometry", TINY], "--geometry is for random weights"),
    (["somewhere", "--per-channel"], "--per-channel is for random weights"),
    (["somewhere"], "is not a quantized model"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(line) for line, _ in BAD])
def test_bad_options_are_explained(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["latency", *arguments, "--bits", "8-8-8"] if TINY in arguments else ["latency", *arguments]
    assert cli.run(benchmark.main, [*line, "--out", str(tmp_path)]) == cli.EXIT_USER_ERROR
    shown = capsys.readouterr().err
    assert message in shown
    assert "→" in shown
    assert list(tmp_path.iterdir()) == []


def test_a_peer_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lineup.importlib.util.find_spec
    absent = lambda name: None if name == "openvino" else found(name)  # noqa: E731
    monkeypatch.setattr(lineup.importlib.util, "find_spec", absent)
    with pytest.raises(UserError, match="pip install openvino nncf"):
        lineup.check_installed(("openvino",))
