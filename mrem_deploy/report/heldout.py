"""What a report says about held-out sentences: the loss of every module there."""

from __future__ import annotations

from mrem_deploy.base.format import NONE, count, is_number, three_digits
from mrem_deploy.base.tables import Table
from mrem_deploy.result import Metrics

RISEN = 1.02  # a module that ended so many times above its best state was trained too long or too fast


def heldout_tables(metrics: Metrics) -> list[Table]:
    """The loss of every module on held-out sentences, where it was measured."""
    rows = [
        (
            name,
            NONE if module.before is None else three_digits(module.before),
            three_digits(module.end),
            three_digits(module.best),
            NONE if module.best_step is None else f"after step {count(module.best_step)}",
        )
        for name, module in metrics.heldout.items()
    ]
    if not rows:
        return []
    note = (
        "The loss that modules train on, over sentences that nothing was trained on; every module reads what "
        "the quantized modules before it give. The last but one column is that of the result: it compares "
        "methods and settings on the same model."
    )
    header = ("Module", "Before training", "At the end", "Of the result", "Kept state")
    return [Table("Held-out loss", header, rows, note)]


def heldout_warnings(metrics: Metrics) -> list[str]:
    """Modules that did better on held-out sentences before the end of their training."""
    found = [
        name
        for name, module in metrics.heldout.items()
        if is_number(module.end) and is_number(module.best) and module.end > RISEN * module.best
    ]
    if not found:
        return []
    return [
        f"The held-out loss rose before the end of training for: {', '.join(found)}. An earlier state was "
        "kept. Try a lower learning rate, fewer steps or more calibration texts."
    ]
