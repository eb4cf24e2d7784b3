"""Rivals outside onnxruntime that need a format of their own, made from the same full-precision model.

- CTranslate2, int8 weights and activations: by its own converter for transformers, which reads the model in
  memory. The converter stops at the pooler.
- llama.cpp, 8 bits (Q8_0) and 4 bits (Q4_0): the GGUF file is written here with the package gguf, as
  llama.cpp's convert_hf_to_gguf.py does, which no package on PyPI contains. Without a tokenizer: what is
  compared starts from tokens. Its BERT ends with the last block and has only one token type.

Both are for BERT classifiers here: the head, which neither format holds, is kept beside the model (heads.py).
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mrem_deploy.base.progress import say
from mrem_deploy.benchmarks.latency.contenders import Contender
from mrem_deploy.benchmarks.latency.heads import Head
from mrem_deploy.export.tracing import quiet_tools

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

GGUF_TYPES = {"Q8_0": "8-bit", "Q4_0": "4-bit"}
CLS_POOLING = 2  # llama.cpp's number for it


def peer_contenders(model: PreTrainedModel, peers: tuple[str, ...], work: Path) -> list[Contender]:
    """The rivals asked for; one that cannot be made of this model is left out, with the reason."""
    found: list[Contender] = []
    wanted = [name for name in ("ctranslate2", "llama.cpp") if name in peers]
    problem = _problem(model) if wanted else ""
    for name in wanted:
        if problem:
            say(f"left out: {name}: {problem}")
        elif name == "ctranslate2":
            say("making the rivals: CTranslate2")
            path = convert_for_ctranslate2(model, work / "ctranslate2")
            found.append(Contender("CTranslate2 int8", path, "ctranslate2"))
        else:
            for kind in GGUF_TYPES:
                say(f"making the rivals: llama.cpp {kind}")
                path = write_gguf(model, work / f"llama-{kind}", kind)
                found.append(Contender(f"llama.cpp {kind}", path, "llama_cpp"))
    return found


def _problem(model: PreTrainedModel) -> str:
    """Why a model has no such rival."""
    kind = type(model).__name__
    if kind != "BertForSequenceClassification":
        return f"made here for BertForSequenceClassification only, and this model is a {kind}"
    config = model.config
    if config.hidden_act != "gelu":
        return f"made here for GELU only, and this model has {config.hidden_act}"
    return ""


def head_of(model: Any) -> Head:
    pooler = model.bert.pooler.dense
    parts = (pooler.weight, pooler.bias, model.classifier.weight, model.classifier.bias)
    return Head(*(_values(part) for part in parts))


def convert_for_ctranslate2(model: Any, folder: Path) -> Path:
    """A folder that ctranslate2.Encoder reads."""
    from ctranslate2.converters import TransformersConverter

    class InMemory(TransformersConverter):
        """The converter, given the model and a vocabulary that nobody reads, since tokens go in."""

        def load_model(self, model_class: Any, model_name_or_path: str, **kwargs: Any) -> Any:
            body = copy.deepcopy(model.bert)  # the converter quantizes the weights where they are
            # transformers 5 has only absolute positions, and no field that says so; the converter reads it.
            body.config.position_embedding_type = "absolute"
            return body

        def load_tokenizer(self, tokenizer_class: Any, model_name_or_path: str, **kwargs: Any) -> Any:
            return _NumberedWords(model.config.vocab_size)

    config = folder.with_name(f"{folder.name}-config")
    model.config.save_pretrained(config)
    try:
        with quiet_tools():
            InMemory(str(config)).convert(str(folder), quantization="int8", force=True)
    finally:
        shutil.rmtree(config)
    head_of(model).save(folder)
    return folder


class _NumberedWords:
    """What the converter asks of a tokenizer."""

    unk_token = "0"

    def __init__(self, words: int) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(self.words)}


def write_gguf(model: Any, folder: Path, kind: str) -> Path:
    """model.gguf in a new folder, matrices in llama.cpp's quantized type `kind`."""
    import gguf

    folder.mkdir(exist_ok=True)
    config, path = model.config, folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(CLS_POOLING))
    writer.add_tokenizer_model("no_vocab")
    writer.add_token_type_count(config.type_vocab_size)
    quantized = gguf.GGMLQuantizationType[kind]
    writer.add_file_type(int(gguf.LlamaFileType[f"MOSTLY_{kind}"]))
    block = gguf.GGML_QUANT_SIZES[quantized][0]
    matrices = 0
    for name, value in gguf_tensors(model):
        # Positions and types are added, not multiplied: llama.cpp's own quantizer leaves them in float.
        wanted = value.ndim == 2 and not name.startswith(("position_embd", "token_types"))
        if wanted and value.shape[1] % block == 0:
            matrices += 1
            writer.add_tensor(name, gguf.quantize(value, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not matrices:
        raise AssertionError(f"no matrix of the model fits {kind}, whose blocks have {block} numbers")
    head_of(model).save(folder)
    return path


def gguf_tensors(model: Any) -> Iterator[tuple[str, np.ndarray]]:
    """llama.cpp's names of BERT's tensors, and their values."""
    body = model.bert
    embeddings = body.embeddings
    yield "token_embd.weight", _values(embeddings.word_embeddings.weight)
    yield "position_embd.weight", _values(embeddings.position_embeddings.weight)
    yield "token_types.weight", _values(embeddings.token_type_embeddings.weight)
    yield from _both("token_embd_norm", embeddings.LayerNorm)
    for number, block in enumerate(body.encoder.layer):
        attention = block.attention
        parts = {
            "attn_q": attention.self.query,
            "attn_k": attention.self.key,
            "attn_v": attention.self.value,
            "attn_output": attention.output.dense,
            "attn_output_norm": attention.output.LayerNorm,
            "ffn_up": block.intermediate.dense,
            "ffn_down": block.output.dense,
            "layer_output_norm": block.output.LayerNorm,
        }
        for name, part in parts.items():
            yield from _both(f"blk.{number}.{name}", part)


def _both(name: str, part: Any) -> Iterator[tuple[str, np.ndarray]]:
    yield f"{name}.weight", _values(part.weight)
    yield f"{name}.bias", _values(part.bias)


def _values(tensor: torch.Tensor) -> np.ndarray:
    found: np.ndarray = tensor.detach().float().contiguous().numpy()
    return found
