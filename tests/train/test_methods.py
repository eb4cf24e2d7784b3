"""The table of methods, the jobs they get and the logs they give."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tiny_models import assert_same_state, state_of, tiny_encoded, tiny_pair, train_job

from mrem_deploy import recipe
from mrem_deploy.train import METHODS
from mrem_deploy.train.job import TrainLog, WorkerReport, WorkerSeconds
from mrem_deploy.train.qat import train_qat


def test_the_table_has_a_row_for_every_choice_of_the_recipe() -> None:
    assert tuple(METHODS) == recipe.METHODS
    assert all(name == row.name for name, row in METHODS.items())
    assert [name for name, row in METHODS.items() if not row.trains] == ["ptq"]
    assert [name for name, row in METHODS.items() if row.needs_training_set] == ["qat"]


def test_the_table_loads_no_torch() -> None:
    code = "import sys, mrem_deploy.train, mrem_deploy.quant.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", METHODS)
def test_every_row_trains_the_student_or_leaves_it(name: str) -> None:
    teacher, student = tiny_pair()
    before = state_of(student)
    options = {"qat_epochs": "1+1"} if name == "qat" else {"steps": 2}
    job = train_job(
        teacher, student, tiny_encoded(), score=lambda model: 1.0, method=name, modules="2", **options
    )
    log = METHODS[name].train(job)
    if METHODS[name].trains:
        assert log.curves
        with pytest.raises(AssertionError):
            assert_same_state(state_of(student), before)
    else:
        assert log == TrainLog()
        assert_same_state(state_of(student), before)


def test_qat_without_a_score_is_refused() -> None:
    with pytest.raises(ValueError, match=r"TrainJob\.score is None"):
        train_qat(train_job(*tiny_pair(), tiny_encoded(), method="qat"))


REPORT = WorkerReport(
    [1, 2], WorkerSeconds(1.0, 2.0, 3.0, 7.0), 0.5, 0.25, 0.125, {0: 6, 1: 8}, 1.5, 2, {0: 3.0}
)


def test_a_report_survives_json_and_has_the_keys_of_metrics_json() -> None:
    values = REPORT.to_dict()
    assert list(values) == [
        "modules", "seconds", "priming_seconds", "serving_seconds", "transfer_seconds", "turns", "queue_mb",
        "dropped", "training_seconds",
    ]  # fmt: skip
    assert values["turns"] == {"0": 6, "1": 8}
    assert list(values["seconds"]) == ["computing", "receiving", "waiting", "whole"]
    assert WorkerReport.from_dict(values) == REPORT
