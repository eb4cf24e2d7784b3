"""What is measured: a full-precision model, its quantized copies, and sentences to calibrate rivals on.

Either all of it comes from a result folder, whose recipe names the original model and its data, or it has
random weights in a given geometry: time depends on the shape, not on the values.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.progress import say
from mrem_deploy.benchmarks.geometry import POSITIONS, Geometry, random_model, random_tokens
from mrem_deploy.data.encoded import Encoded
from mrem_deploy.data.task_data import Columns, open_task, sample
from mrem_deploy.data.texts import encode
from mrem_deploy.models.loading import load_model, longest_input
from mrem_deploy.quant.frozen import FrozenModel, freeze
from mrem_deploy.recipe import Recipe, from_yaml, make_recipe
from mrem_deploy.train.student import make_student

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CALIBRATION_SENTENCES = 32
CALIBRATION_LENGTH = 64  # tokens of a random sentence; real ones have their own length
RANDOM_HEAD = "sequence-classification"
IDENTITY = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")


@dataclass
class Subject:
    """`frozen` has a quantized copy for each bit setting; `folder` is the result folder, if there is one."""

    title: str
    model: PreTrainedModel
    frozen: dict[str, FrozenModel]
    tokens: Encoded
    folder: Path | None = None
    max_length: int = POSITIONS  # tokens; longer sentences of a workload are cut

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def padding(self) -> int:
        return int(getattr(self.model.config, "pad_token_id", None) or 0)

    @property
    def longest(self) -> int | None:
        return longest_input(self.model)


def from_folder(folder: Path, model: str | None, data: str | None, seed: int) -> Subject:
    """A result folder; `model` and `data` say where the original and its sentences are now, if they moved."""
    frozen = FrozenModel.read(folder)
    recipe = _recipe(folder)
    original, tokenizer = _original(folder, recipe, frozen, model)
    tokens = _sentences(folder, recipe, tokenizer, data, seed)
    bits = str(frozen.notes.get("bits", recipe.bits))
    return Subject(folder.resolve().name, original, {bits: frozen}, tokens, folder, recipe.max_length)


def from_geometry(
    geometry: Geometry, bits: tuple[str, ...], per_channel: bool, symmetric: bool, seed: int
) -> Subject:
    """Random weights; scales are searched on random tokens, and nothing is trained."""
    teacher = random_model(geometry, seed).requires_grad_(False)
    tokens = random_tokens(geometry, CALIBRATION_SENTENCES, CALIBRATION_LENGTH, seed)
    frozen = {}
    for setting in bits:
        say(f"{geometry}: quantizing random weights at {setting}")
        recipe = Recipe(
            bits=setting,
            per_channel=per_channel,
            symmetric=symmetric,
            batch_size=CALIBRATION_SENTENCES,
            init_batches=1,
            seed=seed,
        )
        # A copy, because quantizing replaces the teacher's attention as well.
        student = make_student(copy.deepcopy(teacher), recipe, tokens)
        frozen[setting] = freeze(student, RANDOM_HEAD)
        frozen[setting].notes = {"bits": setting, "method": "random weights"}
    return Subject(str(geometry), teacher, frozen, tokens)


def _recipe(folder: Path) -> Recipe:
    path = folder / "recipe.yaml"
    if not path.is_file():
        raise UserError(
            f"{folder} has no recipe.yaml, which names the full-precision model to compare with",
            "copy the entire result folder again",
        )
    return make_recipe(from_yaml(path))


def _original(
    folder: Path, recipe: Recipe, frozen: FrozenModel, moved: str | None
) -> tuple[PreTrainedModel, Any]:
    place = moved or recipe.model
    if place is None:
        raise UserError(f"the recipe of {folder} names no full-precision model", "name it with --model")
    say(f"loading {place}")
    try:
        model, tokenizer = load_model(place, frozen.head)
    except UserError as error:
        if moved:
            raise
        raise UserError(
            f"the full-precision model that {folder} was made of cannot be loaded: {error.problem}",
            "rivals are made of it; say where it is now with --model",
        ) from error
    for name in IDENTITY:
        ours, theirs = (getattr(config, name, None) for config in (frozen.config, model.config))
        if ours != theirs:
            raise UserError(
                f"{place} is not the model that {folder} was made of: its {name} is {theirs}, not {ours}",
                "give the original with --model",
            )
    return model, tokenizer


def _sentences(folder: Path, recipe: Recipe, tokenizer: Any, moved: str | None, seed: int) -> Encoded:
    """A few of the training split, which the quantized model was calibrated on as well."""
    columns = Columns(recipe.text_column, recipe.text_pair_column, recipe.label_column)
    try:
        task = open_task(str(recipe.task), moved or str(recipe.data), columns, recipe.eval_data)
        texts = sample(task.train(), CALIBRATION_SENTENCES, seed)
    except UserError as error:
        if moved:
            raise
        raise UserError(
            f"the data that {folder} was made with cannot be read: {error.problem}",
            "quantize_static is calibrated on a few of its sentences; say where it is now with --data",
        ) from error
    return encode(tokenizer, texts, recipe.max_length)
