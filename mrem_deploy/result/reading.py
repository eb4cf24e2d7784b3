"""Reading JSON into dataclasses, tolerant of files that lack some keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.strict_json import read_object

T = TypeVar("T", covariant=True)
COPY_AGAIN = "copy the result folder again"


class _Readable(Protocol[T]):
    def from_dict(self, content: dict[str, Any], /) -> T: ...


def given(cls: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass that `content` knows; the others keep their defaults."""
    names = {item.name for item in fields(cls)}
    return {name: value for name, value in content.items() if name in names and value is not None}


def part(cls: _Readable[T], content: Mapping[str, Any] | None) -> T | None:
    """A part that not every file has; None also if an older version wrote it without a key it needs."""
    try:
        return cls.from_dict(dict(content)) if content else None
    except (KeyError, TypeError):
        return None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a result folder."""
    if not path.exists():
        raise UserError(f"{path.parent} has no {path.name}", "give a folder that mrem quantize wrote")
    return read_object(path, COPY_AGAIN)


def read_part(cls: _Readable[T], path: Path) -> T:
    """What a file of a result folder holds, as a type; a UserError if it holds something else."""
    content = read_json(path)
    try:
        return cls.from_dict(content)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} does not hold what was written into it: {error}", COPY_AGAIN) from error
