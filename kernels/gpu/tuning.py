"""Which tile a matmul uses: lists of tiles, and a choice by measurement that is remembered.

On a GPU every tile of a list is timed once for each kernel, type, device and size (rounded up to powers of
two); the choice is kept in memory and in the cache folder. A tile that does not compile there, or does not
fit, is passed over. The interpreter has one tile; a dry run compiles all. MREM_TUNE=0 and --deterministic
take the first that compiles, without timing.

Note: the choice changes the speed and, in gradients, the order of sums. The forward matmul is exact and the
same for all tiles.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import cache_folder, write_json
from mrem_deploy.kernels import backends
from mrem_deploy.kernels.gpu.launching import INTERPRETED, DoesNotCompile, dry_run, vendor

VARIABLE = "MREM_TUNE"
TIMED_RUNS = 7  # of each tile, after one that compiles it


@dataclass(frozen=True)
class Tile:
    """m × n results per program, k summed at a time; warps, pipeline stages, tile rows that run together."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8

    @property
    def constants(self) -> dict[str, int]:
        return {"BLOCK_M": self.m, "BLOCK_N": self.n, "BLOCK_K": self.k, "GROUP": self.group}

    @property
    def options(self) -> dict[str, int]:
        return {"warps": self.warps, "stages": self.stages}

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}w{self.warps}s{self.stages}"


# "codes" multiplies int8 codes, "product" quantizes what it reads, "gradient" is for the backward pass.
TILES: dict[str, dict[str, tuple[Tile, ...]]] = {
    "cuda": {
        "codes": (Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 4, 4), Tile(64, 64, 64, 4, 4)),
        "product": (Tile(128, 64, 32, 8, 2), Tile(64, 64, 32, 8, 2), Tile(32, 64, 32, 4, 2)),
        "gradient": (Tile(128, 64, 32, 8, 3), Tile(64, 64, 32, 4, 3), Tile(32, 64, 32, 4, 2)),
    },
    "hip": {
        "codes": (Tile(128, 128, 64, 8, 2), Tile(64, 64, 64, 4, 2)),
        "product": (Tile(128, 64, 32, 8, 2), Tile(64, 64, 32, 4, 2)),
        "gradient": (Tile(128, 64, 32, 8, 2), Tile(64, 64, 32, 4, 2)),
    },
}
# Small enough for several tiles in a test, large enough to be quick.
INTERPRETER_TILE = Tile(64, 64, 64, 1, 1)


def run_tiled(
    kernel: str, sizes: tuple[int, ...], like: torch.Tensor, variant: str, run: Callable[[Tile], object]
) -> None:
    """Run one matmul with the tile that suits it; `run` launches it with a given tile.

    `run` may be called many times; its last call is the one that counts. Raises DoesNotCompile if no tile
    can be compiled for this GPU.
    """
    if INTERPRETED:
        run(INTERPRETER_TILE)
        return
    tiles = TILES[vendor()][kernel]
    if (dry := dry_run()) is not None:
        _run_every(tiles[-(dry.most_tiles or len(tiles)) :], run)
        return
    usable, kind = tiles, (kernel, variant, like.dtype, like.device)
    if measures():
        key = f"{kernel} {variant} {_bucket(sizes)} {str(like.dtype).removeprefix('torch.')}"
        known = remembered(torch.cuda.get_device_name(like.device))
        best = known.tile(key, tiles, lambda tile: _milliseconds(lambda: run(tile), like.device))
        # The others stand by: sizes within a bucket may compile differently.
        usable = (best, *(tile for tile in tiles if tile != best))
    _run_first(usable, run, kind)


def measures() -> bool:
    """Whether tiles are timed, or the first is taken."""
    if os.environ.get(VARIABLE) == "0" or not backends.measures_tiles():
        return False
    return not torch.cuda.is_current_stream_capturing()


def _bucket(sizes: tuple[int, ...]) -> str:
    return "x".join(str(triton.next_power_of_2(size)) for size in sizes)


def _run_every(tiles: tuple[Tile, ...], run: Callable[[Tile], object]) -> None:
    """Compile all; an error only if none can be compiled."""
    failures = []
    for tile in tiles:
        try:
            run(tile)
        except DoesNotCompile as failure:
            failures.append(failure)
    if len(failures) == len(tiles):
        raise failures[-1]


# By kind of matmul and tile: trying to compile again would take long.
_failed: dict[tuple[object, ...], DoesNotCompile] = {}


def _run_first(tiles: tuple[Tile, ...], run: Callable[[Tile], object], kind: tuple[object, ...]) -> None:
    """The first that compiles."""
    keys = [(*kind, tile) for tile in tiles]
    for key, tile in zip(keys, tiles, strict=True):
        if key in _failed:
            continue
        try:
            run(tile)
            return
        except DoesNotCompile as failure:
            _failed[key] = failure
    raise DoesNotCompile(f"no tile compiles: {_failed[keys[-1]]}")


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """The median of a few runs by the clock of that device; infinite if it does not compile there.

    Not `triton.testing.do_bench`: that allocates 256 MiB on the current device, whichever it is.
    """
    with torch.cuda.device(device):
        try:
            call()
        except DoesNotCompile:  # also a GPU that is smaller than the lists assume
            return math.inf
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(TIMED_RUNS)]
        for start, stop in events:
            start.record()
            call()
            stop.record()
        events[-1][1].synchronize()
        return statistics.median(start.elapsed_time(stop) for start, stop in events)


@functools.cache
def remembered(device: str) -> Choices:
    plain = "".join(letter if letter.isalnum() else "-" for letter in device)
    return Choices(cache_folder() / "tuning" / f"{plain}-triton-{triton.__version__}.json")


class Choices:
    """Choices of one device, in memory and in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known = _read(path)

    def tile(self, key: str, tiles: tuple[Tile, ...], time: Callable[[Tile], float]) -> Tile:
        by_name = {str(tile): tile for tile in tiles}
        if self.known.get(key) not in by_name:  # new, or from a version with other tiles
            times = {name: time(tile) for name, tile in by_name.items()}
            best = min(times, key=lambda name: times[name])
            if math.isinf(times[best]):
                raise DoesNotCompile(f"no tile of {key!r} compiles for this GPU, or fits it")
            self.known = {**_read(self.path), **self.known, key: best}
            self._write()
        return by_name[self.known[key]]

    def _write(self) -> None:
        try:
            write_json(self.path, self.known)
        except UserError:  # without the file the next process only has to measure again
            return


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing or damaged: measure again
        return {}
    return {str(key): str(name) for key, name in found.items()} if isinstance(found, dict) else {}
