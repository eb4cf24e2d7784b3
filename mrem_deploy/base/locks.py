"""Locks between processes that the operating system keeps: they end with their process, however it ends.

Note: such a lock belongs to an open file, not to a process. Two handles of the same file exclude each other
even inside one process, and closing the handle releases the lock.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

HAS_LOCKS = fcntl is not None
# What file systems without such locks answer; NFS refuses an exclusive lock on a folder with EBADF.
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


class NoLocks(Exception):
    """This system, or the file system of this file, has no locks."""


def try_lock(handle: int, shared: bool = False) -> bool:
    """Lock an open file or folder, or change the kind of its lock; False if another handle holds it.

    Note: changing the kind is not atomic. Another process may take the lock in between, and after a failure
    the earlier lock is gone.
    """
    if fcntl is None:
        raise NoLocks
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            raise NoLocks from error
        raise
    return True


def is_at(handle: int, path: Path) -> bool:
    """Whether the open file is still the one of that name: it may have been removed since it was opened."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
