"""What a training method is given and what it returns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TrainSettings:
    """What the optimizer needs; learning rates decay linearly to 0 over `steps`."""

    steps: int
    lr: float
    step_lr: float  # of log s: the relative change of a step size per update
    batch_size: int
    seed: int


@dataclass
class TrainLog:
    """What the report shows: loss curves by module (or matrix product) and seconds by stage.

    Then, for modules trained in parallel: what every worker reports, by rank; by module, how often
    entries of each age were used; and the step at which teacher forcing ended. For QAT: the scores on
    the development set by which the result was chosen.
    """

    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    workers: list[dict[str, Any]] = field(default_factory=list)
    ages: dict[str, Counter[int]] = field(default_factory=dict)
    forcing_steps: float = 0.0
    choice: dict[str, Any] = field(default_factory=dict)
