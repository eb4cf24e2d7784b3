"""Which cases there are, in which order, and what is known of one that was tried."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# What can be wrong with the end of a case; the columns of the table.
SILENT, TRACEBACK, HANG = "silent damage", "traceback", "hang"
CRASH, LEFTOVER, MESSAGE = "crash", "leftover", "wrong message"
FAULTS = (SILENT, TRACEBACK, HANG, CRASH, LEFTOVER, MESSAGE)


@dataclass(frozen=True)
class Kind:
    """A row of the table: what is done to the commands, how often, and what must come of it."""

    count: int
    title: str
    promise: str


KINDS = {
    "kill": Kind(
        260, "kills", "the same command continues; its result is that of an undisturbed run, bit for bit"
    ),
    "crew": Kind(
        40,
        "kills in mrem-p",
        "the same; free-running workers promise a complete result, not the same bits",
    ),
    "signal": Kind(
        100, "signals", "exit code 130 or 143, it says what is kept, and the run continues as after a kill"
    ),
    "disk": Kind(50, "full disks", "a message, nothing half-written, and it works once there is space"),
    "damage": Kind(2000, "damaged folders", "equal to the original, or refused with a message"),
    "option": Kind(500, "option sets", "done as asked, or refused with a message"),
    "input": Kind(300, "hostile inputs", "read as text and labels, or refused with a message"),
}


@dataclass(frozen=True)
class Case:
    """One case: everything about it is drawn from the seed of the campaign and its id."""

    kind: str
    number: int

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.number:04d}"

    @classmethod
    def parse(cls, text: str) -> Case:
        kind, _, number = text.rpartition("-")
        if kind not in KINDS or not number.isdecimal() or int(number) >= KINDS[kind].count:
            raise ValueError(f"there is no case {text!r}; expected for example kill-0007")
        return cls(kind, int(number))

    def draw(self, seed: int) -> random.Random:
        return random.Random(f"{seed}/{self.id}")


@dataclass
class Outcome:
    """What came of a case: `faults` has the reason for each that was found."""

    case: str
    what: str = ""  # in words: command, place and kind of the fault
    faults: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    leave_seconds: float | None = None  # from a signal to the end of the process
    result: str = ""  # "refused", "equal", …: how the command ended
    output: str = ""  # the end of what it printed, if something is wrong

    def blame(self, fault: str, reason: str) -> None:
        self.faults.setdefault(fault, reason)

    @property
    def survived(self) -> bool:
        return not self.faults

    def line(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=True)


def all_cases(kinds: Iterable[str] = tuple(KINDS)) -> list[Case]:
    """Every case, evenly mixed: any first part of the list has its share of every kind."""
    placed = [
        ((number + 0.5) / KINDS[kind].count, kind, number)
        for kind in kinds
        for number in range(KINDS[kind].count)
    ]
    return [Case(kind, number) for _, kind, number in sorted(placed)]


def read_log(path: Path) -> dict[str, Outcome]:
    """The outcomes of earlier starts; the last line may be half of one, after a kill of the campaign."""
    if not path.exists():
        return {}
    found: dict[str, Outcome] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values: dict[str, Any] = json.loads(line)
            outcome = Outcome(**values)
        except (ValueError, TypeError):
            continue
        found[outcome.case] = outcome
    return found
