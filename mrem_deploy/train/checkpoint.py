"""Checkpoints of a training run: safetensors files with their bookkeeping in the header.

One file is one atomic write, so a kill at any moment leaves the previous checkpoint intact. The
identity (recipe, data, model) is stored with the first one; `--resume` refuses to continue another run.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import atomic_file, explained, write_json

Tensors = dict[str, torch.Tensor]
Notes = dict[str, Any]  # bookkeeping, written as JSON: each user of the store knows its keys
OptimizerState = dict[str, Any]  # as `torch.optim.Optimizer.state_dict` returns it
OPTIMIZER = "optimizer/"  # begins the names of an optimizer's tensors


class Checkpoint(NamedTuple):
    """What one checkpoint holds."""

    tensors: Tensors
    notes: Notes

    def under(self, prefix: str) -> Tensors:
        """The tensors whose names begin with `prefix`, without it."""
        return {
            name.removeprefix(prefix): value
            for name, value in self.tensors.items()
            if name.startswith(prefix)
        }


class CheckpointStore:
    """A folder of named checkpoints that belong to one run; `identity` is what must agree to resume it."""

    def __init__(self, folder: Path, identity: Notes, resume: bool) -> None:
        self.folder = folder
        self._identity = identity
        self._opened = time.perf_counter()
        self.earlier_seconds = 0.0  # spent by the runs that this one continues, up to their checkpoints
        self._marker = folder / "run.json"
        self.resumed = resume and self._marker.exists()
        if self.resumed:
            with _readable(self._marker):
                stored = json.loads(self._marker.read_text(encoding="utf-8"))
            _refuse_if_different(stored, identity)
        elif folder.exists():
            with explained(folder):
                shutil.rmtree(folder)

    def save(self, name: str, tensors: Tensors, notes: Notes) -> None:
        """Write one checkpoint. The first one makes the folder: a run that fails earlier leaves nothing."""
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

    def load(self, name: str) -> Checkpoint | None:
        """A checkpoint, or None if there is none of that name."""
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            return None
        with _readable(path), safe_open(path, framework="pt") as file:
            notes = json.loads(file.metadata()["notes"])
            self.earlier_seconds = max(self.earlier_seconds, notes["elapsed"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
            return Checkpoint(tensors, notes)

    def notes(self, name: str) -> Notes | None:
        """The bookkeeping of a checkpoint without its tensors."""
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            return None
        with _readable(path), safe_open(path, framework="pt") as file:
            return json.loads(file.metadata()["notes"])

    def names(self, pattern: str) -> list[str]:
        """The checkpoints whose names match; `*` stands for any characters."""
        return sorted(path.stem for path in self.folder.glob(f"{pattern}.safetensors"))

    def discard(self, name: str) -> None:
        (self.folder / f"{name}.safetensors").unlink(missing_ok=True)

    def _seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self._opened

    def remove(self) -> None:
        """Delete all checkpoints: the result is written and nothing is left to resume."""
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Writes are atomic, so a broken file means a broken disk, or that someone edited the file."""
    try:
        yield
    except (SafetensorError, ValueError, KeyError, OSError) as error:
        raise UserError(
            f"the checkpoint {path} cannot be read: {error}", "start from scratch without --resume"
        ) from error


def _refuse_if_different(stored: Notes, wanted: Notes) -> None:
    differences = [
        f"{key}: was {stored.get(key)!r}, is {wanted.get(key)!r}"
        for key in sorted(stored.keys() | wanted.keys())
        if stored.get(key) != wanted.get(key)
    ]
    if differences:
        raise UserError(
            "the interrupted run differs from this one:\n    " + "\n    ".join(differences),
            "resume with the same recipe and data, or start from scratch without --resume",
        )


def flatten_optimizers(states: list[OptimizerState]) -> tuple[Tensors, dict[str, float]]:
    """Optimizer states as named tensors, and the plain numbers among them."""
    tensors: Tensors = {}
    numbers: dict[str, float] = {}
    for which, state in enumerate(states):
        for parameter, values in state["state"].items():
            for key, value in values.items():
                name = f"{OPTIMIZER}{which}/{parameter}/{key}"
                if isinstance(value, torch.Tensor):
                    tensors[name] = value
                else:
                    numbers[name] = value
    return tensors, numbers


def restore_optimizers(
    fresh: list[OptimizerState], tensors: Tensors, numbers: dict[str, float]
) -> list[OptimizerState]:
    """The inverse; `fresh`, the states of newly made optimizers, has the parameter groups."""
    restored: list[OptimizerState] = [{"state": {}, "param_groups": state["param_groups"]} for state in fresh]
    for name, value in {**tensors, **numbers}.items():
        if name.startswith(OPTIMIZER):
            _, which, parameter, key = name.split("/")
            restored[int(which)]["state"].setdefault(int(parameter), {})[key] = value
    return restored
