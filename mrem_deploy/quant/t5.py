"""The encoder of T5, with its attention in transformers' registry and its word embedding once.

T5 does not scale its scores and adds a bias to them, a number for each head and bucket of the distance j − i.
The table of biases is in the first block. transformers hands the sum on from block to block; here a later
part of the model, which has no first block, makes it from the same table, which `Part` lends it.

The classes here take the place of transformers' own in a prepared model, with the same parameters under the
same names. Buckets come from a table, because a logarithm rounds differently from one runtime to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.t5 import modeling_t5

SHARED, BIAS = "shared", "relative_attention_bias"


class RelativeBias(nn.Embedding):
    """The biases of all pairs of tokens, (1, heads, T, T)."""

    bucket_rows: torch.Tensor  # the buckets of the distances −D … D; beyond, it is that of the end

    def forward(self, tokens: int) -> torch.Tensor:  # type: ignore[override]
        place = torch.arange(tokens, device=self.weight.device)
        farthest = len(self.bucket_rows) // 2
        distances = (place - place[:, None]).clamp(-farthest, farthest)
        return super().forward(self.bucket_rows[distances + farthest]).permute(2, 0, 1)[None]


class RegisteredT5Attention(modeling_t5.T5Attention):
    """Self-attention of an encoder, by a function of transformers' registry."""

    attention_function: str
    relative_attention_bias: RelativeBias  # in the first block, and in the first one of a part

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        key_value_states: None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`position_bias` is what the block before has handed on: biases and mask in one."""
        if position_bias is None:
            position_bias = self.relative_attention_bias(hidden_states.shape[1])
            position_bias = position_bias if mask is None else position_bias + mask
        shape = (*hidden_states.shape[:-1], self.n_heads, self.key_value_proj_dim)
        q, k, v = (part(hidden_states).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        attend = ALL_ATTENTION_FUNCTIONS[self.attention_function]
        context, probabilities = attend(self, q, k, v, position_bias, scaling=1.0)
        return self.o(context.flatten(-2)), position_bias, probabilities


class T5EncoderModel(modeling_t5.T5EncoderModel):
    """Has its word embedding in the encoder only, not a second time as `shared`."""

    _tied_weights_keys: Any = {}  # noqa: RUF012 (transformers' own form)

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, new_embeddings: nn.Module) -> None:
        self.encoder.embed_tokens = new_embeddings


def register_t5(base: Any, attentions: Sequence[Any], attention_function: str) -> None:
    """Let an encoder of transformers, its attention modules and their table be those above."""
    if type(base) is not T5EncoderModel:
        base.__class__ = T5EncoderModel
        del base._modules[SHARED]
        base.all_tied_weights_keys = {}
    first = attentions[0]
    table = getattr(first, BIAS)
    table.__class__ = RelativeBias
    farthest = first.relative_attention_max_distance
    rows = first._relative_position_bucket(
        torch.arange(-farthest, farthest + 1),
        num_buckets=first.relative_attention_num_buckets,
        max_distance=farthest,
    )
    table.register_buffer("bucket_rows", rows.to(table.weight.device), persistent=False)
    for attention in attentions:
        attention.__class__ = RegisteredT5Attention
        attention.attention_function = attention_function
