"""Do something as soon as a module of another package has been imported, without importing it.

For packages that take so long to import that only those who use them should wait for them.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then` now if the module is there, else right after its first import."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Watch(name, then))


class _Watch(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and adds a call to the end of its execution."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then
        self._asks = False  # the other finders, among which another watcher may ask this one

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._asks:
            return None
        self._asks = True
        try:
            specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self._asks = False
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: importlib.abc.Loader) -> None:
        """Only of this one object; it stays the loader that inspection and reloading expect."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._then()

        vars(loader)["exec_module"] = exec_module
