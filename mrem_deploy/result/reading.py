"""Reading JSON into dataclasses, tolerant of files that lack some keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mrem_deploy.base.errors import UserError

T = TypeVar("T", covariant=True)


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
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path.parent} has no {path.name}", "give a folder that mrem quantize wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}", "copy the result folder again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object", "copy the result folder again")
    return content
