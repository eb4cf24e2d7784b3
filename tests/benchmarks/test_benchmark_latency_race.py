"""The race of `benchmark latency`: one process per model, and its numbers by hand with a given clock."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from mrem_deploy.base.errors import UserError
from mrem_deploy.benchmarks.latency import lineup, race, report, resources, rivals, serving, tables, verb
from mrem_deploy.benchmarks.latency.contenders import Contender, ContenderFailed, Worker
from mrem_deploy.benchmarks.latency.settings import RaceSettings, Shape, parse_session_options
from mrem_deploy.deploy.providers import CPU, CUDA, TENSORRT

WORDS = 50


def plan(**changes: Any) -> RaceSettings:
    values: dict[str, Any] = {
        "shapes": (Shape(1, 4), Shape(2, 8)),
        "threads": (1,),
        "rounds": 3,
        "warmup": 1,
        "loads": 2,
        "vocabulary": WORDS,
        "seed": 0,
    }
    return RaceSettings(**values | changes)


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
        memory = worker.memory()
        assert 10 < memory["resident_mb"] <= memory["peak_mb"]
        (seconds,) = [worker.node_times(3)]
    assert set(seconds) == {"Gather", "ReduceMean"}
    assert all(value >= 0 for value in seconds.values())
    assert list(tmp_path.iterdir()) == []  # the profile was read and removed


FEED = """
import sys
from mrem_deploy.benchmarks.latency.worker import Holder
holder, sizes = Holder(), {"batch": 1, "sequence": 4, "vocabulary": 50, "seed": 0}
model = {"provider": "CPUExecutionProvider", "provider_options": {}, "disabled_optimizers": [], "config": {}}
holder.load({"runtime": sys.argv[1], "path": sys.argv[2], "threads": 1, "profile": None} | model)
loaded = set(sys.modules)
holder.feed(**sizes)
print(sorted(set(sys.modules) - loaded))
"""


@pytest.mark.parametrize("runtime", ["onnxruntime", "mrem_runtime"])
def test_no_model_is_charged_with_what_the_benchmark_imports(runtime: str, lookup: Path) -> None:
    """Memory is counted from the process as it was before the model: a module that came later would be the
    model's. NumPy's generators come with 6 MiB."""
    pytest.importorskip(runtime)
    command = [sys.executable, "-c", FEED, runtime, str(lookup)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


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

    def memory(self) -> dict[str, float]:
        return {"resident_mb": 70.0, "peak_mb": 75.0}

    def node_times(self, runs: int) -> dict[str, float]:
        return {"Add": 1.0, "MatMul": 3.0}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    for module in (race, resources, serving):
        monkeypatch.setattr(module, "Worker", FakeWorker)
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
    standings = race.race(contenders(tmp_path), plan(shapes=(Shape(2, 8),), profile_nodes=True))
    assert fake.order == [
        *("fp32", "rival", "ours"),
        *("rival", "ours", "fp32"),
        *("ours", "fp32", "rival"),
        *("fp32", "rival", "ours"),
    ]
    first, rival, ours = (standing.to_dict() for standing in standings)
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
    assert tables.against(standings[2], standings[1]) == pytest.approx([2])  # 2, 2 and 1.5


def test_one_that_fails_is_left_out_and_the_others_go_on(fake: type[FakeWorker], tmp_path: Path) -> None:
    fake.broken = {"rival"}
    standings = race.race(contenders(tmp_path), plan())
    assert [standing.failed for standing in standings] == [None, "does not load", None]
    assert [len(standing.cells) for standing in standings] == [2, 0, 2]
    shown = tables.tables({"CPU": standings}, plan())
    assert "| rival |       1.0 |  failed |" in shown
    assert "Failed: rival: does not load" in report.summary({"CPU": standings}, "x", plan(), None, "")
    assert verb._measured(standings) == standings


@pytest.mark.parametrize("lost", ["fp32", "ours"])
def test_without_full_precision_or_ours_there_is_no_result(
    lost: str, fake: type[FakeWorker], tmp_path: Path
) -> None:
    fake.broken = {lost}
    with pytest.raises(UserError, match=f"{lost} does not run here: does not load"):
        verb._measured(race.race(contenders(tmp_path), plan()))


def options(*line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verb.add_options(parser)
    short = (
        "--shapes",
        "1x4",
        "--rounds",
        "3",
        "--warmup",
        "1",
        "--loads",
        "1",
        "--options",
        "none",
        "--memory-shapes",
        "none",
    )
    return parser.parse_args([*short, *line])


def test_a_failure_on_the_gpu_does_not_lose_the_results_of_the_cpu(
    fake: type[FakeWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("no kernel image")

    subject = SimpleNamespace(
        title="x", folder=None, frozen={}, vocabulary=WORDS, longest=None, padding=0, max_length=128
    )
    monkeypatch.setattr(verb, "_subject", lambda options: subject)
    monkeypatch.setattr(lineup, "why_no_gpu", lambda gpu: None)
    monkeypatch.setattr(lineup, "cpu_lineup", lambda *arguments: contenders(tmp_path))
    monkeypatch.setattr(lineup, "gpu_lineup", broken)
    found = verb.run(options())
    assert [row["device"] for row in found.rows] == ["CPU"] * 3
    assert "GPU: skipped, it failed: RuntimeError: no kernel image." in found.summary
    with pytest.raises(RuntimeError, match="no kernel image"):
        verb.run(options("--device", "gpu"))


def test_the_lineup_on_a_gpu(tmp_path: Path, lookup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA folds weights, which is no tuning; TensorRT gets the shapes, and CUDA behind it."""
    for name in ("fp32.onnx", "static.onnx"):
        shutil.copy(lookup, tmp_path / name)
    monkeypatch.setenv("MREM_CACHE", str(tmp_path))
    monkeypatch.setattr(rivals, "convert_to_fp16", lambda fp32, path: path)
    monkeypatch.setattr(lineup, "exported", lambda subject, frozen, bits, profile, work: lookup)
    monkeypatch.setattr(lineup, "tensorrt_problem", lambda: "")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [TENSORRT, CUDA, CPU])
    subject: Any = SimpleNamespace(frozen={"4-4-8": None})
    made = {c.name: c for c in lineup.gpu_lineup(subject, (Shape(1, 32), Shape(8, 16)), tmp_path)}
    assert list(made) == [
        "CUDA fp32",
        "CUDA fp16",
        "CUDA quantize_static QDQ, float matmuls",
        "CUDA ours 4-4-8, float matmuls",
        "TensorRT fp32",
        "TensorRT fp16",
        "TensorRT ours 4-4-8",
    ]
    ours = made["CUDA ours 4-4-8, float matmuls"]
    assert ours.to_dict()["session_config"] == {"session.disable_quant_qdq": "1"}
    assert not ours.tuned
    engine = made["TensorRT ours 4-4-8"].provider_options
    assert engine["trt_profile_max_shapes"] == "input_ids:8x32"
    assert engine["trt_fp16_enable"] == "1"
    assert made["TensorRT fp32"].provider_options["trt_fp16_enable"] == "0"
    monkeypatch.setattr(lineup, "tensorrt_problem", lambda: "there is no libnvinfer.so.10")
    assert not any("TensorRT" in c.name for c in lineup.gpu_lineup(subject, (Shape(1, 32),), tmp_path))


def test_the_tables(fake: type[FakeWorker], tmp_path: Path) -> None:
    tuned = Contender("ours, with --options", tmp_path / "b", disabled_optimizers=("X",), ours=True)
    fake.times["ours, with --options"] = [9.0, 0.01, 0.01, 0.01]
    fake.answers["ours, with --options"] = 1.0
    watched = plan(threads=(1, 2), profile_nodes=True)
    standings = race.race([*contenders(tmp_path), tuned], watched)
    shown = tables.tables({"CPU": standings}, watched)
    assert "CPU, 1 thread: median ms (× faster)" in shown
    assert "CPU, 2 threads: p95 ms · sentences/s" in shown
    assert "200 (4.00×)" in shown
    verdict = shown[shown.index("times faster: geometric mean (lowest)") :].split("\n\n")[0]
    assert "| ours                                  | 4.00× (4.00×) | 2.00× (2.00×) |" in verdict
    assert "--options" not in verdict  # tuned sessions are no part of the headline
    assert "- ours: MatMul 75%, Add 25%" in shown
    figure = report.draw({"CPU": standings}, "x")
    assert [axes.get_title(loc="left") or axes.get_title() for axes in figure.axes] == [
        "x: CPU, 1 thread",
        "x: CPU, 2 threads",
    ]


def test_outputs_of_other_shapes_are_a_defect() -> None:
    one, other = {"shapes": [[2, 3]], "sample": [[1.0]]}, {"shapes": [[2, 2]], "sample": [[1.0]]}
    with pytest.raises(AssertionError, match="other shapes"):
        race.difference(one, other)


def test_small_shares_are_summed_up() -> None:
    shares = race.shares({f"Op{number}": float(number) for number in range(1, 9)})
    assert tables.describe_shares(shares).startswith("Op8 22%, Op7 19%")
    assert tables.describe_shares(shares).endswith("Op3 8%, others 8%")


def test_session_options() -> None:
    options = parse_session_options("disabled_optimizers=A, B;session.key=1")
    assert options is not None
    assert (options.disabled_optimizers, options.config) == (("A", "B"), {"session.key": "1"})
    assert parse_session_options("none") is None
