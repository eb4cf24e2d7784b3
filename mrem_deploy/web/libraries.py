"""The JavaScript libraries of the page: fetched by npm at pinned versions, kept in the cache.

`npm/package.json` and `npm/package-lock.json` are the one place of their versions. npm itself compares every
package with its digest there; none of their scripts runs. Only the files of `WANTED` are kept.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import atomic_folder, cache_folder, explained
from mrem_deploy.base.outside import path_of
from mrem_deploy.base.progress import say
from mrem_deploy.base.scratch import scratch_folder
from mrem_deploy.base.strict_json import read_object

PINS = Path(__file__).parent / "npm"
PACKAGE, LOCK = "package.json", "package-lock.json"
ORT, TOKENIZERS = "onnxruntime-web", "@huggingface/tokenizers"
RUNTIME = "ort-wasm.bin"
# file of the page -> package, file in it. Servers know .js everywhere, .mjs not.
WANTED = {
    "ort.js": (ORT, "dist/ort.wasm.bundle.min.mjs"),
    RUNTIME: (ORT, "dist/ort-wasm-simd-threaded.wasm"),
    "tokenizers.js": (TOKENIZERS, "dist/tokenizers.min.mjs"),
    "tokenizers-LICENSE.txt": (TOKENIZERS, "LICENSE"),
}
COMMAND = ("ci", "--ignore-scripts", "--no-audit", "--no-fund", "--omit=dev", "--loglevel=error")
SECONDS = 900
BY_HAND = (
    f"on a machine with npm: copy {PACKAGE} and {LOCK} from {PINS}, run `npm ci --ignore-scripts` beside "
    "them, and give that folder here: --libraries FOLDER"
)


def versions() -> dict[str, str]:
    """The pinned version of each library."""
    return dict(json.loads((PINS / PACKAGE).read_text(encoding="utf-8"))["dependencies"])


def libraries(given: str | None) -> Path:
    """A folder with the files of the page, from the packages in `given`, from the cache or by npm."""
    key = sha256((PINS / LOCK).read_bytes() + repr(sorted(WANTED.items())).encode()).hexdigest()[:16]
    cached = cache_folder() / "web" / key
    if given is not None:
        return _kept(_packages(path_of("--libraries", given)), cached)
    if all((cached / name).is_file() for name in WANTED):
        return cached
    npm = shutil.which("npm")
    if npm is None:
        raise UserError(
            "the page needs two JavaScript libraries, and npm, which fetches them, is not installed",
            f"install Node.js, which brings npm; or {BY_HAND}",
        )
    with explained(cached):
        cached.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder("npm", cached.parent) as scratch:
        _install(npm, scratch)
        return _kept(scratch, cached)


def _install(npm: str, folder: Path) -> None:
    """`npm ci`, which refuses whatever differs from the digests of the lock file."""
    for name in (PACKAGE, LOCK):
        shutil.copyfile(PINS / name, folder / name)
    named = " and ".join(f"{name} {version}" for name, version in versions().items())
    say(f"npm fetches {named} (only once)")
    try:
        done = subprocess.run(
            [npm, *COMMAND],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"npm did not fetch the libraries of the page: {error}", _ahead(BY_HAND)) from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("npm error ")]
        reason = "; ".join(line.removeprefix("npm error ") for line in lines[:3]) or "it gives no reason"
        raise UserError(f"npm could not fetch the libraries of the page: {reason}", _ahead(BY_HAND))


def _ahead(remedy: str) -> str:
    return f"check the network and npm's settings and try again; or {remedy}"


def _packages(folder: Path) -> Path:
    """A folder in which somebody else has run npm, if its packages are the pinned ones."""
    folder = folder.parent if folder.name == "node_modules" else folder
    for name, version in versions().items():
        path = folder / "node_modules" / name / PACKAGE
        found = read_object(path, BY_HAND).get("version")
        if found != version:
            raise UserError(f"--libraries has {name} {found!r}; the page is made for {version}", BY_HAND)
    return folder


def _kept(folder: Path, cached: Path) -> Path:
    """Put the wanted files of `folder`/node_modules into the cache."""
    with atomic_folder(cached) as new:
        for name, (package, file) in WANTED.items():
            source = folder / "node_modules" / package / file
            if not source.is_file():
                raise UserError(f"{package} has no {file}; it is not the version of the page", BY_HAND)
            data = source.read_bytes()
            (new / name).write_bytes(_compressed(data) if name == RUNTIME else data)
    return cached


def _compressed(data: bytes) -> bytes:
    """A plain file server compresses nothing, so the large file is stored compressed; the page unpacks it."""
    return gzip.compress(data, 9, mtime=0)


def sizes(folder: Path) -> Mapping[str, int]:
    """Bytes of each file of the page's libraries."""
    return {name: (folder / name).stat().st_size for name in WANTED}
