"""The training step of one module, shared by MREM-S and MREM-P.

It knows nothing of processes, queues or caches: it takes a batch with the full-precision and the
quantized input of the module, and returns the loss and both outputs (paper, algorithm 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mrem_deploy.base.errors import UserError
from mrem_deploy.models.architectures import Part
from mrem_deploy.quant.layers import QuantEmbedding, QuantLinear
from mrem_deploy.quant.quantizers import LearnedStep, LossAware
from mrem_deploy.train.loss import reconstruction_terms

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8


@dataclass(frozen=True)
class TrainSettings:
    """What the optimizer needs; learning rates decay linearly to 0 over `steps`."""

    steps: int
    lr: float
    step_lr: float  # of log s: the relative change of a step size per update
    batch_size: int
    seed: int


def teacher_forcing(step: int, anneal_steps: float) -> float:
    """λ_t = max(1 − t/T₀, 0) (paper, section on annealed teacher forcing)."""
    return max(1.0 - step / anneal_steps, 0.0) if anneal_steps > 0 else 0.0


def finite(loss: torch.Tensor, step: int) -> float:
    """The loss as a number; NaN would otherwise be found only when the trained model is scored."""
    value = float(loss.detach())
    if not math.isfinite(value):
        raise UserError(
            f"the loss became {value} at step {step + 1}: the training diverged", "lower --lr and --step-lr"
        )
    return value


class LocalOptimizer:
    """AdamW for one set of layers: weights, step sizes, and embedding rows that occurred.

    Step sizes have a rate of their own; nothing is decayed (latent weights are pulled towards the
    teacher already). Embedding rows get Adam with lazy moments, so that a step costs what the
    batch's rows cost and not 30,000 rows.
    """

    def __init__(self, modules: Iterable[nn.Module], skip: frozenset[int], settings: TrainSettings) -> None:
        modules = list(modules)
        self.settings = settings
        parts = [part for module in modules for part in module.modules()]
        steps = {id(p.log_scale): p.log_scale for p in parts if isinstance(p, LearnedStep)}
        sparse = {
            id(p.weight): p.weight
            for p in parts
            if isinstance(p, QuantEmbedding) or getattr(p, "sparse", False)
        }
        sparse_steps = {
            id(p.weight_quantizer.log_scale): p.weight_quantizer.log_scale
            for p in parts
            if isinstance(p, QuantEmbedding) and isinstance(p.weight_quantizer, LearnedStep)
        }
        every = {id(p): p for module in modules for p in module.parameters() if id(p) not in skip}
        dense = [p for key, p in every.items() if key not in steps and key not in sparse]
        dense_steps = [p for key, p in steps.items() if key not in sparse_steps and key in every]
        self.parameters = list(every.values())
        self._loss_aware = [
            (p.weight, p.weight_quantizer)
            for p in parts
            if isinstance(p, QuantLinear)
            and isinstance(p.weight_quantizer, LossAware)
            and p.weight_quantizer.curvature == "adam"
        ]
        self.optimizers: list[torch.optim.Optimizer] = []
        groups = [
            {"params": params, "lr": rate, "base_lr": rate}
            for params, rate in ((dense, settings.lr), (dense_steps, settings.step_lr))
            if params
        ]
        if groups:
            self.optimizers.append(
                torch.optim.AdamW(groups, betas=ADAM_BETAS, eps=ADAM_EPS, weight_decay=0.0, fused=True)
            )
        rows = [
            {"params": list(params.values()), "lr": rate, "base_lr": rate}
            for params, rate in ((sparse, settings.lr), (sparse_steps, settings.step_lr))
            if params
        ]
        if rows:
            self.optimizers.append(torch.optim.SparseAdam(rows, betas=ADAM_BETAS, eps=ADAM_EPS))

    def update(self, loss: torch.Tensor, step: int) -> None:
        """One step on one loss; gradients never leave the given layers."""
        loss.backward()
        self.apply(step)

    def apply(self, step: int) -> None:
        """Use the gradients gathered so far, at the linearly decayed rate."""
        decay = 1.0 - step / self.settings.steps
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * decay
        for optimizer in self.optimizers:
            optimizer.step()
            # At once, not before the next pass: otherwise gradients lie beside that pass's activations,
            # and those of finished modules stay to the end of the run.
            optimizer.zero_grad(set_to_none=True)
        self._refresh_curvature()

    def _refresh_curvature(self) -> None:
        """LAQ's D = √v̂ + ε from Adam's bias-corrected second moment."""
        for weight, quantizer in self._loss_aware:
            state = self.optimizers[0].state[weight]
            if not state:  # no gradient reaches it, as the pooler of a bare encoder
                continue
            corrected = state["exp_avg_sq"] / (1.0 - ADAM_BETAS[1] ** float(state["step"]))
            assert quantizer.diagonal is not None  # curvature "adam" has one
            quantizer.diagonal.copy_(corrected.sqrt_().add_(ADAM_EPS))

    def state(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


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
    ) -> StepResult:
        """Forward both, one update. The student reads λ·clean + (1−λ)·noisy; the first module
        reads the token ids of `batch` instead, and ignores both."""
        with torch.no_grad():
            target = self.teacher(clean, batch)
        output = self.student(forced(clean, noisy, forcing), batch)
        loss = torch.stack(reconstruction_terms(output, target, batch["attention_mask"])).sum()
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
