"""Training: the table of methods, and the parts that they share.

Importing this package loads no torch: a method's module is imported when it trains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mrem_deploy.train.job import TrainJob, TrainLog


@dataclass(frozen=True)
class Method:
    """One way to train a quantized model; `name` is the value of `--method`."""

    name: str
    title: str  # what it does, for reports
    train: Callable[[TrainJob], TrainLog]  # trains job.student in place
    trains: bool = True  # False: the initial scales are the result
    needs_training_set: bool = False  # not the calibration set; and TrainJob.score, to choose by


def _mrem_s(job: TrainJob) -> TrainLog:
    from mrem_deploy.train.mrem_s import train_mrem_s

    return train_mrem_s(job)


def _mrem_p(job: TrainJob) -> TrainLog:
    from mrem_deploy.train.mrem_p.rank import train_mrem_p

    return train_mrem_p(job)


def _rem(job: TrainJob) -> TrainLog:
    from mrem_deploy.train.rem import train_rem

    return train_rem(job)


def _ptq(job: TrainJob) -> TrainLog:
    from mrem_deploy.train.job import TrainLog

    return TrainLog()


def _qat(job: TrainJob) -> TrainLog:
    from mrem_deploy.train.qat import train_qat

    return train_qat(job)


_ROWS = (
    Method("mrem-s", "modules of several layers trained one after another", _mrem_s),
    Method("mrem-p", "modules of several layers trained in parallel", _mrem_p),
    Method("rem", "every matrix multiplication trained on its own output, in order", _rem),
    Method("ptq", "calibration only, nothing trained", _ptq, trains=False),
    Method("qat", "the whole model trained with quantization in place", _qat, needs_training_set=True),
)
METHODS: dict[str, Method] = {row.name: row for row in _ROWS}
