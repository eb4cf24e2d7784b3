"""What a report says about `--target-drop`: the sizes that were tried, and what each loses."""

from __future__ import annotations

from mrem_deploy.base.format import NONE, count, is_number
from mrem_deploy.base.tables import Table
from mrem_deploy.result.target import Attempt, TargetDrop


def target_tables(found: TargetDrop | None) -> list[Table]:
    if found is None:
        return []
    rows = [_row(found, attempt) for attempt in found.attempts]
    note = (
        f"Estimated by {found.estimate}, on {count(found.examples)} sentences of the training split that "
        "nothing was trained on. A size is taken if its drop and one standard error are within the target; "
        "short trainings only tell where to begin."
    )
    header = ("Size", "Bits per weight", "Training", "Estimated drop", "Flips, %", "KL", "Meets it")
    return [Table(f"At most {found.target:g} points lost", header, rows, note)]


def _row(found: TargetDrop, attempt: Attempt) -> tuple[str, ...]:
    how = "in full" if attempt.full else f"{count(attempt.steps)} steps"
    meets = "yes" if attempt.meets(found.target) else "no"
    return (
        f"{attempt.size_mb:.2f} MiB",
        f"{attempt.bits:.2f}",
        how,
        f"{attempt.drop:.2f} ± {attempt.error:.2f}",
        f"{attempt.flips:.2f}" if is_number(attempt.flips) else NONE,
        f"{attempt.kl:.4f}" if is_number(attempt.kl) else NONE,
        f"{meets}, the result" if attempt is found.result else meets,
    )


def target_warnings(found: TargetDrop | None) -> list[str]:
    """A target that was missed."""
    return [] if found is None or found.met else [f"Target of {found.sentence()}."]
