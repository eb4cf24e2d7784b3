"""How long a cell will take, estimated from the finished ones.

Work is counted in sentences that pass the entire model once forward and backward. The seconds per sentence
are learned on this machine: per method if one of its cells is finished, else over all methods.
"""

from __future__ import annotations

from collections.abc import Sequence

from mrem_deploy.recipe import Recipe, module_count, parse_epochs
from mrem_deploy.result import Metrics
from mrem_deploy.train.mrem_p.launch import usable_cores

# Relative to a training pass of MREM-S: teacher and student forward, student backward.
FORWARD = 0.3  # a sentence through both models, to fill the cache or to initialise
REM = 2.5  # a step of REM runs its block again for each of its matmuls
QAT = 1.2  # attention scores are compared too
EVALUATION = 0.2
USUAL_EVALUATION = 1000  # examples, if all are evaluated and their number is not known yet


def work(recipe: Recipe, examples: int | None = None) -> float:
    """Weighted sentences; `examples` are those of the evaluation, if their number is known."""
    trained = float(recipe.steps * recipe.batch_size)
    cached = FORWARD * recipe.calib_size * (module_count(recipe.modules) if recipe.method == "mrem-s" else 1)
    if recipe.method == "rem":
        trained *= REM
    elif recipe.method == "mrem-p":
        trained /= min(module_count(recipe.modules), recipe.workers or usable_cores())
    elif recipe.method == "qat":
        size = recipe.train_size or 50 * USUAL_EVALUATION
        trained = QAT * size * sum(parse_epochs(recipe.qat_epochs))
    elif recipe.method != "mrem-s":
        trained = 0.0
    if recipe.method == "ptq":
        cached = 0.0
    scored = examples or recipe.eval_size or USUAL_EVALUATION
    return trained + cached + EVALUATION * scored


class Estimate:
    """How many seconds cells take."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._work: dict[str, float] = {}

    def learn(self, recipe: Recipe, metrics: Metrics) -> None:
        examples = sum(split.examples for split in metrics.accuracy.splits.values())
        seconds = metrics.cost.total_seconds
        self._seconds[recipe.method] = self._seconds.get(recipe.method, 0.0) + seconds
        self._work[recipe.method] = self._work.get(recipe.method, 0.0) + work(recipe, examples)

    def seconds(self, recipe: Recipe) -> float | None:
        """None while no cell is finished."""
        if not self._seconds:
            return None
        seen = [recipe.method] if recipe.method in self._seconds else list(self._seconds)
        rate = sum(self._seconds[method] for method in seen) / sum(self._work[method] for method in seen)
        return rate * work(recipe)

    def total(self, recipes: Sequence[Recipe]) -> float | None:
        each = [self.seconds(recipe) for recipe in recipes]
        return None if None in each else sum(seconds for seconds in each if seconds is not None)
