"""What the tests of recipes share: the names of the options, and files and flags made from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mrem_deploy.recipe import Recipe

FIELDS = [field.name for field in dataclasses.fields(Recipe)]


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
