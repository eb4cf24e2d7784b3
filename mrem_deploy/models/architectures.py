"""Where things are in each architecture: one table row each. Nothing else depends on the architecture.

`anatomy(model)` resolves a row against a real model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from mrem_deploy.base.errors import UserError

CONVOLUTION = "use a checkpoint without one, such as any size of DeBERTa-v3"


@dataclass(frozen=True)
class Norms:
    """LayerNorms after attention and feed-forward (post-norm), and the linears around them.

    Paths are inside one block, except that of the embedding's norm, which is inside the base model.
    """

    embedding: str  # its output is the first block's input
    attention_output: str  # the linear whose output is added to the block's input
    middle: str  # the norm after attention
    feed_forward: tuple[str, str]  # the linear that reads `middle`, and the one whose output is added to it
    last: str  # the norm whose output is the block's


@dataclass(frozen=True)
class Gate:
    """A gated feed-forward network whose two halves are separate linears that read the same tensor."""

    module: str  # inside one block
    shared_input: tuple[str, ...]  # inside `module`


@dataclass(frozen=True)
class Architecture:
    """Paths inside the base model (first three) and inside one block (the others)."""

    word_embedding: str
    blocks: str
    attention: str  # the module that computes q, k, v and passes them to the attention function
    shared_input: tuple[str, ...]  # linears inside `attention` that read the same tensor
    after_activation: str | None  # the linear fed by GELU or ReLU; a gate makes its input signed
    projections: tuple[str, ...] = ("classifier", "qa_outputs", "classifier.out_proj")  # the heads
    final_norm: str | None = None  # applied after the last block, belongs to the last module
    constants: tuple[str, ...] = ()  # read by every block, so no module may train them; some may be missing
    norms: Norms | None = None  # None: pre-norm, no biases, or keys that are rotated by their positions
    disentangled: bool = False  # attention has products with relative positions (quant/disentangled.py)
    embeddings: str = "embeddings"  # what later modules do without: their input is embedded already
    gate: Gate | None = None  # in the models that have its linears
    lent: str | None = None  # inside the first block: read by every block, so it is one of the `constants`
    tied: tuple[str, ...] = ()  # other names of the word embedding in the base model; left out
    encoder_class: str = "AutoModel"  # of transformers: builds the model without a head
    heads: tuple[str, ...] | None = None  # those that can be quantized; None: all
    causal: bool = False  # tokens see only those before them, unless the configuration says otherwise
    positions_from_mask: bool = False  # counted from the first real token, whichever side is padded


EMBEDDER = ("feature-extraction",)

_BERT = Architecture(
    word_embedding="embeddings.word_embeddings",
    blocks="encoder.layer",
    attention="attention.self",
    shared_input=("query", "key", "value"),
    after_activation="output.dense",
    norms=Norms(
        embedding="embeddings.LayerNorm",
        attention_output="attention.output.dense",
        middle="attention.output.LayerNorm",
        feed_forward=("intermediate.dense", "output.dense"),
        last="output.LayerNorm",
    ),
)

_GATE = Gate("mlp", ("gate_proj", "up_proj"))
_ROTARY = Architecture(
    word_embedding="embeddings.word_embeddings",
    blocks="layers",
    attention="self_attn",
    shared_input=("q_proj", "k_proj", "v_proj"),
    after_activation=None,
    gate=_GATE,
    heads=("sequence-classification", "token-classification", "feature-extraction"),
)
_DECODER = replace(
    _ROTARY,
    word_embedding="embed_tokens",
    embeddings="embed_tokens",
    final_norm="norm",
    heads=EMBEDDER,
    causal=True,
    positions_from_mask=True,
)

ARCHITECTURES: dict[str, Architecture] = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "electra": _BERT,
    "distilbert": Architecture(
        word_embedding="embeddings.word_embeddings",
        blocks="transformer.layer",
        attention="attention",
        shared_input=("q_lin", "k_lin", "v_lin"),
        after_activation="ffn.lin2",
        norms=Norms(
            embedding="embeddings.LayerNorm",
            attention_output="attention.out_lin",
            middle="sa_layer_norm",
            feed_forward=("ffn.lin1", "ffn.lin2"),
            last="output_layer_norm",
        ),
    ),
    "mpnet": Architecture(
        word_embedding="embeddings.word_embeddings",
        blocks="encoder.layer",
        attention="attention.attn",
        shared_input=("q", "k", "v"),
        after_activation="output.dense",
        constants=("encoder.relative_attention_bias",),
        norms=Norms(
            embedding="embeddings.LayerNorm",
            attention_output="attention.attn.o",
            middle="attention.LayerNorm",
            feed_forward=("intermediate.dense", "output.dense"),
            last="output.LayerNorm",
        ),
    ),
    "deberta-v2": replace(  # DeBERTa v3 has the same model type
        _BERT,
        shared_input=("query_proj", "key_proj", "value_proj"),
        constants=("encoder.rel_embeddings", "encoder.LayerNorm"),
        disentangled=True,
    ),
    "modernbert": Architecture(
        word_embedding="embeddings.tok_embeddings",
        blocks="layers",
        attention="attn",
        shared_input=(),  # q, k and v are one linear already
        after_activation=None,
        final_norm="final_norm",
    ),
    "nomic_bert": _ROTARY,
    "gte": _ROTARY,
    "eurobert": replace(_DECODER, heads=_ROTARY.heads, causal=False, positions_from_mask=False),
    "qwen3": _DECODER,
    "gemma3_text": _DECODER,
    "t5": Architecture(
        word_embedding="encoder.embed_tokens",
        embeddings="encoder.embed_tokens",
        blocks="encoder.block",
        attention="layer.0.SelfAttention",
        shared_input=("q", "k", "v"),
        after_activation="layer.1.DenseReluDense.wo",
        gate=Gate("layer.1.DenseReluDense", ("wi_0", "wi_1")),  # since version 1.1
        final_norm="encoder.final_layer_norm",
        constants=("encoder.block.0.layer.0.SelfAttention.relative_attention_bias",),
        lent="layer.0.SelfAttention.relative_attention_bias",
        tied=("shared",),
        heads=("token-classification", "feature-extraction"),  # the others read the decoder
        encoder_class="AutoModelForTextEncoding",
    ),
}


@dataclass(frozen=True)
class Positions:
    """The products of disentangled attention with relative positions; none in other attention."""

    products: tuple[str, ...] = ()  # "c2p": content to position, "p2c": position to content
    shared: bool = False  # whether the projections of q and k project positions, too


@dataclass(frozen=True)
class Anatomy:
    """Full module names in one model."""

    architecture: Architecture
    base: str  # "" for a bare encoder, "bert" or the like under a head
    word_embedding: str
    blocks: tuple[str, ...]
    attentions: tuple[str, ...]
    linears: tuple[str, ...]  # every linear that the paper quantizes, in order of execution
    shared_inputs: dict[str, str]  # linear -> the module (attention, gate) whose input quantizer it shares
    positive_inputs: frozenset[str]  # linears whose input is mostly positive (after GELU)
    positions: Positions  # what the attention modules do with relative positions
    tied: tuple[str, ...]  # other names of the word embedding, which `prepare` leaves out

    @property
    def readers(self) -> tuple[str, ...]:
        """The modules that quantize one tensor for several linears."""
        return tuple(dict.fromkeys(self.shared_inputs.values()))


def check_model_type(model_type: Any, source: Any = None) -> Architecture:
    """The row of a model type; a UserError lists what is supported. `source` is the file that names it."""
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        named = f"{source}: " if source is not None else ""
        raise UserError(
            f"{named}model type {model_type!r} is not supported",
            f"supported are {', '.join(ARCHITECTURES)}; to add one, see CONTRIBUTING.md",
        )
    return ARCHITECTURES[model_type]


def check_head(model_type: str, head: str, source: Any) -> None:
    """Refuse a head that models of this type have in a form that cannot be cut and quantized here."""
    heads = check_model_type(model_type).heads
    if heads is None or head in heads:
        return
    if heads == EMBEDDER:
        raise UserError(
            f"{source}: a {model_type} model is quantized as an embedder only; the task needs a {head} head",
            "use --task feature-extraction or retrieval; rerankers and classifiers with a decoder's body are "
            "not supported, such as Qwen3-Reranker, which says yes or no with its language model head",
        )
    if has_decoder(model_type):
        raise UserError(
            f"{source}: the {head} head of a {model_type} model reads its decoder; only its encoder is "
            "quantized",
            f"use a task for one of the heads of the encoder: {', '.join(heads)}",
        )
    raise UserError(
        f"{source}: a {model_type} model has no {head} head in transformers",
        f"use a task for one of its heads: {', '.join(heads)}",
    )


def has_decoder(model_type: str) -> bool:
    """Whether AutoModel has a decoder behind the encoder that is quantized here."""
    return check_model_type(model_type).encoder_class != "AutoModel"


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def anatomy(model: PreTrainedModel) -> Anatomy:
    """Find the layers of a Hugging Face model; a UserError lists what is supported."""
    row = check_model_type(getattr(model.config, "model_type", "unknown"))
    if getattr(model.config, "conv_kernel_size", 0):
        raise UserError(
            f"this {model.config.model_type} has a convolution after its first block", CONVOLUTION
        )
    prefix = getattr(model, "base_model_prefix", "")
    base = prefix if prefix and hasattr(model, prefix) else ""
    if has_decoder(model.config.model_type) and hasattr(model.get_submodule(base), "decoder"):
        raise UserError(
            f"this {type(model).__name__} has a decoder; only its encoder is quantized",
            f"load the encoder alone: transformers.{row.encoder_class}.from_pretrained",
        )
    blocks_name = _join(base, row.blocks)
    blocks = tuple(f"{blocks_name}.{i}" for i in range(len(model.get_submodule(blocks_name))))
    heads = _head_names(model, row)
    linears = tuple(
        name for name, part in model.named_modules() if isinstance(part, nn.Linear) and name not in heads
    )
    attentions = tuple(_join(block, row.attention) for block in blocks)
    shared = {f"{attention}.{linear}": attention for attention in attentions for linear in row.shared_input}
    gates = [_join(block, row.gate.module) for block in blocks] if row.gate else []
    gated = row.gate is not None and hasattr(model.get_submodule(gates[0]), row.gate.shared_input[0])
    if row.gate and gated:
        shared |= {f"{gate}.{linear}": gate for gate in gates for linear in row.gate.shared_input}
    positive = (
        frozenset(_join(block, row.after_activation) for block in blocks)
        if row.after_activation and not gated
        else frozenset()
    )
    positions = _positions(model.get_submodule(attentions[0])) if row.disentangled else Positions()
    word_embedding = _join(base, row.word_embedding)
    tied = tuple(_join(base, name) for name in row.tied)
    return Anatomy(row, base, word_embedding, blocks, attentions, linears, shared, positive, positions, tied)


def _positions(attention: Any) -> Positions:
    """What a DisentangledSelfAttention of transformers does."""
    if not attention.relative_attention:
        return Positions()
    products = tuple(product for product in ("c2p", "p2c") if product in attention.pos_att_type)
    return Positions(products, shared=bool(products) and attention.share_att_key)


def _head_names(model: PreTrainedModel, row: Architecture) -> set[str]:
    """The final projection only: a dense layer in front of it is quantized like any other."""
    names = {name for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    return {projection for projection in row.projections if projection in names}


def is_causal(config: PretrainedConfig) -> bool:
    """Whether tokens see only those before them: the last one has read the text, the first has not."""
    both = getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True)
    return check_model_type(config.model_type).causal and not both


def model_outputs(result: Any) -> list[torch.Tensor]:
    """The tensors a user reads: logits, start and end logits, or the last hidden state."""
    if "logits" in result:
        return [result["logits"]]
    if "start_logits" in result:
        return [result["start_logits"], result["end_logits"]]
    return [result["last_hidden_state"]]
