"""Save and load a frozen model: packed integers in safetensors, with a JSON manifest next to them.

The tensors have special names (`codes/…`, `scale/…`, `step/…` for the scales of activations, `full/…`)
in a separate file, so that no library mistakes packed integers for ordinary weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import atomic_file, write_json
from mrem_deploy.kernels import pack, unpack
from mrem_deploy.numerics import Grid
from mrem_deploy.quant.frozen import FrozenModel, FrozenScale, FrozenWeight, build

FORMAT = "mrem_deploy"
FORMAT_VERSION = 1
MANIFEST = "mrem.json"
TENSORS = "mrem.safetensors"


def save(frozen: FrozenModel, folder: Path) -> None:
    """Write the manifest, the tensors and the model's config into `folder`."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in frozen.weights.items():
        tensors[f"codes/{name}"] = torch.from_numpy(pack(weight.codes.numpy().reshape(-1), weight.bits))
        tensors[f"scale/{name}"] = weight.scale
    for name, activation in frozen.scales.items():
        tensors[f"step/{name}"] = activation.scale
    for name, value in frozen.full.items():
        tensors[f"full/{name}"] = value
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "head": frozen.head,
        "weights": {
            name: {"bits": weight.bits, "shape": list(weight.codes.shape)}
            for name, weight in frozen.weights.items()
        },
        "steps": {
            name: {
                "bits": s.grid.bits,
                "low": s.grid.low,
                "high": s.grid.high,
                "zero_point": s.grid.zero_point,
            }
            for name, s in frozen.scales.items()
        },
        "notes": frozen.notes,
    }
    with atomic_file(folder / TENSORS) as path:
        save_file(
            {name: value.contiguous() for name, value in tensors.items()}, path, metadata={"format": "mrem"}
        )
    write_json(folder / MANIFEST, manifest)
    frozen.config.save_pretrained(folder)


def read(folder: str | Path) -> FrozenModel:
    """The frozen model in a result folder; a UserError if the folder is not one."""
    folder = Path(folder)
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
    frozen = FrozenModel(config, manifest["head"], notes=manifest["notes"])
    try:
        for name, entry in manifest["weights"].items():
            count = int(np.prod(entry["shape"]))
            codes = unpack(tensors[f"codes/{name}"].numpy(), entry["bits"], count)
            shaped = torch.from_numpy(codes).reshape(entry["shape"])
            frozen.weights[name] = FrozenWeight(shaped, tensors[f"scale/{name}"], entry["bits"])
        for name, entry in manifest["steps"].items():
            frozen.scales[name] = FrozenScale(tensors[f"step/{name}"], Grid(**entry))
    except KeyError as error:
        raise UserError(
            f"{folder / TENSORS} lacks the tensor {error}", "copy the entire result folder again"
        ) from error
    prefix = "full/"
    frozen.full = {
        name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)
    }
    return frozen


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


def load(folder: str | Path) -> PreTrainedModel:
    """The quantized model in torch, equal to the one that was saved: call it like the original."""
    return build(read(folder))
