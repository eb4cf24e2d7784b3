"""Quantizing a model that is already in memory: `quantize_model`, for notebooks and other programs.

It walks the same way as `pipeline.run`, without files: no task, no evaluation, no checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from mrem_deploy.base import interrupt
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.machine import keep_large_blocks
from mrem_deploy.base.outside import check_text, shown
from mrem_deploy.base.progress import say
from mrem_deploy.data.texts import Texts, encode, split_rows
from mrem_deploy.models.architectures import check_head
from mrem_deploy.models.loading import HEADS
from mrem_deploy.preflight import check_model, resolve_device, select_backend
from mrem_deploy.quant.frozen import FrozenModel, freeze
from mrem_deploy.recipe import Recipe
from mrem_deploy.train import METHODS
from mrem_deploy.train.job import TrainJob
from mrem_deploy.train.mrem_p.crew import Crew
from mrem_deploy.train.student import chosen_bits, make_student

IN_MEMORY = ("mrem-s", "mrem-p", "rem", "ptq")  # methods that need neither labels nor an evaluation split


@interrupt.watched()
def quantize_model(
    model: PreTrainedModel,
    tokenizer: Any,
    sentences: Sequence[str] | Sequence[tuple[str, str]],
    recipe: Recipe | None = None,
) -> FrozenModel:
    """Quantize `model` with unlabelled `sentences` (or pairs of them); `model` itself stays as it is.

    Returns the frozen model: integers and scales. `.build()` makes it a torch model, `.save(folder)` writes
    it, `mrem_deploy.export_onnx(frozen, path)` exports it.
    Of the recipe, model, task, data and out are unused.

        frozen = mrem_deploy.quantize_model(model, tokenizer, sentences, Recipe(bits="2-2-8", steps=500))

    mrem-p trains its modules in turn here, in this process; the command line starts a worker for each.
    """
    recipe = recipe or Recipe()
    if recipe.method not in IN_MEMORY:
        raise UserError(
            f"quantize_model cannot use method {recipe.method!r}: it needs labelled data",
            f"use one of {', '.join(IN_MEMORY)}, or mrem_deploy.run",
        )
    if recipe.target_drop is not None:
        raise UserError(
            "quantize_model cannot look for a --target-drop: it has no labels to estimate it by",
            "give a size, Recipe(bits='auto', budget_mb=…), or use mrem_deploy.run",
        )
    head = head_of(model)
    check_head(model.config.model_type, head, "the model")
    texts = texts_of(sentences)
    device = resolve_device(recipe.device)
    select_backend(recipe.kernels, device, recipe.deterministic)
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    keep_large_blocks()
    teacher = copy.deepcopy(model).float().eval().requires_grad_(False).to(device)
    check_model(recipe, teacher)
    rows, apart = split_rows(len(texts), recipe.calib_size, recipe.holdout, recipe.seed)
    calibration = encode(tokenizer, texts.take(rows), recipe.max_length)
    holdout = encode(tokenizer, texts.take(apart), recipe.max_length) if len(apart) else None
    mixed = chosen_bits(teacher, recipe, calibration, None, Crew()) if recipe.chooses_bits else None
    spec = replace(recipe.spec, layer_bits=mixed.layer_bits) if mixed else recipe.spec
    student = make_student(teacher, recipe, calibration, spec=spec)
    METHODS[recipe.method].train(TrainJob(teacher, student, calibration, recipe, holdout=holdout))
    say(f"quantized to {recipe.bits} with {recipe.method}")
    frozen = freeze(student, head)
    frozen.notes = {"bits": recipe.bits, "method": recipe.method}
    return frozen


def head_of(model: PreTrainedModel) -> str:
    """The kind of head, from the model's class: `BertForSequenceClassification` → sequence-classification."""
    name = type(model).__name__
    for head, auto in HEADS.items():
        ending = auto.removeprefix("AutoModel")
        if ending and name.endswith(ending):
            return head
    if "For" not in name:
        return "feature-extraction"
    raise UserError(
        f"a model of class {name} cannot be quantized",
        f"give a model with one of these heads: {', '.join(HEADS)}",
    )


def texts_of(sentences: Sequence[str] | Sequence[tuple[str, str]]) -> Texts:
    """Sentences or pairs as the texts of a task without labels."""
    rows: list[Any] = list(sentences)
    if not rows:
        raise UserError("sentences is empty", "give a few hundred sentences like those the model will see")
    kind: Any = str if isinstance(rows[0], str) else tuple | list
    for number, row in enumerate(rows, start=1):
        parts = [row] if isinstance(row, str) else row
        fits = isinstance(row, kind) and len(parts) == (1 if kind is str else 2)
        if not fits or not all(isinstance(part, str) for part in parts):
            raise UserError(
                "expected sentences as a list of strings, or of pairs of strings; got "
                f"{type(row).__name__} at place {number}: {shown(row)}",
                "give texts, not tokens or dictionaries",
            )
        for part in parts:
            check_text(f"sentence {number}", part, is_name=False)
    if kind is str:
        return Texts(rows, None, None, ())
    return Texts([row[0] for row in rows], [row[1] for row in rows], None, ())
