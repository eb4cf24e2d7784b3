"""`benchmark latency`: that each number belongs to the model it is said of, not how fast this machine is."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from tiny_job import save_model, write_reviews

from mrem_deploy import artifact, benchmark, cli
from mrem_deploy.benchmarks import latency, latency_lineup, latency_race, latency_report, latency_subject
from mrem_deploy.benchmarks import latency_rivals as rivals
from mrem_deploy.benchmarks.geometry import parse_geometry, random_model, random_tokens
from mrem_deploy.benchmarks.latency_contenders import CUDA, Contender, ContenderFailed, Worker
from mrem_deploy.benchmarks.latency_lineup import parse_session_options
from mrem_deploy.benchmarks.latency_race import Plan, Shape
from mrem_deploy.config import Recipe
from mrem_deploy.errors import UserError
from mrem_deploy.files import write_text
from mrem_deploy.freeze import freeze
from mrem_deploy.loading import load_model
from mrem_deploy.pipeline import make_student

TINY = "16x1x2x32x50"  # hidden, layers, heads, intermediate, vocabulary
WORDS = 50
PNG = b"\x89PNG\r\n\x1a\n"


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "shapes": (Shape(1, 4), Shape(2, 8)),
        "threads": (1,),
        "rounds": 3,
        "warmup": 1,
        "loads": 2,
        "vocabulary": WORDS,
        "seed": 0,
    }
    return Plan(**values | changes)


# -- one process per model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lookup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two nodes: the mean over the tokens of one number per word, the word's own number."""
    numbers = helper.make_tensor("numbers", TensorProto.FLOAT, [WORDS, 1], np.arange(WORDS, dtype=np.float32))
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [1])
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["numbers", "input_ids"], ["found"]),
            helper.make_node("ReduceMean", ["found", "axis"], ["logits"], keepdims=0),
        ],
        "lookup",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1])],
        [numbers, axis],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path = tmp_path_factory.mktemp("lookup") / "lookup.onnx"
    onnx.save(model, path)
    return path


def test_a_model_in_its_own_process(lookup: Path, tmp_path: Path) -> None:
    with Worker(Contender("lookup", lookup), 1, profile=tmp_path) as worker:
        assert worker.load["load_seconds"] > 0
        assert 10 < worker.load["empty_mb"] <= worker.load["loaded_mb"] < 250  # torch alone is larger
        answer = worker.feed(batch=3, sequence=7, vocabulary=WORDS, seed=5)
        expected = np.random.default_rng(5).integers(0, WORDS, size=(3, 7)).mean(axis=1)
        assert answer["shapes"] == [[3, 1]]
        assert answer["sample"][0] == pytest.approx(expected.tolist())
        assert worker.run() > 0
        assert worker.resident_mb() > 10
        (seconds,) = [worker.node_times(3)]
    assert set(seconds) == {"Gather", "ReduceMean"}
    assert all(value >= 0 for value in seconds.values())
    assert list(tmp_path.iterdir()) == []  # the profile was read and removed


def test_a_model_that_does_not_load_or_falls_back_to_another_device_says_so(lookup: Path) -> None:
    with (
        pytest.raises(ContenderFailed, match=r"gone.*no\.onnx"),
        Worker(Contender("gone", Path("no.onnx")), 1),
    ):
        pass
    if CUDA in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has the provider whose absence is tested")
    with (
        pytest.raises(
            ContenderFailed, match="CUDAExecutionProvider did not start; onnxruntime fell back to CPU"
        ),
        Worker(Contender("elsewhere", lookup, provider=CUDA), 1),
    ):
        pass


def test_a_process_that_dies_is_reported_by_its_signal(lookup: Path) -> None:
    with Worker(Contender("doomed", lookup), 1) as worker:
        os.kill(worker._process.pid, signal.SIGILL)
        with pytest.raises(ContenderFailed, match="doomed: its process ended by SIGILL"):
            worker.run()


# -- the race, with a clock that is given ------------------------------------------------------------------


class FakeWorker:
    """Takes its times from a table and answers with one number."""

    times: dict[str, list[float]]
    answers: dict[str, float]
    broken: set[str]
    order: list[str]

    def __init__(self, contender: Contender, threads: int, profile: Path | None = None) -> None:
        self.name = contender.name
        self.load = {"load_seconds": 0.5, "empty_mb": 40.0, "loaded_mb": 60.0}

    def __enter__(self) -> FakeWorker:
        if self.name in self.broken:
            raise ContenderFailed(self.name, "does not load")
        return self

    def __exit__(self, *_: object) -> None: ...

    def feed(self, batch: int, sequence: int, vocabulary: int, seed: int) -> dict[str, Any]:
        self.left = iter(self.times[self.name])
        return {"shapes": [[batch, 1]], "sample": [[self.answers[self.name]]]}

    def run(self) -> float:
        self.order.append(self.name)
        return next(self.left)

    def resident_mb(self) -> float:
        return 70.0

    def node_times(self, runs: int) -> dict[str, float]:
        return {"Add": 1.0, "MatMul": 3.0}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    monkeypatch.setattr(latency_race, "Worker", FakeWorker)
    FakeWorker.broken, FakeWorker.order = set(), []
    FakeWorker.answers = {"fp32": 2.0, "rival": 3.0, "ours": 1.0}
    FakeWorker.times = {
        "fp32": [9.0, 0.4, 0.8, 1.2],  # the first is warm-up
        "rival": [9.0, 0.2, 0.8, 0.3],
        "ours": [9.0, 0.1, 0.4, 0.2],
    }
    return FakeWorker


def contenders(tmp_path: Path) -> list[Contender]:
    for name, size in (("a", 3 * 2**20), ("b", 2**20)):
        (tmp_path / name).write_bytes(bytes(size))
    return [
        Contender("fp32", tmp_path / "a"),
        Contender("rival", tmp_path / "b"),
        Contender("ours", tmp_path / "b", ours=True),
    ]


def test_numbers_of_the_race_by_hand(fake: type[FakeWorker], tmp_path: Path) -> None:
    standings = latency_race.race(contenders(tmp_path), plan(shapes=(Shape(2, 8),), profile_nodes=True))
    assert fake.order == [
        *("fp32", "rival", "ours"),
        *("rival", "ours", "fp32"),
        *("ours", "fp32", "rival"),
        *("fp32", "rival", "ours"),
    ]
    first, rival, ours = (standing.as_dict() for standing in standings)
    assert [row["file_mb"] for row in (first, rival, ours)] == [3.0, 1.0, 1.0]
    assert ours["load_seconds"] == 0.5
    assert (ours["empty_mb"], ours["loaded_mb"], ours["resident_mb"]) == (40.0, 60.0, 70.0)
    (cell,) = ours["cells"]
    assert cell["p50_ms"] == pytest.approx(200)
    assert cell["p95_ms"] == pytest.approx(380)  # nine tenths of the way from 200 to 400
    assert cell["sentences_per_second"] == pytest.approx(2 * 3 / 0.7)
    assert cell["ratio"] == pytest.approx(
        4
    )  # 4, 2 and 6 within the rounds; of the medians it would be 4, too
    assert rival["cells"][0]["ratio"] == pytest.approx(2)  # 2, 1 and 4; of the medians 0.8 / 0.3
    assert first["cells"][0]["ratio"] == 1
    assert cell["difference"] == pytest.approx(0.5)
    assert cell["node_shares"] == {"MatMul": 0.75, "Add": 0.25}
    assert latency_report.against(standings[2], standings[1]) == pytest.approx([2])  # 2, 2 and 1.5


def test_one_that_fails_is_left_out_and_the_others_go_on(fake: type[FakeWorker], tmp_path: Path) -> None:
    fake.broken = {"rival"}
    standings = latency_race.race(contenders(tmp_path), plan())
    assert [standing.failed for standing in standings] == [None, "does not load", None]
    assert [len(standing.cells) for standing in standings] == [2, 0, 2]
    shown = latency_report.tables({"CPU": standings}, plan())
    assert "| rival |      1.0 |  failed |" in shown
    assert "Failed: rival: does not load" in latency_report.summary({"CPU": standings}, "x", plan(), None, "")
    assert latency._measured(standings) == standings


@pytest.mark.parametrize("lost", ["fp32", "ours"])
def test_without_full_precision_or_ours_there_is_no_result(
    lost: str, fake: type[FakeWorker], tmp_path: Path
) -> None:
    fake.broken = {lost}
    with pytest.raises(UserError, match=f"{lost} does not run here: does not load"):
        latency._measured(latency_race.race(contenders(tmp_path), plan()))


def test_the_tables(fake: type[FakeWorker], tmp_path: Path) -> None:
    tuned = Contender("ours, with --options", tmp_path / "b", disabled_optimizers=("X",), ours=True)
    fake.times["ours, with --options"] = [9.0, 0.01, 0.01, 0.01]
    fake.answers["ours, with --options"] = 1.0
    watched = plan(threads=(1, 2), profile_nodes=True)
    standings = latency_race.race([*contenders(tmp_path), tuned], watched)
    shown = latency_report.tables({"CPU": standings}, watched)
    assert "CPU, 1 thread: median ms (× faster)" in shown
    assert "CPU, 2 threads: p95 ms · sentences/s" in shown
    assert "200 (4.00×)" in shown
    verdict = shown[shown.index("times faster: geometric mean (lowest)") :].split("\n\n")[0]
    assert "| ours                                  | 4.00× (4.00×) | 2.00× (2.00×) |" in verdict
    assert "--options" not in verdict  # tuned sessions are no part of the headline
    assert "- ours: MatMul 75%, Add 25%" in shown
    figure = latency_report.draw({"CPU": standings}, "x", watched)
    assert [axes.get_title(loc="left") or axes.get_title() for axes in figure.axes] == [
        "x: CPU, 1 thread",
        "x: CPU, 2 threads",
    ]


def test_outputs_of_other_shapes_are_a_defect() -> None:
    one, other = {"shapes": [[2, 3]], "sample": [[1.0]]}, {"shapes": [[2, 2]], "sample": [[1.0]]}
    with pytest.raises(AssertionError, match="other shapes"):
        latency_race.difference(one, other)


def test_small_shares_are_summed_up() -> None:
    shares = latency_race.shares({f"Op{number}": float(number) for number in range(1, 9)})
    assert latency_report.describe_shares(shares).startswith("Op8 22%, Op7 19%")
    assert latency_report.describe_shares(shares).endswith("Op3 8%, others 8%")


def test_session_options() -> None:
    options = parse_session_options("disabled_optimizers=A, B;session.key=1")
    assert options is not None
    assert (options.disabled_optimizers, options.config) == (("A", "B"), {"session.key": "1"})
    assert parse_session_options("none") is None


# -- rivals ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp32") / "fp32.onnx"
    geometry = parse_geometry(TINY)
    return rivals.export_fp32(random_model(geometry, 0), random_tokens(geometry, 4, 6, 0), path)


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
    monkeypatch.setattr(rivals, "export_fp32", lambda model, tokens, path: Path(shutil.copy(fp32, path)))
    line = ["latency", "--geometry", TINY, "--bits", "2-2-8", "--shapes", "1x8,2x4", "--rounds", "2"]
    assert cli.run(benchmark.main, [*line, "--warmup", "1", "--loads", "1", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "| ours 2-2-8" in shown
    assert "GPU: skipped" in shown or "CUDA fp16" in shown
    written = json.loads((tmp_path / "latency.json").read_text(encoding="utf-8"))
    assert written["settings"]["shapes"] == ["1x8", "2x4"]
    assert written["settings"]["bits"] == ["2-2-8"]
    assert written["environment"]["onnxruntime"]
    rows = {row["name"]: row for row in written["rows"] if row["device"] == "CPU"}
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
    assert 0 < rows["ours 2-2-8"]["cells"][0]["difference"] < 2
    assert set(rows["ours 2-2-8"]["times_faster_than"]) == set(list(rows)[:5])
    assert (tmp_path / "latency.png").read_bytes().startswith(PNG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latency.json", "latency.png"]


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
    artifact.save(frozen, root / "result")
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
    result: Path, lookup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(result / "result", folder)
    frozen = artifact.read(folder)
    subject: Any = SimpleNamespace(folder=folder)
    monkeypatch.setattr("mrem_deploy.export.export_onnx", lambda frozen, path, profile: path)
    made = tmp_path / "4-4-8-ort-cpu.onnx"
    assert latency_lineup.exported(subject, frozen, "4-4-8", "ort-cpu", tmp_path) == made
    shutil.copy(lookup, folder / "model.onnx")
    assert latency_lineup.exported(subject, frozen, "4-4-8", "ort-cpu", tmp_path) == made
    model = onnx.load(lookup)
    helper.set_model_props(model, {"recipe_digest": frozen.notes["recipe_digest"]})
    onnx.save(model, folder / "model.onnx")
    assert latency_lineup.exported(subject, frozen, "4-4-8", "ort-cpu", tmp_path) == folder / "model.onnx"
    assert latency_lineup.choose_profiles(None, folder) == ("ort-cpu",)
    shutil.copy(lookup, folder / "model_int8.onnx")
    assert latency_lineup.choose_profiles(None, folder) == ("ort-cpu", "int8")


BAD = [
    (["--shapes", "1by32"], "'1by32' is no shape"),
    (["--shapes", "0x32"], "'0x32' is no shape"),
    (["--geometry", TINY, "--shapes", "1x513"], "reads at most 512 tokens"),
    (["--peers", "abacus"], "there is no peer 'abacus'"),
    (["--profiles", "ort-gpu"], "there is no export profile 'ort-gpu'"),
    (["--options", "SkipLayerNormFusion"], "--options 'SkipLayerNormFusion' cannot be read"),
    (["--device", "tpu"], "--device must be auto, cpu, gpu; got 'tpu'"),
    (["--threads", "0"], "--threads must be a whole number of at least 1"),
    (["--model", "elsewhere"], "--model belongs to a result folder"),
    (["somewhere", "--geometry", TINY], "--geometry is for random weights"),
    (["somewhere", "--per-channel"], "--per-channel is for random weights"),
    (["somewhere"], "is not a quantized model"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(line) for line, _ in BAD])
def test_bad_options_are_explained(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["latency", *arguments, "--bits", "8-8-8"] if TINY in arguments[:2] else ["latency", *arguments]
    assert cli.run(benchmark.main, [*line, "--out", str(tmp_path)]) == cli.EXIT_USER_ERROR
    shown = capsys.readouterr().err
    assert message in shown
    assert "→" in shown
    assert list(tmp_path.iterdir()) == []


def test_a_peer_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = latency_lineup.importlib.util.find_spec
    absent = lambda name: None if name == "openvino" else found(name)  # noqa: E731
    monkeypatch.setattr(latency_lineup.importlib.util, "find_spec", absent)
    with pytest.raises(UserError, match="pip install openvino nncf"):
        latency_lineup.check_installed(("openvino",))
