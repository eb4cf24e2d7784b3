"""Fields of a dataclass that are command-line options and YAML keys at once.

@dataclass(frozen=True)
class Settings:
    steps: int = option(2000, "training steps", group="training", least=1)

add_options(parser, Settings, {"training": ""})      # --steps, under the heading "training"
Settings(**convert_all(Settings, read_yaml(path, Settings)))
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import re
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import check_text, shown

MOST = 10**9  # of any whole number that has no other bound
MOST_THREADS = 1024  # OpenMP crashes with many more
MOST_SEED = 2**32 - 1
LARGEST_YAML = 2**18  # bytes; a recipe has a few thousand


def option(
    default: Any,
    help: str,
    *,
    group: str,
    choices: tuple[str, ...] | None = None,
    least: int | None = None,
    most: int = MOST,
    shown: str | None = None,
    decides: bool = True,
    rare: bool = False,
    before: Any = dataclasses.MISSING,
) -> Any:
    """A field that is an option.

    least, most: the smallest and the largest number allowed.
    shown: the default as `--help` shows it, where `default` does not say it.
    decides: it changes the result, so a resumed run must have the same value.
    rare: few people need it; it is listed last in its group.
    before: of a young option the value that stands for what was done before there was the option. A recipe
    with that value is the recipe without the option: its digest stays, and an old run can be resumed.
    """
    if shown is None:
        shown = {True: "on", False: "off"}.get(default) if isinstance(default, bool) else str(default)
        shown = "" if default in (None, ()) else shown
    metadata = {"help": help, "group": group, "choices": choices, "least": least, "most": most}
    return dataclasses.field(
        default=default,
        metadata=metadata | {"shown": shown, "decides": decides, "rare": rare, "before": before},
    )


def flag(name: str) -> str:
    """calib_size → --calib-size."""
    return f"--{name.replace('_', '-')}"


def bad_value(name: str, expected: str, got: Any) -> UserError:
    return UserError(f"{flag(name)} must be {expected}; got {shown(got)}", "see --help for examples")


def check_options(settings: Any) -> None:
    """Refuse values outside of the choices and bounds of their options, and texts that no file can hold."""
    for item in dataclasses.fields(settings):
        value, choices, least = getattr(settings, item.name), item.metadata["choices"], item.metadata["least"]
        if choices is not None and value not in choices:
            raise bad_value(item.name, f"one of {', '.join(choices)}", value)
        if least is not None and value < least:
            raise bad_value(item.name, f"at least {least}" if least else "0 or more", value)
        if isinstance(value, int) and value > item.metadata["most"]:
            raise bad_value(item.name, f"at most {item.metadata['most']}", value)
        for text in [value] if isinstance(value, str) else value if isinstance(value, tuple) else ():
            check_text(flag(item.name), text)


# -- the command line and its documentation ----------------------------------------------------------------


def in_group(settings: type, group: str) -> list[dataclasses.Field[Any]]:
    """The options of a group, rare ones last."""
    found = [item for item in dataclasses.fields(settings) if item.metadata["group"] == group]
    return sorted(found, key=lambda item: item.metadata["rare"])


def add_options(parser: argparse.ArgumentParser, settings: type, groups: Mapping[str, str]) -> None:
    """Every field as an option, in groups (title → description). An option that is not given sets nothing."""
    hints = typing.get_type_hints(settings)
    for title, description in groups.items():
        section = parser.add_argument_group(title, description or None)
        for item in in_group(settings, title):
            more: dict[str, Any] = {"metavar": _metavar(item, hints[item.name])}
            if hints[item.name] is bool:
                more = {"action": argparse.BooleanOptionalAction}
            elif hints[item.name] == tuple[str, ...]:
                more = {"action": "append", "metavar": "PATTERN"}
            section.add_argument(flag(item.name), default=argparse.SUPPRESS, help=_help(item), **more)


def add_resuming(parser: argparse.ArgumentParser) -> None:
    """What to do with the checkpoints of an interrupted run."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--resume",
        action="store_true",
        help="continue an interrupted run; this is the default, --resume also says so if there is none",
    )
    either.add_argument(
        "--fresh",
        action="store_true",
        help="start over: remove the checkpoints that an interrupted run into --out has left",
    )


def _metavar(item: dataclasses.Field[Any], hint: Any) -> str:
    if item.metadata["choices"]:
        return "|".join(item.metadata["choices"])
    return {int: "N", float: "X"}.get(hint, item.name.split("_")[-1].upper())


def _help(item: dataclasses.Field[Any]) -> str:
    shown = item.metadata["shown"]
    return f"{item.metadata['help']} (default {shown})" if shown else item.metadata["help"]


def markdown(settings: type, groups: Mapping[str, str]) -> Iterator[str]:
    """The lines of a reference page: a table for every group."""
    for title, description in groups.items():
        yield f"\n## {title}\n"
        if description:
            yield f"{_as_code(description[0].upper() + description[1:])}.\n"
        yield "| option | default | meaning |\n| --- | --- | --- |"
        for item in in_group(settings, title):
            choices = item.metadata["choices"]
            meaning = item.metadata["help"] + (f"; one of {', '.join(choices)}" if choices else "")
            yield f"| `{flag(item.name)}` | {item.metadata['shown']} | {_as_code(meaning)} |"


def _as_code(text: str) -> str:
    """Options and commands in Markdown's code marks."""
    return re.sub(r"(mrem [a-z]+(?: --help)?|--[a-z-]+(?: qat| mrem-p)?)", r"`\1`", text)


# -- values of single options -------------------------------------------------------------------------------


def whole(flag: str, least: int, most: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number in a range."""
    limit = MOST if most is None else most

    def read(text: str) -> int:
        digits = text.isascii() and text.isdigit()
        number = int(text[:20]) if digits else -1  # 20 digits are beyond any limit
        if number < least or number > limit:
            bounds = (
                f", {least} to {limit}" if most is not None or number > limit else f" of at least {least}"
            )
            raise UserError(
                f"{flag} must be a whole number{bounds}; got {shown(text)}", f"for example {flag} {least}"
            )
        return number

    return read


def several(read: Callable[[str], Any], flag: str, example: str) -> Callable[[str], tuple[Any, ...]]:
    """An argparse type: different values separated by commas, each read by `read`."""

    def read_all(text: str) -> tuple[Any, ...]:
        parts = [part.strip() for part in text.split(",")]
        if not all(parts) or len(set(parts)) != len(parts):
            raise UserError(
                f"{flag} must be different values, separated by commas; got {text!r}",
                f"for example {flag} {example}",
            )
        return tuple(read(part) for part in parts)

    return read_all


# -- YAML --------------------------------------------------------------------------------------------------


class _PlainLoader(yaml.SafeLoader):
    """YAML of options: no key twice, and no alias of anything but a single value.

    Aliases of lists multiply: a few lines can stand for more values than any memory holds.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if is_alias and not isinstance(node, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="an alias may stand for a single value only")
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = (key.value.replace("-", "_") for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        (name, times), *_ = Counter(names).most_common(1) or [("", 0)]
        if times > 1:
            raise yaml.MarkedYAMLError(problem=f"{shown(name)} is given {times} times")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, settings: type) -> dict[str, Any]:
    """The keys of a YAML file; an unknown key is an error, not a silent default."""
    try:
        values = yaml.load(_beginning(path), Loader=_PlainLoader)
    except FileNotFoundError:
        raise UserError(f"there is no recipe file {path}", "check the path given to --config") from None
    except RecursionError:
        raise UserError(
            f"{path} cannot be read as YAML: it is nested too deeply", "see recipe.yaml in any result folder"
        ) from None
    except (yaml.YAMLError, OSError, ValueError) as error:  # ValueError: no UTF-8, or an impossible number
        raise UserError(
            f"{path} cannot be read as YAML: {error}", "see recipe.yaml in any result folder"
        ) from error
    values = {} if values is None else values  # an empty file
    if not isinstance(values, dict):
        raise UserError(f"{path} must have `option: value` lines", "see recipe.yaml in any result folder")
    known = {item.name for item in dataclasses.fields(settings)}
    values = {
        key.replace("-", "_") if isinstance(key, str) else shown(key): value for key, value in values.items()
    }
    unknown = sorted(set(values) - known)
    if unknown:
        raise UserError(
            f"{path} has unknown options: {', '.join(name[:60] for name in unknown[:12])}",
            f"the known ones are {', '.join(sorted(known))}",
        )
    return values


def _beginning(path: Path) -> str:
    """The text of a file that is not large; a device or a pipe may never end."""
    with path.open("rb") as file:
        content = file.read(LARGEST_YAML + 1)
    if len(content) > LARGEST_YAML:
        raise ValueError(f"it has more than {LARGEST_YAML:,} bytes")
    return content.decode("utf-8")


@functools.cache
def _hints(settings: type) -> dict[str, Any]:
    return typing.get_type_hints(settings)


def convert_all(settings: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values from YAML or the command line, each converted to the type of its field."""
    return {name: _convert(name, value, _hints(settings)[name]) for name, value in values.items()}


def _convert(name: str, value: Any, hint: Any) -> Any:
    optional = isinstance(hint, types.UnionType)
    if value is None:
        if optional:
            return None
        raise bad_value(name, "given", value)
    kind = typing.get_args(hint)[0] if optional else hint
    if kind == tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            raise bad_value(name, "a pattern or a list of patterns", value)
        return tuple(items)
    if kind is bool:
        if not isinstance(value, bool):
            raise bad_value(name, "true or false", value)
        return value
    try:
        # YAML reads an unquoted `yes` as true and 2024-01-01 as a date: neither is text or a number.
        if not isinstance(value, str | int | float | os.PathLike) or isinstance(value, bool):
            raise TypeError
        if kind is int and (isinstance(value, os.PathLike) or int(value) != float(value)):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        expected = {int: "a whole number", float: "a number"}.get(kind, "text (in quotes)")
        raise bad_value(name, expected, value) from None
