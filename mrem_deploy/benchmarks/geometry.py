"""Models of a given shape with random weights: time and memory depend on the shape, not on the values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mrem_deploy.data.encoded import Encoded

POSITIONS = 512  # the longest input, as in every published BERT
LABELS = 3  # MNLI's


@dataclass(frozen=True)
class Geometry:
    """The numbers that decide how large a BERT is."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int = 30522

    def __str__(self) -> str:
        for name, known in GEOMETRIES.items():
            if known == self:
                return name
        return f"{self.hidden}x{self.layers}x{self.heads}x{self.intermediate}x{self.vocabulary}"


GEOMETRIES = {
    "bert-base": Geometry(768, 12, 12, 3072),
    "bert-large": Geometry(1024, 24, 16, 4096),
    "minilm-l6": Geometry(384, 6, 12, 1536),
}
SPELLING = (
    f"{', '.join(GEOMETRIES)}, or HIDDENxLAYERSxHEADSxINTERMEDIATE (and xVOCABULARY), such as 256x4x4x1024"
)


def parse_geometry(text: str) -> Geometry:
    """'bert-base' or '256x4x4x1024' → the geometry."""
    if text in GEOMETRIES:
        return GEOMETRIES[text]
    if not re.fullmatch(r"[0-9]{1,6}(x[0-9]{1,6}){3,4}", text):
        raise UserError(f"--geometry {shown(text)} is unknown", f"use {SPELLING}")
    geometry = Geometry(*map(int, text.split("x")))
    if min(map(int, text.split("x"))) < 1:
        raise UserError(f"--geometry {text}: every number must be at least 1", f"use {SPELLING}")
    if geometry.hidden % geometry.heads:
        raise UserError(
            f"--geometry {text}: {geometry.hidden} hidden units cannot be cut into {geometry.heads} heads",
            "choose a number of heads that divides the hidden size",
        )
    return geometry


def random_model(geometry: Geometry, seed: int) -> PreTrainedModel:
    """A BERT classifier in evaluation mode, initialised as before pre-training; torch's own random
    state is left alone."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=geometry.vocabulary,
        hidden_size=geometry.hidden,
        num_hidden_layers=geometry.layers,
        num_attention_heads=geometry.heads,
        intermediate_size=geometry.intermediate,
        max_position_embeddings=POSITIONS,
        num_labels=LABELS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BertForSequenceClassification(config).eval()


def random_tokens(geometry: Geometry, examples: int, length: int, seed: int) -> Encoded:
    """Sentences of exactly `length` tokens, the heaviest case: no padding to save anything on."""
    from mrem_deploy.data.encoded import Encoded

    ids = np.random.default_rng(seed).integers(
        0, geometry.vocabulary, size=(examples, length), dtype=np.int32
    )
    return Encoded(
        columns={"input_ids": list(ids), "token_type_ids": list(np.zeros_like(ids))},
        lengths=np.full(examples, length, dtype=np.int64),
        pad={"input_ids": 0, "token_type_ids": 0},
        labels=None,
    )
