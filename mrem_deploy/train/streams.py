"""Inputs of the module being trained: both streams of every calibration example, without padding.

4,096 examples of 128 tokens at 768 wide take 3 GiB for the two streams. What exceeds the memory budget
is kept in memory-mapped files instead, which the operating system pages in as needed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.progress import say, track
from mrem_deploy.base.units import MIB
from mrem_deploy.data.encoded import Encoded, sorted_batches
from mrem_deploy.models.parts import Part
from mrem_deploy.recipe import Recipe, parse_megabytes


class ActivationCache:
    """Two ragged arrays (full-precision and quantized stream) of one row per token."""

    def __init__(self, lengths: np.ndarray, width: int, max_memory_mb: float, folder: Path | None) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        shape = (int(self.offsets[-1]), width)
        self.megabytes = 2 * shape[0] * shape[1] * 4 / 2**20
        self.on_disk = self.megabytes > max_memory_mb
        self._streams: list[torch.Tensor] = []
        self._files: list[Path] = []
        if not self.on_disk:
            self._streams = [torch.empty(shape) for _ in range(2)]
            return
        where = _usable(folder, self.megabytes)
        try:
            for _ in range(2):
                self._streams.append(self._mapped(where, shape))
        except OSError as error:
            self.close()
            raise UserError(
                f"the activation cache cannot be written to {where}: {error}", "give another --cache-dir"
            ) from error

    def _mapped(self, where: Path, shape: tuple[int, int]) -> torch.Tensor:
        """A tensor in a separate file.

        The space is reserved now, because a disk that fills up later would end the process. The file's
        name is removed at once where the system allows it, so that a kill leaves nothing behind.
        """
        handle, name = tempfile.mkstemp(prefix="mrem-cache-", suffix=".bin", dir=where)
        self._files.append(Path(name))
        with os.fdopen(handle, "r+b") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, shape[0] * shape[1] * 4)
            values = np.memmap(file, dtype=np.float32, mode="r+" if file.seek(0, 2) else "w+", shape=shape)
        if os.name == "posix":
            self._remove_files()
        return torch.from_numpy(values)

    def _remove_files(self) -> None:
        while self._files:
            self._files.pop().unlink(missing_ok=True)

    def rows(self, indices: np.ndarray, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of the examples' tokens in the flat arrays, and where they sit in (B, padded)."""
        positions = self.offsets[indices][:, None] + np.arange(padded)[None, :]
        mask = np.arange(padded)[None, :] < self.lengths[indices][:, None]
        return torch.from_numpy(positions[mask]), torch.from_numpy(mask)

    def put(self, indices: np.ndarray, clean: torch.Tensor, noisy: torch.Tensor) -> None:
        """Store (B, T, H) outputs over the module's inputs, which are no longer needed."""
        positions, mask = self.rows(indices, clean.shape[1])
        for stream, value in zip(self._streams, (clean, noisy), strict=True):
            stream[positions] = value.to("cpu", torch.float32)[mask]

    def get(self, indices: np.ndarray, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both streams as (B, padded, H); padding is zero."""
        positions, mask = self.rows(indices, padded)
        out = []
        for stream in self._streams:
            value = torch.zeros(*mask.shape, stream.shape[1])
            value[mask] = stream[positions]
            out.append(value)
        return out[0], out[1]

    def close(self) -> None:
        self._streams = []
        self._remove_files()


def _usable(folder: Path | None, megabytes: float) -> Path:
    """The folder for the files, after checking that it can be written and has the space."""
    where = folder or Path(tempfile.gettempdir())
    try:
        where.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(where).free / 2**20
    except OSError as error:
        raise UserError(
            f"the cache folder {where} cannot be used: {error}", "give another one with --cache-dir"
        ) from error
    if free < megabytes:
        raise UserError(
            f"the activation cache needs {megabytes:.0f} MiB and {where} has {free:.0f} MiB free",
            "give a --cache-dir with more space, raise --max-memory, or lower --calib-size or --max-length",
        )
    return where


@dataclass(frozen=True)
class CacheSettings:
    """How much memory the cache may take, and where it goes beyond that."""

    max_memory_mb: float
    folder: Path | None = None  # None: the system's temporary folder

    @classmethod
    def of(cls, recipe: Recipe) -> CacheSettings:
        """As --max-memory and --cache-dir say; without --max-memory half of what is free."""
        folder = Path(recipe.cache_dir) if recipe.cache_dir else None
        if recipe.max_memory is not None:
            return cls(parse_megabytes(recipe.max_memory), folder)
        return cls(psutil.virtual_memory().available / MIB / 2, folder)


class Streams:
    """The full-precision and the quantized stream at the current cut, over the calibration set."""

    def __init__(self, calibration: Encoded, width: int, settings: CacheSettings, batch_size: int) -> None:
        self.calibration = calibration
        self.batch_size = batch_size
        self.cache: ActivationCache | None = None
        self._width, self._settings = width, settings

    def batch(
        self, indices: np.ndarray, device: torch.device
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None, torch.Tensor | None]:
        """The token batch with both inputs of the module; None for the first module's."""
        tokens = self.calibration.batch(indices)
        tokens.pop("labels", None)
        clean = noisy = None
        if self.cache is not None:
            clean, noisy = self.cache.get(indices, tokens["input_ids"].shape[1])
            clean, noisy = clean.to(device), noisy.to(device)
        return {name: value.to(device) for name, value in tokens.items()}, clean, noisy

    @torch.no_grad()
    def advance(self, teacher: Part, student: Part, label: str) -> None:
        """Replace the inputs of a trained module by its outputs."""
        device = next(student.parameters()).device
        target = self.cache or ActivationCache(
            self.calibration.lengths, self._width, self._settings.max_memory_mb, self._settings.folder
        )
        if target.on_disk and self.cache is None:
            say(f"activation cache: {target.megabytes:.0f} MiB, memory-mapped on disk")
        try:
            for indices in track(sorted_batches(self.calibration.lengths, self.batch_size), label):
                tokens, clean, noisy = self.batch(indices, device)
                target.put(indices, teacher(clean, tokens).hidden[-1], student(noisy, tokens).hidden[-1])
        except BaseException:
            target.close()  # `close` does not know it yet, and its files may take gigabytes
            raise
        self.cache = target

    def close(self) -> None:
        if self.cache is not None:
            self.cache.close()
