"""Atomic writes: a file or folder is either the old one or the new one, never half of one.

Everything is written next to its destination under a temporary name and renamed at the end. On a full disk,
a missing permission or an interruption the temporary one is removed and the old one stays. After a kill the
next write to the same folder removes it (`scratch`, `place`).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

from mrem_deploy.base import interrupt
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import path_of
from mrem_deploy.base.scratch import owned_file, owned_folder, sweep, sweep_files

# <fcntl.h> and <linux/fs.h>
AT_FDCWD = -100
RENAME_EXCHANGE = 2


def _explain(error: OSError, path: Path) -> UserError:
    if error.errno == errno.ENOSPC:
        return UserError(
            f"no space left on the disk of {path}; nothing there was changed",
            "free some space and run again (training continues from its last checkpoint), or write elsewhere",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UserError(f"no permission to write {path}", "choose a folder you may write to")
    return UserError(f"cannot write {path}: {error.strerror or error}", "check the path and try again")


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise _explain(error, path) from error
    except UserError:
        raise
    except Exception as error:
        # safetensors and tokenizers are Rust: they keep only the text of the system's error.
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code:
            raise _explain(OSError(int(code[1]), os.strerror(int(code[1]))), path) from error
        raise


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Write to the yielded path; on success it becomes `path`."""
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep_unfinished(path)
        with owned_file(path.parent, _unfinished(path)) as temporary:
            yield temporary
            os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's files are private; a result is not
            os.replace(temporary, path)


def sweep_unfinished(path: Path) -> None:
    """Remove what killed processes have left of their writing to that file."""
    sweep_files(path.parent, _unfinished(path))


def _unfinished(path: Path) -> str:
    return f".{path.name}.new-"


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Fill the yielded folder; on success it replaces `path` and all that was in it."""
    path = path.absolute()
    prefix = _unfinished(path)
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent, prefix)
        with owned_folder(path.parent, prefix) as temporary:
            os.chmod(temporary, 0o777 & ~_umask())
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():  # some libraries make private files; a result is not private
                    os.chmod(file, 0o666 & ~_umask())
            interrupt.check()  # from here on the new folder is in place, whatever comes
            with interrupt.held():
                _put_in_place(temporary, path)


def _put_in_place(new: Path, path: Path) -> None:
    """Let the folder `new` take the place of `path`. The earlier one may then be under either other name."""
    if path.exists() and (_exchange(new, path) or _onto_empty(new, path)):
        return
    old = new.with_name(new.name.replace(".new-", ".old-"))
    try:
        if path.exists():
            os.rename(path, old)
        try:
            os.rename(new, path)
        except BaseException:  # an interruption as well: without this, neither would be in place
            if old.exists():
                os.rename(old, path)
            raise
    finally:
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one operation, so that a kill at any moment leaves a complete one in place.

    False where the system cannot (not Linux, or a file system without it); then two renames do it.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0


def _onto_empty(new: Path, path: Path) -> bool:
    """Put a folder in the place of an empty one, even one that cannot be renamed; False if not empty."""
    if os.name != "posix" or not path.is_dir() or any(path.iterdir()):
        return False
    os.rename(new, path)
    return True


def is_mount_point(folder: Path) -> bool:
    """Whether another file system, or another folder, is mounted there: then it cannot be renamed."""
    if os.path.ismount(folder):
        return True
    name = re.sub(rb"[ \t\n\\]", lambda found: b"\\%03o" % found[0][0], os.fsencode(folder.resolve()))
    return any(mount[4:5] == [name] for mount in _mounts())


def _mounts() -> list[list[bytes]]:
    """The fields of every line of proc(5) mountinfo: folders mounted from the same file system are in it."""
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return []
    return [line.split(b" ") for line in lines]


def is_in_lower_layer(folder: Path) -> bool:
    """Whether a folder that is not empty comes with a container's image: then it cannot be renamed.

    Such a file system lays a layer that can be written over others. It is asked by a rename that is never
    done, because the other folder is not empty.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    device = os.stat(folder).st_dev
    place = b"%d:%d" % (os.major(device), os.minor(device)) if hasattr(os, "major") else b""
    if not any(mount[2:3] == [place] and b"overlay" in mount[-3] for mount in _mounts()):
        return False
    with owned_folder(folder.parent, _unfinished(folder)) as other:
        (other / "taken").touch()
        try:
            os.rename(folder, other)
        except OSError as error:
            return error.errno == errno.EXDEV
    return False


def check_folder(out: str | None, option: str = "--out") -> Path | None:
    """The folder of --out or another option, made if needed. Refuses one that cannot be written, before any
    work is done."""
    if out is None:
        return None
    folder = Path(out).absolute()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{option} {folder} is a file", "give a folder")
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    return folder


def cache_folder() -> Path:
    """$MREM_CACHE, else the platform's cache folder for this user."""
    named = os.environ.get("MREM_CACHE")
    return path_of("MREM_CACHE", named) if named else Path(platformdirs.user_cache_dir("mrem_deploy", False))


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=True) + "\n")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
