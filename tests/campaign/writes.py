"""Something happens at the n-th write of a command: it is killed there, or the disk is full from there on."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_MAKING = ("open", "os.mkdir", "os.rename", "tempfile.mkstemp", "tempfile.mkdtemp")
_REMOVING = ("os.remove", "os.rmdir", "shutil.rmtree")


class Writes:
    """Counts what Python writes below a folder: files opened for it, renamed or removed, folders made.

    at: the number of the write that is disturbed, from 1; None only counts. full: the disk is full from there
    on; otherwise the process is killed. only: counts names that begin so.
    """

    def __init__(
        self,
        folder: Path,
        at: int | None = None,
        full: bool = False,
        only: str = "",
        report: Path | None = None,
    ) -> None:
        self.folder, self.at, self.full, self.only, self.report = str(folder), at, full, only, report
        self.count = 0

    def watch(self) -> None:
        """From now on, in this process."""
        sys.addaudithook(self._notice)

    def finish(self) -> None:
        """The command is done: write down how often it wrote."""
        if self.report is not None:
            self.report.write_text(str(self.count))

    def _notice(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _MAKING and (self.full or event not in _REMOVING):
            return
        path = arguments[0]
        if not isinstance(path, str | bytes | os.PathLike):
            return
        if event == "open" and not (len(arguments) > 2 and (arguments[2] or 0) & _WRITING):
            return
        name = os.fsdecode(path)
        if not name.startswith(self.folder):
            return
        if self.only and not Path(name).name.startswith(self.only):
            return
        self.count += 1
        if self.at is None or self.count < self.at:
            return
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        os.kill(os.getpid(), signal.SIGKILL)
