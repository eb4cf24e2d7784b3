"""`--keep DIR`: the model files of a comparison stay there, and later runs measure them again.

Making the rivals takes minutes of all cores, while measuring wants a quiet machine. lineup.json says what the
files are and with which options they were made; other options are refused.
"""

from __future__ import annotations

import glob
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import write_json
from mrem_deploy.base.outside import shown
from mrem_deploy.base.strict_json import read_object
from mrem_deploy.benchmarks.latency.contenders import Contender
from mrem_deploy.benchmarks.latency.runtimes import RUNTIMES

if TYPE_CHECKING:
    from mrem_deploy.benchmarks.latency.subject import Subject

FILE = "lineup.json"
FORMAT = 1
REMEDY = "delete the folder, or give another one"


@dataclass(frozen=True)
class Traits:
    """What the measurement has to know about the model beside the files."""

    title: str
    bits: tuple[str, ...]
    vocabulary: int
    padding: int
    longest: int | None
    max_length: int


def traits_of(subject: Subject) -> Traits:
    return Traits(
        subject.title,
        tuple(subject.frozen),
        subject.vocabulary,
        subject.padding,
        subject.longest,
        subject.max_length,
    )


def save(folder: Path, asked: Mapping[str, Any], traits: Traits, lineup: Sequence[Contender]) -> None:
    """Describe the files; those of a result folder are copied. `asked` are the options that decided them."""
    rows = []
    for contender in (_inside(folder, entry) for entry in lineup):
        rows.append(
            {
                "name": contender.name,
                "path": contender.path.relative_to(folder).as_posix(),
                "runtime": contender.runtime,
                "beside": contender.beside,
                "ours": contender.ours,
                "disabled_optimizers": list(contender.disabled_optimizers),
                "config": dict(contender.config),
            }
        )
    content = {
        "format": FORMAT,
        "asked": dict(asked),
        "title": traits.title,
        "bits": list(traits.bits),
        "vocabulary": traits.vocabulary,
        "padding": traits.padding,
        "longest": traits.longest,
        "max_length": traits.max_length,
        "lineup": rows,
    }
    write_json(folder / FILE, content)


def _inside(folder: Path, contender: Contender) -> Contender:
    path = contender.path
    if path.is_relative_to(folder):
        return contender
    copy = folder / f"{len(list(folder.iterdir()))}-{path.name}"
    shutil.copyfile(path, copy)
    for weights in path.parent.glob(
        f"{glob.escape(path.name)}.*.data"
    ):  # of a large model, by that very name
        shutil.copyfile(weights, folder / weights.name)
    return replace(contender, path=copy)


def read(folder: Path, asked: Mapping[str, Any]) -> tuple[Traits, list[Contender]] | None:
    """The lineup of a folder, None if it has none yet; its files are inside it."""
    path = folder / FILE
    if not path.exists():
        return None
    content = read_object(path, REMEDY)
    try:
        if content["format"] != FORMAT:
            raise UserError(f"{path} has the format {content['format']!r}, not {FORMAT}", REMEDY)
        made_with = _typed(content["asked"], dict)
        for name, value in asked.items():
            if made_with.get(name) != value:
                flag, before = f"--{name.replace('_', '-')}", made_with.get(name)
                raise UserError(
                    f"the models in {folder} were made with {flag} {shown(before)}, not {shown(value)}",
                    "give the same options, or another folder to --keep",
                )
        longest = content["longest"]
        traits = Traits(
            _typed(content["title"], str),
            tuple(_typed(bits, str) for bits in _typed(content["bits"], list)),
            _typed(content["vocabulary"], int),
            _typed(content["padding"], int),
            None if longest is None else _typed(longest, int),
            _typed(content["max_length"], int),
        )
        lineup = [_contender(folder, _typed(row, dict)) for row in _typed(content["lineup"], list)]
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}", REMEDY) from error
    if not lineup:
        raise UserError(f"{path} names no models", REMEDY)
    return traits, lineup


def _contender(folder: Path, row: dict[str, Any]) -> Contender:
    name, inside, runtime = (_typed(row[key], str) for key in ("name", "path", "runtime"))
    if runtime not in RUNTIMES:
        raise UserError(f"{folder / FILE}: there is no runtime {shown(runtime)}", REMEDY)
    path = (folder / inside).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.exists():
        raise UserError(f"{folder / FILE}: {inside!r} is not in the folder", REMEDY)
    beside = row["beside"]
    return Contender(
        name,
        path,
        runtime,
        ours=_typed(row["ours"], bool),
        beside=None if beside is None else _typed(beside, str),
        disabled_optimizers=tuple(_typed(n, str) for n in _typed(row["disabled_optimizers"], list)),
        config={key: _typed(value, str) for key, value in _typed(row["config"], dict).items()},
    )


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not {kind.__name__}")
    return value
