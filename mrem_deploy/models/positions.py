"""Positions that count from the first real token, for models whose tokenizers pad on the left.

transformers counts from the left end, padding included. For rotary positions that is the same in full
precision, but not once queries and keys are rounded: vectors would depend on the padding.

Note: no hook does this, because sentence-transformers calls `model.forward`, which runs none.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def counting_positions(kind: Any) -> Any:
    """The same class of base model, but its `forward` makes `position_ids` from the mask if none are given.

    It has the name of the original: transformers looks up by it what a class can record.
    """
    if getattr(kind, "counts_positions", False):
        return kind

    class Counting(kind):
        counts_positions = True

        @functools.wraps(kind.forward)
        def forward(
            self,
            input_ids: torch.Tensor | None = None,
            attention_mask: torch.Tensor | None = None,
            position_ids: torch.Tensor | None = None,
            **others: Any,
        ) -> Any:
            if position_ids is None and attention_mask is not None and attention_mask.dim() == 2:
                position_ids = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
            return super().forward(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **others
            )

    Counting.__name__, Counting.__qualname__ = kind.__name__, kind.__qualname__
    Counting.__module__ = kind.__module__
    return Counting
