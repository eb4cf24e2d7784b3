"""The module-wise reconstruction error (paper, equation 3), as a mean over real tokens.

ℓ⁽ⁿ⁾ = Σ_l mean‖f̂_l − f_l‖² over the module's blocks, plus the same for the embedding output in
the first module and for the logits in the last; every term has weight 1. `--output-loss` gives the
logits another measure.
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


def reconstruction_terms(
    student: PartOutput, teacher: PartOutput, mask: torch.Tensor, output_loss: str = "mse"
) -> list[torch.Tensor]:
    """One term per tensor that the module is trained on, in the order of execution.

    `output_loss` is the recipe's: what the terms of the model's outputs are.
    """
    terms = []
    if student.embedding is not None and teacher.embedding is not None:
        terms.append(token_mse(student.embedding, teacher.embedding, mask))
    terms += [token_mse(s, t, mask) for s, t in zip(student.hidden, teacher.hidden, strict=True)]
    return terms + output_terms(student, teacher, mask, output_loss)


def output_terms(
    student: PartOutput, teacher: PartOutput, mask: torch.Tensor, output_loss: str
) -> list[torch.Tensor]:
    """The terms of a model's outputs; none where the module is not the last.

    "mse": squared error. "kl": KL(teacher ‖ student) of the distributions that the logits stand for, at
    temperature 1. "auto": "kl" where there are distributions. A regression (one output) has none and keeps
    its squared error. So does a bare encoder, but with 1 − cosine of the sentence embeddings next to it.
    """
    if output_loss != "mse" and student.outputs:
        if is_distribution(student):
            return [kl_divergence(s, t) for s, t in distributions(student, teacher, mask)]
        if student.bare:
            squared = output_terms(student, teacher, mask, "mse")
            return squared + cosine_terms(student.outputs[0], teacher.outputs[0], mask, student.causal)
    pairs = zip(student.outputs, teacher.outputs, strict=True)
    return [token_mse(s, t, mask) if student.per_token else (s - t).square().mean() for s, t in pairs]


def term_weights(output: PartOutput, mask: torch.Tensor, output_loss: str = "mse") -> list[float]:
    """What the mean of each term is over: so many tokens, or so many sentences.

    Terms of several batches, weighted by these, average to the terms of all their sentences together.
    """
    sentences, tokens = float(len(mask)), float(mask.sum())
    weights = [tokens] * ((output.embedding is not None) + len(output.hidden))
    spans = output.per_token and not output.bare and bool(output.outputs) and output.outputs[0].dim() == 2
    by_token = output.per_token and not (spans and output_loss != "mse")
    weights += [tokens if by_token else sentences] * len(output.outputs)
    cosines = 2 if output.bare and output.outputs and output_loss != "mse" else 0
    return weights + [sentences] * cosines


# -- outputs ------------------------------------------------------------------------------------------------


def is_distribution(output: PartOutput) -> bool:
    """Whether the outputs are logits of a distribution: of classes, tags, or positions in a text."""
    positions = output.per_token and output.outputs[0].dim() == 2
    return not output.bare and (positions or output.outputs[0].shape[-1] > 1)


def distributions(
    student: PartOutput, teacher: PartOutput, mask: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each output of both models as rows of logits, one row for each distribution.

    Classes of a sentence: a row per sentence. Classes of tokens: a row per real token. Start and end of an
    answer: a row per sentence over its real tokens, for each of the two.
    """
    pairs = list(zip(student.outputs, teacher.outputs, strict=True))
    first = student.outputs[0]
    if student.per_token and first.dim() == 3:  # (B, T, classes)
        real = mask.bool()
        return [(s[real], t[real]) for s, t in pairs]
    if student.per_token:  # (B, T)
        padding, never = mask == 0, torch.finfo(first.dtype).min
        return [(s.masked_fill(padding, never), t.masked_fill(padding, never)) for s, t in pairs]
    return pairs


def kl_divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Mean over rows of Σ p·(log p − log q), p the teacher's distribution, q the student's."""
    log_p, log_q = teacher.log_softmax(dim=-1), student.log_softmax(dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1).mean()


def cosine_terms(
    student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor, causal: bool = False
) -> list[torch.Tensor]:
    """1 − cosine of both usual sentence embeddings: the mean over real tokens, and the first token (in a
    causal model the last real one: the first has read nothing but itself)."""
    real = mask.to(student.dtype)[:, :, None]
    means = [(value * real).sum(dim=1) / real.sum(dim=1) for value in (student, teacher)]
    rows, columns = (torch.arange(size, device=mask.device) for size in mask.shape)
    last = (columns * (mask != 0)).argmax(dim=1)
    ends = [value[rows, last] if causal else value[:, 0] for value in (student, teacher)]
    pairs = [(means[0], means[1]), (ends[0], ends[1])]
    return [1.0 - torch.nn.functional.cosine_similarity(s, t, dim=-1).mean() for s, t in pairs]
