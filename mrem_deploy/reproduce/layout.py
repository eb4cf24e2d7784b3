"""A table as records: numbers for csv and json, and columns that show them to people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mrem_deploy.base.format import NONE, is_number
from mrem_deploy.base.tables import Table, short
from mrem_deploy.evaluate.metrics import metric_of
from mrem_deploy.evaluate.uncertainty import Spread
from mrem_deploy.report.plots import Plot
from mrem_deploy.reproduce.claims import Finding
from mrem_deploy.reproduce.paper import Figure
from mrem_deploy.reproduce.plan import Subject
from mrem_deploy.reproduce.results import Gap, Measured

Record = dict[str, Any]  # a row as csv and json get it
NAMES = {
    "full": "full precision",
    "qat": "QAT",
    "rem": "REM",
    "mrem-s": "MREM-S",
    "mrem-p": "MREM-P",
    "ptq": "no training",
    "gobo": "GOBO",
}


@dataclass
class Shown:
    """An experiment as it is shown: `records` are the rows, `columns` show them."""

    columns: list[Column]
    records: list[Record]
    findings: list[Finding] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    text_columns: int = 2

    def table(self, title: str) -> Table:
        header = tuple(column.header for column in self.columns)
        rows = [tuple(column.show(record) for column in self.columns) for record in self.records]
        return Table(title, header, rows, text_columns=self.text_columns)


@dataclass(frozen=True)
class Column:
    header: str
    show: Callable[[Record], str]


def words(key: str, header: str) -> Column:
    return Column(header, lambda record: str(record.get(key) or ""))


def method(key: str = "method", header: str = "Method") -> Column:
    return Column(header, lambda record: NAMES.get(record[key], str(record[key])))


def number(key: str, header: str, digits: int = 1) -> Column:
    def show(record: Record) -> str:
        value = record.get(key)
        return f"{value:,.{digits}f}" if is_number(value) else NONE

    return Column(header, show)


def quantity(key: str, header: str) -> Column:
    def show(record: Record) -> str:
        value = record.get(key)
        return short(value) if is_number(value) else NONE

    return Column(header, show)


def spread(key: str, header: str, digits: int = 2) -> Column:
    """mean ± std of `key` and `key_std`."""

    def show(record: Record) -> str:
        value, std = record.get(key), record.get(f"{key}_std")
        if not is_number(value):
            return NONE
        return f"{value:.{digits}f}" + (f" ± {std:.{digits}f}" if is_number(std) else "")

    return Column(header, show)


def difference(key: str, header: str) -> Column:
    """value ± standard error of `key` and `key_error`."""

    def show(record: Record) -> str:
        value, error = record.get(key), record.get(f"{key}_error")
        if not is_number(value):
            return NONE
        sign = f"{value:+.2f}".replace("-", "−")
        return sign + (f" ± {error:.2f}" if is_number(error) else "")

    return Column(header, show)


def measured(key: str, header: str, digits: int) -> Column:
    """value ± standard error of `key` and `key_error`, without a sign."""

    def show(record: Record) -> str:
        value, error = record.get(key), record.get(f"{key}_error")
        if not is_number(value):
            return NONE
        return f"{value:.{digits}f}" + (f" ± {error:.{digits}f}" if is_number(error) else "")

    return Column(header, show)


def fidelity_fields(found: Measured | None) -> Record:
    """Flips and KL against full precision."""
    record: Record = {}
    for name in ("flips", "kl"):
        value, error = (found.fidelity(name) if found else None) or (None, None)
        record |= {name: value, f"{name}_error": error if is_number(error) else None}
    return record


def fidelity_columns(records: Sequence[Record]) -> list[Column]:
    """None for runs of an earlier version, which did not keep them."""
    known = any(is_number(record.get("kl")) for record in records)
    return [measured("flips", "Flips, %", 2), measured("kl", "KL, nats", 4)] if known else []


def score_fields(key: str, ours: Spread | None, papers: Figure | None) -> Record:
    """Our score and the paper's, under `key` and `paper_key`."""
    return {
        key: ours.mean if ours else None,
        f"{key}_std": ours.std if ours else None,
        f"paper_{key}": papers.value if papers else None,
        f"paper_{key}_std": papers.std if papers else None,
    }


def gap_fields(key: str, gap: Gap | None) -> Record:
    """A difference with its uncertainty."""
    if gap is None:
        return dict.fromkeys((key, f"{key}_error", f"{key}_low", f"{key}_high", f"{key}_how"))
    numbers = {key: gap.value, f"{key}_error": gap.error, f"{key}_low": gap.low, f"{key}_high": gap.high}
    known = {name: value if is_number(value) else None for name, value in numbers.items()}
    return {**known, f"{key}_how": gap.how}


@dataclass(frozen=True)
class Score:
    """One of the scores of a task: where it is in our metrics and in the paper's tables."""

    key: str
    header: str
    split: str
    metric: str
    papers: int  # 0 or 1: the first or second score of the paper's main tables


def scores_of(subject: Subject, measured: Measured) -> list[Score]:
    """MNLI has two splits, SQuAD two metrics, every other task one score."""
    first = measured.splits[0]
    if subject.task.startswith("squad"):
        return [Score("exact", "EM", first, "exact", 0), Score("f1", "F1", first, "f1", 1)]
    if subject.task == "mnli":
        return [
            Score(name, f"Acc. {name}", name, "accuracy", i) for i, name in enumerate(measured.splits[:2])
        ]
    name = metric_of(measured.metric).title
    return [Score(measured.metric, name, first, measured.metric, 0)]


def score_columns(scores: Sequence[Score]) -> list[Column]:
    found = []
    for score in scores:
        found += [spread(score.key, score.header), spread(f"paper_{score.key}", "paper", 1)]
    return found
