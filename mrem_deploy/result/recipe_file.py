"""recipe.yaml in a result: a comment with the SHA-256 of the file, then the options of the run."""

from __future__ import annotations

import re
from pathlib import Path

from mrem_deploy.base import digests
from mrem_deploy.base.files import write_text
from mrem_deploy.recipe import Recipe

BEFORE = b"# sha256: "


def write_recipe(path: Path, recipe: Recipe) -> None:
    whole = BEFORE + digests.UNSEALED.encode() + b"\n" + recipe.to_yaml().encode()
    write_text(path, digests.seal(whole, BEFORE).decode())


def recipe_has_changed(path: Path) -> bool:
    """Whether the file is not as the run wrote it. One of an earlier release does not say."""
    data = path.read_bytes()
    line = re.match(BEFORE + rb"([0-9a-f]{64})\n", data)
    if line is None:
        return data.startswith(b"#") or not data.strip()  # what no release has written
    return not digests.is_sealed(data, BEFORE, line[1].decode())
