"""Time and memory of the paper's shapes: real training code on a shape small enough for a test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mrem_deploy.benchmarks.geometry import Geometry
from mrem_deploy.reproduce import geometry, run
from mrem_deploy.reproduce.geometry import TRAINING_EXAMPLES, Shape, measure_all, minutes, show
from mrem_deploy.reproduce.layout import Record
from mrem_deploy.reproduce.plan import make_plan

SHAPE = Shape("bert-base", Geometry(16, 5, 2, 32, 60), "4-4-8", 4, 8, steps=2, threads=1)


def test_methods_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = measure_all([SHAPE], ("rem", "mrem-s", "mrem-p"), tmp_path)
    assert [r["method"] for r in records] == ["rem", "mrem-s", "mrem-p"]
    rem, sequential, parallel = records
    assert all(r["seconds_per_step"] > 0 and r["gigabytes"] > 0 for r in records)
    assert parallel["seconds_per_step"] < sequential["seconds_per_step"]  # the slowest module, not the sum
    # 2,000 steps of 32 from steps of 4: eight times as long
    assert sequential["minutes"] == pytest.approx(2000 * sequential["seconds_per_step"] / 60 * 8)
    assert rem["minutes"] == pytest.approx(250 * rem["seconds_per_step"] / 60 * 8)
    assert (parallel["paper_minutes"], parallel["paper_gigabytes"]) == (9, 3.7)
    monkeypatch.setattr(geometry, "_MEASURES", {})  # nothing could be measured again
    assert measure_all([SHAPE], ("rem", "mrem-s", "mrem-p"), tmp_path) == records
    shown = show(records, SHAPE)
    assert "bert-base: MREM-P takes less time than MREM-S" in [f.claim for f in shown.findings]
    assert "extrapolated to the paper's on MNLI, scaled to batches of 32" in shown.notes[0]
    assert shown.notes[-1].startswith("Memory is for batches of 4, not scaled")
    assert "not scaled" not in show(records, replace(SHAPE, batch_size=32)).notes[-1]


def test_a_step_may_be_measured_with_a_batch_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Shape] = []

    def measured(shapes: Sequence[Shape], methods: Sequence[str], folder: Path) -> list[Record]:
        asked.extend(shapes)
        return []

    monkeypatch.setattr(geometry, "measure_all", measured)
    plan = make_plan("mnli", quick=False, given={"batch_size": 8})
    for batch in (None, 32):
        (entry,) = run.of_geometry(["bert-base"], 2, batch, plan, tmp_path)
        assert entry.stem == "geometry"
    assert [shape.batch_size for shape in asked] == [8, 32]


def test_minutes_are_the_papers_steps() -> None:
    assert minutes("mrem-s", [1.0, 2.0]) == 2000 * 3 / 60
    assert minutes("mrem-p", [1.0, 2.0]) == 2000 * 2 / 60
    assert minutes("rem", [1.0, 2.0]) == 250 * 3 / 60
    assert minutes("qat", [1.0, 2.0]) == pytest.approx((3 + 6) * TRAINING_EXAMPLES / 32 / 60)
