"""One checkpoint file, read with every check: it is in its folder, readable, and as it was written.

The header has the SHA-256 of every tensor and of itself (`base.digests`). Files of earlier releases have no
digests; they are read all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mrem_deploy.base import digests
from mrem_deploy.base.errors import UserError
from mrem_deploy.models import gate

START_OVER = "start over with --fresh"
# What wrong content makes of safetensors, JSON and load_state_dict.
UNUSABLE = (SafetensorError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, OSError)


def read_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata of a checkpoint; a UserError if it cannot be read or has changed."""
    with fitting(path), safe_open(gate.existing(path, START_OVER), framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        metadata = file.metadata() or {}
        changed = digests.metadata_differences(metadata) or digests.tensor_differences(metadata, tensors)
    _refuse_if_changed(path, changed)
    return tensors, metadata


def read_header(path: Path) -> dict[str, str]:
    """The metadata of a checkpoint without its tensors."""
    with fitting(path), safe_open(gate.existing(path, START_OVER), framework="pt") as file:
        metadata = file.metadata() or {}
    _refuse_if_changed(path, digests.metadata_differences(metadata))
    return metadata


def _refuse_if_changed(path: Path, changed: list[str]) -> None:
    if changed:
        raise UserError(f"the checkpoint {path} is damaged: {'; '.join(changed[:3])}", START_OVER)


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Around everything that takes its values from a checkpoint: if it fails, the file is at fault.

    Writes are atomic, so a broken file means a broken disk, or that someone edited the file.
    """
    try:
        yield
    except UNUSABLE as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"the checkpoint {path} cannot be used: {reason}", START_OVER) from error
