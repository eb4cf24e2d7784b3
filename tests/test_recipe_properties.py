"""Recipes, whatever the options: refused with a message, or the same after YAML and the command line."""

from __future__ import annotations

import dataclasses
import string
import tempfile
import typing
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st
from properties import made, texts, values, writable

from mrem_deploy.base.options import flag
from mrem_deploy.quantize import build_parser
from mrem_deploy.recipe import Recipe, from_yaml, make_recipe

FIELDS = dataclasses.fields(Recipe)
HINTS = typing.get_type_hints(Recipe)
names = texts.filter(writable)
rates = st.floats(1e-6, 0.5)
# Values that may be right; others follow from the type and the bounds of the option.
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "bits": st.sampled_from(["4-4-8", "2-2-8", "2-2-4", "3-4-8", "8-2-8", "4-4-32"]),
    "modules": st.sampled_from(["4", "1", "3,6,9", "3,", "[2, 5]"]) | st.integers(1, 12).map(str),
    "method": st.sampled_from(["mrem-s", "mrem-p", "rem"]),
    "max_length": st.integers(3, 512),
    "budget_mb": st.just(0.0),
    "target_drop": st.none(),  # only with bits auto
    "threshold": st.none() | st.floats(-1e6, 1e6),
    "train_size": st.just(0),
    "accumulate": st.just(1),
    "time_budget": st.sampled_from(["10m", "1h30m", "0.5h"]),
    "qat_epochs": st.sampled_from(["3+3", "0.5+1", "0+2"]),
    "hot_rows": st.sampled_from(["auto", "0", "64"]),
    "max_memory": st.sampled_from(["8GB", "1.5 gb", "500M", "0MB"]),
    "weight_quantizer": st.sampled_from(["auto", "laq", "uniform"]),
    "keep_fp": st.lists(names, max_size=3).map(tuple),
    **dict.fromkeys(("lr", "step_lr", "qat_lr", "embedding_rate", "qat_warmup", "teacher_forcing"), rates),
}


def likely(item: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
    if item.name in LIKELY:
        return LIKELY[item.name]
    if item.metadata["choices"]:
        return st.sampled_from(item.metadata["choices"])
    if HINTS[item.name] is bool:
        return st.booleans()
    if HINTS[item.name] is int:
        return st.integers(item.metadata["least"] or 0, item.metadata["most"])
    return names


options = st.fixed_dictionaries({}, optional={item.name: likely(item) for item in FIELDS})
anything = st.dictionaries(st.sampled_from([item.name for item in FIELDS]), values, max_size=4)


def read(text: str | bytes) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recipe.yaml")
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return from_yaml(path)


def arguments(recipe: Recipe) -> list[str]:
    """The recipe as a command line; what is None is not given."""
    given = []
    for name, value in recipe.as_dict().items():
        if isinstance(value, bool):
            given.append(flag(name) if value else f"--no-{flag(name)[2:]}")
        elif isinstance(value, list):
            given += [f"{flag(name)}={item}" for item in value]
        elif value is not None:
            given.append(f"{flag(name)}={value}")
    return given


@given(options)
def test_a_recipe_is_the_same_after_yaml_and_the_command_line(chosen: dict[str, Any]) -> None:
    recipe = make_recipe(chosen)  # nothing contradicts: see LIKELY
    by_yaml = make_recipe(read(recipe.to_yaml()))
    parsed = vars(build_parser().parse_args(arguments(recipe)))
    by_flags = make_recipe({name: parsed[name] for name in HINTS if name in parsed})
    assert by_yaml == by_flags == recipe
    assert by_yaml.digest() == by_flags.digest() == recipe.digest()
    assert dataclasses.replace(recipe) == recipe


@given(options, anything)
def test_any_values_make_a_recipe_or_are_refused(chosen: dict[str, Any], wrong: dict[str, Any]) -> None:
    recipe = made(lambda: make_recipe(chosen | wrong))
    if recipe is not None:
        assert make_recipe(read(recipe.to_yaml())) == recipe
        assert len(recipe.digest()) == 16


@given(options, anything)
def test_python_gives_the_recipe_of_the_file(chosen: dict[str, Any], wrong: dict[str, Any]) -> None:
    """`Recipe(...)` converts and refuses as YAML does; only there None means "not given"."""
    merged = {name: value for name, value in (chosen | wrong).items() if value is not None}
    merged = {name: value for name, value in merged.items() if not isinstance(value, list)}
    assert made(lambda: Recipe(**merged)) == made(lambda: make_recipe(merged))


yaml_like = st.text(st.sampled_from(string.printable + "&*{}[]<>:-!|\ufeff\x85é"), max_size=80)
plain_yaml = anything.map(lambda content: yaml.dump(content, allow_unicode=True).encode(errors="ignore"))


@given(st.binary(max_size=200) | yaml_like | plain_yaml)
def test_any_file_is_read_or_refused(content: str | bytes) -> None:
    found = made(lambda: read(content))
    if found is not None:
        assert found.keys() <= HINTS.keys()
        made(lambda: make_recipe(found))
