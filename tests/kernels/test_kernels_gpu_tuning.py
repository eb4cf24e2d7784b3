"""The choice of tiles: measured once, remembered, and never in the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from mrem_deploy.kernels.gpu.tuning import TILES, Choices, Tile

TILE_LIST = (Tile(128, 128, 64, 8, 3), Tile(64, 64, 64, 4, 4), Tile(32, 64, 64, 4, 2))
TIMES = {128: 3.0, 64: 1.0, 32: 2.0}


def timer(calls: list[Tile]) -> Callable[[Tile], float]:
    def time(tile: Tile) -> float:
        calls.append(tile)
        return TIMES[tile.m]

    return time


def test_the_fastest_is_chosen_once_and_remembered_on_disk(tmp_path: Path) -> None:
    calls: list[Tile] = []
    path = tmp_path / "tuning" / "device.json"
    for _ in range(2):
        choices = Choices(path)  # the second reads the file
        for _ in range(2):
            assert choices.tile("product 64", TILE_LIST, timer(calls)).m == 64
    assert calls == list(TILE_LIST)


def test_a_choice_that_is_no_longer_in_the_list_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    Choices(path).tile("product", TILE_LIST, timer([]))
    assert Choices(path).tile("product", TILE_LIST[::2], timer([])).m == 32


def test_processes_keep_what_others_found(tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    one, other = Choices(path), Choices(path)
    one.tile("a", TILE_LIST, timer([]))
    other.tile("b", TILE_LIST, timer([]))
    assert set(Choices(path).known) == {"a", "b"}


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"product": 7}'])
def test_a_damaged_file_is_measured_again(tmp_path: Path, content: str) -> None:
    path = tmp_path / "device.json"
    path.write_text(content)
    assert Choices(path).tile("product", TILE_LIST, timer([])).m == 64


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    calls: list[Tile] = []
    choices = Choices(tmp_path / "file" / "device.json")
    for _ in range(2):
        assert choices.tile("product", TILE_LIST, timer(calls)).m == 64
    assert len(calls) == len(TILE_LIST)


def test_tiles_that_do_not_fit_are_passed_over(tmp_path: Path) -> None:
    choices = Choices(tmp_path / "device.json")
    assert choices.tile("a", TILE_LIST, lambda tile: 1.0 if tile.m == 32 else float("inf")).m == 32
    with pytest.raises(RuntimeError, match="too little shared memory"):
        choices.tile("b", TILE_LIST, lambda tile: float("inf"))


def test_tiles_of_a_list_differ_by_name() -> None:
    for lists in TILES.values():
        for tiles in lists.values():
            assert len({str(tile) for tile in tiles}) == len(tiles)
