"""Tiny models of every supported architecture and head, with batches and quantized twins for tests.

The weights are drawn anew with a spread that matters: freshly initialised models have biases of 0,
norms of 1 and near-uniform attention, in which a lost bias or a wrong mask would not be seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_bert import save_tiny_bert
from torch import nn

from mrem_deploy.data.encoded import Encoded
from mrem_deploy.models import architectures
from mrem_deploy.models.architectures import Anatomy
from mrem_deploy.models.loading import HEADS, auto_class
from mrem_deploy.numerics import UNQUANTIZED_BITS, activation_grid, asymmetric_grid
from mrem_deploy.quant.insert import activation_points, insert_quantizers, prepare
from mrem_deploy.quant.quantizers import LearnedScale
from mrem_deploy.quant.spec import QuantSpec
from mrem_deploy.recipe import Recipe
from mrem_deploy.train.checkpoint import CheckpointStore
from mrem_deploy.train.job import TrainJob, TrainSettings

BLOCKS = 3  # the least that has a first, a middle and a last module
WIDTH = 16
HEADS_PER_BLOCK = 2  # so a head is 8 wide
VOCABULARY = 60
POSITIONS = 40
FIRST_WORD = 5  # ids below are special tokens
ENCODERS = (
    *("bert", "roberta", "xlm-roberta", "electra", "distilbert", "mpnet"),
    *("deberta-v2", "modernbert"),
)
GATED = ("nomic_bert", "gte", "eurobert", "qwen3", "gemma3_text")
ARCHITECTURES = (*ENCODERS, *GATED, "t5")
# A trace takes seconds. NomicBERT is GTE without biases, EuroBERT is Qwen3 without norms of q and k.
TRACED = (*ENCODERS, "gte", "qwen3", "gemma3_text", "t5")
# What only disentangled attention quantizes: positions, before and after they are projected.
POSITION_POINTS = ("position_quantizer", "c2p.right", "p2c.right")
READ_BY_ALL = {  # parameters of the encoder that every block reads, by architecture; no module trains them
    "mpnet": {"relative_attention_bias.weight"},
    "deberta-v2": {"rel_embeddings.weight", "LayerNorm.weight", "LayerNorm.bias"},
    "t5": {"block.0.layer.0.SelfAttention.relative_attention_bias.weight"},
}
HEAD_NAMES = tuple(HEADS)


def heads_of(kind: str) -> tuple[str, ...]:
    """The heads that can be quantized; the first is the usual one."""
    heads = architectures.ARCHITECTURES[kind].heads or HEAD_NAMES
    return tuple(head for head in HEAD_NAMES if head in heads)


EVERY_MODEL = [(kind, head) for kind in ARCHITECTURES for head in heads_of(kind)]


def tiny_config(kind: str, head: str | None = None, **changes: Any) -> transformers.PretrainedConfig:
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": HEADS_PER_BLOCK,
        "intermediate_size": 24,
        "max_position_embeddings": POSITIONS,
        "num_labels": 2 if head == "question-answering" else 3,  # start and end
    }
    if kind == "distilbert":
        shape["hidden_dim"] = 24  # its name of the intermediate size
    if kind == "electra":
        shape["embedding_size"] = 12  # unlike the hidden size: ELECTRA then projects its embeddings
    if kind == "deberta-v2":  # as v3: buckets, some of them logarithmic, and one projection for all
        shape |= {"relative_attention": True, "position_buckets": 4, "max_relative_positions": 8}
        shape |= {"pos_att_type": ["p2c", "c2p"], "share_att_key": True, "norm_rel_ebd": "layer_norm"}
        shape |= {"position_biased_input": False, "type_vocab_size": 0, "pad_token_id": 0}
    if kind == "modernbert":
        # A window narrower than the sentences, and two kinds of blocks: global, local, global.
        shape |= {"local_attention": 4, "global_attn_every_n_layers": 2, "pad_token_id": 0}
        shape |= {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    if kind in ("nomic_bert", "gte"):
        shape |= {"hidden_dropout_prob": 0.1, "layer_norm_eps": 1e-6, "pad_token_id": 0}
    if kind in ("eurobert", "qwen3", "gemma3_text"):
        # Two heads read one key; a head is as wide as no division of the hidden size.
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "pad_token_id": 0}
        shape |= {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}
    if kind == "eurobert":
        shape |= {"mask_token_id": 3, "head_dim": 4}
    if kind == "qwen3":
        shape |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    if kind == "gemma3_text":
        # Windows of a few tokens, then a block that sees all, then windows again: parts must tell them apart.
        shape |= {"use_bidirectional_attention": True, "sliding_window": 4, "query_pre_attn_scalar": 9}
        shape |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    if kind == "t5":  # heads as wide as no division of the width, and distances beyond the last bucket
        names = {"hidden_size": "d_model", "num_hidden_layers": "num_layers", "intermediate_size": "d_ff"}
        names |= {"num_attention_heads": "num_heads"}
        shape = {names.get(name, name): value for name, value in shape.items() if "position" not in name}
        shape |= {"d_kv": 6, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 8}
    return transformers.AutoConfig.for_model(kind, **(shape | changes))


@torch.no_grad()
def tiny_model(
    kind: str = "bert",
    head: str | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **changes: Any,
) -> nn.Module:
    """A model in evaluation mode with weights that make every part of it matter."""
    head = head or heads_of(kind)[0]
    config = tiny_config(kind, head, **changes)
    model = auto_class(head, kind).from_config(config).eval().to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for value in model.parameters():
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(dtype)
        if value.dim() > 1:
            value.copy_(noise / value.shape[-1] ** 0.5)
        else:
            value.add_(0.1 * noise)
    return model


def tiny_encoded(kind: str = "bert", count: int = 12, seed: int = 0, longest: int = 11) -> Encoded:
    """Sentences of many lengths, among them one of a single token and one of the greatest length."""
    config = tiny_config(kind)
    generator = np.random.default_rng(seed)
    lengths = generator.integers(2, longest, size=count)
    lengths[0], lengths[-1] = 1, longest
    columns = {"input_ids": [generator.integers(FIRST_WORD, VOCABULARY, size=n) for n in lengths]}
    pad = {"input_ids": int(config.pad_token_id or 0)}
    if getattr(config, "type_vocab_size", 0) > 1:
        columns["token_type_ids"] = [(np.arange(n) >= n // 2).astype(np.int64) for n in lengths]
        pad["token_type_ids"] = 0
    return Encoded(columns, lengths, pad, None)


def tiny_batch(kind: str = "bert", seed: int = 0) -> dict[str, torch.Tensor]:
    """Three sentences in one batch: full, half padding, and a lone token in a row of padding."""
    encoded = tiny_encoded(kind, count=3, seed=seed)
    return encoded.batch(np.array([2, 1, 0]))


def made_up_scales(found: Anatomy, spec: QuantSpec, dtype: torch.dtype) -> dict[str, LearnedScale]:
    """Activation quantizers without a search (it costs more than all the rest of a test): steps that
    differ from point to point, reach over most values and saturate at the outliers."""
    steps = {}
    if spec.activation_bits == UNQUANTIZED_BITS:
        return steps
    levels = 2**spec.activation_bits
    for number, (name, asymmetric) in enumerate(activation_points(found, spec).items()):
        softmax = name.endswith("context.left")
        reach = (0.9 if softmax else 1.8) + 0.01 * number
        if asymmetric:
            grid, step = asymmetric_grid(spec.activation_bits, 0 if softmax else levels // 16), reach / levels
        else:
            grid, step = activation_grid(spec.activation_bits), 2 * reach / levels
        steps[name] = LearnedScale(torch.tensor(step, dtype=dtype), grid)
    return steps


def quantized_twin(model: nn.Module, spec: QuantSpec) -> tuple[nn.Module, nn.Module]:
    """(full-precision teacher, fake-quant student) of a model, which is not changed."""
    teacher = copy.deepcopy(model).requires_grad_(False)
    found = prepare(teacher)
    student = copy.deepcopy(teacher)
    insert_quantizers(student, spec, made_up_scales(found, spec, next(model.parameters()).dtype))
    return teacher, student.requires_grad_(True)


def tiny_pair(
    kind: str = "bert",
    head: str | None = None,
    spec: QuantSpec | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[nn.Module, nn.Module]:
    """Made once, then copied: most of the time would go into searching the same scales again."""
    return copy.deepcopy(_pair(kind, head or heads_of(kind)[0], spec or QuantSpec(4, 4, 8), dtype))


@cache
def _pair(kind: str, head: str, spec: QuantSpec, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    return quantized_twin(tiny_model(kind, head, dtype), spec)


def settings(**changes: Any) -> TrainSettings:
    """A run of a few steps at rates that change the weights visibly."""
    values: dict[str, Any] = {"steps": 6, "lr": 3e-3, "step_lr": 1e-2, "batch_size": 4, "seed": 0}
    return TrainSettings(**(values | changes))


def train_job(
    teacher: nn.Module,
    student: nn.Module,
    data: Encoded,
    cuts: list[int] | None = None,
    store: CheckpointStore | None = None,
    score: Callable[[nn.Module], float] | None = None,
    holdout: Encoded | None = None,
    **changes: Any,
) -> TrainJob:
    """A job of a few steps, as `settings` has them; `changes` are options of the recipe."""
    values: dict[str, Any] = {"steps": 6, "step_lr": 1e-2, "batch_size": 4, "checkpoint_steps": 0}
    values |= {"max_memory": "1GB"}
    values |= {"qat_lr": 3e-3} if changes.get("method") == "qat" else {"lr": 3e-3}
    if cuts is not None:
        values["modules"] = "".join(f"{cut}," for cut in cuts[1:-1]) or "1"
    return TrainJob(teacher, student, data, Recipe(**(values | changes)), store, score=score, holdout=holdout)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_state(came: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit: names, types and values."""
    assert came.keys() == expected.keys()
    different = [
        name
        for name in came
        if came[name].dtype != expected[name].dtype or not torch.equal(came[name], expected[name])
    ]
    assert different == []


def differing(came: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in expected if not torch.equal(came[name], expected[name])}


class Killed(BaseException):
    """Stands for a kill: nothing in the package may catch it."""


@contextmanager
def killed_at_call(owner: Any, name: str, call: int) -> Iterator[None]:
    """The `call`-th call (from 1) of `owner.name` raises Killed before it does anything; expects that."""
    count = 0
    original: Callable[..., Any] = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            raise Killed
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, replacement)
        with pytest.raises(Killed):
            yield


def save_tiny_classifier(folder: Path, blocks: int = BLOCKS) -> Path:
    """A BERT with tokenizer on disk, as a user would give it; its weights matter, too."""
    save_tiny_bert(folder, num_hidden_layers=blocks)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.2 * torch.randn(value.shape, generator=generator))
    model.save_pretrained(folder)
    return folder
