"""What `benchmark compare` found: the conditions and a row for every model, as types and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import UNREADABLE

BASE = "ORT fp32"
# Of embedders and rerankers: column, field, digits.
RANKED = (("cosine", "cosine", 2), ("first ten, %", "overlap", 1), ("rank corr.", "rank", 3),
          ("drift", "drift", 4))  # fmt: skip
FIDELITY_NOTE = f" Flips: predictions that differ from {BASE}'s. KL: their mean divergence from it, in nats."


@dataclass(frozen=True)
class Score:
    """The task's metric in percent, and the change against ORT fp32 in points, with its 95% interval.

    The interval comes from a paired bootstrap over the examples. Metrics that cannot be resampled have none.
    Flips and KL (evaluate/fidelity.py) are against ORT fp32 as well; embeddings and regressions have none.
    """

    value: float
    agreement: float  # percent of predictions that equal those of ORT fp32
    change: float
    standard_error: float | None = None
    low: float | None = None
    high: float | None = None
    flips: float | None = None  # percent of predictions that changed
    flips_error: float | None = None
    kl: float | None = None  # nats
    kl_error: float | None = None
    cosine: float | None = None  # of embeddings, with those of ORT fp32, times 100
    overlap: float | None = None  # percent of the first ten that both find
    overlap_error: float | None = None
    rank: float | None = None  # rank correlation over what ORT fp32 finds
    drift: float | None = None  # mean |score − score of ORT fp32|


@dataclass(frozen=True)
class Speed:
    """Latency of one run; `ratio` says how many times faster than ORT fp32 (median over rounds)."""

    p50_ms: float
    p95_ms: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    rounds_ms: tuple[float, ...]


@dataclass(frozen=True)
class Entry:
    """One model of the comparison: a row of the table and a bubble in the picture."""

    name: str
    ours: bool
    file_mib: float
    score: Score
    speed: Speed
    recipe_digest: str | None = None  # of ours: the run that made it

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Entry:
        speed = dict(content["speed"])
        for name in ("ratio_quartiles", "rounds_ms"):
            speed[name] = tuple(speed[name])
        parts = {"score": Score(**content["score"]), "speed": Speed(**speed)}
        return cls(**{**content, **parts})


@dataclass(frozen=True)
class Conditions:
    """What the numbers belong to: the model, the examples and how latency was measured."""

    model: str
    task: str
    metric: str
    split: str
    examples: int
    digest: str  # names the tokens of the examples
    shape: str
    threads: int
    rounds: int
    cpu: str


def read(path: Path) -> tuple[Conditions, list[Entry]]:
    """The content of an earlier compare.json."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Conditions(**content["settings"]), [Entry.from_dict(row) for row in content["rows"]]
    except UNREADABLE as error:
        raise UserError(
            f"--from {path} cannot be read as a compare.json: {error}",
            "give the compare.json that this command wrote",
        ) from error


def table_and_notes(conditions: Conditions, entries: Sequence[Entry]) -> tuple[str, str]:
    """The table and the sentences under it."""
    from mrem_deploy.benchmarks.output import table

    fidelity = any(entry.score.flips is not None for entry in entries)  # older files have none
    ranked = [row for row in RANKED if any(getattr(entry.score, row[1]) is not None for entry in entries)]
    head = [
        f"{conditions.model}, {conditions.task}",
        f"{conditions.metric}, %",
        "change",
        *(("flips, %", "KL") if fidelity else ()),
        *(title for title, _, _ in ranked),
        "size, MiB",
        "latency, ms",
        "times faster",
    ]
    rows = [
        [
            entry.name,
            f"{entry.score.value:.2f}",
            _change(entry.score) if entry.name != BASE else "",
            *(_fidelity(entry) if fidelity else ()),
            *(_ranked(entry, name, digits) for _, name, digits in ranked),
            f"{entry.file_mib:.1f}",
            f"{entry.speed.p50_ms:.1f}",
            f"{entry.speed.ratio:.2f}",
        ]
        for entry in entries
    ]
    threads = f"{conditions.threads} thread{'s' if conditions.threads > 1 else ''}"
    summary = (
        f"{conditions.metric} on {conditions.examples:,} examples of {conditions.split}; ± is one standard "
        f"error of the change from {BASE}.{FIDELITY_NOTE if fidelity else ''} Latency: median of "
        f"{conditions.rounds} interleaved rounds, "
        f"{conditions.shape.replace('x', ' × ')} tokens, {threads}, {conditions.cpu}."
    )
    return table(head, rows), summary


def _ranked(entry: Entry, name: str, digits: int) -> str:
    value, error = getattr(entry.score, name), getattr(entry.score, f"{name}_error", None)
    if entry.name == BASE or value is None:
        return ""
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def _fidelity(entry: Entry) -> tuple[str, str]:
    score = entry.score
    if entry.name == BASE or score.flips is None or score.kl is None:
        return "", ""
    flips_error = "" if score.flips_error is None else f" ± {score.flips_error:.2f}"
    kl_error = "" if score.kl_error is None else f" ± {score.kl_error:.4f}"
    return f"{score.flips:.2f}{flips_error}", f"{score.kl:.4f}{kl_error}"


def _change(score: Score) -> str:
    signed = f"{score.change:+.2f}".replace("-", "−")
    return signed if score.standard_error is None else f"{signed} ± {score.standard_error:.2f}"
