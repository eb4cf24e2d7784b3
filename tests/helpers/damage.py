"""A small result folder, and damage to JSON: any value in it replaced, removed, wrapped or doubled."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from tiny_models import HEAD_NAMES, tiny_pair

from mrem_deploy.quant.frozen import freeze
from mrem_deploy.quant.spec import QuantSpec

REMOVED, WRAPPED, JOINED = object(), object(), object()
INSTEAD: tuple[Any, ...] = (
    REMOVED, WRAPPED, JOINED,
    None, True, False, 0, 1, -1, 2, 3, 4, 8, 16, 32, 255, 2**31, -(2**63), 10**30, 0.5, -0.0, 1e400,
    float("nan"),
    "", "0", "x", "\ud800", "\0", "../x", "/etc/passwd", "bert", "gpt2", "feature-extraction", "x" * 5000,
    [], {}, [[]], [0], [-1], [1, 1], [10**9, 10**9], {"a": 1}, {"": None}, [[[[[[[[]]]]]]]],
)  # fmt: skip
HOWS = len(INSTEAD)


def small_result(folder: Path) -> Path:
    """A folder with a quantized model of two tiny layers, without a tokenizer."""
    head = HEAD_NAMES[0]
    _, student = tiny_pair("bert", head, QuantSpec(2, 2, 8))
    frozen = freeze(student, head)
    frozen.notes = {"bits": "2-2-8"}
    return frozen.save(folder)


def places_in(content: Any) -> list[tuple[Any, ...]]:
    """The keys that lead to every value, in a fixed order."""
    inner = content.items() if isinstance(content, dict) else enumerate(content)
    found: list[tuple[Any, ...]] = []
    for key, value in inner:
        found.append((key,))
        if isinstance(value, dict | list):
            found += [(key, *rest) for rest in places_in(value)]
    return found


def changed_json(content: bytes, place: int, how: int) -> bytes:
    """The JSON object `content` with one of its values changed."""
    changed = copy.deepcopy(json.loads(content))
    places = places_in(changed)
    *way, last = places[place % len(places)]
    owner, instead = changed, INSTEAD[how % HOWS]
    for key in way:
        owner = owner[key]
    if instead is REMOVED:
        del owner[last]
    elif instead is WRAPPED:
        owner[last] = [owner[last]]
    elif instead is JOINED and isinstance(owner, dict):
        owner[f"{last}.more"] = owner[last]
    elif instead is not JOINED:
        owner[last] = instead
    return json.dumps(changed).encode()
