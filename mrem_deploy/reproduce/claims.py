"""Which of the paper's orderings hold here. The verdicts come from the numbers, never written by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from mrem_deploy.base.tables import short
from mrem_deploy.reproduce.results import Gap

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be told"
SAME = 0.02  # memory or time within this share of each other are called equal


@dataclass(frozen=True)
class Finding:
    """One ordering of the paper, whether it holds here, and the numbers behind the verdict."""

    claim: str
    verdict: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.claim}: {self.verdict} ({self.evidence})"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def verdict_of(gap: Gap) -> str:
    """An ordering holds if the entire interval of the difference is above 0."""
    if not math.isfinite(gap.low) or gap.low <= 0 <= gap.high:
        return OPEN
    return HOLDS if gap.low > 0 else FAILS


def above(claim: str, gap: Gap, papers: float | None = None) -> Finding:
    """`gap`: the difference that the claim says is positive; `papers`: the same in the paper."""
    evidence = str(gap)
    if math.isfinite(gap.low):
        interval = f"{gap.low:+.2f} … {gap.high:+.2f}".replace("-", "−")
        evidence += f", 95% within {interval}"
    evidence += f"; {gap.how}"
    if papers is not None:
        evidence += f"; paper {papers:+.1f}".replace("-", "−")
    return Finding(claim, verdict_of(gap), evidence)


def less(
    claim: str, smaller: float, larger: float, unit: str, papers: tuple[float, float] | None = None
) -> Finding:
    """A cost that the paper finds smaller than another. Costs have no interval: within 2% they are equal."""
    verdict = HOLDS if smaller < larger else FAILS
    if abs(smaller - larger) <= SAME * larger:
        verdict = OPEN
    evidence = f"{short(smaller)} against {short(larger)} {unit}"
    if papers is not None:
        evidence += f"; paper {short(papers[0])} against {short(papers[1])}"
    return Finding(claim, verdict, evidence)


def falling(claim: str, values: Sequence[float], unit: str) -> Finding:
    """Each value is smaller than the one before."""
    rises = any(after > before * (1 + SAME) for before, after in pairwise(values))
    flat = any(after >= before * (1 - SAME) for before, after in pairwise(values))
    verdict = FAILS if rises else OPEN if flat or len(values) < 2 else HOLDS
    return Finding(claim, verdict, " → ".join(map(short, values)) + f" {unit}")


def counted(claim: str, hits: int, of: int, evidence: str) -> Finding:
    """An ordering in many places: it holds if it holds in all of them, fails if it fails in most."""
    verdict = HOLDS if hits == of else FAILS if 2 * hits < of else OPEN
    return Finding(claim, verdict, f"in {hits} of {of}; {evidence}")


def summary(findings: Sequence[Finding]) -> str:
    """One line about all of them; empty if there are none."""
    if not findings:
        return ""
    number = {verdict: sum(f.verdict == verdict for f in findings) for verdict in (HOLDS, FAILS, OPEN)}
    hold, do = ("holds" if number[HOLDS] == 1 else "hold"), ("does" if number[FAILS] == 1 else "do")
    orderings = f"{len(findings)} ordering{'' if len(findings) == 1 else 's'}"
    return (
        f"Of {orderings} of the paper, {number[HOLDS]} {hold} here, {number[FAILS]} {do} not, "
        f"and {number[OPEN]} cannot be told from these runs."
    )
