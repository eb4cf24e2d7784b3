"""What is right and what is wrong at the end of a command."""

from __future__ import annotations

import json
import signal
from collections.abc import Collection
from pathlib import Path

from tests.campaign.cases import CRASH, HANG, LEFTOVER, MESSAGE, TRACEBACK, Outcome
from tests.campaign.forked import Ended, Place

DONE, FAILED, REFUSED = 0, 1, 2
MARKS = ("Traceback (most recent call last)", "Exception ignored in", "Fatal Python error")
SHORTEST_MESSAGE = 15  # characters of a message that can help anyone


def check_end(outcome: Outcome, ended: Ended, codes: Collection[int], killed: bool = False) -> bool:
    """Blame what is wrong with the end itself. True if it is one of those expected."""
    good = True
    if ended.code is None:
        good = False
        outcome.blame(HANG, f"still running after {ended.seconds:.0f} s")
    elif ended.code < 0 and not (killed and ended.code == -signal.SIGKILL):
        good = False
        name = signal.Signals(-ended.code).name
        cause = HANG if ended.code == -signal.SIGXCPU else CRASH
        outcome.blame(cause, f"ended by {name}")
    mark = next((mark for mark in MARKS if mark in ended.text), None)
    if mark is not None:
        good = False
        where = ended.text.index(mark)
        lines = ended.text[where:].strip().splitlines()
        last = next((line for line in lines[1:] if line[:1] not in (" ", "")), lines[0])
        outcome.blame(TRACEBACK, last[:300])
    elif good and not killed and ended.code not in codes:
        good = False
        outcome.blame(MESSAGE, f"exit code {ended.code}; expected {sorted(codes)}")
    elif good and ended.code == REFUSED and len(message(ended)) < SHORTEST_MESSAGE:
        good = False
        outcome.blame(MESSAGE, "refused without a message")
    if ended.left:
        outcome.blame(LEFTOVER, f"a process is left: {ended.left[0]}")
    if not good or ended.left:
        outcome.output = ended.text[-1500:]
    return good


def message(ended: Ended) -> str:
    """What the command says about why it refused."""
    return ended.err.partition("error:")[2].strip()


def check_rest(
    outcome: Outcome, place: Place, kept: Collection[str] = (), moment: str = "at the end"
) -> None:
    """Blame everything that is left next to what shall be there. kept: names in the place of the command."""
    found = [f"work/{path.name}" for path in place.work.iterdir() if path.name not in kept]
    found += [f"tmp/{path.name}" for path in place.tmp.iterdir()]
    found += [
        str(path.relative_to(place.root))
        for path in place.cache.rglob("*")
        if path.name.startswith(".") or path.suffix in (".tmp", ".part")
    ]
    if found:
        outcome.blame(LEFTOVER, f"{moment}: {', '.join(sorted(found)[:5])}")


def values_of(folder: Path, root: Path) -> dict[str, str]:
    """A digest for every file of a result that shall be the same after the same run."""
    import golden

    if (folder / "finetune.json").exists():
        record = json.loads((folder / "finetune.json").read_text(encoding="utf-8"))
        loss = {key: record[key] for key in ("score", "splits", "loss", "curve", "steps")}
        weights = golden.tensor_bytes(folder / "model.safetensors")
        return {"model.safetensors": golden.digest(weights), "finetune.json": golden.digest(loss)}
    if not (folder / "mrem.json").exists():
        files = golden.files_of(folder)
        return {str(path.relative_to(folder)): golden.digest(_content(path)) for path in files}
    described = golden.describe_result(folder, root)
    return {**described["values"], "files": described["structure"]["files"]}


def _content(path: Path) -> bytes:
    import golden

    return golden.graph_bytes(path) if path.suffix == ".onnx" else path.read_bytes()


def differing(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
