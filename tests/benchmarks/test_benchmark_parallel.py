"""The parallel benchmark on a tiny geometry, its runs in this process: what it counts and what it says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mrem_deploy import benchmark
from mrem_deploy.base import cli
from mrem_deploy.benchmarks import parallel
from mrem_deploy.benchmarks.parallel_job import Job, TimedRun, measure

SHAPE = ["--geometry", "16x3x2x32x50", "--batch-size", "2", "--length", "6", "--steps", "4"]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The runs that were made; in one process, because starting others is tested elsewhere."""
    made: list[Job] = []
    threads = torch.get_num_threads()
    monkeypatch.setattr(parallel, "run_job", lambda job: made.append(job) or TimedRun.from_dict(measure(job)))
    yield made
    torch.set_num_threads(threads)


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_runs_take_turns_and_their_numbers_are_written(
    rounds: int, jobs: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--staleness", "2", "--rounds", str(rounds), "--out", str(tmp_path)]
    assert cli.run(benchmark.main, ["parallel", *SHAPE, *more]) == 0
    made = [(job.method, job.workers, job.threads, job.lockstep) for job in jobs]
    round_ = [("mrem-s", 1, 1, False), ("mrem-p", 2, 1, False), ("mrem-s", 1, 2, False)]
    assert made == [*round_ * rounds, ("mrem-p", 2, 1, False), ("mrem-p", 2, 1, True)]
    assert [job.slowdown for job in jobs[-2:]] == [{0: 3.0}, {0: 3.0}]
    written = json.loads((tmp_path / "parallel.json").read_text())
    rows = {row["run"]: row for row in written["rows"]}
    assert rows["mrem-s, 1 thread"]["speed_up"] == 1.0
    assert len(rows["mrem-p"]["rounds"]) == rounds
    (worker,) = rows["mrem-p"]["workers"]
    assert 0.5 < worker["computing"] <= 1.0
    assert worker["waiting"] < 0.5
    # Its pace is the slow worker's: a speed would say nothing of the others.
    assert rows["mrem-p, one slowed"]["speed_up"] is None
    said = capsys.readouterr().out
    assert "computing" in said
    assert "1 (3× slower)" in said
    assert (tmp_path / "parallel.png").read_bytes().startswith(b"\x89PNG")


def test_a_speed_up_is_that_of_neighbours_in_time() -> None:
    def runs(*seconds: float) -> list[TimedRun]:
        return [TimedRun(s) for s in seconds]

    row = parallel.summarise("x", runs(1.0, 2.0, 10.0), runs(2.0, 3.0, 40.0), steps=1)
    assert row.speed_up == 2.0  # of 2, 1.5 and 4; the ratio of the medians would be 1.5
    assert row.seconds == 2.0


def test_a_short_run_caches_the_share_of_a_full_one() -> None:
    parser = argparse.ArgumentParser()
    parallel.add_options(parser)
    options = parallel.opt.fill_in(
        parser.parse_args(["--steps", "250", "--batch-size", "32"]), parallel.DEFAULTS
    )
    assert parallel._job(options).calib_size == 512  # 4,096 for 2,000 steps


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--modules", "4"], "3 blocks"),
        (["--straggler", "3"], "1 to 2"),
        (["--modules", "1"], "at least 2"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    jobs: list[Job], wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(benchmark.main, ["parallel", *SHAPE, *wrong]) == cli.EXIT_USER_ERROR
    assert said in capsys.readouterr().err
    assert jobs == []


def test_on_gpus_every_worker_needs_one(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(benchmark.main, ["parallel", *SHAPE, "--device", "cuda"]) == cli.EXIT_USER_ERROR
    assert "torch sees no GPU here" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for wrong in (["--device", "cuda:1"], ["--device", "cuda", "--modules", "3"]):
        assert cli.run(benchmark.main, ["parallel", *SHAPE, *wrong]) == cli.EXIT_USER_ERROR
        assert "workers need one each" in capsys.readouterr().err
    assert jobs == []
    finished = TimedRun(1.0)
    monkeypatch.setattr(parallel, "run_job", lambda job: jobs.append(job) or finished)
    monkeypatch.setattr(parallel, "_summary", lambda *arguments: "")
    assert cli.run(benchmark.main, ["parallel", *SHAPE, "--device", "cuda", "--straggler", "0"]) == 0
    assert [(job.method, job.device) for job in jobs[:2]] == [("mrem-s", "cuda"), ("mrem-p", "cuda")]
    assert {job.threads for job in jobs} == {1}  # more threads would make no difference
