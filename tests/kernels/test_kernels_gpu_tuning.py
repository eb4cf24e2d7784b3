"""The choice of tiles: measured once, remembered, and never in the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton exists for Linux only")

from mrem_deploy.kernels import backends
from mrem_deploy.kernels.gpu import launching, tuning
from mrem_deploy.kernels.gpu.launching import DoesNotCompile
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
    with pytest.raises(DoesNotCompile, match="no tile of 'b'"):
        choices.tile("b", TILE_LIST, lambda tile: float("inf"))


def test_tiles_of_a_list_differ_by_name() -> None:
    for lists in TILES.values():
        for tiles in lists.values():
            assert len({str(tile) for tile in tiles}) == len(tiles)


# -- which tile runs on a GPU, with the GPU replaced by a fake ----------------------------------------------

DEVICE = torch.device("cuda", 1)


class FakeEvent:
    """A clock that a run moves on by the time of its tile; it knows the device that was current."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        assert FakeGpu.current == DEVICE

    def record(self) -> None:
        self.at = FakeEvent.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, stop: FakeEvent) -> float:
        return stop.at - self.at


class FakeGpu:
    """Launches of the tiles of TILE_LIST; those in `broken` do not compile."""

    current: torch.device | None = None

    def __init__(self, broken: tuple[int, ...] = ()) -> None:
        self.broken, self.launched = broken, list[int]()

    def run(self, tile: Tile) -> None:
        self.launched.append(tile.m)
        if tile.m in self.broken:
            raise DoesNotCompile(f"the tile with {tile.m} rows")
        FakeEvent.now += TIMES[tile.m]

    def call(self, variant: str = "") -> list[int]:
        """The tiles that one matmul launched; the last one gave its result."""
        self.launched.clear()
        like = torch.zeros(1).as_subclass(OnGpu)
        tuning.run_tiled("product", (1, 64, 64, 64), like, variant, self.run)
        return self.launched


class OnGpu(torch.Tensor):
    device = DEVICE


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., FakeGpu]]:
    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        FakeGpu.current = device
        yield
        FakeGpu.current = None

    monkeypatch.setattr(tuning, "INTERPRETED", False)
    monkeypatch.setitem(TILES[launching.vendor()], "product", TILE_LIST)
    monkeypatch.setattr(tuning, "remembered", lambda name: Choices(tmp_path / f"{name}.json"))
    monkeypatch.setattr(tuning, "_failed", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "fake")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    yield FakeGpu
    backends.measure_tiles(True)


def test_tiles_are_timed_on_the_device_of_the_tensor(gpu: Callable[..., FakeGpu]) -> None:
    fake = gpu()
    runs = 1 + tuning.TIMED_RUNS
    assert fake.call() == [128] * runs + [64] * runs + [32] * runs + [64]
    assert fake.call() == [64]


def test_timing_allocates_nothing(gpu: Callable[..., FakeGpu]) -> None:
    fake, like = gpu(), torch.zeros(1).as_subclass(OnGpu)

    class Forbidden(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} is called")

    with Forbidden():
        tuning.run_tiled("product", (1, 64, 64, 64), like, "", fake.run)
    assert fake.launched[-1] == 64


def test_a_deterministic_run_takes_the_first_tile(
    gpu: Callable[..., FakeGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = gpu()
    backends.measure_tiles(False)
    assert fake.call() == [128]
    backends.measure_tiles(True)
    monkeypatch.setenv(tuning.VARIABLE, "0")
    assert fake.call() == [128]


@pytest.mark.parametrize("measured", [True, False])
def test_a_tile_that_does_not_compile_is_skipped(measured: bool, gpu: Callable[..., FakeGpu]) -> None:
    fake = gpu(broken=(128, 64))
    backends.measure_tiles(measured)
    assert fake.call()[-1] == 32
    assert fake.call() == [32]  # failures are remembered: compiling takes seconds


@pytest.mark.parametrize("measured", [True, False])
def test_no_tile_left_is_an_error_of_its_own(measured: bool, gpu: Callable[..., FakeGpu]) -> None:
    backends.measure_tiles(measured)
    with pytest.raises(DoesNotCompile, match="no tile"):
        gpu(broken=(128, 64, 32)).call()


def test_the_choice_stands_by_where_another_variant_does_not_compile(gpu: Callable[..., FakeGpu]) -> None:
    fake = gpu()
    assert fake.call()[-1] == 64
    fake.broken = (64,)
    assert fake.call() == [64, 128]
    assert fake.call() == [128]


# -- launching ----------------------------------------------------------------------------------------------


class FakeKernel:
    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.__name__ = error, "fake_kernel"

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: Any, **options: Any) -> None:
            if self.error is not None:
                raise self.error

        return run


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "INTERPRETED", False)


@pytest.mark.usefixtures("compiled")
def test_errors_of_the_compiler_are_told_from_all_others() -> None:
    from triton.runtime.errors import OutOfResources, PTXASError

    for error in (
        OutOfResources(200_000, 100_000, "shared memory"),
        PTXASError("no such instruction"),
        RuntimeError("PassManager::run failed"),
    ):
        with pytest.raises(DoesNotCompile, match="fake_kernel: "):
            launching.launch(FakeKernel(error), 1, torch.zeros(1))
    for other in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("an illegal memory access")):
        with pytest.raises(type(other), match=str(other)):
            launching.launch(FakeKernel(other), 1, torch.zeros(1))


@pytest.mark.usefixtures("compiled")
def test_the_first_launch_says_that_kernels_are_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    launching.announce.cache_clear()
    for _ in range(2):
        launching.launch(FakeKernel(), 1, torch.zeros(1))
    assert capsys.readouterr().err.count("compiling kernels") == 1


def test_an_op_without_a_kernel_is_the_references_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from mrem_deploy.kernels import reference
    from mrem_deploy.kernels.gpu import linear, ops
    from mrem_deploy.kernels.quantized import Quantized
    from mrem_deploy.numerics import activation_grid, symmetric_grid

    tried = []

    def broken(*arguments: Any) -> None:
        tried.append(arguments)
        raise DoesNotCompile("product_kernel: PassManager::run failed")

    monkeypatch.setattr(linear, "linear", broken)
    monkeypatch.setattr(ops, "_without_kernel", set())
    scale = torch.tensor(0.1)
    arguments = (torch.randn(3, 4), torch.randn(2, 4), None, Quantized(scale, activation_grid(8)),
                 Quantized(scale, symmetric_grid(4)))  # fmt: skip
    with pytest.warns(RuntimeWarning, match=r"linear is computed in plain torch.*PassManager") as warned:
        found = [ops.linear(*arguments) for _ in range(2)]
    assert len(warned) == len(tried) == 1
    assert all(torch.equal(y, reference.linear(*arguments)) for y in found)


def test_the_probe_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    from mrem_deploy.kernels import reference
    from mrem_deploy.kernels.gpu import probe

    def fails(error: Exception) -> str:
        def run(*arguments: Any) -> None:
            raise error

        monkeypatch.setattr(probe.fake_quant, "fake_quant", run)
        return probe.problem(torch.device("cpu"))

    none = RuntimeError("Failed to find C compiler. Please specify via CC environment variable")
    assert fails(none) == "Triton needs a C compiler at run time, and there is none"
    assert "C compiler that Triton needs" in fails(subprocess.CalledProcessError(1, ["gcc", "main.c"]))
    assert "(no kernel image)" in fails(RuntimeError("no kernel image"))
    monkeypatch.setattr(probe.fake_quant, "fake_quant", lambda x, scale, grid: x)
    assert "other numbers" in probe.problem(torch.device("cpu"))
    monkeypatch.setattr(probe.fake_quant, "fake_quant", reference.fake_quant)
    assert probe.problem(torch.device("cpu")) == ""
