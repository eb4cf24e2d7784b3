"""The full-precision fine-tuning loop: AdamW, linear decay, dropout on, labels as the target.

Note: the random state is set from (seed, step) before every step. So a step's dropout depends on its
number alone, as its batch does, and an interrupted run ends with the same bits as an uninterrupted one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from mrem_deploy.base import interrupt
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.progress import bar
from mrem_deploy.data.encoded import BatchSchedule, Encoded
from mrem_deploy.models.architectures import model_outputs
from mrem_deploy.train.checkpoint import CheckpointStore, flatten_optimizers, restore_optimizers

CHECKPOINT = "finetuning"
CLIP_NORM = 1.0  # Hugging Face's default
CURVE_POINTS = 200  # of the loss curve that is kept


@dataclass(frozen=True)
class LoopSettings:
    """What the loop needs; `warmup` is a share of the steps."""

    steps: int
    batch_size: int
    lr: float
    warmup: float
    seed: int
    checkpoint_steps: int  # 0: none


@dataclass
class LoopLog:
    """Time and losses, over all parts of an interrupted run."""

    seconds: float = 0.0
    curve: list[list[float]] = field(default_factory=list)  # [step, mean loss since the last point]

    @property
    def final_loss(self) -> float:
        return self.curve[-1][1] if self.curve else math.nan


def learning_rate(step: int, settings: LoopSettings) -> float:
    """Up from 0 over the warm-up, then linearly down to 0 at the end."""
    warm = math.ceil(settings.warmup * settings.steps)
    if step < warm:
        return settings.lr * step / warm
    return settings.lr * (settings.steps - step) / (settings.steps - warm)


def task_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy for classes of texts or tokens (int64 labels), squared error for scores (float labels).

    Labels of tokens, (B, T), may be wider than the batch; tokens with label −100 do not count.
    """
    if labels.is_floating_point():
        return F.mse_loss(logits.squeeze(-1), labels)
    if logits.dim() == 3:
        return F.cross_entropy(logits.transpose(1, 2), labels[:, : logits.shape[1]])
    return F.cross_entropy(logits, labels)


def span_loss(start: torch.Tensor, end: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """For reading comprehension: the mean of the cross-entropies of start and end; labels (B, 2)."""
    return (F.cross_entropy(start, labels[:, 0]) + F.cross_entropy(end, labels[:, 1])) / 2


def batch_loss(outputs: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """The loss of a model's outputs, as `model_outputs` returns them."""
    return task_loss(outputs[0], labels) if len(outputs) == 1 else span_loss(outputs[0], outputs[1], labels)


def relevance_loss(outputs: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """For rerankers: the cross-entropy of the sigmoid of one output, with labels from 0 to 1."""
    return F.binary_cross_entropy_with_logits(outputs[0].squeeze(-1), labels)


def train_on_labels(
    model: nn.Module,
    encoded: Encoded,
    labels: torch.Tensor,
    settings: LoopSettings,
    store: CheckpointStore | None = None,
    loss_of: Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor] = batch_loss,
) -> LoopLog:
    """Fine-tune the model in place; `labels` has a row for each example, as `loss_of` needs it."""
    device = next(model.parameters()).device
    schedule = BatchSchedule(encoded.lengths, settings.batch_size, settings.seed)
    # The fused update makes no temporaries the size of the embedding table: a third of the time.
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0, fused=True)
    step, log, losses = _restore(store, model, optimizer)
    every = max(1, settings.steps // CURVE_POINTS)
    started = time.perf_counter() - log.seconds
    model.train()
    with bar(settings.steps, "fine-tuning", initial=step) as shown:
        while step < settings.steps:
            interrupt.check()
            torch.manual_seed(_step_seed(settings.seed, step))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, settings)
            indices = schedule.at(step)
            batch = {name: value.to(device) for name, value in encoded.batch(indices).items()}
            loss = loss_of(model_outputs(model(**batch)), labels[indices].to(device))
            losses.append(_finite(loss.item(), step))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            log.seconds = time.perf_counter() - started
            if step % every == 0 or step == settings.steps:
                log.curve.append([step, sum(losses) / len(losses)])
                shown.set_postfix(loss=f"{log.final_loss:.3f}", refresh=False)
                losses.clear()
            if store and settings.checkpoint_steps and step % settings.checkpoint_steps == 0:
                _save(store, model, optimizer, step, log, losses)
            shown.update()
    model.eval()
    return log


def _step_seed(seed: int, step: int) -> int:
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])


def _finite(loss: float, step: int) -> float:
    if not math.isfinite(loss):
        raise UserError(
            f"The loss became {loss} at step {step + 1}: the training diverged.",
            "Lower --lr, or give --warmup 0.1.",
        )
    return loss


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _save(
    store: CheckpointStore,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    log: LoopLog,
    losses: list[float],
) -> None:
    tensors = {f"model/{name}": value for name, value in _tensors(model)}
    state, numbers = flatten_optimizers([optimizer.state_dict()])
    notes = {"step": step, "seconds": log.seconds, "curve": log.curve, "losses": losses, "numbers": numbers}
    store.save(CHECKPOINT, tensors | state, notes)


@torch.no_grad()
def _restore(
    store: CheckpointStore | None, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, LoopLog, list[float]]:
    """Restore model and optimizer from the last checkpoint; returns the next step, 0 without one."""
    saved = store.load(CHECKPOINT) if store else None
    if store is None or saved is None:
        return 0, LoopLog(), []
    tensors, notes = saved
    with store.fitting(CHECKPOINT):
        for name, value in _tensors(model):
            value.copy_(tensors[f"model/{name}"])
        (state,) = restore_optimizers([optimizer.state_dict()], tensors, notes["numbers"])
        optimizer.load_state_dict(state)
        return notes["step"], LoopLog(notes["seconds"], notes["curve"]), notes["losses"]
