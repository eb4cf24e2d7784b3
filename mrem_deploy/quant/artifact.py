"""The files of a frozen model: packed integers in safetensors, with a JSON manifest next to them.

The tensors have special names (`codes/…`, `scale/…`, `hot/…` for the hot rows of an embedding, `step/…` for
the scales of activations, `full/…`) in a separate file, so that no library mistakes packed integers for
ordinary weights. `FrozenModel.save` and `FrozenModel.read` (frozen.py) fill them and make a model of them
again.

The manifest has the SHA-256 of every tensor, of config.json, of the tokenizer's files and of itself. Folders
of earlier releases have no digests; their content is checked all the same (integrity.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedTokenizerBase

from mrem_deploy.base import digests
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import atomic_file, explained, write_json
from mrem_deploy.base.strict_json import parse_object, read_bytes, read_object
from mrem_deploy.models import gate, packed

FORMAT = "mrem_deploy"
FORMAT_VERSION = 1
MANIFEST = "mrem.json"
TENSORS = "mrem.safetensors"
CONFIG = gate.CONFIG
HEADER = {"format": "mrem"}  # the metadata of the tensors' file
DIGESTS = "digests"
KEYS = ("format", "format_version", "head", "weights", "steps", "notes", DIGESTS)
PLACE = b'"manifest": "'  # in front of the manifest's digest of itself
COPY_AGAIN = "copy the entire result folder again"


@dataclass(frozen=True)
class Artifact:
    """What the files hold, as they hold it."""

    manifest: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    config: PretrainedConfig


@dataclass(frozen=True)
class Stored:
    """A result folder as it was read, and what is not as it was written."""

    artifact: Artifact
    findings: tuple[str, ...]
    has_digests: bool  # False: an earlier release wrote it


def result_digest(manifest: Mapping[str, Any], lines: Mapping[str, str]) -> str:
    """Names a frozen model: its tensors and what the manifest says about them. ONNX files carry it."""
    kept = {key: manifest.get(key) for key in ("head", "weights", "steps")}
    return digests.of_content({**kept, "tensors": dict(lines)})


def write(
    artifact: Artifact,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """Write the tensors, the model's config, the tokenizer and, last, the manifest into `folder`.

    `beside` are further files that belong to the model, such as 1_Pooling/config.json.
    """
    contiguous = {name: value.contiguous() for name, value in artifact.tensors.items()}
    with atomic_file(folder / TENSORS) as path:
        save_file(contiguous, path, metadata=HEADER)
    with explained(folder / CONFIG):
        artifact.config.save_pretrained(folder)
        write_json(folder / CONFIG, {**read_object(folder / CONFIG, COPY_AGAIN), **packed.KEYS})
    written: dict[str, Any] = {
        "config": digests.of_bytes((folder / CONFIG).read_bytes()),
        "manifest": digests.UNSEALED,
        "tensors": digests.lines_of(contiguous),
    }
    if tokenizer is not None:
        files = [Path(file) for file in tokenizer.save_pretrained(folder)]
        written["tokenizer"] = {
            file.name: digests.of_bytes(file.read_bytes()) for file in files if file.is_file()
        }
    for name, data in (beside or {}).items():
        with atomic_file(folder / name) as path:
            path.write_bytes(data)
    if beside:
        written["beside"] = {name: digests.of_bytes(data) for name, data in beside.items()}
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, **artifact.manifest, DIGESTS: written}
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    with atomic_file(folder / MANIFEST) as path:
        path.write_bytes(digests.seal(text.encode("utf-8"), PLACE))


def read(folder: Path) -> Stored:
    """The files of a result folder; a UserError if they cannot be read or the folder is not one."""
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"{folder} is not a quantized model: it has no {MANIFEST}",
            "give the --out folder of `python -m mrem_deploy.quantize`",
        )
    for name in (MANIFEST, TENSORS, CONFIG):
        gate.existing(folder / name, COPY_AGAIN)
    data = read_bytes(folder / MANIFEST, COPY_AGAIN)
    manifest = parse_object(data, folder / MANIFEST, COPY_AGAIN)
    _check_format(manifest, folder / MANIFEST)
    tensors, findings = _read_tensors(folder / TENSORS)
    config_data = read_bytes(folder / CONFIG, COPY_AGAIN)
    written = manifest.get(DIGESTS)
    if DIGESTS in manifest:
        findings += _changed(folder, data, config_data, written)
    if isinstance(written, dict):
        findings += _changed_tensors(tensors, written.get("tensors"))
    findings += [f"{MANIFEST} has an unknown key {key!r}" for key in manifest if key not in KEYS]
    config = _config(config_data, folder, (folder / TENSORS).stat().st_size)
    return Stored(Artifact(manifest, tensors, config), tuple(findings), DIGESTS in manifest)


def refuse_damaged(folder: Path, findings: Sequence[str]) -> None:
    """A UserError that names the first findings, if there are any."""
    if findings:
        more = f" (and {len(findings) - 3} more)" if len(findings) > 3 else ""
        raise UserError(
            f"{folder} is damaged: {'; '.join(findings[:3])}{more}",
            "copy the entire result folder again, or quantize again; `mrem verify` lists all findings",
        )


def check_all_but_tensors(folder: Path) -> str | None:
    """Refuse a result whose config, tokenizer or modules have changed: for those who run its ONNX files.

    Returns the digest that these files carry; None in a folder without a manifest, to which somebody copied
    what onnxruntime needs, and in one of an earlier release.
    """
    if not (folder / MANIFEST).is_file():
        return None
    data, config_data = (
        read_bytes(gate.existing(folder / name, COPY_AGAIN), COPY_AGAIN) for name in (MANIFEST, CONFIG)
    )
    manifest = parse_object(data, folder / MANIFEST, COPY_AGAIN)
    _check_format(manifest, folder / MANIFEST)
    if DIGESTS not in manifest:
        return None
    findings = _changed(folder, data, config_data, manifest[DIGESTS], complete=True)
    lines = {} if findings else manifest[DIGESTS].get("tensors")
    if not isinstance(lines, dict):
        findings.append(f"{MANIFEST} has no digests of tensors")
    refuse_damaged(folder, findings)
    return result_digest(manifest, lines)


def _changed(
    folder: Path, data: bytes, config_data: bytes, written: Any, complete: bool = False
) -> list[str]:
    """What is not as it was written, by the digests in the manifest: everything but the tensors.

    A model can be used without its tokenizer, unless the folder must be `complete`.
    """
    if not isinstance(written, dict):
        return [f"{DIGESTS} in {MANIFEST} is not a table"]
    found = []
    if not digests.is_sealed(data, PLACE, str(written.get("manifest"))):
        found.append(f"{MANIFEST} has changed since it was written")
    if written.get("config") != digests.of_bytes(config_data):
        found.append(f"{CONFIG} has changed since it was written")
    found += _changed_tokenizer(folder, written.get("tokenizer", {}), complete)
    return found + _changed_beside(folder, written.get("beside", {}))


def _changed_tensors(tensors: Mapping[str, torch.Tensor], lines: Any) -> list[str]:
    if not isinstance(lines, dict):
        return [f"{MANIFEST} has no digests of tensors"]
    return digests.differences(tensors, lines)


def _changed_tokenizer(folder: Path, written: Any, complete: bool) -> list[str]:
    """Files of the tokenizer that have changed or, if it is to be complete, are gone."""
    if not isinstance(written, dict):
        return [f"{MANIFEST} has no digests of the tokenizer's files"]
    found = []
    for name, digest in written.items():
        path = folder / Path(name).name
        try:
            there = path.is_file()
            changed = there and digests.of_bytes(path.read_bytes()) != digest
        except (OSError, ValueError):  # ValueError: a null character in the name
            there, changed = True, True
        if changed:
            found.append(f"{path.name} has changed since it was written")
        elif complete and not there:
            found.append(f"{path.name} is missing")
    return found


def _changed_beside(folder: Path, written: Any) -> list[str]:
    """Further files of the model that have changed or are gone: without them it gives other vectors."""
    if not isinstance(written, dict):
        return [f"{MANIFEST} has no digests of the files of sentence-transformers"]
    found = []
    for name, digest in written.items():
        try:
            same = digests.of_bytes(gate.below(folder, name).read_bytes()) == digest
        except (OSError, ValueError, UserError):  # ValueError: a null character in the name
            same = False
        if not same:
            found.append(f"{name} has changed since it was written, or is gone")
    return found


def _check_format(manifest: Mapping[str, Any], path: Path) -> None:
    version = manifest.get("format_version")
    if manifest.get("format") != FORMAT or isinstance(version, bool) or version != FORMAT_VERSION:
        raise UserError(
            f"{path} has format {manifest.get('format')!r} version {version!r}; "
            f"this release reads version {FORMAT_VERSION}",
            "use the release of mrem_deploy that wrote it, or quantize again; if you changed nothing, the "
            "file is damaged",
        )


def _read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            header = file.metadata()
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}", COPY_AGAIN) from error
    changed = [f"the header of {path.name} has changed since it was written"]
    return tensors, [] if header == HEADER else changed


def _config(data: bytes, folder: Path, weight_bytes: int) -> PretrainedConfig:
    """The configuration of a known architecture, of a size that the tensors can have."""
    path = folder / CONFIG
    content = gate.check_config(packed.without_keys(parse_object(data, path, COPY_AGAIN)), path)
    gate.check_bytes(path, content, weight_bytes, gate.RESULT_BITS)
    try:
        return CONFIG_MAPPING[content["model_type"]].from_dict(content, name_or_path=str(folder))
    except Exception as error:  # what is in the file decides what transformers raises
        reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{path} cannot be read: {reason[0]}", COPY_AGAIN) from error
