"""Options that every benchmark has, and argparse types that check numbers.

`--quick` changes only defaults: a given option keeps its value.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mrem_deploy.base.options import MOST_SEED as MOST_SEED
from mrem_deploy.base.options import MOST_THREADS as MOST_THREADS
from mrem_deploy.base.options import several as several
from mrem_deploy.base.options import whole as whole
from mrem_deploy.benchmarks.geometry import POSITIONS, SPELLING, parse_geometry


@dataclass(frozen=True)
class Default:
    """The default of an option: in a full measurement and with --quick."""

    full: Any
    quick: Any


def bits(text: str) -> str:
    """An argparse type: W-E-A, checked."""
    from mrem_deploy.recipe import parse_bits  # not needed for --help

    parse_bits(text)
    return text


def add_shared(parser: argparse.ArgumentParser, defaults: Mapping[str, Default]) -> None:
    """Shape of the model and of the batch, threads, seed, where the result goes."""

    def add(flag: str, read: Callable[[str], Any], help: str) -> None:
        add_option(parser, flag, read, help, defaults)

    add("--geometry", parse_geometry, f"shape of the model: {SPELLING}")
    add("--batch-size", whole("--batch-size", 1), "sentences per step")
    add("--length", whole("--length", 3, POSITIONS), "tokens per sentence")
    parser.add_argument(
        "--threads",
        type=whole("--threads", 0, MOST_THREADS),
        default=0,
        help="CPU threads; 0 (default): torch's choice",
    )
    add_places(parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="cpu", help="cpu (default), cuda, cuda:0, or auto: the GPU if there is one"
    )


def add_places(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark: the seed, where the result goes, and whether it is a first look."""
    parser.add_argument(
        "--seed", type=whole("--seed", 0, MOST_SEED), default=0, help="of weights and tokens (default 0)"
    )
    parser.add_argument("--out", metavar="DIR", help="folder for the numbers (.json) and the plot (.png)")
    parser.add_argument(
        "--quick", action="store_true", help="a first look: smaller defaults; options you give stay as given"
    )


def add_option(
    parser: argparse.ArgumentParser,
    flag: str,
    read: Callable[[str], Any],
    help: str,
    defaults: Mapping[str, Default],
    name: str | None = None,
) -> None:
    """An option whose default depends on --quick; `name` is its key if that is not the flag's name."""
    name = name or _name(flag)
    default = defaults[name]
    shown = f"{_show(default.full)}; --quick: {_show(default.quick)}"
    if default.full == default.quick:
        shown = _show(default.full)
    help_text = f"{help} (default {shown})"
    parser.add_argument(flag, dest=name, type=read, metavar=_name(flag).upper(), help=help_text)


def fill_in(options: argparse.Namespace, defaults: Mapping[str, Default]) -> argparse.Namespace:
    """Set what was not given."""
    for name, default in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, default.quick if options.quick else default.full)
    return options


def as_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options as they go into the json file."""
    plain = {name: value for name, value in vars(options).items() if name != "out"}
    return {name: _plain(value) for name, value in plain.items()}


def _plain(value: Any) -> Any:
    """For json: numbers unchanged, tuples part by part, the rest as text."""
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value if value is None or isinstance(value, int) else str(value)


def _show(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
