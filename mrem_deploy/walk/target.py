"""`--target-drop`: the smallest model that loses at most so many points, by bits per layer.

Sensitivities are measured once; they choose the bits of every layer at a few sizes from 2 to 8 bits (rungs).
Short trainings bisect the rungs. They lose more than long ones, so the walk begins one rung below the first
that does, and trains every rung in full until one meets the target: that training is the result.

What a model loses is estimated on sentences of the training split that nothing is trained on, never on the
evaluation split: the drop of the task's metric where they have labels, else the share of predictions that
differ from full precision's, which no drop exceeds. A rung meets the target if the drop and one standard
error are within it. Attempts are kept as checkpoints, so an interrupted walk goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from mrem_deploy.base.progress import say
from mrem_deploy.data.tasks import find_task
from mrem_deploy.data.texts import encode
from mrem_deploy.evaluate.predict import predict, torch_predictor
from mrem_deploy.evaluate.scorers import Comparison, Scorer, scorer_for
from mrem_deploy.quant.mixed import Choices, MixedBits
from mrem_deploy.recipe import Recipe
from mrem_deploy.recipe_defaults import default_rate, rate_at
from mrem_deploy.result import Attempt, TargetDrop
from mrem_deploy.train import METHODS
from mrem_deploy.train.job import TrainJob
from mrem_deploy.train.student import BITS_CHECKPOINT, bit_choices, make_student
from mrem_deploy.walk.loading import Loaded
from mrem_deploy.walk.state import Run

Outputs = list[np.ndarray]
Predictions = Callable[[nn.Module], Outputs]

CHECKPOINT = "target"
SHORT = 0.25  # of the steps: a short training
# Sizes between 2 bits (0), 4 bits (1) and 8 bits (2) everywhere; what few bits lose is lost below 4.
RUNGS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
MOST_SHORT = 3  # trainings that bisect the rungs


def walk_to_target(run: Run, loaded: Loaded) -> TargetDrop:
    """Find the size. From here on the run has a recipe of that size, and the checkpoints of its training."""
    walk = _Walk(run, loaded)
    first = 0
    if METHODS[run.recipe.method].trains:
        found = smallest(len(walk.rungs), lambda rung: walk.attempt(rung, full=False).meets(walk.target))
        first = max(found - 1, 0)
    for rung in range(first, len(walk.rungs)):
        if walk.attempt(rung, full=True).meets(walk.target):
            break
    found_here = walk.outcome()
    say(f"target: {found_here.sentence()}")
    run.recipe = sized(run.recipe, walk.rungs[found_here.chosen])
    run.continue_within(_part(found_here.chosen, full=True))
    return found_here


def smallest(count: int, meets: Callable[[int], bool]) -> int:
    """The first of `count` rungs that meets the target, as far as those above it do too; `count`: none."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if meets(middle):
            high = middle
        else:
            low = middle + 1
    return high


def rungs_of(choices: Choices) -> list[MixedBits]:
    """The choices of bits from the smallest to the largest size, each once."""
    ends = [choices.bytes_with(bits) for bits in (2, 4, 8)]
    sizes = [int(np.interp(rung, range(len(ends)), ends)) for rung in RUNGS]
    found: list[MixedBits] = []
    for size in sizes:
        mixed = choices.within_bytes(size)
        if not found or mixed.layers != found[-1].layers:
            found.append(mixed)
    return found


def sized(recipe: Recipe, mixed: MixedBits) -> Recipe:
    """The recipe of one size. With the same bits everywhere the default rate is that of these bits."""
    bits, lr = set(mixed.layers.values()), recipe.lr
    if len(bits) == 1 and lr == default_rate(recipe):
        lr = rate_at(recipe.method, bits.pop())
    return replace(recipe, target_drop=None, budget_mb=mixed.budget_mb, lr=lr)


def _part(rung: int, full: bool) -> str:
    """The name of an attempt's checkpoints."""
    return f"{'full' if full else 'short'}-{rung}"


class _Walk:
    def __init__(self, run: Run, loaded: Loaded) -> None:
        assert run.recipe.target_drop is not None
        self.run, self.loaded, self.target = run, loaded, run.recipe.target_drop
        choices = bit_choices(loaded.teacher, run.recipe, loaded.calibration, run.store)
        self.rungs = rungs_of(choices)
        self.weights = choices.weights
        self.judge = Judge.of(loaded)
        kept = run.store.load(CHECKPOINT)
        self.attempts = [Attempt(**each) for each in kept.notes["attempts"]] if kept else []
        say(
            f"target: at most {self.target:g} points, estimated by {self.judge.estimate} on "
            f"{self.judge.examples:,} sentences; {len(self.rungs)} sizes from "
            f"{self.rungs[0].planned_mb:.1f} to {self.rungs[-1].planned_mb:.1f} MiB"
        )

    def attempt(self, rung: int, full: bool) -> Attempt:
        """Train a rung and estimate what it loses, unless that is known."""
        known = next((one for one in self.attempts if (one.rung, one.full) == (rung, full)), None)
        if known is not None:
            return known
        run, loaded, mixed = self.run, self.loaded, self.rungs[rung]
        recipe = sized(run.recipe, mixed)
        if not full:
            recipe = replace(recipe, steps=max(1, round(SHORT * recipe.steps)))
        store = run.store.within(_part(rung, full))
        store.save(BITS_CHECKPOINT, {}, {"chosen": mixed.to_dict()})
        spec = replace(recipe.spec, layer_bits=mixed.layer_bits)
        student = make_student(loaded.teacher, recipe, loaded.calibration, run.crew, spec)
        job = TrainJob(
            loaded.teacher, student, loaded.calibration, recipe, store, run.crew, None, loaded.holdout
        )
        METHODS[recipe.method].train(job)
        loss = self.judge.of_model(student)
        bits = sum(self.weights[name] * mixed.layers[name] for name in self.weights)
        attempt = Attempt(
            rung,
            mixed.planned_mb,
            bits / sum(self.weights.values()),
            full,
            recipe.steps if METHODS[recipe.method].trains else 0,
            loss.drop,
            loss.error,
            loss.flips,
            loss.kl,
        )
        self.attempts.append(attempt)
        run.store.save(CHECKPOINT, {}, {"attempts": [vars(one) for one in self.attempts]})
        self._forget_all_but_the_best()
        say(f"target: {attempt}, {'meets' if attempt.meets(self.target) else 'does not meet'} it")
        return attempt

    def _forget_all_but_the_best(self) -> None:
        """Only the checkpoints of what may become the result take space."""
        kept = self._best()
        for one in self.attempts:
            if one is not kept:
                store = self.run.store.within(_part(one.rung, one.full))
                for name in store.names("*"):
                    store.discard(name)

    def _best(self) -> Attempt | None:
        """Of the rungs trained in full: the smallest that meets the target, else the one that loses least."""
        trained = [one for one in self.attempts if one.full]
        meeting = [one for one in trained if one.meets(self.target)]
        if meeting:
            return min(meeting, key=lambda one: one.size_mb)
        return min(trained, key=lambda one: one.bound, default=None)

    def outcome(self) -> TargetDrop:
        best = self._best()
        assert best is not None  # the last rung is trained in full, if no other is
        return TargetDrop(
            self.target,
            self.judge.estimate,
            self.judge.examples,
            best.meets(self.target),
            best.rung,
            tuple(self.attempts),
        )


@dataclass(frozen=True)
class Loss:
    """What a model loses against full precision, in points, with one standard error."""

    drop: float
    error: float
    flips: float | None
    kl: float | None


class Judge:
    """Sentences with full precision's predictions, against which quantized models are compared."""

    def __init__(self, scorer: Scorer, metric: str | None, predictions: Predictions, full: Outputs) -> None:
        """metric: the task's, where the sentences have labels."""
        self._scorer, self._metric, self._predictions, self._full = scorer, metric, predictions, full
        self.examples = 0
        self.estimate = f"the drop of {metric}" if metric else "predictions that differ, a bound of any drop"

    @classmethod
    def of(cls, loaded: Loaded) -> Judge:
        texts, task, recipe = loaded.judged, loaded.task_data.task, loaded.recipe
        if task.searches:  # the pairs of the training split have labels, but no queries over a corpus
            task = find_task(task.name)
        assert texts is not None
        encoded = encode(loaded.tokenizer, texts, recipe.max_length)
        labelled = texts.labelled and not task.label_free
        scorer = scorer_for(task, texts, encoded, loaded.teacher.config) if labelled else Comparison(task)
        pooling = loaded.sentences.head if loaded.sentences and task.kind == "embedding" else None

        def predictions(model: nn.Module) -> list[np.ndarray]:
            return predict(torch_predictor(model), encoded, "estimate the drop", recipe.batch_size, pooling)

        found = cls(scorer, task.metric if labelled else None, predictions, predictions(loaded.teacher))
        found.examples = len(texts)
        return found

    def of_model(self, model: nn.Module) -> Loss:
        rows = self._predictions(model)
        fidelity = self._scorer.fidelity(self._full, rows)
        if self._metric is None:
            agreed = next(iter(self._scorer.agreement(self._full, rows).values()))
            return Loss(100.0 - agreed, fidelity.flips_error or 0.0, fidelity.flips, fidelity.kl)
        changed = self._scorer.change(self._full, rows).get(self._metric, {})
        drop = self._scorer.score(self._full)[self._metric] - self._scorer.score(rows)[self._metric]
        return Loss(drop, changed.get("standard_error", 0.0), fidelity.flips, fidelity.kl)
