"""The two losses of QAT: what a quantized model learns from the full-precision one, end to end.

Stage 1 (`imitation_loss`): hidden states and attention scores; stage 2 (`prediction_loss`): soft
cross-entropy of the predictions (Zhang et al., "TernaryBERT", 2020, section 3.3; Jiao et al.,
"TinyBERT", 2020).

Note: gradients may be accumulated over micro-batches with unequal numbers of tokens. So every mean is
weighted by the share that its micro-batch has of the batch (`Amount`), and the sum is the loss of the
entire batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from mrem_deploy.models.parts import Part, PartOutput
from mrem_deploy.quant.layers import Matmul
from mrem_deploy.train.loss import distributions, is_distribution, output_terms, token_mse, valid_mse


@dataclass(frozen=True)
class Amount:
    """How much a mean is taken over; also the share of it that a micro-batch has."""

    examples: float
    tokens: float
    pairs: float  # of a query and a key

    @classmethod
    def of(cls, lengths: np.ndarray) -> Amount:
        return cls(len(lengths), float(lengths.sum()), float((lengths.astype(np.float64) ** 2).sum()))

    def share_of(self, whole: Amount) -> Amount:
        return Amount(self.examples / whole.examples, self.tokens / whole.tokens, self.pairs / whole.pairs)


@dataclass
class Seen:
    """What one pass over the entire model shows: its layers, and the scores of every attention."""

    output: PartOutput
    scores: list[torch.Tensor]  # q·kᵀ/√d before mask and softmax, (B, heads, T, T)


def watch(part: Part, batch: dict[str, torch.Tensor]) -> Seen:
    """Run an entire model and record the attention scores next to its layers."""
    with _recorded_scores(part) as scores:
        output = part(None, batch)
    return Seen(output, scores)


@contextmanager
def _recorded_scores(part: Part) -> Iterator[list[torch.Tensor]]:
    seen: list[torch.Tensor] = []

    def on_leave(product: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        seen.append(output * args[0].shape[-1] ** -0.5)

    products = [
        module
        for name, module in part.view.named_modules()
        if isinstance(module, Matmul) and name.endswith(".scores")
    ]
    handles = [product.register_forward_hook(on_leave) for product in products]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Powers:
    """The mean square of every target over real tokens (hidden states) or pairs of them (scores)."""

    hidden: tuple[float, ...]
    scores: tuple[float, ...]


@torch.no_grad()
def target_powers(teacher: Part, batches: Iterable[dict[str, torch.Tensor]]) -> Powers:
    """Measured on a few batches once: a constant for each term, however the batches are split.

    Where all targets are 0 the constant is 1: there is nothing to be relative to.
    """
    hidden: list[list[float]] = []
    scores: list[list[float]] = []
    amounts: list[Amount] = []
    for batch in batches:
        seen, mask = watch(teacher, batch), batch["attention_mask"]
        assert seen.output.embedding is not None
        states = (seen.output.embedding, *seen.output.hidden)
        hidden.append([float(token_mse(state, torch.zeros_like(state), mask)) for state in states])
        scores.append([float(valid_mse(s, torch.zeros_like(s), mask, keys=True)) for s in seen.scores])
        amounts.append(Amount.of(mask.sum(dim=1).cpu().numpy()))
    means = (
        np.average(hidden, axis=0, weights=[amount.tokens for amount in amounts]),
        np.average(scores, axis=0, weights=[amount.pairs for amount in amounts]),
    )
    return Powers(*(tuple(float(power) or 1.0 for power in found) for found in means))


def imitation_loss(
    student: Seen, teacher: Seen, mask: torch.Tensor, share: Amount, powers: Powers | None = None
) -> torch.Tensor:
    """Σ_l MSE(hidden state l) + Σ_l MSE(attention scores l); l = 0 is the embeddings' output.

    Scores count where query and key are real tokens, never at padding. In blocks that attend within a
    window (ModernBERT) or only backwards (Qwen3) pairs outside of it count as well. With `powers` each term
    is relative to the mean square of its target: scores are tens of times larger than hidden states, and
    would be nearly all of the loss.
    """
    assert student.output.embedding is not None
    assert teacher.output.embedding is not None
    hidden = [
        token_mse(s, t, mask)
        for s, t in zip(
            (student.output.embedding, *student.output.hidden),
            (teacher.output.embedding, *teacher.output.hidden),
            strict=True,
        )
    ]
    scores = [valid_mse(s, t, mask, keys=True) for s, t in zip(student.scores, teacher.scores, strict=True)]
    if powers is not None:
        hidden = [term / power for term, power in zip(hidden, powers.hidden, strict=True)]
        scores = [term / power for term, power in zip(scores, powers.scores, strict=True)]
    return torch.stack(hidden).sum() * share.tokens + torch.stack(scores).sum() * share.pairs


def prediction_loss(
    student: PartOutput, teacher: PartOutput, mask: torch.Tensor, share: Amount
) -> torch.Tensor:
    """−Σ softmax(teacher)·log softmax(student), for each distribution that the head gives.

    A regression (one output) and a bare encoder have none: mean squared error.
    """
    by_token = student.per_token and student.outputs[0].dim() == 3
    amount = share.tokens if by_token else share.examples
    if is_distribution(student):
        rows = distributions(student, teacher, mask)
        return _sum([soft_cross_entropy(s, t) for s, t in rows]) * amount
    return _sum(output_terms(student, teacher, mask, "mse")) * amount


def soft_cross_entropy(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Mean over rows of the cross-entropy between two distributions given as logits (N, classes)."""
    return -(teacher.softmax(dim=-1) * student.log_softmax(dim=-1)).sum(dim=-1).mean()


def _sum(terms: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(terms).sum()
