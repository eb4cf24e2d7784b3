"""The benchmarks on a tiny geometry: that they measure what they say, not how fast this machine is."""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mrem_deploy import benchmark
from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError
from mrem_deploy.benchmarks import options, step, step_job
from mrem_deploy.benchmarks.contenders import present
from mrem_deploy.benchmarks.geometry import Geometry, parse_geometry, random_model, random_tokens
from mrem_deploy.benchmarks.output import check_folder, table
from mrem_deploy.benchmarks.quantized import check_quantized, expected_quantizers, names_outside
from mrem_deploy.benchmarks.timing import Comparison, geometric_mean, interleave, percentile, quartiles, timed
from mrem_deploy.models.parts import Part, carve
from mrem_deploy.quant.insert import prepare
from mrem_deploy.quant.layers import QuantLinear
from mrem_deploy.quant.quantizers import LearnedScale
from mrem_deploy.recipe import Recipe
from mrem_deploy.train.job import TrainSettings
from mrem_deploy.train.module import ModuleTrainer
from mrem_deploy.train.student import make_student

TINY = "16x3x2x32x50"  # hidden, layers, heads, intermediate, vocabulary
SHAPE = ["--geometry", TINY, "--batch-size", "2", "--length", "6"]
CUTS = [0, 1, 2, 3]
PNG = b"\x89PNG\r\n\x1a\n"


def read(verb: Any, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verb.add_options(parser)
    return parser.parse_args(list(arguments))


# -- shapes ------------------------------------------------------------------------------------------------


def test_geometries_by_name_and_by_numbers() -> None:
    assert parse_geometry("bert-base") == Geometry(768, 12, 12, 3072, 30522)
    assert parse_geometry("256x4x8x1024") == Geometry(256, 4, 8, 1024, 30522)
    assert parse_geometry(TINY) == Geometry(16, 3, 2, 32, 50)
    for text in ("bert-large", "minilm-l6", TINY):
        assert str(parse_geometry(text)) == text


def test_a_random_model_has_the_shape_and_only_the_seed_decides_its_weights() -> None:
    state = torch.random.get_rng_state()
    first, again, other = (random_model(parse_geometry(TINY), seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not first.training  # dropout would cost time and memory that a run does not have
    weights = first.bert.encoder.layer[2].output.dense.weight
    assert weights.shape == (16, 32)
    assert torch.equal(weights, again.bert.encoder.layer[2].output.dense.weight)
    assert not torch.equal(weights, other.bert.encoder.layer[2].output.dense.weight)


def test_random_tokens_fill_every_place() -> None:
    tokens = random_tokens(parse_geometry(TINY), examples=40, length=6, seed=0)
    batch = tokens.batch(np.arange(40))
    assert batch["input_ids"].shape == (40, 6)
    assert batch["attention_mask"].all()
    assert batch["input_ids"].min() >= 0
    assert 40 < batch["input_ids"].max() < 50  # 240 draws out of 50 words come near the end


# -- timing ------------------------------------------------------------------------------------------------


def test_rounds_interleave_and_the_warm_up_is_not_counted() -> None:
    now = 0.0
    calls: list[str] = []
    durations = {
        "a": iter([9.0, 1.0, 2.0, 4.0]),
        "b": iter([9.0, 3.0, 3.0, 4.0]),
        "c": iter([9.0, 5.0, 6.0, 7.0]),
    }

    def work(name: str) -> None:
        nonlocal now
        calls.append(name)
        now += next(durations[name])

    ticks = itertools.count(1)
    last_tick = 0

    def tick() -> None:
        nonlocal last_tick
        last_tick = next(ticks)

    contenders = {name: timed(lambda name=name: work(name), clock=lambda: now) for name in durations}  # type: ignore[misc]
    times = interleave(contenders, rounds=3, warmup=1, after_call=tick)
    assert calls == ["a", "b", "c", "b", "c", "a", "c", "a", "b", "a", "b", "c"]  # everyone has every place
    assert last_tick == 12
    assert times == {"a": (1.0, 2.0, 4.0), "b": (3.0, 3.0, 4.0), "c": (5.0, 6.0, 7.0)}


def test_the_ratio_is_the_median_of_neighbours_not_the_ratio_of_medians() -> None:
    result = Comparison((1.0, 2.0, 10.0), (1.5, 2.0, 20.0)).to_dict()  # ratios 1.5, 1, 2
    assert result["base_seconds"] == 2.0
    assert result["seconds"] == 2.0
    assert result["ratio"] == 1.5
    assert result["ratio_quartiles"] == [1.25, 1.75]
    assert result["ratio_range"] == [1.0, 2.0]
    assert result["rounds"] == [[1.0, 1.5], [2.0, 2.0], [10.0, 20.0]]


def test_quartiles_by_hand() -> None:
    assert quartiles((5.0, 1.0, 4.0, 2.0, 3.0)) == (2.0, 3.0, 4.0)
    assert quartiles((7.0,)) == (7.0, 7.0, 7.0)
    assert percentile((3.0, 1.0, 2.0, 4.0, 5.0), 95) == pytest.approx(4.8)  # four fifths from 4 to 5
    assert percentile((2.0, 1.0), 100) == 2.0


def test_a_gain_and_a_loss_of_the_same_size_cancel() -> None:
    assert geometric_mean((2.0, 0.5)) == pytest.approx(1.0)
    assert geometric_mean((4.0, 1.0)) == pytest.approx(2.0)


# -- options and output ------------------------------------------------------------------------------------


def test_quick_changes_only_what_was_not_given() -> None:
    full = options.fill_in(read(step), step.DEFAULTS)
    quick = options.fill_in(read(step, "--quick", "--rounds", "33"), step.DEFAULTS)
    assert (str(full.geometry), full.batch_size, full.length) == ("bert-base", 32, 128)
    assert full.bits == ("8-8-8", "4-4-8", "2-2-8", "2-2-4")
    assert str(quick.geometry) == "minilm-l6"
    assert quick.rounds == 33
    json.dumps(options.as_settings(quick))


def test_table_is_aligned_markdown() -> None:
    assert table(["name", "s"], [["a", "1.25"], ["longer", "10"]]).splitlines() == [
        "| name   |    s |",
        "|--------|-----:|",
        "| a      | 1.25 |",
        "| longer |   10 |",
    ]


def test_help_lists_every_benchmark_and_each_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for verb, what in benchmark.VERBS.items():
        assert verb in shown
        assert what in shown
        with pytest.raises(SystemExit) as stop:
            benchmark.main([verb, "--help"])
        assert stop.value.code == 0
        assert f"mrem_deploy.benchmark {verb}" in capsys.readouterr().out


BAD = [
    (["latency-of-tea"], "no benchmark 'latency-of-tea'"),
    (["memory", "--geometry", "bert-huge"], "--geometry 'bert-huge' is unknown"),
    (["memory", "--geometry", "16x2x0x32"], "at least 1"),
    (["memory", "--geometry", "16x2x3x32"], "16 hidden units cannot be cut into 3 heads"),
    (["memory", "--geometry", TINY, "--modules", "1,4"], "must be 1 to 3; got 4"),
    (["memory", "--modules", "1,,4"], "--modules must be different values"),
    (["memory", "--modules", "2,2"], "--modules must be different values"),
    (["memory", "--modules", "0"], "--modules must be a whole number of at least 1; got '0'"),
    (["memory", "--steps", "1"], "--steps must be a whole number of at least 2"),
    (["memory", "--bits", "5-5-8"], "5 bits for weights are not supported"),
    (["memory", "--fill", "tape"], "--fill must be ram or disk; got 'tape'"),
    (["memory", "--cache-dir", "somewhere"], "--cache-dir is for memory-mapped files"),
    (["memory", "--limit", "much"], "--limit must be a size such as 24GB"),
    (["memory", "--fill", "--calib-size", str(10**9)], "the cache needs"),
    (["step", "--bits", "32-4-32"], "--bits 32-4-32 leaves nothing to compare"),
    (["step", "--bits", "4-4-8,four"], "--bits must be three numbers"),
    (["step", "--geometry", TINY, "--modules", "3", "--module", "4"], "--module must be 1 to 3"),
    (["step", "--geometry", TINY, "--modules", "4"], "so --modules must be 1 to 3; got 4"),
    (["step", "--length", "513"], "--length must be a whole number, 3 to 512"),
    (["step", "--rounds", "-1"], "--rounds must be a whole number of at least 1"),
    (["step", "--seed", "1.5"], "--seed must be a whole number"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(line) for line, _ in BAD])
def test_bad_options_are_explained(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(benchmark.main, arguments) == cli.EXIT_USER_ERROR
    shown = capsys.readouterr().err
    assert message in shown
    assert "→" in shown  # what to do


def test_a_result_folder_that_cannot_be_is_refused_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match="is a file"):
        check_folder(str(tmp_path / "taken"))
    with pytest.raises(UserError):
        check_folder(str(tmp_path / "taken" / "below"))
    assert check_folder(str(tmp_path / "new")) == tmp_path / "new"
    assert list((tmp_path / "new").iterdir()) == []


# -- step --------------------------------------------------------------------------------------------------


def students(module: int, bits: str = "4-4-8", per_channel: bool = False) -> tuple[Any, Part, Part, Recipe]:
    """The teacher, its part and the quantized part, of one block each."""
    geometry = parse_geometry(TINY)
    teacher = random_model(geometry, 0).requires_grad_(False)
    prepare(teacher)
    part = carve(teacher, CUTS)[module]
    recipe = Recipe(
        bits=bits,
        per_channel=per_channel,
        batch_size=2,
        init_batches=1,
        keep_fp=names_outside(teacher, part),
    )
    student = make_student(teacher, recipe, random_tokens(geometry, 2, 6, 0))
    return teacher, part, carve(student, CUTS)[module], recipe


def inputs(module: int) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    batch = random_tokens(parse_geometry(TINY), 2, 6, 0).batch(np.arange(2))
    hidden = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    return batch, hidden if module else None


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        # A block has q, k, v, attention output and two feed-forward weights; q, k and v share one of the
        # four input steps, and the two products inside attention have four more.
        (0, {"weights": 6, "activations": 8, "embeddings": 1}),
        (1, {"weights": 6, "activations": 8, "embeddings": 0}),
        (2, {"weights": 7, "activations": 9, "embeddings": 0}),  # with the pooler, without the classifier
    ],
)
@pytest.mark.parametrize(("bits", "per_channel"), [("8-8-8", False), ("4-4-8", True), ("2-2-4", False)])
def test_a_quantized_module_is_recognised(
    module: int, expected: dict[str, int], bits: str, per_channel: bool
) -> None:
    teacher, part, quantized, recipe = students(module, bits, per_channel)
    assert expected_quantizers(teacher, recipe.spec) == expected
    checked = check_quantized(part, quantized, expected, *inputs(module))
    assert checked.pop("relative_difference") > 1e-3
    assert checked == expected


def test_an_unquantized_module_is_not_taken_for_a_quantized_one() -> None:
    teacher, part, quantized, recipe = students(1)
    expected = expected_quantizers(teacher, recipe.spec)
    plain = carve(step_job.unquantized_student(teacher), CUTS)[1]
    with pytest.raises(AssertionError, match="expected quantizers"):
        check_quantized(part, plain, expected, *inputs(1))
    with pytest.raises(AssertionError, match="changes the output by 0"):
        check_quantized(part, part, dict.fromkeys(expected, 0), *inputs(1))
    layer = next(m for m in quantized.modules() if isinstance(m, QuantLinear))
    layer.weight_quantizer = nn.Identity()
    with pytest.raises(AssertionError, match="'weights': 5"):
        check_quantized(part, quantized, expected, *inputs(1))


def test_a_quantizer_that_leaves_its_grid_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, part, quantized, recipe = students(1)
    expected = expected_quantizers(teacher, recipe.spec)
    monkeypatch.setattr(LearnedScale, "forward", lambda self, x: x)
    with pytest.raises(AssertionError, match="off its grid"):
        check_quantized(part, quantized, expected, *inputs(1))


def test_a_quantizer_that_does_not_run_is_found() -> None:
    teacher, part, quantized, recipe = students(1)
    expected = expected_quantizers(teacher, recipe.spec)
    layer = next(m for m in quantized.modules() if isinstance(m, QuantLinear))
    layer.forward = lambda x: nn.functional.linear(x, layer.weight, layer.bias)  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="from that of its quantized operands"):
        check_quantized(part, quantized, expected, *inputs(1))


def test_a_layer_that_is_passed_by_is_found() -> None:
    teacher, part, quantized, recipe = students(1)
    expected = expected_quantizers(teacher, recipe.spec)
    name = next(name for name, _ in quantized.view.named_modules() if name.endswith("output.dense"))
    skipped = quantized.view.get_submodule(name.removesuffix(".dense"))
    skipped.forward = lambda hidden, residual: residual  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="did not run"):
        check_quantized(part, quantized, expected, *inputs(1))


@pytest.mark.parametrize("module", [0, 1, 2])
def test_both_students_train_and_leave_no_gradients_behind(module: int) -> None:
    teacher, part, quantized, _ = students(module)
    plain = carve(step_job.unquantized_student(teacher), CUTS)[module]
    batch, hidden = inputs(module)
    for student in (plain, quantized):
        trainer = ModuleTrainer(part, student, TrainSettings(10, 1e-4, 1e-3, 2, 0))
        step_job.check_trains(step_job.stepper(trainer, [(batch, hidden, hidden)]), student)
        # Gradients of a finished module would lie in memory while all the others are trained.
        assert all(parameter.grad is None for parameter in student.parameters())


def test_a_student_that_does_not_train_is_found() -> None:
    teacher, part, _, _ = students(1)
    batch, hidden = inputs(1)
    student = carve(step_job.unquantized_student(teacher), CUTS)[1]
    frozen = ModuleTrainer(part, student, TrainSettings(10, 0.0, 0.0, 2, 0))
    with pytest.raises(AssertionError, match=r"unmoved: .*query"):
        step_job.check_trains(step_job.stepper(frozen, [(batch, hidden, hidden)]), student)
    twin = carve(copy.deepcopy(teacher).requires_grad_(True), CUTS)[1]
    equal = ModuleTrainer(part, twin, TrainSettings(10, 1e-4, 1e-3, 2, 0))
    with pytest.raises(AssertionError, match="loss 0"):
        step_job.check_trains(step_job.stepper(equal, [(batch, hidden, hidden)]), twin)


def test_the_stepper_counts_steps_and_takes_batches_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Trainer:
        def step(self, *arguments: Any) -> argparse.Namespace:
            seen.append(arguments)
            return argparse.Namespace(loss=1.0)

    batches: Any = [("a", 1, 2), ("b", 3, 4)]
    call = step_job.stepper(Trainer(), batches, torch.device("cpu"))  # type: ignore[arg-type]
    assert [call() for _ in range(3)] == [1.0] * 3
    assert seen == [(0, "a", 1, 2), (1, "b", 3, 4), (2, "a", 1, 2)]
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    gpu = torch.device("cuda", 0)
    step_job.stepper(Trainer(), batches, gpu)()  # type: ignore[arg-type]
    assert waited == [gpu]  # a launch returns before the GPU has done the work


def test_kernels_of_another_device_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    for verb in ("step", "footprint"):
        assert cli.run(benchmark.main, [verb, *SHAPE, "--kernels", "triton"]) == cli.EXIT_USER_ERROR
        assert "--kernels triton does not compute on cpu" in capsys.readouterr().err
    assert cli.run(benchmark.main, ["step", *SHAPE, "--device", "cuda"]) == cli.EXIT_USER_ERROR
    assert "torch sees no GPU here" in capsys.readouterr().err


@pytest.fixture
def allocator_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrem_deploy.benchmarks.step_job.keep_large_blocks", lambda: True)


@pytest.mark.usefixtures("allocator_left_alone")
def test_step_writes_its_numbers_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["step", *SHAPE, "--modules", "3", "--module", "1", "--bits", "2-2-8", "--rounds", "3"]
    assert cli.run(benchmark.main, [*line, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "| 2-2-8 |  per tensor |" in shown
    assert "| 2-2-8 | per channel |" in shown
    written = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))
    assert written["benchmark"] == "step"
    assert written["settings"]["geometry"] == TINY
    assert written["settings"]["blocks"] == [0, 1]
    assert written["environment"]["torch"] == str(torch.__version__)
    assert written["date"] == written["environment"]["date"]
    assert [(row["bits"], row["per_channel"]) for row in written["rows"]] == [
        ("2-2-8", False),
        ("2-2-8", True),
    ]
    for row in written["rows"]:
        assert len(row["rounds"]) == 3
        assert all(seconds > 0 for pair in row["rounds"] for seconds in pair)
        assert row["checked"]["embeddings"] == 1
        assert [row["kernels"], *row["others"]] == list(present())
        for other in row["others"].values():
            assert len(other["rounds"]) == 3
            first, theirs = row["rounds"], other["rounds"]
            ratios = [slow[1] / fast[1] for fast, slow in zip(first, theirs, strict=True)]
            assert other["speed_up"]["ratio"] == pytest.approx(percentile(ratios, 50))
    assert (tmp_path / "step.png").read_bytes().startswith(PNG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.json", "step.png"]


@pytest.mark.parametrize("verb", benchmark.VERBS)
def test_help_loads_neither_torch_nor_a_runtime(verb: str) -> None:
    code = (
        "import sys; from mrem_deploy import benchmark\n"
        f"try: benchmark.main([{verb!r}, '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'onnx', 'onnx_ir', 'onnxruntime', 'matplotlib'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"usage: mrem benchmark {verb}" in done.stdout, done.stderr
    assert done.returncode == 0, f"loaded: {done.stderr}"
