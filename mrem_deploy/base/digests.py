"""SHA-256 of what is written, so that damage is noticed when it is read.

A file can carry the digest of its own bytes: it is written with zeros in that place, and `seal` puts the
digest of these bytes there. A single changed bit anywhere, in the digest or in its name as well, shows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

UNSEALED = "0" * 64  # stands where the digest of the file will be
SEAL = "sha256"  # the key of the digest of all other metadata of a safetensors file
TENSORS = "tensors"  # the key of the lines of its tensors


def of_bytes(data: Any) -> str:
    """The digest of bytes, or of anything that gives its memory."""
    return hashlib.sha256(data).hexdigest()


def of_content(content: Any) -> str:
    """The digest of JSON content, whatever the order of its keys."""
    return of_bytes(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def of_tensor(tensor: torch.Tensor) -> str:
    """The digest of a tensor's bytes, in row-major order."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return of_bytes(flat.numpy())


def line_of(tensor: torch.Tensor) -> str:
    """Type, shape and digest of a tensor: 'float32 768x1 9f86d081…'; the shape of a number is '-'."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {'x'.join(map(str, tensor.shape)) or '-'} {of_tensor(tensor)}"


def lines_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The lines of all tensors, by name."""
    return {name: line_of(tensor) for name, tensor in sorted(tensors.items())}


def differences(tensors: Mapping[str, torch.Tensor], lines: Mapping[str, Any]) -> list[str]:
    """What is not as the lines say, a sentence for each tensor."""
    found = [f"the tensor {name} is missing" for name in sorted(lines.keys() - tensors.keys())]
    added = sorted(tensors.keys() - lines.keys())
    found += [f"the tensor {name} is not one of those written" for name in added]
    for name in sorted(tensors.keys() & lines.keys()):
        now, written = line_of(tensors[name]), str(lines[name])
        if now == written:
            continue
        if now.split()[:2] == written.split()[:2]:
            found.append(f"the tensor {name} has changed since it was written")
        else:
            found.append(f"the tensor {name} is {_kind(now)}; it was written as {_kind(written)}")
    return found


def _kind(line: str) -> str:
    return " ".join(line.split()[:2])


def seal(data: bytes, before: bytes) -> bytes:
    """Put the digest of `data` in the place of the zeros that follow `before`."""
    place = before + UNSEALED.encode()
    if data.count(place) != 1:
        raise ValueError(f"expected one place for the digest, got {data.count(place)}")
    return data.replace(place, before + of_bytes(data).encode())


def is_sealed(data: bytes, before: bytes, digest: str) -> bool:
    """Whether `data` is what was sealed with this digest."""
    place = before + digest.encode()
    return data.count(place) == 1 and of_bytes(data.replace(place, before + UNSEALED.encode())) == digest


def sealed_metadata(metadata: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The metadata of a safetensors file with the lines of its tensors, and a digest of all of it."""
    complete = {**metadata, TENSORS: json.dumps(lines_of(tensors))}
    return complete | {SEAL: of_content(complete)}


def metadata_differences(metadata: Mapping[str, str]) -> list[str]:
    """What is wrong with the metadata of a file; files of earlier releases have neither lines nor digest."""
    if SEAL not in metadata and TENSORS not in metadata:
        return []
    others = {key: value for key, value in metadata.items() if key != SEAL}
    if metadata.get(SEAL) != of_content(others):
        return ["the header has changed since it was written"]
    return []


def has_digests(metadata: Mapping[str, str]) -> bool:
    return SEAL in metadata or TENSORS in metadata


def tensor_differences(metadata: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """What is wrong with the tensors of a file whose metadata is as it was written."""
    return differences(tensors, json.loads(metadata[TENSORS])) if TENSORS in metadata else []
