"""The place of a result belongs to one run at a time, and each run puts in order what a killed one left.

result/            what the run will replace
.result.lock       who is at work here
.result.work/      its checkpoints (`resuming`)
.result.new-*      the next result, while it is written
.result.old-*      the earlier one, while the new one takes its place in two steps (`files.atomic_folder`)

All processes of a run share the lock, known by a token: it is free when the last one has ended.
"""

from __future__ import annotations

import glob
import json
import os
import platform
import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import explained
from mrem_deploy.base.locks import HAS_LOCKS, NoLocks, is_at, try_lock
from mrem_deploy.base.progress import say
from mrem_deploy.base.resuming import discarded, work_folder
from mrem_deploy.base.scratch import sweep, sweep_scratch

ATTEMPTS, PAUSE_SECONDS = 25, 0.02  # another process may hold the lock just to look whose it is


@dataclass(frozen=True)
class Owner:
    """The process that has taken a place first, of all processes of its run."""

    token: str
    pid: int
    host: str
    started: str
    command: str

    @classmethod
    def here(cls, token: str) -> Owner:
        program = Path(sys.argv[0])
        name = program.parent.name if program.name == "__main__.py" else program.name
        command = shlex.join([name, *sys.argv[1:]])
        return cls(token, os.getpid(), platform.node(), time.strftime("%Y-%m-%d %H:%M:%S"), command)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {self.started}: {self.command}"


def new_token() -> str:
    """Names a run; all its processes hold its place with the same one."""
    return uuid.uuid4().hex


@contextmanager
def hold(out: Path, token: str) -> Iterator[None]:
    """Keep the place of `out` for the run of that token; refuses if another run has it.

    The first process to come removes what killed runs have left there.
    """
    path = out.with_name(f".{out.name}.lock")
    with explained(out):
        made = _make_parents(path.parent)
    handle = None
    try:
        with explained(out):
            handle, first = _take(path, out, token)
            if first:
                tidy(out)
        yield
    finally:
        if handle is not None:
            _release(path, handle)
        for parent in made:
            with suppress(OSError):  # not empty: there is a result or a checkpoint
                parent.rmdir()


def tidy(out: Path) -> None:
    """Remove what killed runs have left around `out`, except checkpoints; only for who holds the place."""
    sweep_scratch()
    sweep(out.parent, f".{out.name}.new-", ownerless=True)
    shutil.rmtree(discarded(work_folder(out)), ignore_errors=True)
    for half in work_folder(out).glob(".*.safetensors.*"):  # checkpoints that were being written
        half.unlink(missing_ok=True)
    aside = [out.parent / name for name in glob.glob(f".{glob.escape(out.name)}.old-*", root_dir=out.parent)]
    aside.sort(key=lambda folder: folder.stat().st_mtime)
    if aside and not (out.exists() and any(out.iterdir())):
        os.rename(aside.pop(), out)
        say(f"restored {out}: a run that was killed had moved it aside")
    for folder in aside:
        shutil.rmtree(folder, ignore_errors=True)


def _take(path: Path, out: Path, token: str) -> tuple[int | None, bool]:
    """The handle of the locked file, and whether this process is the first of its run.

    Who gets the lock alone writes down the owner and then shares it. Between these two steps another run
    may get it: so the owner is read again after sharing, and this run is refused if it is the other one.
    """
    found = None
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE_SECONDS)
        try:
            handle, first = _lock_file(path, token)
        except NoLocks:
            path.unlink(missing_ok=True)
            say(f"note: {path.parent} has no file locks; start no second run with --out {out}")
            return None, False
        found = _owner(handle) or found
        if handle is not None and found is not None and found.token == token:
            return handle, first
        if handle is not None:
            os.close(handle)
    raise UserError(
        f"another run is writing to --out {out}: {found or 'its process is unknown'}",
        "wait for it to end, stop it, or give another folder for --out",
    )


def _lock_file(path: Path, token: str) -> tuple[int | None, bool]:
    """The file with a shared lock, or None if it is not to be had, and whether nobody else had one."""
    if not HAS_LOCKS:
        raise NoLocks
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        first = try_lock(handle)
        if first and is_at(handle, path):
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(asdict(Owner.here(token))).encode(), 0)
        if try_lock(handle, shared=True) and is_at(handle, path):
            return handle, first
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None, False


def _owner(handle: int | None) -> Owner | None:
    """What the file says; None if nothing that can be read."""
    if handle is None:
        return None
    try:
        return Owner(**json.loads(os.pread(handle, os.fstat(handle).st_size, 0)))
    except (ValueError, TypeError):
        return None


def _release(path: Path, handle: int) -> None:
    """The last process of a run removes the file."""
    if try_lock(handle) and is_at(handle, path):
        path.unlink()
    os.close(handle)


def _make_parents(folder: Path) -> list[Path]:
    """Make a folder and the folders it is in; returns the new ones, innermost first."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing
