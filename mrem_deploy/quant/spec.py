"""What the layers are quantized to: plain data, loads no torch."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from mrem_deploy.numerics import UNQUANTIZED_BITS

WEIGHT_QUANTIZERS = ("auto", "twn", "midrise", "laq", "uniform")
USUAL_QUANTIZERS = {2: "midrise", 3: "uniform", 4: "laq", 8: "uniform"}  # by bits: what `auto` stands for
TWO_BIT_QUANTIZERS = ("twn", "midrise")  # weights of other bits get the usual quantizer
HOT_ROWS = {2: 64, 4: 64}  # rows of the word embedding at 8 bits that `auto` means, by its bits


@dataclass(frozen=True)
class WeightSpec:
    """How one weight is quantized."""

    bits: int
    per_channel: bool = False  # one scale per row (output channel, or token of the embedding)
    quantizer: str = "auto"
    curvature: str = "identity"
    hot_rows: int = 0  # of an embedding: rows that get 8 bits, at most

    @property
    def is_quantized(self) -> bool:
        return self.bits != UNQUANTIZED_BITS

    @property
    def kind(self) -> str:
        """The quantizer by name: the one asked for, or the usual one of these bits."""
        unfit = self.quantizer in TWO_BIT_QUANTIZERS and self.bits != 2
        return USUAL_QUANTIZERS[self.bits] if self.quantizer == "auto" or unfit else self.quantizer


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
    hot_rows: int | None = 0  # of the word embedding, below 8 bits; None: as many as its bits call for

    @property
    def quantizes_activations(self) -> bool:
        return self.activation_bits != UNQUANTIZED_BITS

    def keeps(self, name: str) -> bool:
        """Whether `keep_fp` leaves the layer in full precision."""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.keep_fp)

    def bits_of(self, name: str, usual: int) -> int:
        """Bits of one layer's weight: its own where it has any, else the `usual` ones of its kind."""
        return UNQUANTIZED_BITS if self.keeps(name) else dict(self.layer_bits).get(name, usual)

    def linear(self, name: str) -> WeightSpec:
        """How the weight of a linear is quantized."""
        bits = self.bits_of(name, self.weight_bits)
        return WeightSpec(bits, self.per_channel, self.weight_quantizer, self.curvature)

    def embedding(self, name: str) -> WeightSpec:
        """How the word embedding is quantized: always per channel, by the usual quantizer of its bits, unless
        one of 2 bits is asked for."""
        bits = self.bits_of(name, self.embedding_bits)
        quantizer = self.weight_quantizer if self.weight_quantizer in TWO_BIT_QUANTIZERS else "auto"
        return WeightSpec(bits, per_channel=True, quantizer=quantizer, hot_rows=self.hot_rows_at(bits))

    def hot_rows_at(self, bits: int) -> int:
        """How many rows of a word embedding of so many bits get 8; those of 8 and 32 bits need none."""
        usual = HOT_ROWS.get(bits, 0)
        return usual if self.hot_rows is None or bits not in HOT_ROWS else self.hot_rows
