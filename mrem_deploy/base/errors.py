"""The exceptions a user is meant to see.

Raise `UserError` for anything the user can fix: a wrong path, a missing column, bits that do not exist. The
command line prints it without a traceback and exits with 2. `WorkerFailed` reports the error of another
process, which has printed its own traceback. Everything else is a bug here and keeps its traceback.
"""

from __future__ import annotations

MOST_CHARACTERS = 2000  # of a message


class UserError(Exception):
    """What was expected, what was given, and what to do about it, in that order."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        if len(problem) > MOST_CHARACTERS:  # a value from a file may be of any length
            problem = f"{problem[:MOST_CHARACTERS]} …"
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem}\n  → {remedy}" if remedy else problem)


class WorkerFailed(Exception):
    """A worker process ended without finishing; the message is its own error."""


class WorkerKilled(WorkerFailed):
    """The same, by a signal: mostly because memory ran out."""
