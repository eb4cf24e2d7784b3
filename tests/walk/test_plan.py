"""The plan before a run: its arithmetic by hand, and a measurement that leaves everything as it was."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_job import job_in, workshop_in
from tiny_models import assert_same_state, state_of, tiny_encoded, tiny_model

from mrem_deploy.data.encoded import BatchSchedule
from mrem_deploy.recipe import Recipe
from mrem_deploy.walk.plan import ONNX_COST, ModelShape, Plan, make_plan, shape_of
from mrem_deploy.walk.timing import TIMED_STEPS, Timing, measure, timed_batches

SHAPE = ModelShape(
    blocks=12,
    width=768,
    block_parameters=7_000_000,
    parameters=110_000_000,
    embedding_parameters=23_000_000,
    cuts=(0, 3, 6, 9, 12),
)
TIMING = Timing(
    train=0.5, teacher=0.1, student=0.2, search=1.0, step_mib=200.0, held_mib=1000.0, mean_length=32.0
)
RECIPE = Recipe(model="somewhere/bert-base", steps=1000, batch_size=32, init_batches=8, lr=1e-4)


def stages(plan: Plan) -> dict[str, float]:
    return {stage.name: stage.seconds for stage in plan.stages}


def test_seconds_of_every_method_by_hand() -> None:
    found = stages(make_plan(RECIPE, SHAPE, TIMING, sentences=4096, evaluation_examples=2000))
    assert found["calibrate"] == pytest.approx(8 * 12 * 0.1 + 12 * 1.0)
    assert found["train"] == pytest.approx(1000 * 12 * 0.4)  # without the teacher
    # 128 batches through the first nine blocks, and the teacher through the last three
    assert found["cache"] == pytest.approx(128 * (9 * 0.3 + 3 * 0.1))
    every_step = stages(make_plan(replace(RECIPE, teacher_cache="never"), SHAPE, TIMING, sentences=4096))
    assert every_step["train"] == pytest.approx(1000 * 12 * 0.5)
    assert every_step["cache"] == pytest.approx(128 * 9 * 0.3)
    in_onnx = ONNX_COST * 0.1
    assert found["evaluate"] == pytest.approx(2000 / 32 * 12 * (0.1 + in_onnx))
    assert found["compare"] == pytest.approx(512 / 32 * 12 * 0.2)  # a sample in torch
    few = stages(make_plan(RECIPE, SHAPE, TIMING, sentences=4096, evaluation_examples=64))
    assert few["compare"] == pytest.approx(64 / 32 * 12 * 0.2)
    for recipe, profiles, passes in (
        (RECIPE, 0, 0.1 + 0.2),  # nothing exported: torch scores everything
        (replace(RECIPE, validate=False), 1, 0.1 + 0.2),
        (replace(RECIPE, scored_by="torch"), 1, 0.1 + in_onnx + 0.2),
    ):
        other = stages(
            make_plan(recipe, SHAPE, TIMING, sentences=4096, profiles=profiles, evaluation_examples=2000)
        )
        assert other["evaluate"] == pytest.approx(2000 / 32 * 12 * passes)
        assert "compare" not in other

    parallel = make_plan(replace(RECIPE, method="mrem-p"), SHAPE, TIMING, 4096, workers=2)
    assert stages(parallel)["train"] == pytest.approx(1000 * 6 * 0.5)  # two modules of three blocks each
    assert "cache" not in stages(parallel)
    # Six states on 8 batches of held-out sentences, one pass more for the next module, and the teacher's.
    assert stages(parallel)["choose"] == pytest.approx(256 / 32 * 12 * (7 * 0.2 + 0.1))
    without = make_plan(replace(RECIPE, method="mrem-p", holdout=0), SHAPE, TIMING, 4096, workers=2)
    assert "choose" not in stages(without)
    assert parallel.disk_mib - without.disk_mib == pytest.approx(5 * 110e6 * 4 / 2**20)
    alone = make_plan(replace(RECIPE, method="mrem-p"), SHAPE, TIMING, 4096, workers=4)
    assert stages(alone)["train"] == pytest.approx(1000 * 3 * 0.5)

    assert set(stages(make_plan(replace(RECIPE, method="ptq"), SHAPE, TIMING, 4096))) == {
        "calibrate",
        "compare",
    }
    trained = replace(RECIPE, method="qat", lr=Recipe(method="qat").lr, qat_epochs="1+2")
    assert stages(make_plan(trained, SHAPE, TIMING, 3200))["train"] == pytest.approx(3 * 100 * 12 * 0.5 * 1.2)
    longer = make_plan(replace(trained, train_size=320_000, accumulate=2), SHAPE, TIMING, 320_000)
    assert "--method mrem-s" in dict(longer.shorter)


def test_memory_and_disk_by_hand() -> None:
    mib = 2**20
    cache = 2 * 4096 * 32 * 768 * 4 / mib
    model, embedding = 110e6 * 4 / mib, 23e6 * 4 / mib
    off = replace(RECIPE, teacher_cache="never")
    plan = make_plan(off, SHAPE, TIMING, 4096)
    assert plan.memory_mib == pytest.approx(1000 + model + 3 * 200 + 2 * embedding + cache)
    on_disk = make_plan(off, SHAPE, TIMING, 4096, cache_budget_mib=cache - 1)
    assert on_disk.memory_mib == pytest.approx(plan.memory_mib - cache)
    assert on_disk.disk_mib - plan.disk_mib == pytest.approx(cache - 2 * 110e6 / 2 / mib)
    whole = make_plan(replace(off, modules="1"), replace(SHAPE, cuts=(0, 12)), TIMING, 4096)
    assert whole.memory_mib == pytest.approx(1000 + model + 12 * 200 + 2 * embedding)  # nothing to cache


def test_memory_and_disk_of_targets_by_hand() -> None:
    """Of a module with three blocks: the embedding's output and two hidden states; the third is a stream."""
    mib = 2**20
    hidden = 4096 * 32 * 768 * 4 / mib
    without = make_plan(replace(RECIPE, teacher_cache="never"), SHAPE, TIMING, 4096)
    plan = make_plan(RECIPE, SHAPE, TIMING, 4096)
    assert plan.memory_mib == pytest.approx(without.memory_mib + 3 * hidden)
    split = make_plan(RECIPE, SHAPE, TIMING, 4096, cache_budget_mib=5 * hidden - 1)
    assert split.memory_mib == pytest.approx(without.memory_mib)  # the streams stay in memory
    assert split.disk_mib - plan.disk_mib == pytest.approx(3 * hidden - 2 * 110e6 / 2 / mib)
    on_disk = make_plan(RECIPE, SHAPE, TIMING, 4096, cache_budget_mib=1.0)
    assert on_disk.memory_mib == pytest.approx(without.memory_mib - 2 * hidden)
    assert on_disk.disk_mib - split.disk_mib == pytest.approx(2 * hidden)


def test_a_long_run_is_told_how_to_be_shorter() -> None:
    long = replace(RECIPE, steps=2000)
    plan = make_plan(long, SHAPE, TIMING, 4096, threads=2, evaluation_examples=4000)
    offered = dict(plan.shorter)
    fewer = make_plan(replace(long, steps=400), SHAPE, TIMING, 4096, evaluation_examples=4000)
    assert offered["--steps 400"] == pytest.approx(fewer.seconds)
    assert offered["--batch-size 16"] == pytest.approx(plan.seconds - 2000 * 12 * 0.4 / 2)
    assert "--eval-size 1000" not in offered  # would save less than a tenth
    text = "\n".join(plan.lines())
    assert text.startswith("plan: bert-base (12 blocks, 110 M parameters) to 4-4-8 with mrem-s\n")
    assert "4 × 2,000 steps of 32 sentences" in text
    assert f"about {plan.seconds / 3600:.1f} h on this machine (2 threads)" in text
    assert "shorter: --steps 100 (about" in text
    assert make_plan(replace(RECIPE, steps=100, batch_size=8), SHAPE, TIMING, 4096).shorter == ()


def test_a_corpus_is_read_for_any_number_of_queries() -> None:
    """10,000 queries over 2,000 documents: torch compares 512 of them, and the whole corpus, too."""
    sizes = {"evaluation_examples": 12_000, "compared": 2_512, "few": 3_000}
    plan = make_plan(RECIPE, SHAPE, TIMING, 4096, **sizes)
    assert stages(plan)["compare"] == pytest.approx(2_512 / 32 * 12 * 0.2)
    assert stages(plan)["evaluate"] == pytest.approx(12_000 / 32 * 12 * (0.1 + ONNX_COST * 0.1))
    quick = replace(RECIPE, steps=10)  # its evaluation takes most of the time
    plan = make_plan(quick, SHAPE, TIMING, 4096, **sizes)
    less = make_plan(quick, SHAPE, TIMING, 4096, **(sizes | {"evaluation_examples": 3_000}))
    assert dict(plan.shorter)["--eval-size 1000"] == pytest.approx(less.seconds)
    assert "--eval-size 1000" not in dict(
        make_plan(quick, SHAPE, TIMING, 4096, **(sizes | {"few": 7_000})).shorter
    )


def test_without_a_count_of_examples_the_evaluation_is_quoted_by_the_thousand() -> None:
    assert "per 1,000 evaluation examples" in "\n".join(make_plan(RECIPE, SHAPE, TIMING, 4096).lines())


@pytest.mark.parametrize("method", ["mrem-s", "rem"])
def test_measuring_changes_neither_the_model_nor_the_random_numbers(method: str) -> None:
    model, calibration = tiny_model(), tiny_encoded()
    recipe = Recipe(method=method, steps=5, batch_size=4, init_batches=1, modules="3")
    before, drawn = state_of(model), torch.get_rng_state()
    classes = [type(part) for part in model.modules()]
    timing = measure(model, recipe, calibration)
    assert_same_state(state_of(model), before)
    assert [type(part) for part in model.modules()] == classes
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(part.requires_grad for part in model.parameters())
    assert 0 < timing.teacher < math.inf
    assert 0 < timing.student < math.inf
    assert timing.train > timing.teacher
    assert timing.mean_length == pytest.approx(float(np.mean(calibration.lengths)))
    assert shape_of(model, recipe).blocks == 3


def test_questions_mixed_with_paragraphs_are_timed_at_their_mean_size() -> None:
    """Seven of ten texts are short: the first few batches, or the median one, would promise too little."""
    lengths = np.random.default_rng(0).permutation(np.repeat([10, 150], [700, 300]))
    schedule = BatchSchedule(lengths, 16, seed=0)
    tokens = [len(batch) * int(lengths[batch].max()) for batch in map(schedule.at, range(63))]
    (largest, most), *usual = timed_batches(schedule, lengths)
    assert len(largest) * lengths[largest].max() == max(tokens)
    assert most == pytest.approx(max(tokens) / np.mean(tokens))
    assert len(usual) == TIMED_STEPS
    for batch, size in usual:
        assert size >= 1.0
        assert len(batch) * lengths[batch].max() == pytest.approx(size * np.mean(tokens))
    few = BatchSchedule(np.array([5, 7]), 16, seed=0)  # a single batch is timed again and again
    assert [size for _, size in timed_batches(few, np.array([5, 7]))] == [1.0] * (TIMED_STEPS + 1)


def test_plan_stops_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with workshop_in(tmp_path) as workshop:
        assert job_in(workshop, "out").run("--plan") == 0
        shown = capsys.readouterr().out
        assert "2 × 6 steps of 8 sentences" in shown
        assert "on this machine" in shown
        assert not (workshop / "out").exists()
        assert not list(workshop.glob(".out*"))
