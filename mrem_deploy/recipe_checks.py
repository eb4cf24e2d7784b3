"""What a recipe may not say: values out of range, and options that contradict each other."""

from __future__ import annotations

import math
from typing import Any

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.options import bad_value, check_options, convert_all, flag
from mrem_deploy.data.tasks import NO_DATA
from mrem_deploy.quant.spec import HOT_ROWS, TWO_BIT_QUANTIZERS
from mrem_deploy.recipe_defaults import default_rate, filled_in
from mrem_deploy.recipe_values import (
    parse_duration,
    parse_epochs,
    parse_hot_rows,
    parse_megabytes,
    parse_modules,
)

Recipe = Any  # mrem_deploy.recipe.Recipe, which calls this module

EARLIER_RATES = (5e-4, 5e-5)  # defaults of --lr that earlier builds wrote into recipe.yaml, also of qat
FOR_TARGET = ("mrem-s", "rem", "ptq")  # methods that train in one process, and without the evaluation split
WITH_STEPS = ("mrem-s", "mrem-p", "rem")  # methods whose training is counted in steps per module or matmul


def settle(recipe: Recipe) -> None:
    """Give every option its type, fill in what is left open, and check the whole."""
    given = {name: value for name, value in vars(recipe).items() if value is not None}
    for name, value in convert_all(type(recipe), given).items():
        object.__setattr__(recipe, name, value)
    for name, value in filled_in(recipe).items():
        object.__setattr__(recipe, name, value)
    check(recipe)


def check(recipe: Recipe) -> None:
    """Raise a UserError for the first thing that cannot be meant."""
    parse_modules(recipe.modules)
    parse_epochs(recipe.qat_epochs)
    _check_quantizer(recipe)
    _check_budget(recipe)
    _check_hot_rows(recipe)
    check_options(recipe)
    _check_method(recipe)
    _check_data(recipe)
    if recipe.max_length < 3:
        raise bad_value("max_length", "at least 3 (two special tokens and one more)", recipe.max_length)
    if not 0 <= recipe.teacher_forcing <= 1:
        raise bad_value("teacher_forcing", "a share between 0 and 1", recipe.teacher_forcing)
    for name in ("lr", "step_lr", "qat_lr"):
        if not 0 < getattr(recipe, name) < 1:
            raise bad_value(name, "a number between 0 and 1", getattr(recipe, name))
    if not 0 < recipe.embedding_rate <= 1:
        raise bad_value("embedding_rate", "a share above 0, at most 1", recipe.embedding_rate)
    if not 0 <= recipe.qat_warmup < 1:
        raise bad_value("qat_warmup", "a share from 0 to below 1", recipe.qat_warmup)
    if recipe.threshold is not None and not math.isfinite(recipe.threshold):
        raise bad_value("threshold", "a number", recipe.threshold)
    if recipe.max_memory is not None:
        parse_megabytes(recipe.max_memory)


def _check_data(recipe: Recipe) -> None:
    """`none` is for calibration."""
    if recipe.eval_data == NO_DATA:
        raise UserError(
            f"--eval-data {NO_DATA}: a model is measured on text that somebody gives",
            f"leave it out; --data {NO_DATA} alone measures the agreement on generated text",
        )
    if recipe.data == NO_DATA and recipe.target_drop is not None:
        raise UserError(
            f"--target-drop estimates what is lost on data of the task, and --data {NO_DATA} has none",
            "give data, or --bits or --budget-mb instead",
        )


def _check_method(recipe: Recipe) -> None:
    """Options that only some methods have."""
    for name, unset in (("train_size", 0), ("accumulate", 1)):
        if getattr(recipe, name) != unset and recipe.method != "qat":
            raise UserError(
                f"{flag(name)} is for --method qat; the method is {recipe.method}",
                "leave it out; the other methods use --calib-size and --batch-size",
            )
    if recipe.method == "qat" and recipe.lr not in (default_rate(recipe), *EARLIER_RATES):
        raise UserError(
            "--lr is for the other methods; the method is qat",
            "use --qat-lr: training the entire model needs a lower rate",
        )
    if recipe.time_budget is not None:
        parse_duration(recipe.time_budget)
        if recipe.method not in WITH_STEPS:
            raise UserError(
                f"--time-budget chooses the steps of {', '.join(WITH_STEPS)}; the method is {recipe.method}",
                "leave it out; qat has --qat-epochs and --train-size",
            )


def _check_quantizer(recipe: Recipe) -> None:
    """TWN and midrise are for 2 bits; the others for any bits."""
    has_two_bits = recipe.chooses_bits or 2 in (recipe.spec.weight_bits, recipe.spec.embedding_bits)
    if recipe.weight_quantizer in TWO_BIT_QUANTIZERS and not has_two_bits:
        raise UserError(
            f"--weight-quantizer {recipe.weight_quantizer} is for 2 bits, and --bits {recipe.bits} has none",
            "use auto, laq or uniform, or give weights or embeddings 2 bits",
        )


def _check_budget(recipe: Recipe) -> None:
    """A budget and bits to choose go together."""
    if not 0 <= recipe.budget_mb < float("inf"):
        raise bad_value("budget_mb", "a size in MiB", recipe.budget_mb)
    if recipe.target_drop is not None:
        _check_target(recipe)
    elif recipe.chooses_bits and not recipe.budget_mb:
        raise UserError(
            f"--bits {recipe.bits} needs a size for the model",
            "give it in MiB, for example --budget-mb 12, or what may be lost, such as --target-drop 1.0",
        )
    if recipe.budget_mb and not recipe.chooses_bits:
        raise UserError(
            f"--budget-mb has no effect with --bits {recipe.bits}", "leave it out, or use --bits auto"
        )


def _check_target(recipe: Recipe) -> None:
    """A target for the drop needs bits to choose, and a training that can be repeated at every size."""
    if not 0 <= recipe.target_drop <= 100:
        raise bad_value("target_drop", "points from 0 to 100", recipe.target_drop)
    if not recipe.chooses_bits:
        raise UserError(
            f"--target-drop chooses the bits of every layer, and --bits {recipe.bits} fixes them",
            "use --bits auto, or auto-4 for 4-bit activations; or leave --target-drop out",
        )
    if recipe.budget_mb:
        raise UserError(
            "--target-drop looks for the smallest size, and --budget-mb gives one", "leave one of them out"
        )
    if recipe.method not in FOR_TARGET:
        raise UserError(
            f"--target-drop works with {', '.join(FOR_TARGET)}; the method is {recipe.method}",
            "use --method mrem-s; then run the recipe that it writes with another method",
        )
    if recipe.time_budget is not None:
        raise UserError(
            "--target-drop trains several models, and --time-budget is for one",
            "leave one of them out; --plan prints the time, --preset quick and --steps shorten it",
        )


def _check_hot_rows(recipe: Recipe) -> None:
    """Rows of 8 bits need an embedding of fewer."""
    bits = recipe.spec.embedding_bits
    given = recipe.hot_rows != "auto" and parse_hot_rows(recipe.hot_rows)
    if given and bits not in HOT_ROWS and not recipe.chooses_bits:
        raise UserError(
            f"--hot-rows {recipe.hot_rows} has no effect with --bits {recipe.bits}",
            "leave it out, or give the word embedding 2 or 4 bits",
        )
