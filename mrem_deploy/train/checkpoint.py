"""Checkpoints of a training run: safetensors files with their bookkeeping in the header.

One file is one atomic write, so a kill at any moment leaves the previous checkpoint whole. The
identity (recipe, data, model) is stored first; `--resume` refuses to continue another run.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mrem_deploy.errors import UserError
from mrem_deploy.files import atomic_file, explained, write_json


class CheckpointStore:
    """A folder of named checkpoints that belong to one run."""

    def __init__(self, folder: Path, identity: dict[str, Any], resume: bool) -> None:
        self.folder = folder
        marker = folder / "run.json"
        if resume and marker.exists():
            _refuse_if_different(json.loads(marker.read_text(encoding="utf-8")), identity)
            self.resumed = True
            return
        self.resumed = False
        with explained(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        write_json(marker, identity)

    def save(self, name: str, tensors: dict[str, torch.Tensor], notes: dict[str, Any]) -> None:
        contiguous = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        with atomic_file(self.folder / f"{name}.safetensors") as path:
            save_file(contiguous, path, metadata={"notes": json.dumps(notes)})

    def load(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            return None
        with safe_open(path, framework="pt") as file:
            notes = json.loads(file.metadata()["notes"])
            return {key: file.get_tensor(key) for key in file.keys()}, notes  # noqa: SIM118 (not a dict)

    def drop(self, name: str) -> None:
        (self.folder / f"{name}.safetensors").unlink(missing_ok=True)

    def remove(self) -> None:
        """After the result is written, nothing is left to resume."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _refuse_if_different(stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    differences = [
        f"{key}: was {stored.get(key)!r}, is {wanted.get(key)!r}"
        for key in sorted(stored.keys() | wanted.keys())
        if stored.get(key) != wanted.get(key)
    ]
    if differences:
        raise UserError(
            "the interrupted run differs from this one:\n    " + "\n    ".join(differences),
            "resume with the same recipe and data, or start afresh without --resume",
        )


def flatten_optimizers(states: list[dict[str, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Optimizer states as named tensors, and the plain numbers among them."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for which, state in enumerate(states):
        for parameter, values in state["state"].items():
            for key, value in values.items():
                name = f"optimizer/{which}/{parameter}/{key}"
                if isinstance(value, torch.Tensor):
                    tensors[name] = value
                else:
                    numbers[name] = value
    return tensors, numbers


def restore_optimizers(
    fresh: list[dict[str, Any]], tensors: dict[str, torch.Tensor], numbers: dict[str, Any]
) -> list[dict[str, Any]]:
    """The inverse: `fresh` (from newly made optimizers) gives the parameter groups."""
    restored: list[dict[str, Any]] = [{"state": {}, "param_groups": state["param_groups"]} for state in fresh]
    for name, value in {**tensors, **numbers}.items():
        if name.startswith("optimizer/"):
            _, which, parameter, key = name.split("/")
            restored[int(which)]["state"].setdefault(int(parameter), {})[key] = value
    return restored
