"""Where the workers of one machine meet: a private folder, so that no port is open for it.

One file is one key, replaced as a whole, so a reader never sees half a value. It does what `Crew` needs of
torch's stores, and no more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

MEETING_PLACE = "MREM_MEETING_PLACE"  # the variable that names the folder to the workers


class Store(Protocol):
    """What `Crew` needs of a key-value store; torch's own have it too."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


class FolderStore:
    """Keys and values as the files of a folder that only this user may enter."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: str, /) -> None:
        path = self._path(key)
        new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        new.write_text(value, encoding="utf-8")
        os.replace(new, path)

    def get(self, key: str, /) -> bytes:
        return self._path(key).read_bytes()

    def check(self, keys: Sequence[str], /) -> bool:
        return all(self._path(key).exists() for key in keys)

    def _path(self, key: str) -> Path:
        return self._folder / f"key {quote(key, safe=' ')}"
