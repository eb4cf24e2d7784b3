"""Programs with a fault each, judged by the campaign: run as a script, it prints what was noticed as JSON.

A process of its own, because the campaign ends every process that its own process has left.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from safetensors.numpy import save_file

from tests.campaign import forked, interruptions, judge
from tests.campaign.cases import Outcome
from tests.campaign.forked import Place, Running
from tests.campaign.jobs import JOBS, OUT
from tests.campaign.workshop import Baseline, check_result
from tests.campaign.writes import Writes

LONG = 300  # seconds; nobody waits for them


def write_result(folder: Path, value: float = 1.0) -> int:
    folder.mkdir(parents=True)
    save_file({"codes/a": np.full((2, 3), value, np.float32)}, folder / "mrem.safetensors")
    return 0


def refuse() -> int:
    print("error: the file x is not there\n  → check the path", file=sys.stderr)
    return 2


def refuse_without_a_word() -> int:
    return 2


def leave_file() -> int:
    (Path.cwd() / ".out.new-1").mkdir()
    return 0


def leave_temporary_file() -> int:
    Path(os.environ["TMPDIR"], "scratch").touch()
    return 0


def leave_process() -> int:
    if os.fork() == 0:
        os.setsid()
        time.sleep(LONG)
    return 0


def raise_error() -> int:
    raise ZeroDivisionError("planted")


def hang() -> int:
    time.sleep(LONG)
    return 0


def crash() -> int:
    os.abort()


def ignore_sigterm() -> int:
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    print("loading x", file=sys.stderr, flush=True)
    while not stopped:
        time.sleep(0.01)
    return 0


def obey_sigterm() -> int:
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    print("loading x", file=sys.stderr, flush=True)
    while not stopped:
        time.sleep(0.01)
    print("interrupted before the first checkpoint", file=sys.stderr)
    return 143


def judged(call: Callable[[], int], place: Place, wall: float = 60) -> dict[str, str]:
    """An ordinary command: done or refused, and nothing left."""
    outcome = Outcome("planted-0000")
    ended = forked.run(call, place, wall=wall)
    judge.check_end(outcome, ended, (judge.DONE, judge.REFUSED))
    judge.check_rest(outcome, place, (OUT,))
    return outcome.faults


def judged_signal(call: Callable[[], int], place: Place) -> dict[str, str]:
    outcome = Outcome("planted-0000")
    moment = interruptions.Moment("loading", 0, 0.0)

    def disturb(running: Running) -> None:
        assert moment.reached(running)
        running.send(signal.SIGTERM)

    ended = forked.run(call, place, disturb)
    interruptions.check_left(place, outcome, ended, signal.SIGTERM, twice=False)
    return outcome.faults


def judged_result(value: float, place: Place) -> dict[str, str]:
    """The result of a run next to the undisturbed one, which has 1.0 in its tensor."""
    outcome = Outcome("planted-0000")
    original = place.root / "original" / OUT
    write_result(original)
    values = judge.values_of(original, original.parent)
    baseline = Baseline(JOBS["mrem-s"], original, values, [], 1.0, 1)
    forked.run(lambda: write_result(place.work / OUT, value), place)
    check_result(outcome, baseline, place)
    return outcome.faults


def write_three(folder: Path) -> int:
    for name in "abc":
        (folder / name).write_text(name)
    return 0


def disturbed_writes(place: Place, full: bool) -> list[object]:
    """What is there after the second of three writes was disturbed, and how it ended."""
    writes = Writes(place.work, at=2, full=full)
    ended = forked.run(lambda: write_three(place.work), place, before=writes.watch)
    return [ended.code, sorted(path.name for path in place.work.iterdir()), "No space left" in ended.err]


def main(root: Path) -> None:
    forked.GRACE_SECONDS = 0.5

    def place(name: str) -> Place:
        return Place(root / name).make()

    plain = (
        refuse,
        refuse_without_a_word,
        leave_file,
        leave_temporary_file,
        leave_process,
        raise_error,
        crash,
    )
    found: dict[str, object] = {call.__name__: judged(call, place(call.__name__)) for call in plain}
    found["hang"] = judged(hang, place("hang"), wall=0.3)
    found["ignore_sigterm"] = judged_signal(ignore_sigterm, place("ignore"))
    found["obey_sigterm"] = judged_signal(obey_sigterm, place("obey"))
    found["same tensor"] = judged_result(1.0, place("same"))
    found["changed tensor"] = judged_result(1.0000001, place("changed"))
    found["killed write"] = disturbed_writes(place("killed"), full=False)
    found["full disk"] = disturbed_writes(place("full"), full=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
