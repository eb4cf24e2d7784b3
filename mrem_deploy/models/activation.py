"""What a cross-encoder makes of its outputs before anybody sees them, as sentence-transformers settles it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import shown
from mrem_deploy.models.sentence_files import SentenceFiles

SIGMOID, IDENTITY = "Sigmoid", "Identity"
SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    SIGMOID: torch.sigmoid,
    IDENTITY: lambda scores: scores,
    "Tanh": torch.tanh,
    "Softmax": lambda scores: torch.softmax(scores, dim=-1),
}
EARLIER = "sbert_ce_default_activation_function"  # its key in config.json, before version 4


def score_activation(config: Mapping[str, Any], files: SentenceFiles, outputs: int) -> str:
    """The name of the activation: as the model's files say, else the sigmoid of a single output."""
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, Mapping) else None
    named = named or config.get(EARLIER) or files.activation
    if named is None:
        return SIGMOID if outputs == 1 else IDENTITY
    name = named.rpartition(".")[2] if isinstance(named, str) else ""
    if name not in SCORES or not str(named).startswith("torch."):
        raise UserError(
            f"the model names the activation {shown(named)} for its scores; known are {', '.join(SCORES)}",
            "give a model with one of these, of torch.nn",
        )
    return name
