"""The training step of one module, shared by MREM-S and MREM-P.

It knows nothing of processes, queues or caches. It takes a batch with the full-precision and the
quantized input of the module, and returns the loss and both outputs (paper, algorithm 2). Where the
teacher's outputs for the batch are known already, they replace its full-precision input and the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrem_deploy.models.parts import Part, PartOutput
from mrem_deploy.train.job import TrainSettings
from mrem_deploy.train.loss import reconstruction_terms
from mrem_deploy.train.optimizer import LocalOptimizer, finite


def teacher_forcing(step: int, anneal_steps: float) -> float:
    """λ_t = max(1 − t/T₀, 0) (paper, section on annealed teacher forcing)."""
    return max(1.0 - step / anneal_steps, 0.0) if anneal_steps > 0 else 0.0


def forced(clean: torch.Tensor | None, noisy: torch.Tensor | None, forcing: float) -> torch.Tensor | None:
    """λ·clean + (1−λ)·noisy, the quantized module's input (paper, equation 4)."""
    if clean is None or noisy is None or forcing <= 0.0:
        return noisy
    return torch.lerp(noisy, clean, forcing)


@dataclass
class StepResult:
    loss: float
    clean: torch.Tensor  # the module's full-precision output, for its successor
    noisy: torch.Tensor  # the module's quantized output


class ModuleTrainer:
    """Trains a quantized part to reproduce its full-precision twin."""

    def __init__(self, teacher: Part, student: Part, settings: TrainSettings) -> None:
        self.teacher, self.student, self.settings = teacher, student, settings
        self.optimizer = LocalOptimizer([student.view], student.shared_parameters, settings)

    def step(
        self,
        step: int,
        batch: dict[str, torch.Tensor],
        clean: torch.Tensor | None,
        noisy: torch.Tensor | None,
        forcing: float = 0.0,
        target: PartOutput | None = None,
    ) -> StepResult:
        """Forward both, one update. The student reads λ·clean + (1−λ)·noisy; the first module
        reads the token ids of `batch` instead, and ignores both. The teacher runs unless there is a `target`.
        """
        if target is None:
            with torch.no_grad():
                target = self.teacher(clean, batch)
        output = self.student(forced(clean, noisy, forcing), batch)
        mask, output_loss = batch["attention_mask"], self.settings.output_loss
        loss = torch.stack(reconstruction_terms(output, target, mask, output_loss)).sum()
        self.optimizer.update(loss, step)
        return StepResult(finite(loss, step), target.hidden[-1], output.hidden[-1].detach())

    @torch.no_grad()
    def outputs(
        self,
        batch: dict[str, torch.Tensor],
        clean: torch.Tensor | None,
        noisy: torch.Tensor | None,
        forcing: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The full-precision and the quantized output on the same inputs, without an update."""
        target = self.teacher(clean, batch)
        return target.hidden[-1], self.student(forced(clean, noisy, forcing), batch).hidden[-1]
