"""The simulator: exact where the result can be written down, and the claims that the docs draw from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrem_deploy import benchmark
from mrem_deploy.base import cli
from mrem_deploy.benchmarks.simulator import World, gpipe, gpipe_bubble, pipedream, simulate
from mrem_deploy.train.mrem_p.schedule import ScheduleRules


def even(modules: int, **changes: float) -> World:
    """Equal modules without jitter and with instant links, unless changed."""
    values = {"jitter": 0.0, "latency": 0.0, "parcel": 0.0, "forward_share": 0.25} | changes
    return World((1.0,) * modules, **values)  # type: ignore[arg-type]


def test_equal_modules_train_at_once_after_priming_in_order() -> None:
    outcome = simulate(even(4), ScheduleRules(steps=100, staleness=3))
    # Three batches pass three modules in order, the last one only fills its queue: (3 + 2) · 0.25 s.
    assert outcome.priming == pytest.approx(1.25)
    assert outcome.seconds == pytest.approx(101.25)
    assert outcome.busy == pytest.approx(400 / (4 * 101.25))
    assert outcome.waiting == [0.0] * 4
    assert outcome.oldest == 2


def test_a_straggler_slows_only_itself() -> None:
    world = World((1.0, 3.0, 1.0), jitter=0.0, latency=0.0, parcel=0.0)
    outcome = simulate(world, ScheduleRules(steps=60, staleness=4))
    assert outcome.waiting == [0.0] * 3
    assert outcome.seconds == pytest.approx(outcome.priming + 180.0)
    assert outcome.fresh < 0.7  # the price: the module behind it uses its outputs again
    lockstep = simulate(world, ScheduleRules(steps=60, staleness=4, lockstep=True))
    assert max(lockstep.waiting) > 0.6  # two seconds of three


def test_a_slow_link_drops_and_does_not_stop_the_sender() -> None:
    slow = even(2, parcel=4e9, inside=1e9)  # four steps for one parcel
    outcome = simulate(slow, ScheduleRules(steps=80, staleness=4))
    assert outcome.waiting == [0.0, 0.0]
    assert outcome.dropped > 40
    assert outcome.oldest > 4  # dropped entries make the others older


def test_links_between_machines_are_slower() -> None:
    world = World((1.0,) * 4, per_node=2, parcel=1e9, inside=1e10, between=1e9, latency=0.5)
    assert [world.transfer(module) for module in range(3)] == pytest.approx([0.6, 1.5, 0.6])


def test_jitter_costs_lock_step_time_but_not_mrem_p() -> None:
    world = even(8, jitter=0.3)
    free, locked = (simulate(world, ScheduleRules(200, 8, lockstep)) for lockstep in (False, True))
    assert max(free.waiting) == 0.0
    assert max(locked.waiting) > 0.05
    assert free.busy > locked.busy


@pytest.mark.parametrize(("modules", "micro_batches"), [(2, 1), (4, 8), (16, 4)])
def test_gpipe_has_the_bubble_of_its_formula(modules: int, micro_batches: int) -> None:
    outcome = gpipe(even(modules), steps=3, micro_batches=micro_batches)
    assert 1 - outcome.busy == pytest.approx(gpipe_bubble(modules, micro_batches))


def test_pipedream_keeps_all_stages_busy_between_ramps() -> None:
    """Without jitter only filling and draining the pipeline is lost: N − 1 steps of the first forward
    and the last backward passes."""
    outcome = pipedream(even(4), steps=300)
    assert outcome.seconds == pytest.approx(303.0)
    assert outcome.busy == pytest.approx(300 / 303)


def test_the_command_writes_table_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--quick", "--modules", "2,3", "--steps", "40", "--staleness", "1,4"]
    assert cli.run(benchmark.main, ["schedule", *options, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "After priming no module of mrem-p waits" in said
    written = json.loads((tmp_path / "schedule.json").read_text())
    assert {row["scheme"] for row in written["rows"]} == {"mrem-p", "lock-step", "pipedream", "gpipe"}
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")


def test_measured_step_times_are_read_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = tmp_path / "parallel.json"
    rows = [{"run": "mrem-p", "step_seconds": {"1": 0.5, "2": 1.5}}]
    measured.write_text(json.dumps({"rows": rows}))
    options = ["schedule", "--quick", "--modules", "2", "--steps", "20", "--staleness", "1"]
    assert cli.run(benchmark.main, [*options, "--measured", str(measured)]) == 0
    assert "steps of 1 s" in capsys.readouterr().out
    measured.write_text("[]")
    assert cli.run(benchmark.main, [*options, "--measured", str(measured)]) == cli.EXIT_USER_ERROR
