"""A tiny sentence embedder and a tiny cross-encoder, in the files that sentence-transformers writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tiny_bert import WORDS
from tiny_job import POSITIONS, save_model

WIDTH = 16
TYPES = "sentence_transformers.models."


def write_json(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def add_modules(folder: Path, *types: str) -> None:
    """modules.json: an encoder and these."""
    kinds = ("Transformer", *types)
    write_json(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": TYPES + kind}
            for i, kind in enumerate(kinds)
        ],
    )


def save_embedder(
    folder: Path,
    pooling: str | list[str] = "mean",
    dense: int | None = None,
    activation: str = "torch.nn.modules.activation.Tanh",
    normalize: bool = True,
    settings: Mapping[str, Any] | None = None,
    encoder: Mapping[str, Any] | None = None,
) -> Path:
    """An embedder of random weights; `dense` is the width of a Dense module, if there is to be one."""
    save_model(folder, "BertModel")
    modes = [pooling] if isinstance(pooling, str) else pooling
    add_modules(folder, "Pooling", *(["Dense"] if dense else []), *(["Normalize"] if normalize else []))
    write_json(folder / "1_Pooling" / "config.json", {"embedding_dimension": WIDTH, "pooling_mode": pooling})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": POSITIONS, **(encoder or {})})
    if settings is not None:
        write_json(folder / "config_sentence_transformers.json", settings)
    if dense:
        given, draw = WIDTH * len(modes), np.random.default_rng(3)
        write_json(
            folder / "2_Dense" / "config.json",
            {"in_features": given, "out_features": dense, "bias": True, "activation_function": activation},
        )
        weights = {"linear.weight": draw.normal(size=(dense, given)), "linear.bias": draw.normal(size=dense)}
        save_file(
            {name: value.astype(np.float32) for name, value in weights.items()},
            folder / "2_Dense" / "model.safetensors",
        )
    return folder


def save_reranker(folder: Path, **config: Any) -> Path:
    """A classifier with one output."""
    return save_model(folder, num_labels=1, **config)


def texts(count: int, seed: int = 0, longest: int = 20) -> list[str]:
    """Sentences of many lengths, in the words of the tiny model."""
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, size=draw.integers(1, longest))) for _ in range(count)]
