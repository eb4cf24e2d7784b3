"""What a recipe means where it does not say: by preset, by task and by bits. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.options import bad_value
from mrem_deploy.data.tasks import TASKS, Defaults, defaults_of

Recipe = Any  # mrem_deploy.recipe.Recipe, which calls this module


@dataclass(frozen=True)
class Preset:
    """How much to train, unless the recipe says otherwise. Steps are per module."""

    steps: int
    batch_size: int
    calib_size: int


# Batches are small: with the same sentences, more steps reach a lower held-out loss (docs/findings.md).
PRESETS = {
    "quick": Preset(steps=100, batch_size=16, calib_size=2048),
    "balanced": Preset(steps=400, batch_size=16, calib_size=4096),
    "best": Preset(steps=2000, batch_size=16, calib_size=8192),
}
BALANCED = "balanced"
MOST_STEPS = 5000  # per module, with a time budget

# Learning rate by the bits of the weights. At 2 bits latent weights must cross wide gaps between the levels;
# at 4 bits such a rate undoes the good start (docs/findings.md). Bits chosen per layer get one between.
RATES = {2: 1e-3, 3: 1e-3, 4: 1e-4, 8: 1e-4, 32: 1e-4}
RATE_OF_CHOSEN_BITS = 3e-4

# Methods whose rates differ from these, by bits. A method gets a row when its held-out loss says so, not its
# score on the evaluation split. REM has none: what it spoiled at 1e-3 was the word embedding, which has a
# lower rate now.
RATES_BY_METHOD: dict[str, dict[int, float]] = {}

# Of the embeddings, as a share of the rate of the weights. What rows learn from a few sentences is wrong
# elsewhere; qat sees the entire training split, and TernaryBERT, whose recipe it is, has one rate.
EMBEDDING_RATES = {"": 0.1, "qat": 1.0}


def rate_at(method: str, bits: int) -> float:
    """The default learning rate of a method at so many bits."""
    return RATES_BY_METHOD.get(method, {}).get(bits, RATES[bits])


def default_rate(recipe: Recipe) -> float:
    """The learning rate of a recipe that names none."""
    return RATE_OF_CHOSEN_BITS if recipe.chooses_bits else rate_at(recipe.method, recipe.spec.weight_bits)


def filled_in(recipe: Recipe) -> dict[str, Any]:
    """The values of the options that the recipe leaves open (None)."""
    if recipe.method == "gobo":
        raise UserError(
            "GOBO maps weights to values that lie on no grid: they can be neither packed nor exported",
            "it is for comparison only, in torch: see mrem_deploy.reproduce.gobo.gobo_model",
        )
    if recipe.preset not in PRESETS:
        raise bad_value("preset", f"one of {', '.join(PRESETS)}", recipe.preset)
    values: dict[str, Any] = vars(PRESETS[recipe.preset]) | vars(defaults_of(recipe.task))
    if recipe.time_budget is not None:
        values["steps"] = MOST_STEPS
    values["lr"] = default_rate(recipe)
    values["embedding_rate"] = EMBEDDING_RATES.get(recipe.method, EMBEDDING_RATES[""])
    return {name: value for name, value in values.items() if getattr(recipe, name) is None}


# -- as help shows them ------------------------------------------------------------------------------------


def by_preset(name: str) -> str:
    return ", ".join(f"{preset} {getattr(values, name)}" for preset, values in PRESETS.items())


def by_task(name: str) -> str:
    """The usual one, then those of tasks with another."""
    usual = getattr(Defaults(), name)
    others: dict[Any, list[str]] = {}
    for task in TASKS.values():
        others.setdefault(getattr(task.defaults, name), []).append(task.name)
    others.pop(usual, None)
    return "; ".join([str(usual), *(f"{_listed(tasks)} {value}" for value, tasks in others.items())])


def _listed(names: list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def by_method() -> str:
    """The usual rate of the embeddings (of ""), then those of methods with another."""
    return "; ".join(f"{method} {value:g}".strip() for method, value in EMBEDDING_RATES.items())


def by_bits() -> str:
    """The usual rates, then those of methods with others."""
    usual = f"{RATES[2]:g} at 2 and 3 bits, {RATES[4]:g} at more, {RATE_OF_CHOSEN_BITS:g} with bits auto"
    others = (
        f"{method} {rate:g} at {bits} bits"
        for method, own in RATES_BY_METHOD.items()
        for bits, rate in own.items()
    )
    return "; ".join([usual, *others])
