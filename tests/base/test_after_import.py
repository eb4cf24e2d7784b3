"""A call right after the first import of a module, which stays the module that it is."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrem_deploy.base.after_import import after_import

NAME = "a_package_to_watch.inner"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "a_package_to_watch"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "inner.py").write_text("TABLE = {}\n")
    (folder / "broken.py").write_text("raise ValueError('broken')\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.startswith("a_package_to_watch")]:
        del sys.modules[name]


def test_it_is_called_once_when_the_module_is_complete(package: None) -> None:
    calls: list[dict[str, str]] = []
    after_import(NAME, lambda: calls.append(sys.modules[NAME].TABLE))
    assert calls == []
    module = importlib.import_module(NAME)
    assert calls == [{}]
    assert calls[0] is module.TABLE
    importlib.import_module(NAME)
    assert len(calls) == 1


def test_a_module_that_is_there_already(package: None) -> None:
    importlib.import_module(NAME)
    calls: list[int] = []
    after_import(NAME, lambda: calls.append(1))
    assert calls == [1]


def test_the_module_can_still_be_inspected_and_loaded_again(package: None) -> None:
    calls: list[int] = []
    after_import(NAME, lambda: calls.append(1))
    module = importlib.import_module(NAME)
    assert inspect.getsource(module) == "TABLE = {}\n"
    importlib.reload(module)
    assert calls == [1, 1]


def test_two_watchers(package: None) -> None:
    calls: list[str] = []
    after_import(NAME, lambda: calls.append("first"))
    after_import(NAME, lambda: calls.append("second"))
    importlib.import_module(NAME)
    assert sorted(calls) == ["first", "second"]


def test_a_module_that_fails_or_is_missing(package: None) -> None:
    calls: list[int] = []
    for name in ("a_package_to_watch.broken", "a_package_to_watch.missing"):
        after_import(name, lambda: calls.append(1))
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module("a_package_to_watch.broken")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("a_package_to_watch.missing")
    assert calls == []


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, mrem_deploy; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
