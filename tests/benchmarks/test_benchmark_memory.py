"""`benchmark memory`: peaks of training and of the cache, each in a fresh process."""

from __future__ import annotations

import argparse
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrem_deploy import benchmark
from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError
from mrem_deploy.benchmarks import memory, memory_job
from mrem_deploy.benchmarks.geometry import parse_geometry
from mrem_deploy.benchmarks.memory_job import Measured, Phase

TINY = "16x3x2x32x50"  # hidden, layers, heads, intermediate, vocabulary
SHAPE = ["--geometry", TINY, "--batch-size", "2", "--length", "6"]
CUTS = [0, 1, 2, 3]
PNG = b"\x89PNG\r\n\x1a\n"


def read(verb: Any, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verb.add_options(parser)
    return parser.parse_args(list(arguments))


def job(**changes: Any) -> memory_job.Job:
    values: dict[str, Any] = {
        "geometry": parse_geometry(TINY),
        "modules": 3,
        "bits": "4-4-8",
        "batch_size": 2,
        "length": 6,
        "steps": 2,
        "examples": 5,  # not a multiple of the batch: the last batch is short
        "on_disk": False,
        "cache_dir": None,
        "threads": 0,
        "seed": 0,
    }
    return memory_job.Job(**values | changes)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure in this process, and leave the tests' own memory allocator alone."""
    for module in ("mrem_deploy.base.machine", "mrem_deploy.benchmarks.step_job"):
        monkeypatch.setattr(f"{module}.keep_large_blocks", lambda: True)
    monkeypatch.setattr(memory, "in_fresh_process", memory_job.measure)


def test_size_of_the_cache_by_hand() -> None:
    # 4,096 sentences × 128 tokens × 768 values × 4 bytes = 1.5 GiB, twice
    assert memory_job.cache_megabytes(4096, 128, 768) == 3072.0


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_cache_is_really_filled(on_disk: bool, tmp_path: Path) -> None:
    cache = memory_job.filled_cache(job(on_disk=on_disk, cache_dir=tmp_path))
    assert cache.on_disk is on_disk
    assert cache.megabytes == memory_job.cache_megabytes(5, 6, 16)
    clean, noisy = cache.get(np.arange(5), 6)
    assert (clean != 0).all()
    assert torch.allclose(noisy - clean, torch.tensor(0.01), atol=1e-6)  # float32 of values up to 4
    cache.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("here")
def test_every_module_is_trained_and_all_but_the_first_have_the_cache(tmp_path: Path) -> None:
    row = memory_job.measure(job())
    assert row.cuts == CUTS
    assert [phase.name for phase in row.phases] == [
        "initialise",
        "module 1/3",
        "module 2/3",
        "module 3/3",
    ]
    size = memory_job.cache_megabytes(5, 6, 16)
    assert [phase.cache_mb for phase in row.phases] == [0.0, 0.0, size, size]
    assert all(phase.peak_mb > 50 for phase in row.phases)  # Python with torch is larger than that
    assert len(row.losses) == 3
    whole = memory_job.measure(job(modules=1))
    assert [phase.cache_mb for phase in whole.phases] == [0.0, 0.0]
    assert whole.cached_examples == 0
    memory_job.measure(job(modules=2, on_disk=True, cache_dir=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_totals_by_hand() -> None:
    """The cache that was there comes out, the whole one goes in, and only where there is one."""
    phases = [
        Phase("initialise", peak_mb=300.0, cache_mb=0.0),
        Phase("module 1/2", peak_mb=900.0, cache_mb=0.0, seconds=1.0),
        Phase("module 2/2", peak_mb=880.0, cache_mb=10.0, seconds=1.0),
    ]
    measured = Measured(2, CUTS, 250.0, phases, "peak", 5, [0.1, 0.1], 9.0)
    row = memory.with_totals(measured, full_cache_mb=200.0, limit_mb=1000.0)
    assert (row.peak_mb, row.training_mb, row.cache_mb, row.total_mb) == (900, 900, 200, 1070)
    assert row.fits is False
    written = row.to_dict()
    assert written["phases"][0] == {"name": "initialise", "peak_mb": 300.0, "cache_mb": 0.0}
    assert list(written)[:4] == ["modules", "cuts", "ready_mb", "phases"]
    assert list(written)[-5:] == ["peak_mb", "training_mb", "cache_mb", "total_mb", "fits"]
    small = memory.with_totals(measured, full_cache_mb=20.0, limit_mb=1000.0)
    assert small.total_mb == 900.0  # the first module remains the heaviest
    assert small.fits is True
    single = replace(measured, modules=1, phases=phases[:2])
    alone = memory.with_totals(single, full_cache_mb=200.0, limit_mb=1000.0)
    assert (alone.cache_mb, alone.total_mb) == (0.0, 900.0)


@pytest.mark.usefixtures("here")
def test_memory_writes_its_numbers_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["memory", *SHAPE, "--modules", "1,3", "--steps", "2", "--calib-size", "20"]
    assert cli.run(benchmark.main, [*line, "--fill", "disk", "--cache-dir", str(tmp_path / "cache")]) == 0
    assert "cache, MiB (filled)" in capsys.readouterr().out
    assert cli.run(benchmark.main, [*line, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "1 + 1 + 1" in shown
    assert "cache, MiB (computed)" in shown
    written = json.loads((tmp_path / "out" / "memory.json").read_text(encoding="utf-8"))
    assert written["settings"]["modules"] == [1, 3]
    assert [row["modules"] for row in written["rows"]] == [1, 3]
    assert [row["cached_examples"] for row in written["rows"]] == [0, 4]  # 2 steps of 2; 20 are computed
    assert written["rows"][1]["cache_mb"] == memory_job.cache_megabytes(20, 6, 16)
    assert written["rows"][0]["peak_kind"] == written["rows"][1]["peak_kind"]
    assert (tmp_path / "out" / "memory.png").read_bytes().startswith(PNG)


def die(job: memory_job.Job) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_measurement_is_explained_and_this_process_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_job, "measure", die)
    with pytest.raises(UserError, match="most likely because memory ran out"):
        memory_job.in_fresh_process(job())


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_measurement_in_a_fresh_process() -> None:
    ballast = torch.ones(400 * 2**18)  # 400 MB that a process of its own does not have
    apart = memory_job.in_fresh_process(job(modules=2))
    beside = memory_job.measure(job(modules=2))
    del ballast
    assert apart.phases[0].peak_mb < beside.phases[0].peak_mb - 200
    assert apart.losses == pytest.approx(beside.losses, rel=1e-4)  # other threads, other order of sums
