"""Stand-ins for the JavaScript libraries of `mrem web`, in the folders that `npm ci` makes."""

from __future__ import annotations

import json
from pathlib import Path

from mrem_deploy.web import libraries

WASM = b"\0asm not really"


def packages(folder: Path) -> Path:
    """What `npm ci` leaves, as far as the page wants it."""
    for name, version in libraries.versions().items():
        place = folder / "node_modules" / name
        place.mkdir(parents=True)
        (place / "package.json").write_text(json.dumps({"name": name, "version": version}))
    for package, file in libraries.WANTED.values():
        path = folder / "node_modules" / package / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(WASM if file.endswith(".wasm") else f"// {file}".encode())
    return folder
