"""Which tile a matmul uses: lists of tiles, and a choice by measurement that is remembered.

On a GPU every tile of a list is timed once for each kernel, type, device and size (rounded up to powers of
two); the choice is kept in memory and in the cache folder. The interpreter has one tile; a dry run compiles
all. MREM_TUNE=0 takes the first of the list without timing.

Note: the choice changes the speed and, in gradients, the order of sums. The forward matmul is exact and the
same for all tiles.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import cache_folder, write_json
from mrem_deploy.kernels.gpu.launching import INTERPRETED, is_dry_run, vendor

VARIABLE = "MREM_TUNE"


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


def choose(
    kernel: str, sizes: tuple[int, ...], like: torch.Tensor, variant: str, run: Callable[[Tile], object]
) -> Tile:
    """The tile for one matmul; `run` launches it with a given tile and may be called many times."""
    if INTERPRETED:
        return INTERPRETER_TILE
    tiles = TILES[vendor()][kernel]
    if is_dry_run():
        for tile in tiles[1:]:
            run(tile)
        return tiles[0]  # the caller runs this one
    if os.environ.get(VARIABLE) == "0" or torch.cuda.is_current_stream_capturing():
        return tiles[0]
    name = torch.cuda.get_device_name(like.device)
    bucket = "x".join(str(triton.next_power_of_2(size)) for size in sizes)
    key = f"{kernel} {variant} {bucket} {str(like.dtype).removeprefix('torch.')}"
    return remembered(name).tile(key, tiles, lambda tile: _milliseconds(lambda: run(tile)))


def _milliseconds(call: Callable[[], object]) -> float:
    try:
        return float(triton.testing.do_bench(call, return_mode="median"))
    except triton.OutOfResources:  # this GPU is smaller than the lists assume
        return math.inf


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
                raise RuntimeError(f"this GPU has too little shared memory for every tile of {key!r}")
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
