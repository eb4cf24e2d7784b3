"""Who is started, with what: workers, threads, devices; and what the display says."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_job import job_in, save_model, workshop_in

from mrem_deploy import pipeline
from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError
from mrem_deploy.train.mrem_p import launch, team
from mrem_deploy.train.mrem_p.crew import Crew
from mrem_deploy.train.mrem_p.worker import ModuleStatus


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop_in(tmp_path_factory.mktemp("workshop")) as root:
        save_model(root / "model", num_hidden_layers=4)
        yield root


@pytest.mark.parametrize(
    ("options", "cores", "workers"),
    [
        ({"modules": 3}, 8, 3),  # one per module
        ({"modules": 4}, 2, 2),  # no more than cores
        ({"modules": "1,2,3"}, 8, 4),  # cut points
        ({"modules": 4, "workers": 3}, 2, 3),  # as asked, even on fewer cores
        ({"modules": 2, "workers": 5}, 8, 2),  # but not more than modules
    ],
)
def test_one_worker_per_module_and_core(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], cores: int, workers: int
) -> None:
    started: list[int] = []

    def record(work: Any, arguments: Any, count: int, max_restarts: int) -> Path:
        started.append(count)
        raise UserError("enough")

    monkeypatch.setattr(team, "launch", record)
    monkeypatch.setattr(launch, "usable_cores", lambda: cores)
    job_in(workshop, "result", method="mrem-p", device="cpu", **options).run()
    assert started == [workers]


@pytest.mark.parametrize(("options", "cores"), [({"modules": 1}, 8), ({"modules": 3}, 1)])
def test_one_worker_needs_no_new_process(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], cores: int
) -> None:
    walked: list[Any] = []
    monkeypatch.setattr(launch, "usable_cores", lambda: cores)
    monkeypatch.setattr(pipeline, "walk", lambda *args: walked.append(args) or _refuse())
    job_in(workshop, "result", method="mrem-p", device="cpu", **options).run()
    assert len(walked) == 1


def _refuse() -> None:
    raise UserError("enough")


def test_threads_are_divided_among_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "usable_cores", lambda: 8)
    assert launch.threads_each(0, 3) == 2
    assert launch.threads_each(4, 2) == 2
    assert launch.threads_each(1, 4) == 1  # at least one each


def test_ranks_are_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses two ranks on one GPU, and a GPU that was named is only one."""
    cpu, gpu, third = (torch.device(name) for name in ("cpu", "cuda", "cuda:2"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert launch.devices(gpu) == 4
    assert launch.devices(third) == 1
    assert launch.device_of(cpu, Crew(1, 2, 1, 2)) == cpu
    assert launch.device_of(gpu, Crew(3, 8, 3, 4)) == torch.device("cuda:3")
    assert chosen == [3]
    with pytest.raises(UserError, match="8 workers were started for 4 GPUs"):
        launch.device_of(gpu, Crew(0, 8, 0, 8))


def test_the_display_tells_loss_forcing_and_age() -> None:
    status = ModuleStatus(1, 10, 5, loss=0.12345, forcing=0.25, mean_age=3.4, oldest=7, serving=False)
    assert status.line() == "loss 0.1235, λ 0.25, age 3.4 (max 7)"
    assert replace(status, serving=True).line().endswith("done, serving")
    first = ModuleStatus(0, 10, 0, loss=None, forcing=None, mean_age=0.0, oldest=0, serving=False)
    assert first.line() == ""  # the first module has no queue


def test_workers_wait_without_spinning_unless_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import torch anew, so what the launcher sets for them comes early enough."""
    for name in cli.PASSIVE_WAITING:
        monkeypatch.delenv(name, raising=False)
    assert team._child_environment().items() >= cli.PASSIVE_WAITING.items()
    with team._environment(team._child_environment()):
        assert {name: os.environ[name] for name in cli.PASSIVE_WAITING} == cli.PASSIVE_WAITING
    assert not cli.PASSIVE_WAITING.keys() & os.environ.keys()
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert not team._child_environment().keys() & cli.PASSIVE_WAITING.keys()


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="the loopback interface has another name")
def test_workers_of_one_machine_use_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the user has named another one, for jobs on several machines; afterwards that is back."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    with team._environment(team._child_environment()):
        assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")
        assert os.environ["NCCL_SOCKET_IFNAME"].startswith("lo")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "NCCL_SOCKET_IFNAME" not in os.environ
