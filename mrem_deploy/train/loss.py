"""The module-wise reconstruction error (paper, equation 3), as a mean over real tokens.

ℓ⁽ⁿ⁾ = Σ_l mean‖f̂_l − f_l‖² over the module's blocks, plus the same for the embedding output in
the first module and for the logits in the last; every term has weight 1.
"""

from __future__ import annotations

import torch

from mrem_deploy.models.parts import PartOutput


def token_mse(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean squared error over elements of non-padding tokens; x is (B, T, …), mask is (B, T)."""
    squared = (student - teacher).square()
    weights = mask.to(squared.dtype).reshape(*mask.shape, *([1] * (squared.dim() - 2)))
    return (squared * weights).sum() / (weights.sum() * (squared.numel() / mask.numel()))


def valid_mse(
    student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor, keys: bool = False
) -> torch.Tensor:
    """Mean squared error over real tokens, for (B, T, H), attention's (B, heads, T, ·) and pooled (B, H).

    `keys`: the last dimension are tokens as well. The shape cannot show it when T equals the head's width.
    """
    squared = (student - teacher).square()
    real = mask.to(squared.dtype)
    if squared.dim() == 4:
        weights = real[:, None, :, None]
        if keys:  # scores: real queries × real keys
            weights = weights * real[:, None, None, :]
    elif squared.dim() == 3:
        weights = real[:, :, None]
    else:
        return squared.mean()
    weights = weights.expand_as(squared)
    return (squared * weights).sum() / weights.sum()


def reconstruction_terms(student: PartOutput, teacher: PartOutput, mask: torch.Tensor) -> list[torch.Tensor]:
    """One term per tensor that the module is trained on, in the order of execution."""
    terms = []
    if student.embedding is not None and teacher.embedding is not None:
        terms.append(token_mse(student.embedding, teacher.embedding, mask))
    terms += [token_mse(s, t, mask) for s, t in zip(student.hidden, teacher.hidden, strict=True)]
    for s, t in zip(student.outputs, teacher.outputs, strict=True):
        terms.append(token_mse(s, t, mask) if student.per_token else (s - t).square().mean())
    return terms
