"""Data files as people write them, and what was read from them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mrem_deploy.data.task_data import (
    Texts,
)


def tsv(path: Path, *rows: str) -> Path:
    """Fields are separated by | here, for the eye."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row.replace("|", "\t") + "\n" for row in rows), encoding="utf-8")
    return path


def jsonl(path: Path, *rows: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def check(found: Texts, first: list[str], second: list[str] | None, labels: list[float]) -> None:
    assert found.first == first
    assert found.second == second
    assert found.labels is not None
    assert found.labels == pytest.approx(np.array(labels))
