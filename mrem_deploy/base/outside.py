"""What comes from outside: texts, paths and values that a user gives, and how messages show them."""

from __future__ import annotations

import errno
import os
import reprlib
from pathlib import Path

from mrem_deploy.base.errors import UserError

# Errors of the operating system that a user can mend, and how. Others are defects of ours.
REMEDIES = {
    errno.ENAMETOOLONG: "give a shorter path; most systems allow names of up to 255 bytes",
    errno.ELOOP: "a link leads back to itself: remove it, or give the place that it should lead to",
    errno.EACCES: "choose another place, or ask its owner for the permission",
    errno.EPERM: "choose another place, or ask its owner for the permission",
    errno.EISDIR: "a file is expected here, not a folder",
    errno.ENOTDIR: "a folder is expected here, not a file",
    errno.EROFS: "choose a place that can be written to",
    errno.ENOSPC: "free some space and run again",
    errno.EDQUOT: "free some space and run again",
    errno.EMFILE: "raise the limit of open files (ulimit -n) and run again",
    errno.EIO: "the disk or the network drive has a fault: copy the files elsewhere",
    errno.ESTALE: "the network drive has changed: mount it again",
}

MOST_BITS = 10_000  # of a number that is written out; Python refuses to write thousands of digits
# What reading a JSON file raises that is missing, damaged or of another kind.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


class _Brief(reprlib.Repr):
    """A repr that always ends soon, also that of nested lists and of numbers with thousands of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 3, 100, 100, 60

    def repr_int(self, number: int, level: int) -> str:
        if number.bit_length() > MOST_BITS:
            return f"a number of {number.bit_length()} bits"
        return super().repr_int(number, level)


def shown(value: object) -> str:
    """A value as a message shows it: its repr, cut where it is long or deep."""
    return _Brief().repr(value)


def check_text(what: str, text: str, is_name: bool = True) -> None:
    """Refuse a text that cannot be written to a file; `what` names it, such as --data.

    A lone surrogate is half of a character. Python also shows bytes of a file name or an argument that are
    not UTF-8 as lone surrogates. `is_name`: it may be the name of a file, which cannot have a NUL.
    """
    problem = "it has a NUL character" if is_name and "\0" in text else ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"{text[error.start]!r} at place {error.start + 1} is not a character"
    if problem:
        raise UserError(
            f"{what} must be text in UTF-8; got {shown(text)}: {problem}",
            "write it in UTF-8; rename a file or folder whose name is not",
        )


def path_of(what: str, text: str | os.PathLike[str]) -> Path:
    """The path that `what` (such as --data) names, with ~ filled in.

    It need not exist. Refused are paths that the system cannot look up: too long, a loop of links, a folder
    that may not be entered.
    """
    check_text(what, str(text))
    try:
        path = Path(text).expanduser()
        os.stat(path)
    except RuntimeError:
        raise UserError(
            f"{what} {text}: the home folder of that user is unknown", "write the path without ~"
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise UserError(
            f"{what} {shown(str(text))} cannot be used: {error.strerror or error}",
            REMEDIES.get(error.errno or 0, "check the path"),
        ) from error
    return path


def refusal(error: OSError) -> UserError | None:
    """The message for an error of the system that a user can mend; None for a defect of ours."""
    if error.errno not in REMEDIES:
        return None
    place = "" if error.filename is None else f"{shown(error.filename)}: "
    return UserError(f"{place}{error.strerror or error}", REMEDIES[error.errno])
