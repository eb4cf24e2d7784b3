"""Checkpoints of a training run: safetensors files with their bookkeeping in the header.

One file is one atomic write, so a kill at any moment leaves the previous checkpoint whole. The
identity (recipe, data, model) is stored first; `--resume` refuses to continue another run.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import atomic_file, explained, write_json


class CheckpointStore:
    """A folder of named checkpoints that belong to one run."""

    def __init__(self, folder: Path, identity: dict[str, Any], resume: bool) -> None:
        self.folder = folder
        self._identity = identity
        self._opened = time.perf_counter()
        self.earlier_seconds = 0.0  # spent by the runs that this one continues, up to their checkpoints
        self._marker = folder / "run.json"
        self.resumed = resume and self._marker.exists()
        if self.resumed:
            with _whole(self._marker):
                stored = json.loads(self._marker.read_text(encoding="utf-8"))
            _refuse_if_different(stored, identity)
        elif folder.exists():
            with explained(folder):
                shutil.rmtree(folder)

    def save(self, name: str, tensors: dict[str, torch.Tensor], notes: dict[str, Any]) -> None:
        """Write one checkpoint. The folder is made by the first: a run that fails earlier leaves nothing."""
        contiguous = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        try:
            with atomic_file(self.folder / f"{name}.safetensors") as path:
                save_file(
                    contiguous, path, metadata={"notes": json.dumps({**notes, "elapsed": self._seconds()})}
                )
            if not self._marker.exists():
                write_json(self._marker, self._identity)
        except UserError:
            if not self._marker.exists():
                self.remove()
            raise

    def load(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            return None
        with _whole(path), safe_open(path, framework="pt") as file:
            notes = json.loads(file.metadata()["notes"])
            self.earlier_seconds = max(self.earlier_seconds, notes["elapsed"])
            return {key: file.get_tensor(key) for key in file.keys()}, notes  # noqa: SIM118 (not a dict)

    def notes(self, name: str) -> dict[str, Any] | None:
        """The bookkeeping of a checkpoint without its tensors."""
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            return None
        with _whole(path), safe_open(path, framework="pt") as file:
            return json.loads(file.metadata()["notes"])

    def names(self, pattern: str) -> list[str]:
        """The checkpoints whose name matches, `*` for any characters."""
        return sorted(path.stem for path in self.folder.glob(f"{pattern}.safetensors"))

    def discard(self, name: str) -> None:
        (self.folder / f"{name}.safetensors").unlink(missing_ok=True)

    def _seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self._opened

    def remove(self) -> None:
        """After the result is written, nothing is left to resume."""
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Writes are atomic, so a broken file means a broken disk or a hand that edited it."""
    try:
        yield
    except (SafetensorError, ValueError, KeyError, OSError) as error:
        raise UserError(
            f"the checkpoint {path} cannot be read: {error}", "start afresh without --resume"
        ) from error


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
