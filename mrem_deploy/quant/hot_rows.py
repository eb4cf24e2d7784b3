"""Hot rows: the few rows of the word embedding that get 8 bits, because their error is met most often.

A few dozen tokens ('.', [SEP], 'the', ',' …) make half of the error of a 2-bit embedding: they are in every
sentence, and their rows have outliers. `choose_hot_rows` takes the rows of greatest

    count of the token in the calibration sentences · ‖Q(row) − row‖²

with Q the low-bit quantizer before training. A hot row has its own scale, the largest magnitude in it over
127, computed anew in every forward pass: at 8 bits nothing is gained by learning it.

Note: a frozen table still has low-bit codes for its hot rows, but their scale is 0. So they decode to
nothing, and a reader may add the two parts of every row without asking which one it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from mrem_deploy.numerics import quantize, symmetric_grid
from mrem_deploy.quant.quantizers import _StraightThrough
from mrem_deploy.quant.spec import WeightSpec

GRID = symmetric_grid(8)
ROWS_AT_A_TIME = 4096
ID_BYTES = SCALE_BYTES = 4


@dataclass(frozen=True)
class HotRows:
    """The rows `ids` of a frozen table: codes · scale instead of what the table itself says."""

    ids: torch.Tensor  # int32 (K,), ascending
    codes: torch.Tensor  # int8 (K, H)
    scale: torch.Tensor  # (K, 1)

    def values(self) -> torch.Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """By the names that they have in the file of the layer `name`."""
        parts = (self.ids, self.codes, self.scale)
        return dict(zip(tensor_names(name), parts, strict=True))

    @classmethod
    def read(cls, tensors: Mapping[str, torch.Tensor], name: str) -> HotRows:
        return cls(*(tensors[stored] for stored in tensor_names(name)))


def tensor_names(name: str) -> tuple[str, ...]:
    """The tensors of a file that hold the hot rows of the layer `name`."""
    return tuple(f"hot/{name}/{part}" for part in ("rows", "codes", "scale"))


def token_counts(sentences: Iterable[np.ndarray], vocabulary: int) -> torch.Tensor:
    """How often every token occurs, (vocabulary,); padding is not among the sentences' tokens."""
    tokens = np.concatenate([np.zeros(0, np.int64), *sentences])
    return torch.from_numpy(np.bincount(tokens, minlength=vocabulary))


@torch.no_grad()
def choose_hot_rows(
    weight: torch.Tensor, quantizer: Any, counts: torch.Tensor, most: int
) -> torch.Tensor | None:
    """At most `most` rows, ascending; None if none is worth it.

    Only rows that occur can be hot. Of equals the first rows are taken: workers must agree.
    """
    seen = counts.nonzero().flatten().to(weight.device)
    if not len(seen):
        return None
    errors = []
    for ids in seen.split(ROWS_AT_A_TIME):
        rows = weight[ids]
        errors.append((quantizer.rows(rows, ids) - rows).double().square().sum(dim=-1))
    scores = torch.cat(errors) * counts.to(weight.device)[seen]
    order = scores.argsort(descending=True, stable=True)[:most]
    chosen = seen[order[scores[order] > 0]]
    return chosen.sort().values if len(chosen) else None


def codes_and_scale(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """s = max|row| / 127 and codes = round(row / s), one scale per row."""
    top = rows.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(top > 0, top, torch.ones_like(top)) / GRID.high
    return quantize(rows, scale, GRID), scale


class HotRowQuantizer(nn.Module):
    """Quantizes the rows of hot tokens; straight-through, like the quantizers of the other rows."""

    def __init__(self, ids: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("ids", ids)
        self.ids: torch.Tensor  # int64 (K,), ascending

    def forward(self, rows: torch.Tensor, ids: torch.Tensor, cold: torch.Tensor) -> torch.Tensor:
        """`cold`, but 8-bit values of `rows` where the token is hot; ids (…), the others (…, H)."""
        codes, scale = codes_and_scale(rows.detach())
        hot = _StraightThrough.apply(rows, codes.mul_(scale))
        return torch.where(self.is_hot(ids).unsqueeze(-1), hot, cold)

    def is_hot(self, ids: torch.Tensor) -> torch.Tensor:
        place = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
        return self.ids[place] == ids

    def freeze(self, weight: torch.Tensor) -> HotRows:
        codes, scale = codes_and_scale(weight.detach()[self.ids])
        return HotRows(self.ids.to("cpu", torch.int32), codes.to("cpu", torch.int8), scale.cpu())

    def extra_repr(self) -> str:
        return f"{len(self.ids)} rows"


def make_hot_quantizer(
    weight: torch.Tensor, quantizer: Any, spec: WeightSpec, counts: torch.Tensor | None
) -> HotRowQuantizer | None:
    """The quantizer of a table's hot rows, if the spec asks for any and any row is worth it."""
    if not spec.hot_rows:
        return None
    if counts is None:
        raise ValueError(f"{spec.hot_rows} hot rows are chosen by the counts of tokens; counts is None")
    ids = choose_hot_rows(weight, quantizer, counts, spec.hot_rows)
    return None if ids is None else HotRowQuantizer(ids)


def hot_bytes(rows: int, width: int) -> int:
    """What so many hot rows take in a file: codes, scales and ids."""
    return rows * (width + SCALE_BYTES + ID_BYTES)
