"""Hidden states of many examples, one row per token, without padding; on a GPU, in memory or in mapped files.

4,096 examples of 128 tokens at 768 wide take 1.5 GiB for one hidden state. A run on a GPU keeps them there if
they fit, which saves two copies per batch. What exceeds the memory budget is in memory-mapped files, which
the operating system pages in as needed. The values are the same in all three places.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
import psutil
import torch

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.units import MIB
from mrem_deploy.recipe import Recipe, parse_megabytes

BYTES_PER_VALUE = 4  # float32: what comes back is what was put, to the bit


class NoSpace(UserError):
    """The disk is too small for the cache."""


@dataclass(frozen=True)
class CacheSettings:
    """How much memory the cache may take, and where it goes beyond that."""

    max_memory_mb: float
    folder: Path | None = None  # None: the system's temporary folder
    device: torch.device | None = None  # where it goes first
    max_device_mb: float = 0.0

    @classmethod
    def of(cls, recipe: Recipe, device: torch.device | None = None) -> CacheSettings:
        """As --max-memory and --cache-dir say; without --max-memory half of what is free. On a GPU, half of
        its free memory comes first."""
        folder = Path(recipe.cache_dir) if recipe.cache_dir else None
        memory = psutil.virtual_memory().available / MIB / 2
        if recipe.max_memory is not None:
            memory = parse_megabytes(recipe.max_memory)
        if device is None or device.type != "cuda":
            return cls(memory, folder)
        free, _ = torch.cuda.mem_get_info(device)
        return cls(memory, folder, device, free / MIB / 2)

    def share(self, own: int, total: int) -> CacheSettings:
        """The part of one of several caches, by the tokens of each."""
        return replace(
            self,
            max_memory_mb=self.max_memory_mb * own / total,
            max_device_mb=self.max_device_mb * own / total,
        )

    def beside(self, other: ActivationCache | None) -> CacheSettings:
        """What another cache leaves over."""
        if other is None:
            return self
        return replace(
            self,
            max_memory_mb=max(0.0, self.max_memory_mb - other.memory_mb),
            max_device_mb=max(0.0, self.max_device_mb - other.device_mb),
        )


class ActivationCache:
    """`count` ragged arrays of one row per token: by default the full-precision and the quantized stream.

    An example of length 0 takes no space, and must be neither put nor asked for.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        width: int,
        max_memory_mb: float,
        folder: Path | None,
        count: int = 2,
        device: torch.device | None = None,
        max_device_mb: float = 0.0,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        shape = (int(self.offsets[-1]), width)
        self.megabytes = count * shape[0] * shape[1] * BYTES_PER_VALUE / MIB
        self._arrays: list[torch.Tensor] = []
        self._files: list[Path] = []
        if device is not None and self.megabytes <= max_device_mb:
            self._arrays = _on_device(device, shape, count)
        self.on_device = bool(self._arrays)
        self.on_disk = not self.on_device and self.megabytes > max_memory_mb
        if self.on_device:
            return
        if not self.on_disk:
            self._arrays = [torch.empty(shape) for _ in range(count)]
            return
        where = _usable(folder, self.megabytes)
        try:
            for _ in range(count):
                self._arrays.append(self._mapped(where, shape))
        except OSError as error:
            self.close()
            raise NoSpace(
                f"the activation cache cannot be written to {where}: {error}", "give another --cache-dir"
            ) from error

    @classmethod
    def made(
        cls, lengths: np.ndarray, width: int, settings: CacheSettings, count: int = 2
    ) -> ActivationCache:
        """Where the settings allow."""
        return cls(
            lengths,
            width,
            settings.max_memory_mb,
            settings.folder,
            count,
            settings.device,
            settings.max_device_mb,
        )

    @property
    def memory_mb(self) -> float:
        """What of it counts against the memory budget."""
        return 0.0 if self.on_disk or self.on_device else self.megabytes

    @property
    def device_mb(self) -> float:
        """What of it counts against the budget of the GPU."""
        return self.megabytes if self.on_device else 0.0

    @property
    def arrays(self) -> list[torch.Tensor]:
        """What it holds, (tokens of all examples, width) each."""
        return self._arrays

    def _mapped(self, where: Path, shape: tuple[int, int]) -> torch.Tensor:
        """A tensor in a separate file.

        The space is reserved now, because a disk that fills up later would end the process. The file has no
        name where the system allows that, so that a kill leaves nothing behind.
        """
        with self._nameless(where) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, shape[0] * shape[1] * BYTES_PER_VALUE)
            values = np.memmap(file, dtype=np.float32, mode="r+" if file.seek(0, 2) else "w+", shape=shape)
        return torch.from_numpy(values)

    def _nameless(self, where: Path) -> IO[bytes]:
        if os.name == "posix":
            return tempfile.TemporaryFile(prefix="mrem-cache-", suffix=".bin", dir=where)
        handle, name = tempfile.mkstemp(prefix="mrem-cache-", suffix=".bin", dir=where)
        self._files.append(Path(name))
        return os.fdopen(handle, "r+b")

    def _remove_files(self) -> None:
        while self._files:
            self._files.pop().unlink(missing_ok=True)

    def put(self, indices: np.ndarray, *values: torch.Tensor | None) -> None:
        """Store (B, T, H) values over what is there; None leaves that array as it is."""
        for array, value in zip(self._arrays, values, strict=True):
            if value is None:
                continue
            here = value.to(array.device, torch.float32)
            for row, i in zip(here, indices, strict=True):  # a copy of memory each: no lists of positions
                start, stop = self.offsets[i], self.offsets[i + 1]
                array[start:stop] = row[: stop - start]

    def get(self, indices: np.ndarray, padded: int, which: int | None = None) -> list[torch.Tensor]:
        """All arrays, or only number `which`, as (B, padded, H); padding is zero."""
        arrays = self._arrays if which is None else [self._arrays[which]]
        return [self._padded(array, indices, padded) for array in arrays]

    def _padded(self, array: torch.Tensor, indices: np.ndarray, padded: int) -> torch.Tensor:
        value = torch.empty(len(indices), padded, array.shape[1], device=array.device)
        for row, i in zip(value, indices, strict=True):
            start, stop = self.offsets[i], self.offsets[i + 1]
            row[: stop - start] = array[start:stop]
            row[stop - start :] = 0.0
        return value

    def close(self) -> None:
        self._arrays = []
        self._remove_files()


def _on_device(device: torch.device, shape: tuple[int, int], count: int) -> list[torch.Tensor]:
    """The arrays there; none if the device has less memory than it said."""
    try:
        return [torch.empty(shape, device=device) for _ in range(count)]
    except torch.OutOfMemoryError:
        return []


def _usable(folder: Path | None, megabytes: float) -> Path:
    """The folder for the files, after checking that it can be written and has the space."""
    where = folder or Path(tempfile.gettempdir())
    try:
        where.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(where).free / MIB
    except OSError as error:
        raise UserError(
            f"the cache folder {where} cannot be used: {error}", "give another one with --cache-dir"
        ) from error
    if free < megabytes:
        raise NoSpace(
            f"the activation cache needs {megabytes:.0f} MiB and {where} has {free:.0f} MiB free",
            "give a --cache-dir with more space, raise --max-memory, or lower --calib-size or --max-length",
        )
    return where
