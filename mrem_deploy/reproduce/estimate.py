"""How long a cell will take, from those that are finished.

Work is counted in sentences that pass the whole model once forward and backward; how many seconds one takes
is learned on this machine, for each method where it has been seen, else over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from mrem_deploy.recipe import Recipe, module_count
from mrem_deploy.result import Metrics
from mrem_deploy.train.mrem_p.launch import usable_cores

# Beside a training pass of MREM-S: teacher and student forward, student backward.
FORWARD = 0.3  # a sentence through both models, to fill the cache or to initialise
REM = 2.5  # a step of REM runs its block anew for each of its products
QAT = 1.2  # attention scores are compared as well
EVALUATION = 0.2
USUAL_EVALUATION = 1000  # examples, where all are evaluated and their number is not known yet


def work(recipe: Recipe, examples: int | None = None) -> float:
    """Sentences by weight; `examples` are those of the evaluation, where they are known."""
    trained = float(recipe.steps * recipe.batch_size)
    cached = FORWARD * recipe.calib_size * (module_count(recipe.modules) if recipe.method == "mrem-s" else 1)
    if recipe.method == "rem":
        trained *= REM
    elif recipe.method == "mrem-p":
        trained /= min(module_count(recipe.modules), recipe.workers or usable_cores())
    elif recipe.method == "qat":
        first, _, second = str(getattr(recipe, "qat_epochs", "3+3")).partition("+")
        size = getattr(recipe, "train_size", 0) or 50 * USUAL_EVALUATION
        trained = QAT * size * (float(first) + float(second or 0))
    elif recipe.method != "mrem-s":
        trained = 0.0
    if recipe.method == "ptq":
        cached = 0.0
    scored = examples or recipe.eval_size or USUAL_EVALUATION
    return trained + cached + EVALUATION * scored


class Estimate:
    """Seconds of cells."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._work: dict[str, float] = {}

    def learn(self, recipe: Recipe, metrics: Metrics) -> None:
        examples = sum(split.examples for split in metrics.accuracy.splits.values())
        seconds = metrics.cost.total_seconds
        self._seconds[recipe.method] = self._seconds.get(recipe.method, 0.0) + seconds
        self._work[recipe.method] = self._work.get(recipe.method, 0.0) + work(recipe, examples)

    def seconds(self, recipe: Recipe) -> float | None:
        """None as long as nothing is known."""
        if not self._seconds:
            return None
        seen = [recipe.method] if recipe.method in self._seconds else list(self._seconds)
        rate = sum(self._seconds[method] for method in seen) / sum(self._work[method] for method in seen)
        return rate * work(recipe)

    def total(self, recipes: Sequence[Recipe]) -> float | None:
        each = [self.seconds(recipe) for recipe in recipes]
        return None if None in each else sum(seconds for seconds in each if seconds is not None)
