"""AdamW for one set of layers: weights, scales, and the embedding rows that occurred."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from mrem_deploy.base.errors import UserError
from mrem_deploy.quant.layers import QuantEmbedding, QuantLinear
from mrem_deploy.quant.quantizers import LAQ, LearnedScale
from mrem_deploy.train.checkpoint import OptimizerState
from mrem_deploy.train.job import TrainSettings

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8


def finite(loss: torch.Tensor, step: int) -> float:
    """The loss as a number; NaN would otherwise be found only when the trained model is scored."""
    value = float(loss.detach())
    if not math.isfinite(value):
        raise UserError(
            f"the loss became {value} at step {step + 1}: the training diverged", "lower --lr and --step-lr"
        )
    return value


def rate_at(step: int, steps: int, warmup: float = 0.0) -> float:
    """The share of the learning rate at a step: up over the warm-up, then linearly down to 0 at the end."""
    warm = math.ceil(warmup * steps)
    if step < warm:
        return (step + 1) / (warm + 1)
    return 1.0 - (step - warm) / (steps - warm)


def _is_table(part: nn.Module) -> bool:
    """Whether it is the word embedding, of which only rows that occurred have gradients."""
    return isinstance(part, QuantEmbedding) or getattr(part, "sparse", False)


def _has_blocks(part: nn.Module) -> bool:
    """In a decoder's body the word embedding is next to the blocks, not among norms and positions."""
    return any(isinstance(child, nn.ModuleList) for child in part.children())


class LocalOptimizer:
    """AdamW for one set of layers: weights, scales, and the embedding rows that occurred.

    Scales have a separate learning rate. Nothing is decayed (latent weights are pulled towards the
    teacher already). Embedding rows get Adam with lazy moments, so that a step costs the batch's rows
    and not 30,000 rows. `settings.embedding_rate` lowers the rate of these rows and of all else in the
    embeddings' module: what is trained there for rows that occur is wrong for those that never do.
    """

    def __init__(self, modules: Iterable[nn.Module], skip: frozenset[int], settings: TrainSettings) -> None:
        modules = list(modules)
        self.settings = settings
        parts = [part for module in modules for part in module.modules()]
        scales = {id(p.log_scale): p.log_scale for p in parts if isinstance(p, LearnedScale)}
        sparse = {id(p.weight): p.weight for p in parts if _is_table(p)}
        sparse_scales = {
            id(p.weight_quantizer.log_scale): p.weight_quantizer.log_scale
            for p in parts
            if isinstance(p, QuantEmbedding) and isinstance(p.weight_quantizer, LearnedScale)
        }
        every = {id(p): p for module in modules for p in module.parameters() if id(p) not in skip}
        homes = [part for part in parts if any(map(_is_table, part.children())) and not _has_blocks(part)]
        beside = {id(p) for home in homes for p in home.parameters()}
        dense = {key: p for key, p in every.items() if key not in scales and key not in sparse}
        near = [p for key, p in dense.items() if key in beside]
        far = [p for key, p in dense.items() if key not in beside]
        embedding_lr = settings.lr * settings.embedding_rate
        dense_scales = [p for key, p in scales.items() if key not in sparse_scales and key in every]
        self.parameters = list(every.values())
        self._loss_aware = [
            (p.weight, p.weight_quantizer)
            for p in parts
            if isinstance(p, QuantLinear)
            and isinstance(p.weight_quantizer, LAQ)
            and p.weight_quantizer.curvature == "adam"
        ]
        self.optimizers: list[torch.optim.Optimizer] = []
        groups = [
            {"params": params, "lr": rate, "base_lr": rate}
            for params, rate in (
                (far, settings.lr),
                (dense_scales, settings.step_lr),
                (near, embedding_lr),
            )
            if params
        ]
        if groups:
            self.optimizers.append(
                torch.optim.AdamW(groups, betas=ADAM_BETAS, eps=ADAM_EPS, weight_decay=0.0, fused=True)
            )
        rows = [
            {"params": list(params.values()), "lr": rate, "base_lr": rate}
            for params, rate in ((sparse, embedding_lr), (sparse_scales, settings.step_lr))
            if params
        ]
        if rows:
            self.optimizers.append(torch.optim.SparseAdam(rows, betas=ADAM_BETAS, eps=ADAM_EPS))

    def update(self, loss: torch.Tensor, step: int) -> None:
        """One step on one loss; gradients never leave the given layers."""
        loss.backward()
        self.apply(step)

    def apply(self, step: int) -> None:
        """Apply the gradients accumulated so far, at the rate of the step."""
        decay = rate_at(step, self.settings.steps, self.settings.warmup)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * decay
        for optimizer in self.optimizers:
            optimizer.step()
            # Now, not before the next pass: otherwise gradients take memory next to that pass's
            # activations, and those of finished modules stay to the end of the run.
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

    def state(self) -> list[OptimizerState]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state(self, states: list[OptimizerState]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
