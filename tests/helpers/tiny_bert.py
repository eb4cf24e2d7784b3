"""A BERT small enough to train in a test, with a tokenizer that knows a few words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

POSITIVE = ["good", "great", "fine", "lovely"]
NEGATIVE = ["bad", "awful", "poor", "dull"]
WORDS = ["the", "film", "was", "a", "plot", "actor", "very", "and", *POSITIVE, *NEGATIVE]


def save_tiny_bert(folder: Path, architecture: str = "BertForSequenceClassification", **config: Any) -> Path:
    """Write a randomly initialised (seed 0) two-layer BERT and its tokenizer; returns the folder."""
    import transformers
    from transformers import BertConfig, BertTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    words = folder / "vocab.txt"
    words.write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n", encoding="utf-8"
    )
    tokenizer = BertTokenizerFast.from_pretrained(str(folder))
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 32,
    }
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(BertConfig(**(shape | config)))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
