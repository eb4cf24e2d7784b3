"""The activation cache: in memory or memory-mapped, the same numbers; and nothing left behind."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrem_deploy.base.errors import UserError
from mrem_deploy.recipe import Recipe
from mrem_deploy.train.activation_cache import ActivationCache, CacheSettings

WIDTH = 5
# A lone token, the longest in the middle, two of one length: offsets that a wrong sum would mix up.
LENGTHS = np.array([3, 1, 7, 2, 2])
IN_MEMORY, ON_DISK = 100.0, 0.0
GPU = torch.device("cuda", 0)


def values(batch: np.ndarray, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T, H) of both streams, with numbers in the padding as well."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(batch), int(LENGTHS[batch].max()), WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@pytest.fixture(params=["memory", "disk", "device"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> ActivationCache:
    """The CPU stands for the GPU, which may be absent."""
    memory = IN_MEMORY if request.param == "memory" else ON_DISK
    device = (torch.device("cpu"), 1.0) if request.param == "device" else (None, 0.0)
    made = ActivationCache(LENGTHS, WIDTH, memory, tmp_path / "deep" / "folder", 2, *device)
    assert made.on_disk == (request.param == "disk")
    assert made.on_device == (request.param == "device")
    yield made
    made.close()


def test_what_was_put_comes_back_in_any_company(cache: ActivationCache) -> None:
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for seed, batch in enumerate((np.array([2, 0]), np.array([1]), np.array([4, 3]))):
        clean, noisy = values(batch, seed)
        cache.put(batch, clean, noisy)
        for row, i in enumerate(batch):
            kept[int(i)] = (clean[row, : LENGTHS[i]], noisy[row, : LENGTHS[i]])
    for batch, padded in (
        (np.array([4, 2, 1]), 7),
        (np.array([1, 1, 0]), 3),
        (np.array([3]), 2),
        (np.array([1]), 9),
    ):
        for which, stream in enumerate(cache.get(batch, padded)):
            assert stream.shape == (len(batch), padded, WIDTH)
            for row, i in enumerate(batch):
                assert torch.equal(stream[row, : LENGTHS[i]], kept[int(i)][which])
                assert (stream[row, LENGTHS[i] :] == 0).all()  # padding is zero, not a neighbour's token


def test_putting_again_replaces_only_what_is_put(cache: ActivationCache) -> None:
    everything = np.arange(5)
    cache.put(everything, *values(everything, 0))
    before = cache.get(everything, 7)
    one = np.array([2])
    cache.put(one, *values(one, 1))
    after = cache.get(everything, 7)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[[0, 1, 3, 4]], new[[0, 1, 3, 4]])
        assert not torch.equal(old[2], new[2])


def test_what_comes_back_is_a_copy(cache: ActivationCache) -> None:
    everything = np.arange(5)
    cache.put(everything, *values(everything, 0))
    cache.get(everything, 7)[0].zero_()
    assert cache.get(everything, 7)[0].abs().sum() > 0


def test_the_budget_decides_and_counts_both_streams(tmp_path: Path) -> None:
    lengths = np.array([128] * 8)
    exact = 2 * 1024 * 16 * 4 / 2**20  # streams · tokens · width · bytes, in MiB
    for budget, on_disk in ((exact, False), (exact * 0.999, True)):
        made = ActivationCache(lengths, 16, budget, tmp_path)
        assert made.megabytes == exact
        assert made.on_disk == on_disk
        made.close()


def test_padding_is_not_stored(tmp_path: Path) -> None:
    made = ActivationCache(LENGTHS, WIDTH, ON_DISK, tmp_path)
    assert made.megabytes * 2**20 == LENGTHS.sum() * WIDTH * 4 * 2
    made.close()


@pytest.mark.skipif(os.name != "posix", reason="elsewhere an open file cannot lose its name")
def test_a_kill_leaves_no_files(tmp_path: Path) -> None:
    """The names are gone as soon as the files are mapped; what was stored is still there."""
    made = ActivationCache(LENGTHS, WIDTH, ON_DISK, tmp_path)
    assert list(tmp_path.iterdir()) == []
    one = np.array([0])
    value = torch.arange(float(LENGTHS[0] * WIDTH)).reshape(1, LENGTHS[0], WIDTH)
    made.put(one, value, -value)
    clean, noisy = made.get(one, int(LENGTHS[0]))
    assert torch.equal(clean, value)
    assert torch.equal(noisy, -value)
    made.close()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system reserves no space")
def test_a_kill_while_the_space_is_reserved_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may take minutes: some file systems write every byte for it."""
    seen: list[list[Path]] = []
    reserve = os.posix_fallocate

    def look(*given: int) -> None:
        seen.append(list(tmp_path.iterdir()))
        reserve(*given)

    monkeypatch.setattr(os, "posix_fallocate", look)
    ActivationCache(LENGTHS, WIDTH, ON_DISK, tmp_path).close()
    assert seen == [[], []]


def test_space_is_reserved_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(UserError, match="No space left"):
        ActivationCache(LENGTHS, WIDTH, ON_DISK, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_closing_leaves_the_neighbours(tmp_path: Path) -> None:
    neighbour = tmp_path / "mine.txt"
    neighbour.write_text("keep")
    ActivationCache(LENGTHS, WIDTH, ON_DISK, tmp_path).close()
    assert list(tmp_path.iterdir()) == [neighbour]


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(UserError) as caught:
        ActivationCache(LENGTHS, WIDTH, ON_DISK, path)
    assert str(path) in caught.value.problem
    assert "--cache-dir" in caught.value.remedy


def test_a_disk_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 100, 10))
    with pytest.raises(UserError) as caught:
        ActivationCache(np.array([1000] * 1000), 64, ON_DISK, tmp_path)
    assert "488 MiB" in caught.value.problem  # 2 · 10⁶ · 64 · 4 bytes
    assert "--calib-size" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


# -- on a GPU ------------------------------------------------------------------------------------------------


def test_a_gpu_gives_half_of_its_free_memory_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * 2**30, 8 * 2**30))
    found = CacheSettings.of(Recipe(max_memory="10MB"), GPU)
    assert (found.device, found.max_device_mb) == (GPU, 3 * 1024)
    on_cpu = CacheSettings.of(Recipe(max_memory="10MB"), torch.device("cpu"))
    assert found.max_memory_mb == on_cpu.max_memory_mb
    assert on_cpu.device is None


def test_what_does_not_fit_on_the_gpu_goes_to_memory(tmp_path: Path) -> None:
    lengths, device = np.array([128] * 8), torch.device("cpu")
    exact = 2 * 1024 * 16 * 4 / 2**20
    settings = CacheSettings(100.0, tmp_path, device, exact)
    first = ActivationCache.made(lengths, 16, settings)
    assert (first.on_device, first.device_mb, first.memory_mb) == (True, exact, 0.0)
    second = ActivationCache.made(lengths, 16, settings.beside(first))
    assert (second.on_device, second.device_mb, second.memory_mb) == (False, 0.0, exact)
    assert settings.beside(second).max_memory_mb == 100.0 - exact
    assert settings.share(1, 4) == CacheSettings(25.0, tmp_path, device, exact / 4)


def test_a_gpu_without_the_memory_that_it_announced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = torch.empty

    def empty(*shape: Any, device: Any = None, **options: Any) -> torch.Tensor:
        if device == GPU:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(*shape, **options)

    monkeypatch.setattr(torch, "empty", empty)
    made = ActivationCache.made(LENGTHS, WIDTH, CacheSettings(IN_MEMORY, tmp_path, GPU, 100.0))
    assert not made.on_device
    assert not made.on_disk
