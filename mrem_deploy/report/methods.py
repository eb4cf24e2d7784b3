"""What only some methods have to tell in a report: how QAT was trained and chosen, the bits of each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mrem_deploy.base.format import NONE, count, mb
from mrem_deploy.base.tables import Table
from mrem_deploy.report.summary import words


def qat_rows(qat: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What QAT was trained on, and by what its result was chosen."""
    if not qat:
        return []
    used, there = qat.get("training_samples"), qat.get("training_split")
    whole = "all of the training split" if used == there else f"of {count(there)}, a reduced training set"
    rows = [("Training texts", f"{count(used)}, {whole}")]
    rows.append(("Epochs", " + ".join(f"{epochs:g}" for epochs in qat.get("epochs") or [])))
    choice = qat.get("chosen_on_the_evaluation_split")
    if choice:
        told = f"step {count(choice.get('step'))} of stage 2, the best of {len(choice['evaluations'])}"
        rows.append(("Chosen on the evaluation split", f"{told}; the score above flatters it by that choice"))
    return rows


def mixed_tables(mixed: Mapping[str, Any]) -> list[Table]:
    """Which bits every layer got under the budget, and what each number of them would cost in error."""
    if not mixed:
        return []
    errors = mixed.get("errors") or {}
    rows = []
    for name, bits in (mixed.get("layers") or {}).items():
        measured = errors.get(name)  # of q, k and v together, told at the first of them
        told = [three_digits(measured[width]) if measured else "" for width in ("2", "4", "8")]
        rows.append((name, str(bits), *told))
    note = (
        f"Chosen by {words(mixed.get('sensitivity'))} for {mb(mixed.get('budget_mb'))}; "
        f"{mb(mixed.get('planned_mb'))} planned."
    )
    return [Table("Bits of every layer", ("Layer", "Bits", "Error at 2", "at 4", "at 8"), rows, note, True)]


def three_digits(value: float) -> str:
    return f"{value:#.3g}".rstrip(".") if math.isfinite(value) else NONE
