"""The files of a frozen model: packed integers in safetensors, with a JSON manifest next to them.

The tensors have special names (`codes/…`, `scale/…`, `hot/…` for the hot rows of an embedding, `step/…` for
the scales of activations, `full/…`) in a separate file, so that no library mistakes packed integers for
ordinary weights. `FrozenModel.save` and `FrozenModel.read` (frozen.py) fill them and make a model of them
again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PretrainedConfig

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import atomic_file, write_json

FORMAT = "mrem_deploy"
FORMAT_VERSION = 1
MANIFEST = "mrem.json"
TENSORS = "mrem.safetensors"


@dataclass(frozen=True)
class Artifact:
    """What the files hold, as they hold it."""

    manifest: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    config: PretrainedConfig


def write(artifact: Artifact, folder: Path) -> None:
    """Write the manifest, the tensors and the model's config into `folder`."""
    contiguous = {name: value.contiguous() for name, value in artifact.tensors.items()}
    with atomic_file(folder / TENSORS) as path:
        save_file(contiguous, path, metadata={"format": "mrem"})
    write_json(folder / MANIFEST, {"format": FORMAT, "format_version": FORMAT_VERSION, **artifact.manifest})
    artifact.config.save_pretrained(folder)


def read(folder: Path) -> Artifact:
    """The files of a result folder; a UserError if the folder is not one."""
    manifest = _read_manifest(folder)
    try:
        tensors = load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{folder / TENSORS} cannot be read: {error}", "copy the entire result folder again"
        ) from error
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder / 'config.json'} cannot be read: {error}", "copy the entire result folder again"
        ) from error
    return Artifact(manifest, tensors, config)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(
            f"{folder} is not a quantized model: it has no {MANIFEST}",
            "give the --out folder of `python -m mrem_deploy.quantize`",
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{path} is not valid JSON: {error}", "copy the entire result folder again"
        ) from error
    version = manifest.get("format_version")
    if manifest.get("format") != FORMAT or version != FORMAT_VERSION:
        raise UserError(
            f"{path} has format {manifest.get('format')!r} version {version!r}; "
            f"this release reads version {FORMAT_VERSION}",
            "use the release of mrem_deploy that wrote it, or quantize again",
        )
    return manifest
