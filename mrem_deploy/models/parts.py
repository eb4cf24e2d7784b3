"""Consecutive blocks of a model as a separate module (`Part`), and its outputs.

`carve(model, cuts)` cuts a model into parts. A part is a shallow view that shares the model's parameters
and runs Hugging Face's own forward code, so masks, rotary embeddings and relative biases are not
implemented again here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mrem_deploy.models.architectures import anatomy, is_causal, model_outputs

# A model whose hidden states are shifted by constants (quant/centring.py) has them in this attribute: by the
# number of the block that reads the hidden state.
HIDDEN_SHIFTS = "hidden_shifts"


class _HandThrough(nn.Module):
    """Replaces the embeddings in later modules, whose input is embedded already."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        if inputs_embeds is None:  # DistilBERT passes (input_ids, inputs_embeds, position_ids) by position
            inputs_embeds = args[1]
        return inputs_embeds


def _view(model: nn.Module, replace: dict[str, nn.Module | None]) -> nn.Module:
    """A copy of the module tree in which only `replace` differs; parameters are the same objects."""
    new = copy.copy(model)
    new.__dict__["_modules"] = dict(model._modules)
    inner: dict[str, dict[str, nn.Module | None]] = {}
    for path, child in replace.items():
        head, _, rest = path.partition(".")
        if rest:
            inner.setdefault(head, {})[rest] = child
        else:
            new._modules[head] = child
    for head, deeper in inner.items():
        new._modules[head] = _view(new.get_submodule(head), deeper)
    return new


@dataclass
class PartOutput:
    """What one module passes on and is trained on."""

    embedding: torch.Tensor | None  # input of the first block, for the first module
    hidden: list[torch.Tensor]  # output of each block, (B, T, H)
    outputs: list[torch.Tensor]  # logits (or the final hidden state of a bare encoder), for the last module
    per_token: bool = False  # whether `outputs` follow the tokens, (B, T, …), or the sentence, (B, classes)
    bare: bool = False  # whether `outputs` are a hidden state: the model has no head
    causal: bool = False  # whether only the last token has read the entire text


class Part(nn.Module):
    """Blocks start..stop−1 of a model, with the embeddings if first and the head if last."""

    def __init__(self, model: PreTrainedModel, start: int, stop: int) -> None:
        super().__init__()
        found = anatomy(model)
        count = len(found.blocks)
        self.first, self.last = start == 0, stop == count
        self.bare = found.base == ""  # an encoder without a head
        self.causal = is_causal(model.config)
        self.start, self.stop = start, stop
        blocks = [model.get_submodule(name) for name in found.blocks[start:stop]]
        if (lent := found.architecture.lent) and not self.first:
            lender = model.get_submodule(found.blocks[0])
            blocks[0] = _view(blocks[0], {lent: lender.get_submodule(lent)})
        base = model.get_submodule(found.base)
        replace: dict[str, nn.Module | None] = {found.architecture.blocks: nn.ModuleList(blocks)}
        replace |= dict.fromkeys(found.architecture.tied)
        if not self.first:
            replace[found.architecture.embeddings] = _HandThrough()
            if hasattr(base, "embeddings_project"):  # ELECTRA's, part of the first module
                replace["embeddings_project"] = nn.Identity()
        if not self.last:
            if getattr(base, "pooler", None) is not None:
                replace["pooler"] = None
            if found.architecture.final_norm:
                replace[found.architecture.final_norm] = nn.Identity()
        constants = found.architecture.constants
        shared = [part for name, part in base.named_modules() if name in constants]
        self.shared_parameters = frozenset(id(p) for part in shared for p in part.parameters())
        view = _view(base, replace)
        if getattr(base.config, "layer_types", None):  # of the blocks, which the view counts from 0
            config: Any = copy.copy(base.config)
            config.use_cache, config.num_hidden_layers = False, stop - start
            config.layer_types = config.layer_types[start:stop]
            view.config = config
        if self.last and found.base:
            view = _view(model, {found.base: view})
        self.view = view
        # Not registered as submodules: the blocks are in the view already.
        object.__setattr__(self, "blocks", blocks)
        self.blocks: list[nn.Module]
        self.shifts: dict[int, torch.Tensor] = getattr(model, HIDDEN_SHIFTS, {})

    def forward(self, hidden: torch.Tensor | None, batch: dict[str, torch.Tensor]) -> PartOutput:
        """Run on `batch` (the first module) or on the predecessor's hidden state and batch's mask.

        Hidden states go in and come out without the shifts that the model may have."""
        if self.first:
            inputs = {name: value for name, value in batch.items() if name != "labels"}
        else:
            assert hidden is not None  # only the first module reads token ids
            if self.start in self.shifts:
                hidden = hidden - self.shifts[self.start].to(hidden)
            inputs = {"inputs_embeds": hidden, "attention_mask": batch["attention_mask"]}
        with _record(self.blocks) as (entered, left):
            result = self.view(**inputs)
        outputs = model_outputs(result) if self.last else []
        per_token = self.last and (outputs[0].dim() == 3 or "start_logits" in result)
        left = [self.unshifted(hidden, number) for number, hidden in enumerate(left, start=self.start + 1)]
        embedding = self.unshifted(entered[0], 0) if self.first else None
        return PartOutput(embedding, left, outputs, per_token, self.bare, self.causal)

    def unshifted(self, hidden: torch.Tensor, block: int) -> torch.Tensor:
        """The input of a block, without its shift."""
        return hidden + self.shifts[block].to(hidden) if block in self.shifts else hidden


@contextmanager
def _record(blocks: list[nn.Module]) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Collect the input of the first block and the output of every block during one call."""
    entered: list[torch.Tensor] = []
    left: list[torch.Tensor] = []

    def on_enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(args[0] if args else kwargs["hidden_states"])

    def on_leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        left.append(output[0] if isinstance(output, tuple) else output)

    handles = [blocks[0].register_forward_pre_hook(on_enter, with_kwargs=True)]
    handles += [block.register_forward_hook(on_leave) for block in blocks]
    try:
        yield entered, left
    finally:
        for handle in handles:
            handle.remove()


def carve(model: PreTrainedModel, cuts: list[int]) -> list[Part]:
    """Cut the model into parts at the block indices `cuts` = [0, …, number of blocks]."""
    return [Part(model, start, stop) for start, stop in pairwise(cuts)]
