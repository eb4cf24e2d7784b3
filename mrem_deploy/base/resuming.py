"""How an interrupted run is continued: the folder of its checkpoints, and the command that goes on from them.

result/            --out, written as a whole at the end
.result.work/      until then: checkpoints, the recipe of the run, and the command that continues it
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMMAND = "command.txt"  # in the work folder
_ATTRIBUTE = "continued_by"  # of an exception that ended a run


def work_folder(out: Path) -> Path:
    """Where a run into `out` keeps its checkpoints."""
    return out.with_name(f".{out.name}.work")


def discard(work: Path) -> None:
    """Remove a work folder. In one step: of half a set of checkpoints no run could tell what it is."""
    gone = discarded(work)
    try:
        os.rename(work, gone)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        gone = work  # it came with a container's image (`files.is_in_lower_layer`)
        for file in work.iterdir():
            if file.suffix != ".safetensors":
                file.unlink()  # first: checkpoints without the name of their run are refused
    shutil.rmtree(gone, ignore_errors=True)


def discarded(work: Path) -> Path:
    """The name of a work folder while it is removed."""
    return work.with_name(f"{work.name}-gone")


def has_checkpoints(folder: Path) -> bool:
    """Whether a work folder holds anything to continue from."""
    return next(folder.glob("*.safetensors"), None) is not None


def continue_command(out: Path) -> str | None:
    """The command that continues the interrupted run into `out`; None if it has left no checkpoint."""
    folder = work_folder(out)
    return command_in(folder) if has_checkpoints(folder) else None


def command_in(folder: Path) -> str | None:
    """The command that a work folder names."""
    try:
        return (folder / COMMAND).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """A run into `out`: an exception that ends it knows the command that continues it (`command_after`)."""
    try:
        yield
    except BaseException as error:
        setattr(error, _ATTRIBUTE, continue_command(out))
        raise


def command_after(error: BaseException) -> str | None:
    """The command that continues the run which this exception ended, if it has left a checkpoint.

    Another exception may have taken the place of the one that ended the run.
    """
    cause: BaseException | None = error
    while cause is not None:
        if hasattr(cause, _ATTRIBUTE):
            return getattr(cause, _ATTRIBUTE)
        cause = cause.__cause__ or cause.__context__
    return None
