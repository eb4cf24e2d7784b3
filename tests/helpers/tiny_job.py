"""A whole quantization run, small enough for a test: a two-layer model, sixty sentences, a few steps."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_bert import NEGATIVE, POSITIVE, WORDS, save_tiny_bert

from mrem_deploy import quantize
from mrem_deploy.base import cli

TRAIN, DEV = 60, 40  # sentences
POSITIONS = 32  # the most tokens that the tiny model reads


def save_model(folder: Path, architecture: str = "BertForSequenceClassification", **config: Any) -> Path:
    """A spread of weights that matters: with the usual one all sentences get the same answer."""
    return save_tiny_bert(folder, architecture, **{"initializer_range": 0.4} | config)


def sentences(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of text and label, 0 or 1, in lengths from 2 to 11 words."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        label = draw.randrange(2)
        words = [*draw.choices(WORDS, k=draw.randint(1, 10)), draw.choice((NEGATIVE, POSITIVE)[label])]
        rows.append({"text": " ".join(words), "label": label})
    return rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_reviews(folder: Path) -> Path:
    write_jsonl(folder / "train.jsonl", sentences(TRAIN, seed=1))
    write_jsonl(folder / "dev.jsonl", sentences(DEV, seed=2))
    return folder


@contextmanager
def workshop_in(root: Path) -> Iterator[Path]:
    """A folder with `model` and `data`; predictions are kept in a cache of its own meanwhile."""
    save_model(root / "model")
    write_reviews(root / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MREM_CACHE", str(root / "cache"))
        yield root


class Job:
    """Options of `mrem quantize` on the tiny model; every one can be changed or left out (None)."""

    def __init__(self, **options: Any) -> None:
        self.options: dict[str, Any] = {
            "task": "text-classification",
            "bits": "2-2-8",
            "modules": 2,
            "steps": 6,
            "checkpoint_steps": 4,
            "calib_size": 32,
            "batch_size": 8,
            "max_length": POSITIONS,
            "init_batches": 2,
            "lr": 1e-3,
            "export": "none",  # tracing the model takes longer than all the rest of such a run
            **options,
        }

    def set(self, **options: Any) -> None:
        self.options.update(options)

    def argv(self, *more: str) -> list[str]:
        given = {f"--{name.replace('_', '-')}": value for name, value in self.options.items()}
        return [*(str(p) for pair in given.items() if pair[1] is not None for p in pair), *more]

    def run(self, *more: str) -> int:
        """The exit code, as a shell would see it."""
        try:
            return cli.run(quantize.main, self.argv(*more))
        except SystemExit as exit:  # argparse's own refusals
            return exit.code if isinstance(exit.code, int) else 1


def job_in(workshop: Path, out: str, **options: Any) -> Job:
    """The job on the workshop's model and data, unless they are among the options."""
    return Job(**{"model": workshop / "model", "data": workshop / "data", "out": workshop / out} | options)
