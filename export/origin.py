"""Where an ONNX file of ours says that it comes from, read from its bytes: needs neither onnx nor torch.

Two entries of `metadata_props` are digests: `result_digest` names the frozen model that was exported
(`FrozenModel.digest`), `file_sha256` is the digest of the file itself, written by `base.digests.seal`.
Note: tensors in a separate file (models of more than 2 GiB) are not part of `file_sha256`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mrem_deploy.base import digests

RESULT, FILE = "result_digest", "file_sha256"


def _before(key: str) -> bytes:
    """How protobuf writes a StringStringEntryProto up to a value of 64 characters: key, then value."""
    return b"\n" + bytes([len(key)]) + key.encode() + b"\x12@"


@dataclass(frozen=True)
class Origin:
    """The digests in an ONNX file; None where it has none."""

    result: str | None
    changed: bool | None  # since it was exported; None: it does not say, an earlier release wrote it


def seal(data: bytes) -> bytes:
    """The bytes of a model whose metadata has `file_sha256`, with the digest filled in."""
    return digests.seal(data, _before(FILE))


def origin_of(path: Path) -> Origin:
    """What the file says; an OSError if it cannot be read."""
    data = path.read_bytes()
    result, own = (_value(data, key) for key in (RESULT, FILE))
    if own is not None:
        return Origin(result, not digests.is_sealed(data, _before(FILE), own))
    # A file with only one of the two entries was written with both.
    return Origin(result, None if result is None and RESULT.encode() not in data else True)


def _value(data: bytes, key: str) -> str | None:
    """The last entry of that key: metadata follow the graph."""
    found = re.findall(re.escape(_before(key)) + rb"([0-9a-f]{64})", data)
    return found[-1].decode() if found else None
