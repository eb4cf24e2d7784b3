"""A result with its pages and plots, drawn once for each file of tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from a_result import Page, write


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("result")
    write(folder, draw=True)
    return folder


@pytest.fixture(scope="module")
def page(written: Path) -> Page:
    return Page((written / "report.html").read_text(encoding="utf-8"))
