"""What the report says of some methods only: how QAT was trained and chosen, the bits of each layer."""

from __future__ import annotations

from mrem_deploy.base.format import count, mib, three_digits
from mrem_deploy.base.tables import Table
from mrem_deploy.quant.mixed import MixedBits
from mrem_deploy.report.summary import words
from mrem_deploy.result import Qat

WIDTHS = (2, 4, 8)  # bits to choose from


def qat_rows(qat: Qat | None) -> list[tuple[str, str]]:
    """What QAT was trained on, and what its result was chosen by."""
    if qat is None:
        return []
    used, there = qat.training_samples, qat.training_split
    share = "all of the training split" if used == there else f"of {count(there)}, a reduced training set"
    rows = [("Training texts", f"{count(used)}, {share}")]
    rows.append(("Epochs", " + ".join(f"{epochs:g}" for epochs in qat.epochs)))
    if qat.choice is not None:
        chosen = f"step {count(qat.choice.step)} of stage 2, the best of {len(qat.choice.evaluations)}"
        rows.append(("Chosen on the evaluation split", f"{chosen}; this choice flatters the score above"))
    return rows


def mixed_tables(mixed: MixedBits | None) -> list[Table]:
    """The bits that every layer got under the budget, and the error at each number of bits."""
    if mixed is None:
        return []
    rows = []
    for name, bits in mixed.layers.items():
        measured = mixed.errors.get(name)  # of q, k and v together, shown at the first of them
        errors = [three_digits(measured[width]) if measured else "" for width in WIDTHS]
        rows.append((name, str(bits), *errors))
    note = (
        f"Chosen by {words(mixed.sensitivity)} for {mib(mixed.budget_mb)}; {mib(mixed.planned_mb)} planned."
    )
    header = (
        "Layer",
        "Bits",
        *(f"Error at {width}" if width == WIDTHS[0] else f"at {width}" for width in WIDTHS),
    )
    return [Table("Bits of every layer", header, rows, note, long=True)]
