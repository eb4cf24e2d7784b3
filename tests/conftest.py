"""What every test needs before torch is imported, and the fixtures that all share."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

# Here and not in a fixture: test modules import torch and transformers while they are collected.
os.environ["HF_HUB_OFFLINE"] = "1"  # a test must not depend on the network
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # see the Makefile
# One thread: sums depend on their number, tiny models gain nothing by a second one, and on a busy machine
# threads that wait for each other make everything many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent.parent
# Files that take longest come first: one that started last would keep a single process busy at the end.
LONGEST_FIRST = (
    "test_export.py",
    "test_benchmark_compare.py",
    "test_golden.py",
    "test_reproduce.py",
    "test_kernels_gpu_interpreter.py",
    "test_api.py",
    "test_checkpoint.py",
    "test_squad_walk.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """GPUs are used only by tests that are asked for by their marker: `pytest -m gpu`. CUDA reads these
    variables when it starts, which no import does; processes that tests start inherit them."""
    if not asks_for_gpus(config.option.markexpr, os.environ):
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""


def asks_for_gpus(markers: str, environment: Mapping[str, str]) -> bool:
    """By `-m gpu` (not by `-m "not gpu"` or `-m gpu_compile`), or by the battery's own variable."""
    named = re.search(r"(?<!not )\bgpu\b", markers) is not None
    return named or environment.get("MREM_TEST_DEVICE", "").startswith("cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))  # stable: the rest stays in order


@pytest.fixture(scope="module")
def usual_signals() -> Iterator[None]:
    """Handlers as in a terminal; in the background a shell lets its commands ignore Ctrl-C."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    if hasattr(signal, "SIGHUP"):
        usual[signal.SIGHUP] = signal.SIG_DFL
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real models and data beside the repository; most machines do not have it."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"no folder {folder.name}/ with real models and data beside the repository")
    return folder
