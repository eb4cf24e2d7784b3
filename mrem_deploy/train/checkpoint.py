"""Checkpoints of a training run: safetensors files with their bookkeeping in the header.

One file is one atomic write, so a kill at any moment leaves the previous checkpoint intact. The identity of
the run (recipe, data, model) is written next to the first one, and its digest into every one: checkpoints of
another run are refused, never restored and never removed unless `--fresh` is given. The header also has the
SHA-256 of every tensor: a checkpoint that has changed is refused (checkpoint_file.py).
"""

from __future__ import annotations

import copy
import json
import secrets
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from mrem_deploy.base import digests
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import atomic_file, explained, write_json, write_text
from mrem_deploy.base.progress import say
from mrem_deploy.base.resuming import command_in, discard, has_checkpoints, work_folder
from mrem_deploy.base.strict_json import read_object
from mrem_deploy.train.checkpoint_file import START_OVER, fitting, read_checkpoint, read_header

Tensors = dict[str, torch.Tensor]
Notes = dict[str, Any]  # bookkeeping, written as JSON: each user of the store knows its keys
OptimizerState = dict[str, Any]  # as `torch.optim.Optimizer.state_dict` returns it
MARKER = "run.json"  # the identity of the run whose checkpoints are next to it
IDENTITY = "identity"  # the key of its digest in the header of every checkpoint
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


@dataclass
class _Clock:
    """The time of a run over its interruptions: checkpoints of other sessions are those of earlier parts."""

    session: str = field(default_factory=lambda: secrets.token_hex(8))
    opened: float = field(default_factory=time.perf_counter)
    earlier: float = 0.0  # seconds of earlier parts, up to their checkpoints

    def seconds(self) -> float:
        return self.earlier + time.perf_counter() - self.opened


class CheckpointStore:
    """A folder of named checkpoints that belong to one run; `identity` is what must agree to resume it.

    beside: other files of the run, by name, that are written with its first checkpoint.
    """

    def __init__(
        self, folder: Path, identity: Notes, resume: bool, beside: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self._identity = identity
        self._beside = beside or {}
        self._introduced = False  # whether this process has written who the checkpoints belong to
        self._clock = _Clock()
        self._prefix = ""
        self._marker = folder / MARKER
        self.resumed = resume and has_checkpoints(folder)
        if self.resumed:
            stored = read_object(self._marker, START_OVER)
            _refuse_if_different(folder, stored, identity)
            self._identity = stored  # equal, but perhaps 2 instead of 2.0, and then of another digest
        elif folder.exists():
            with explained(folder):
                discard(folder)
        self._digest = identity_digest(self._identity)

    @property
    def earlier_seconds(self) -> float:
        """Spent by the runs that this one continues, up to their checkpoints that were loaded."""
        return self._clock.earlier

    def within(self, part: str) -> CheckpointStore:
        """The same folder with names of its own, for one of several trainings of a run."""
        other = copy.copy(self)
        other._prefix = f"{self._prefix}{part}."
        return other

    def save(self, name: str, tensors: Tensors, notes: Notes) -> None:
        """Write one checkpoint. The first one makes the folder: a run that fails earlier leaves nothing."""
        contiguous = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        notes = {**notes, "elapsed": self._clock.seconds(), "session": self._clock.session}
        about = {"notes": json.dumps(notes), IDENTITY: self._digest}
        try:
            self._introduce()
            with atomic_file(self._path(name)) as path:
                save_file(contiguous, path, metadata=digests.sealed_metadata(about, contiguous))
        except BaseException:
            if not has_checkpoints(self.folder):
                self.remove()
            raise

    def _introduce(self) -> None:
        """Before the first checkpoint: no kill leaves one of which nobody knows the run."""
        if self._introduced and self._marker.exists():  # a worker that failed may have removed it
            return
        for name, text in self._beside.items():
            write_text(self.folder / name, text)
        write_json(self._marker, self._identity)
        self._introduced = True

    def load(self, name: str) -> Checkpoint | None:
        """A checkpoint, or None if there is none of that name."""
        path = self._path(name)
        if not path.exists():
            return None
        tensors, about = read_checkpoint(path)
        with fitting(path):
            notes = self._own_notes(path, about)
            if notes.get("session") != self._clock.session:
                self._clock.earlier = max(self._clock.earlier, notes["elapsed"])
        return Checkpoint(tensors, notes)

    def notes(self, name: str) -> Notes | None:
        """The bookkeeping of a checkpoint without its tensors."""
        path = self._path(name)
        if not path.exists():
            return None
        with fitting(path):
            return self._own_notes(path, read_header(path))

    def fitting(self, name: str) -> AbstractContextManager[None]:
        """Around everything that takes its values from a checkpoint: a UserError if it does not fit."""
        return fitting(self.folder / f"{name}.safetensors")

    def _own_notes(self, path: Path, about: Mapping[str, str]) -> Notes:
        """The bookkeeping in a file's header, if the file is of this run."""
        found = about.get(IDENTITY)
        if found != self._digest:
            whose = "was written by another run" if found else "does not say which run wrote it"
            raise UserError(
                f"the checkpoint {path} {whose} (identity {str(found)[:12]}, this run is "
                f"{self._digest[:12]}); nothing was restored from it",
                "start over with --fresh, or give another folder for --out",
            )
        return json.loads(about["notes"])

    def names(self, pattern: str) -> list[str]:
        """The checkpoints whose names match; `*` stands for any characters."""
        found = self.folder.glob(f"{self._prefix}{pattern}.safetensors")
        return sorted(path.stem.removeprefix(self._prefix) for path in found)

    def discard(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{self._prefix}{name}.safetensors"

    def remove(self) -> None:
        """Delete all checkpoints: the result is written and nothing is left to resume."""
        with suppress(OSError):  # the first worker of another machine may have done it, on a shared disk
            discard(self.folder)


def identity_digest(identity: Notes) -> str:
    """What every checkpoint of a run carries."""
    return digests.of_bytes(json.dumps(identity, sort_keys=True).encode())


def open_store(
    out: Path, identity: Notes, beside: Mapping[str, str], *, resume: bool = False, fresh: bool = False
) -> CheckpointStore:
    """The checkpoints of a run into `out`: those of an interrupted run of the same identity are continued.

    resume: say so if there are none. fresh: remove them instead, whatever run they belong to.
    """
    folder = work_folder(out)
    found = has_checkpoints(folder)
    store = CheckpointStore(folder, identity, not fresh, beside)
    if store.resumed:
        say(f"continuing the interrupted run from its checkpoints in {folder} (--fresh starts over)")
    elif found:
        say(f"removed the checkpoints of an interrupted run in {folder}, because of --fresh")
    elif resume:
        say("found no interrupted run; starting from scratch")
    return store


def _refuse_if_different(folder: Path, stored: Notes, wanted: Notes) -> None:
    differences = [
        f"{key}: was {stored.get(key)!r}, is {wanted.get(key)!r}"
        for key in sorted(stored.keys() | wanted.keys())
        if stored.get(key) != wanted.get(key)
    ]
    if not differences:
        return
    raise UserError(
        f"{folder} holds checkpoints of an interrupted run that differs from this one; they are kept:\n    "
        + "\n    ".join(differences),
        f"to continue that run: {command_in(folder) or 'give its recipe and data'}\n"
        "  → to start this run and remove these checkpoints: --fresh; to keep both: another --out",
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
