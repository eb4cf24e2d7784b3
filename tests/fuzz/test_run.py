"""What `make fuzz` counts, and what a new corpus begins with."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def run(tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_run", Path(__file__).with_name("run.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.BUILD = tmp_path
    return module


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("#2\tINITED cov: 3\n#500\tNEW cov: 4\nDone 30945 runs in 61 second(s)\n", 30945),
        ("#2\tINITED cov: 3\n#512\tNEW cov: 4\nFAILED: another value\n==1== ERROR: libFuzzer\n", 512),
        ("no such file\n", 0),
    ],
)
def test_inputs_are_counted(run: ModuleType, log: str, expected: int) -> None:
    assert run.inputs_tried(log) == expected


def test_inputs_of_all_runs_are_added_up(run: ModuleType) -> None:
    assert [run.added_up("runtime", count) for count in (30, 0, 12)] == [30, 30, 42]
    assert run.added_up("tables", 5) == 5


def test_a_new_corpus_begins_with_what_is_stored(run: ModuleType) -> None:
    run.seeds("runtime")
    stored = (Path(__file__).parent / "seeds" / "runtime.hex").read_text().split()
    found = {path.read_bytes().hex() for path in (run.BUILD / "runtime").iterdir()}
    assert found == set(stored)
    assert len(stored) > 100
    assert sum(map(len, stored)) < 2**15, "the corpus is kept small"
