"""The quantization settings that tests over many models share."""

from __future__ import annotations

import torch
from torch import nn

from mrem_deploy.quant.spec import QuantSpec

SPECS = {
    "2-2-8": QuantSpec(2, 2, 8),
    "4-4-8": QuantSpec(4, 4, 8),
    "3-8-8": QuantSpec(3, 8, 8),
    "8-8-8": QuantSpec(8, 8, 8),
    "2-2-4": QuantSpec(2, 2, 4),
    "32-4-8": QuantSpec(32, 4, 8),
    "4-32-8": QuantSpec(4, 32, 8),
    "2-2-32": QuantSpec(2, 2, 32),
    "32-32-32": QuantSpec(32, 32, 32),
    "4-4-8 per channel": QuantSpec(4, 4, 8, per_channel=True),
    "8-8-8 per channel": QuantSpec(8, 8, 8, per_channel=True),
    "4-4-8 symmetric": QuantSpec(4, 4, 8, symmetric=True),
    "2-2-8 keeping a block, q of another, and the words": QuantSpec(
        2,
        2,
        8,
        keep_fp=("*.1.*", "*.0.*quer*", "*.0.*q_lin", "*.0.*.q", "*word_embeddings", "*tok_embeddings"),
    ),
    "4-4-8 adam": QuantSpec(4, 4, 8, curvature="adam"),
    "2-4-8 laq": QuantSpec(2, 4, 8, weight_quantizer="laq"),
    "2-2-8 midrise": QuantSpec(2, 2, 8, weight_quantizer="midrise"),
    "2-2-4 midrise per channel": QuantSpec(2, 2, 4, per_channel=True, weight_quantizer="midrise"),
    "4-2-8 midrise": QuantSpec(4, 2, 8, weight_quantizer="midrise"),
    "2-4-32 midrise": QuantSpec(2, 4, 32, weight_quantizer="midrise"),
}


def plain(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return module(weight)
