"""JSON from files that others may have written or damaged: an object of plain text, or a UserError.

Python's own reader lets through what fails much later, in a library or at the terminal: halves of surrogate
pairs, which no file and no terminal can hold, and nesting so deep that copying the content overflows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mrem_deploy.base.errors import UserError

MOST_BYTES = 64 * 2**20
MOST_LEVELS = 64


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file; `remedy` says what to do if it has none."""
    return parse_object(read_bytes(path, remedy), path, remedy)


def read_list(path: Path, remedy: str) -> list[Any]:
    """The same for a JSON array."""
    return _parse(read_bytes(path, remedy), path, remedy, list)


def read_bytes(path: Path, remedy: str) -> bytes:
    """The content of a file of JSON, if it has a size that one can have."""
    try:
        if not path.is_file():
            what = "it is not a file" if path.exists() else "there is no such file"
            raise UserError(f"{path} cannot be read: {what}", remedy)
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path} is too large: at most {MOST_BYTES >> 20} MiB are expected", remedy)
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise UserError(f"{path} cannot be read: {error}", remedy) from error


def parse_object(data: bytes, path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in the bytes of the file `path`."""
    return _parse(data, path, remedy, dict)


def _parse(data: bytes, path: Path, remedy: str, kind: type) -> Any:
    try:
        content = json.loads(data.decode("utf-8"))
        problem = _problem(content, kind)
    except UnicodeDecodeError as error:
        problem = f"it is not UTF-8 text (byte {error.start})"
    except RecursionError:
        problem = f"it is nested more than {MOST_LEVELS} levels deep"
    except ValueError as error:
        problem = f"it is not valid JSON: {error}"
    if problem is not None:
        raise UserError(f"{path} cannot be read: {problem}", remedy)
    return content


def _problem(content: Any, kind: type) -> str | None:
    """What makes the content unusable, if anything does."""
    if not isinstance(content, kind):
        expected = "object" if kind is dict else "array"
        return f"a JSON {expected} is expected, it holds a {type(content).__name__}"
    ahead: list[tuple[Any, int]] = [(content, 1)]
    while ahead:
        value, level = ahead.pop()
        if isinstance(value, str) and not _is_text(value):
            return "it holds half of a surrogate pair, which is no text"
        if isinstance(value, dict | list):
            if level > MOST_LEVELS:
                return f"it is nested more than {MOST_LEVELS} levels deep"
            inner = [*value, *value.values()] if isinstance(value, dict) else value
            ahead += [(part, level + 1) for part in inner]
    return None


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
