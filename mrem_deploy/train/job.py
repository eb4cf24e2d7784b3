"""What a training method gets (`TrainJob`) and what it returns (`TrainLog`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from mrem_deploy.data.encoded import Encoded
from mrem_deploy.recipe import Recipe
from mrem_deploy.train.checkpoint import CheckpointStore
from mrem_deploy.train.mrem_p.crew import Crew

Curve = list[tuple[int, float]]  # (step, loss)


@dataclass(frozen=True)
class TrainSettings:
    """What the optimizer needs; learning rates decay linearly to 0 over `steps`, after a warm-up."""

    steps: int
    lr: float
    step_lr: float  # of log s: the relative change of a scale per update
    batch_size: int
    seed: int
    embedding_rate: float = 1.0  # learning rate of the embeddings, as a share of `lr`
    output_loss: str = "mse"  # of the last module; see train/loss.py
    warmup: float = 0.0  # share of the steps in which the rates rise

    @classmethod
    def of(cls, recipe: Recipe) -> TrainSettings:
        return cls(
            recipe.steps,
            recipe.lr,
            recipe.step_lr,
            recipe.batch_size,
            recipe.seed,
            recipe.embedding_rate,
            recipe.output_loss,
        )


@dataclass(frozen=True)
class TrainJob:
    """One training. The method trains `student` in place and does not change `teacher`."""

    teacher: PreTrainedModel
    student: PreTrainedModel
    data: Encoded  # the calibration set; for qat the training set
    recipe: Recipe
    store: CheckpointStore | None = None  # None: no checkpoints
    crew: Crew = field(default_factory=Crew)  # the workers of mrem-p
    score: Callable[[nn.Module], float] | None = None  # qat only: higher is better
    holdout: Encoded | None = None  # sentences that nothing is trained on

    @property
    def settings(self) -> TrainSettings:
        return TrainSettings.of(self.recipe)


@dataclass
class WorkerSeconds:
    """Where a worker's time went, from the end of priming until its modules were trained.

    What is left of `whole` is checkpoints and the like.
    """

    computing: float = 0.0
    receiving: float = 0.0  # fetching a batch from the queue (or the data) onto the device
    waiting: float = 0.0
    whole: float = 0.0


@dataclass(frozen=True)
class WorkerReport:
    """What one worker of mrem-p did. Dictionaries have the module's index as key."""

    modules: list[int]  # their numbers, counted from 1
    seconds: WorkerSeconds
    priming_seconds: float
    serving_seconds: float
    transfer_seconds: float
    turns: dict[int, int]
    queue_mb: float
    dropped: int  # entries that a full outbox dropped
    training_seconds: dict[int, float]

    def to_dict(self) -> dict[str, Any]:
        """As in metrics.json."""
        values = asdict(self)
        for name in ("turns", "training_seconds"):
            values[name] = {str(module): value for module, value in values[name].items()}
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> WorkerReport:
        keyed = {
            name: {int(module): value for module, value in values[name].items()}
            for name in ("turns", "training_seconds")
        }
        return cls(**{**values, **keyed, "seconds": WorkerSeconds(**values["seconds"])})


@dataclass(frozen=True)
class QatChoice:
    """The scores on the development set, and the best of them: that state is the result."""

    step: int
    score: float
    evaluations: list[tuple[int, float]]  # (step of stage 2, score)

    def to_dict(self) -> dict[str, Any]:
        """As in metrics.json."""
        return {"step": self.step, "score": self.score, "evaluations": self.evaluations}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> QatChoice:
        evaluations = [(step, score) for step, score in values["evaluations"]]
        return cls(values["step"], values["score"], evaluations)


@dataclass
class TrainLog:
    """What the report shows."""

    curves: dict[str, Curve] = field(default_factory=dict)  # by module (rem: by matmul; qat: by stage)
    heldout: dict[str, Curve] = field(default_factory=dict)  # by module: (steps done, held-out loss)
    seconds: dict[str, float] = field(default_factory=dict)  # by stage
    workers: list[WorkerReport] = field(default_factory=list)  # mrem-p: by rank
    ages: dict[str, Counter[int]] = field(default_factory=dict)  # mrem-p: age of used entries, by module
    forcing_steps: float = 0.0  # mrem-p: the step at which teacher forcing ended
    choice: QatChoice | None = None  # qat with a second stage


@dataclass(frozen=True)
class ProcessCost:
    """What the training cost one process."""

    peak_memory_mb: float
    cpu_seconds: float

    def to_dict(self) -> dict[str, float]:
        return {"peak_memory_mb": self.peak_memory_mb, "cpu_seconds": self.cpu_seconds}
