"""What the layers are quantized to. Loads no torch."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

import torch
from torch import nn

from mrem_deploy.numerics import FULL_PRECISION
from mrem_deploy.quant.quantizers import make_weight_quantizer


@dataclass(frozen=True)
class QuantSpec:
    """How the model is quantized; the part of a recipe that the layers need."""

    weight_bits: int = 4
    embedding_bits: int = 4
    activation_bits: int = 8
    per_channel: bool = False
    symmetric: bool = False  # no asymmetric activations at all (TensorRT)
    weight_quantizer: str = "auto"
    curvature: str = "identity"
    keep_fp: tuple[str, ...] = ()
    layer_bits: tuple[tuple[str, int], ...] = ()  # of layers that do not have the bits above

    def keeps(self, name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.keep_fp)

    def bits_of(self, name: str, usual: int) -> int:
        """Bits of one layer's weight: its own where it has any, else the `usual` ones of its kind."""
        return FULL_PRECISION if self.keeps(name) else dict(self.layer_bits).get(name, usual)

    def weight_quantizer_of(self, name: str, weight: torch.Tensor) -> nn.Module:
        """The quantizer of a linear's weight; the identity where it stays full precision."""
        bits = self.bits_of(name, self.weight_bits)
        if bits == FULL_PRECISION:
            return nn.Identity()
        return make_weight_quantizer(weight, bits, self.per_channel, self.weight_quantizer, self.curvature)

    def embedding_quantizer_of(self, name: str, weight: torch.Tensor) -> nn.Module:
        """The same for the word embedding, which is always quantized per row."""
        bits = self.bits_of(name, self.embedding_bits)
        return nn.Identity() if bits == FULL_PRECISION else make_weight_quantizer(weight, bits, per_row=True)
