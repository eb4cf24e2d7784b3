"""Temporary folders and files that show whether their owner lives: what a killed process leaves, the next one
removes.

The process that makes one holds a lock on it. So one whose lock is free has no owner any more. Where the file
system has no locks, nobody can tell, and it stays.
"""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mrem_deploy.base.locks import HAS_LOCKS, NoLocks, is_at, try_lock

SUFFIX = ".tmp"


def settle_temporary_folder() -> None:
    """Choose the folder for temporary files without a trace.

    tempfile tries a folder by a file of any name, which a kill leaves for ever. A file without a name ends
    with its process. Where no folder of these can be written, tempfile looks further by itself.
    """
    if tempfile.tempdir is not None:
        return
    named = [os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
    for folder in map(os.path.abspath, [*named, *(["/tmp", "/var/tmp"] if os.name == "posix" else [])]):
        with suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"any")
            file.flush()
            tempfile.tempdir = folder
            return


@contextmanager
def scratch_folder(purpose: str, parent: Path | None = None) -> Iterator[Path]:
    """A new folder for temporary files, removed at the end. Those of killed processes are removed first."""
    where = parent or Path(tempfile.gettempdir())
    sweep_scratch(where)
    with owned_folder(where, f"mrem-{purpose}-", SUFFIX) as folder:
        yield folder


def sweep_scratch(parent: Path | None = None) -> None:
    """Remove the scratch folders of processes that were killed."""
    sweep(parent or Path(tempfile.gettempdir()), "mrem-", SUFFIX)


@contextmanager
def owned_folder(parent: Path, prefix: str, suffix: str = "") -> Iterator[Path]:
    """A new folder that `sweep` leaves alone for as long as this process lives; removed at the end."""
    folder, lock = _new(lambda: tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@contextmanager
def owned_file(parent: Path, prefix: str) -> Iterator[Path]:
    """A new file that `sweep_files` leaves alone for as long as this process lives; removed at the end."""

    def make() -> str:
        handle, name = tempfile.mkstemp(prefix=prefix, dir=parent)
        os.close(handle)
        return name

    file, lock = _new(make)
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)
        if lock is not None:
            os.close(lock)


def sweep_files(parent: Path, prefix: str) -> None:
    """Remove the files of that name whose owner is dead."""
    for name in glob.glob(f"{glob.escape(prefix)}*", root_dir=parent):
        file = parent / name
        if file.is_symlink() or not file.is_file():
            continue
        with suppress(NoLocks, OSError):  # someone else's, or gone by now
            lock = _lock(file)
            if lock is not None:
                file.unlink(missing_ok=True)
                os.close(lock)


def sweep(parent: Path, prefix: str, suffix: str = "", ownerless: bool = False) -> None:
    """Remove the folders of that name whose owner is dead.

    ownerless: the caller knows that no living process owns any; then those that cannot be locked go too.
    """
    for name in glob.glob(f"{glob.escape(prefix)}*{glob.escape(suffix)}", root_dir=parent):
        folder = parent / name
        if folder.is_symlink() or not folder.is_dir():
            continue
        try:
            lock = _lock(folder)
        except NoLocks:
            if ownerless:
                shutil.rmtree(folder, ignore_errors=True)
            continue
        except OSError:  # someone else's, or gone by now
            continue
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _new(make: Callable[[], str]) -> tuple[Path, int | None]:
    """What `make` makes, and its lock. A sweeper may see it before it is locked; then another one is made."""
    while True:
        path = Path(make())
        try:
            lock = _lock(path)
        except NoLocks:
            return path, None
        except FileNotFoundError:
            continue
        if lock is None:
            continue
        if is_at(lock, path):
            return path, lock
        os.close(lock)


def _lock(path: Path) -> int | None:
    """The handle of a folder or file that is locked now; None if another handle holds its lock."""
    if not HAS_LOCKS:
        raise NoLocks
    handle = os.open(path, os.O_RDONLY)
    try:
        if try_lock(handle):
            return handle
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None
