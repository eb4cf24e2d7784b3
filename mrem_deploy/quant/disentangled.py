"""DeBERTa's disentangled attention (He et al., "DeBERTa", eq. 4), with a quantizer at every operand.

A score is the sum of three products over the head's width, d, with δ(i, j) the bucket of the distance i − j:

    q_i · k_j  +  q_i · k̃_δ(i,j)  +  k_j · q̃_δ(i,j),    k̃ and q̃ the projected positions

The classes here take the place of transformers' own in a prepared model, with the same parameters under the
same names. `scores`, `c2p` and `p2c` are the three products. q and k are operands of two, and have one
quantizer each; k̃ and q̃ have their own, and so has what is projected, if the projections of q and k do it.

transformers multiplies with every bucket and gathers the result. Here the buckets of the distances
T − 1 … −T are gathered first: after the product, row i needs T of these 2T columns, beginning at T − 1 − i,
and a reshape moves them to where they belong (`skewed`). Buckets come from a table, because a logarithm
rounds differently from one runtime to another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DebertaV2Encoder,
    DisentangledSelfAttention,
    make_log_bucket_position,
)

from mrem_deploy.quant.layers import Matmul, read_quantized


def bucket_rows(encoder: DebertaV2Encoder) -> torch.Tensor:
    """The row of the embedding of positions for the distances −D … D; beyond, it is that of the end."""
    farthest, span = encoder.max_relative_positions, len(encoder.rel_embeddings.weight) // 2
    distances = torch.arange(-farthest, farthest + 1)
    buckets = distances
    if encoder.position_buckets > 0:
        buckets = make_log_bucket_position(distances, span, farthest).long()
    return (buckets + span).clamp(0, 2 * span - 1)


def skewed(product: torch.Tensor) -> torch.Tensor:
    """(…, T, 2T) → (…, T, T): the entry (i, j) is the one at (i, T − 1 − i + j)."""
    tokens = product.shape[-2]
    flat = product.flatten(-2)[..., tokens - 1 : -1]
    return flat.unflatten(-1, (tokens, 2 * tokens - 1))[..., :tokens]


class DisentangledEncoder(DebertaV2Encoder):
    """Hands on what every block needs in the form that `DisentangledAttention` takes."""

    bucket_rows: torch.Tensor

    def get_attention_mask(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """What is added to the scores, (B, 1, 1, T); transformers hides everything from padding, too."""
        dtype = next(self.parameters()).dtype
        hidden = attention_mask[:, None, None, :] == 0
        return hidden.to(dtype) * torch.finfo(dtype).min

    def get_rel_pos(
        self, hidden_states: torch.Tensor, query_states: Any = None, relative_pos: Any = None
    ) -> torch.Tensor | None:
        """The rows of the distances T − 1 … −T, and of 1 − T … T: (2, 2T)."""
        if not self.relative_attention:
            return None
        tokens, farthest = hidden_states.shape[-2], len(self.bucket_rows) // 2
        rising = torch.arange(2 * tokens, device=hidden_states.device) + (1 - tokens)
        distances = torch.stack([-rising, rising])
        return self.bucket_rows[distances.clamp(-farthest, farthest) + farthest]


class DisentangledAttention(DisentangledSelfAttention):
    """transformers' module with its products in modules of their own."""

    attention_function: str
    position_quantizer: Any
    c2p: Matmul
    p2c: Matmul

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        output_attentions: bool = False,
        query_states: torch.Tensor | None = None,
        relative_pos: torch.Tensor | None = None,
        rel_embeddings: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        projections = (self.query_proj, self.key_proj, self.value_proj)
        query, key, value = (self._heads(project(hidden_states)) for project in projections)
        summands = 1 + ("c2p" in self.pos_att_type) + ("p2c" in self.pos_att_type)
        root = np.sqrt(
            np.float32(self.attention_head_size * summands)
        )  # in single precision, as transformers
        attend = ALL_ATTENTION_FUNCTIONS[self.attention_function]
        context, probabilities = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=1 / float(root),
            positions=(relative_pos, rel_embeddings) if self.relative_attention else None,
        )
        return context.flatten(-2), probabilities

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """(…, T, heads · d) → (…, heads, T, d)"""
        return x.unflatten(-1, (self.num_attention_heads, -1)).transpose(-2, -3)

    def position_scores(
        self, query: torch.Tensor, key: torch.Tensor, rows: torch.Tensor, embeddings: torch.Tensor
    ) -> torch.Tensor:
        """The second and the third product, (B, heads, T, T), or one of them; `rows` as of `get_rel_pos`."""
        if self.share_att_key:
            embeddings, own = self.position_quantizer(embeddings), self.position_quantizer
            of_keys, of_queries = self.key_proj, self.query_proj
        else:
            own = nn.Identity()  # these linears have quantizers of their own
            of_keys, of_queries = getattr(self, "pos_key_proj", None), getattr(self, "pos_query_proj", None)
        scores: Any = 0
        if "c2p" in self.pos_att_type:
            positions = self._heads(read_quantized(of_keys, embeddings, own))[:, rows[0]]  # (heads, 2T, d)
            positions = positions.transpose(-1, -2).expand(len(query), -1, -1, -1)
            scores = scores + skewed(self.c2p(query, positions))
        if "p2c" in self.pos_att_type:
            positions = self._heads(read_quantized(of_queries, embeddings, own))[:, rows[1]]
            positions = positions.transpose(-1, -2).expand(len(key), -1, -1, -1)
            scores = scores + skewed(self.p2c(key, positions)).transpose(-1, -2)
        return scores


def disentangle(encoder: nn.Module, attentions: Iterable[nn.Module], attention_function: str) -> None:
    """Let an encoder of transformers, and its attention modules, be those above."""
    encoder.__class__ = DisentangledEncoder
    if encoder.relative_attention:
        encoder.register_buffer("bucket_rows", bucket_rows(encoder), persistent=False)
    for attention in attentions:
        attention.__class__ = DisentangledAttention
        assert isinstance(attention, DisentangledAttention)
        attention.attention_function = attention_function
