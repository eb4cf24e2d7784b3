"""Full disks: a tiny file system where the system allows one, or writes that fail from the n-th on."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
from contextlib import suppress
from pathlib import Path

from tests.campaign import judge
from tests.campaign.cases import LEFTOVER, MESSAGE, SILENT, Outcome
from tests.campaign.forked import Ended, Place
from tests.campaign.jobs import ALONE, OUT
from tests.campaign.workshop import Baseline, Workshop, check_result, copy_tree, run_command
from tests.campaign.writes import Writes

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000  # <sched.h>
MS_REMOUNT, MS_REC, MS_PRIVATE = 32, 16384, 1 << 18  # <sys/mount.h>
LARGE = "64m"
TRIES = 6
WORK = f".{OUT}.work"


def fill(shop: Workshop, place: Place, draw: random.Random, outcome: Outcome) -> None:
    """Run on a disk that becomes full, then with enough space."""
    baseline = shop.baseline(draw.choice(ALONE))
    earlier = None
    tiny = draw.random() < 0.6 and private_mounts()
    if tiny:
        mount(place.work, LARGE)
    if baseline.job.older and draw.random() < 0.25:
        earlier = shop.baseline(baseline.job.older).folder
    ended = _on_tiny_disk(shop, baseline, place, earlier, draw, outcome) if tiny else None
    if ended is None:
        ended = _failing_write(shop, baseline, place, earlier, draw, outcome)
    judge.check_end(outcome, ended, (judge.REFUSED,))
    if "no space left" not in ended.err.lower():
        outcome.blame(MESSAGE, "does not say that the disk is full")
        outcome.output = ended.text[-1500:]
    _check_nothing_half(outcome, place, earlier)
    if tiny:
        mount(place.work, LARGE, MS_REMOUNT)
    ended = run_command(baseline.job.argv(shop.root, place.work / OUT), place)
    if judge.check_end(outcome, ended, (judge.DONE,)):
        check_result(outcome, baseline, place)
        judge.check_rest(outcome, place, (OUT,))
        outcome.result = "done with more space"


def _on_tiny_disk(
    shop: Workshop,
    baseline: Baseline,
    place: Place,
    earlier: Path | None,
    draw: random.Random,
    outcome: Outcome,
) -> Ended | None:
    """None if no try met a full disk."""
    needed = sum(path.stat().st_size + 4096 for path in baseline.folder.rglob("*") if path.is_file())
    room = draw.random() * 1.2 * needed
    for _ in range(TRIES):
        mount(place.work, LARGE, MS_REMOUNT)
        _begin(place, earlier)
        used = sum(path.stat().st_size + 4096 for path in place.work.rglob("*") if path.is_file())
        pages = 2 + int((used + room) / 4096)
        mount(place.work, f"{pages * 4}k", MS_REMOUNT)
        outcome.what = f"{baseline.job.name} with {int(room / 1024)} KiB of space"
        ended = run_command(baseline.job.argv(shop.root, place.work / OUT), place)
        if ended.code != judge.DONE:
            return ended
        room /= 3
    return None


def _failing_write(
    shop: Workshop,
    baseline: Baseline,
    place: Place,
    earlier: Path | None,
    draw: random.Random,
    outcome: Outcome,
) -> Ended:
    write = draw.randint(1, baseline.writes)
    for _ in range(TRIES):
        _begin(place, earlier)
        outcome.what = f"{baseline.job.name}, full from write {write} on"
        full = Writes(place.work, at=write, full=True)
        ended = run_command(baseline.job.argv(shop.root, place.work / OUT), place, writes=full)
        if ended.code != judge.DONE:
            break
        write = 1 + write // 3  # some writes only remove, and do not count when the disk is full
    return ended


def _begin(place: Place, earlier: Path | None) -> None:
    """The place before the command: the older result alone, or nothing."""
    for folder in place.work.iterdir():
        shutil.rmtree(folder)
    if earlier is not None:
        copy_tree(earlier, place.work / OUT)


def _check_nothing_half(outcome: Outcome, place: Place, earlier: Path | None) -> None:
    from safetensors import safe_open

    found = [path.name for path in place.work.iterdir() if path.name not in (OUT, WORK)]
    if found:
        outcome.blame(LEFTOVER, f"on the full disk: {', '.join(found)}")
    for path in (place.work / WORK).rglob("*"):
        if path.name.startswith("."):
            outcome.blame(LEFTOVER, f"on the full disk: {path.name}")
        elif path.suffix == ".safetensors":
            try:
                with safe_open(path, "np"):
                    pass
            except Exception as error:  # noqa: BLE001 (safetensors has many)
                outcome.blame(SILENT, f"half of a checkpoint, {path.name}: {error}")
    if (place.work / OUT).exists() and earlier is None:
        outcome.blame(LEFTOVER, "half of a result")
    if earlier is not None:
        now = place.work / OUT
        names = [path.name for path in earlier.iterdir() if path.is_file()]
        with suppress(OSError):
            if all((now / name).read_bytes() == (earlier / name).read_bytes() for name in names):
                return
        outcome.blame(SILENT, "the older result has changed")


# -- file systems ------------------------------------------------------------------------------------------


def private_mounts() -> bool:
    """Let this process and its children have mounts that no other process sees; False if not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0)) != 0:
        return False
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    return bool(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0)


def mount(folder: Path, size: str, flags: int = 0) -> None:
    """A file system in memory, or another size for it."""
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={size}".encode()
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(folder))
