"""Tiny embedders in the files of Qwen3-Embedding, EmbeddingGemma and sentence-t5."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from tiny_bert import WORDS
from tiny_embedder import add_modules, write_json
from tiny_models import tiny_config

SPECIAL = ("[PAD]", "[UNK]", "[BOS]", "[EOS]")
CLASSES = {"qwen3": "Qwen3ForCausalLM", "gemma3_text": "Gemma3TextModel", "t5": "T5EncoderModel"}
WIDE = 24  # numbers between the two Dense modules of the Gemma


def save_decoder(folder: Path, kind: str, architecture: str | None = None) -> Path:
    """Weights in bfloat16; the Qwen3 with the name of its body in front of them and a tied language model
    head, pooled at the last token, the others pooled by their mean and followed by two Dense modules."""
    config = tiny_config(kind)
    config.vocab_size = len(SPECIAL) + len(WORDS)
    torch.manual_seed(0)
    model = getattr(transformers, architecture or CLASSES[kind])(config)
    with torch.no_grad():
        for value in model.parameters():  # with the usual spread all sentences get the same vector
            value.add_(torch.randn(value.shape) * (0.4 if value.dim() > 1 else 0.1))
    model.to(torch.bfloat16).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    if kind == "qwen3":
        add_modules(folder, "Pooling", "Normalize")
    else:
        add_modules(folder, "Pooling", "Dense", "Dense", "Normalize")
        _save_dense(folder / "2_Dense", config.hidden_size, WIDE, 2)
        _save_dense(folder / "3_Dense", WIDE, config.hidden_size, 3)
    pooling = {"pooling_mode_lasttoken" if kind == "qwen3" else "pooling_mode_mean_tokens": True}
    sizes = {"word_embedding_dimension": config.hidden_size}
    write_json(folder / "1_Pooling" / "config.json", sizes | pooling)
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": {"query": "the very ", "document": ""}, "similarity_fn_name": "cosine"},
    )
    return folder


def _save_dense(folder: Path, given: int, out: int, seed: int) -> None:
    identity = "torch.nn.modules.linear.Identity"
    sizes = {"in_features": given, "out_features": out, "bias": False, "activation_function": identity}
    write_json(folder / "config.json", sizes)
    weight = np.random.default_rng(seed).normal(size=(out, given)).astype(np.float32)
    save_file({"linear.weight": weight}, folder / "model.safetensors")


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Words, padded on the left and closed by [EOS], without token types."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="$A [EOS]", pair="$A $B [EOS]", special_tokens=[("[EOS]", vocabulary["[EOS]"])]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]",
        padding_side="left", model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
