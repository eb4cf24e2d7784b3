"""QAT, the paper's upper baseline: the entire model distilled end to end on the entire training set.

Two stages (TernaryBERT's), each with a separate optimizer, a warm-up and linear decay: hidden states and
attention scores, then predictions. The result is the state that scored best on the development set during
stage 2. That set is therefore read several times here, and the final score is a little too good.
Everything follows from (seed, stage, step), and dropout is off: a resumed run ends with the same bits.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from mrem_deploy.base import interrupt
from mrem_deploy.base.progress import bar, say
from mrem_deploy.data.encoded import BatchSchedule
from mrem_deploy.models.parts import carve
from mrem_deploy.recipe import parse_epochs
from mrem_deploy.train.checkpoint import Checkpoint, Notes, flatten_optimizers, restore_optimizers
from mrem_deploy.train.distillation import (
    Amount,
    Powers,
    imitation_loss,
    prediction_loss,
    target_powers,
    watch,
)
from mrem_deploy.train.job import Curve, QatChoice, TrainJob, TrainLog, TrainSettings
from mrem_deploy.train.optimizer import LocalOptimizer, finite
from mrem_deploy.train.supervised import CURVE_POINTS

CHECKPOINT = "qat"
POWER_BATCHES = 4  # on which the targets of stage 1 are measured
STAGES = ("stage 1: hidden states and attention scores", "stage 2: predictions")


@dataclass
class Progress:
    """Where a run is: what a checkpoint holds besides weights and optimizer."""

    stage: int = 0
    step: int = 0
    curves: dict[str, Curve] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)  # since the last point of the curve
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # (step of stage 2, score)
    best: dict[str, torch.Tensor] = field(default_factory=dict)  # the state with the highest score

    @property
    def chosen(self) -> tuple[int, float]:
        """Step and score of the best evaluation, the earliest of equals."""
        return max(self.evaluations, key=lambda entry: entry[1])

    def notes(self) -> Notes:
        """For a checkpoint."""
        names = ("stage", "step", "curves", "losses", "evaluations")
        return {name: getattr(self, name) for name in names}


def evaluation_steps(steps: int, epochs: float, per_epoch: int) -> list[int]:
    """After how many steps of stage 2 the model is scored: evenly spread, the last at the end."""
    count = max(1, round(epochs * per_epoch))
    return sorted({max(1, round(steps * (i + 1) / count)) for i in range(count)}) if steps else []


def train_qat(job: TrainJob) -> TrainLog:
    """Train the student in place; `job.score` scores it on the development set, higher is better."""
    return _Run(job).go()


class _Run:
    def __init__(self, job: TrainJob) -> None:
        if job.score is None:
            raise ValueError("QAT needs a score to choose by; TrainJob.score is None")
        self.recipe, self.model, self.training = job.recipe, job.student, job.data
        self.score, self.store = job.score, job.store
        whole = [0, job.teacher.config.num_hidden_layers]
        self.teacher, self.student = carve(job.teacher, whole)[0], carve(job.student, whole)[0]
        self.device = next(job.student.parameters()).device
        self.at = Progress()
        self.powers: Powers | None = None  # of stage 1's targets; None: terms are not relative
        self.log = TrainLog()
        both_epochs = parse_epochs(job.recipe.qat_epochs)
        per_epoch = math.ceil(len(job.data) / job.recipe.batch_size)
        self.steps = [math.ceil(epochs * per_epoch) for epochs in both_epochs]
        self.scored = evaluation_steps(self.steps[1], both_epochs[1], job.recipe.qat_evals)

    def go(self) -> TrainLog:
        saved = self._restore()
        for stage in range(self.at.stage, len(STAGES)):
            if stage > self.at.stage:
                self.at.stage, self.at.step, saved = stage, 0, None
            self.log.seconds[STAGES[stage]], started = 0.0, time.perf_counter()
            self._train_stage(saved)
            self.log.seconds[STAGES[stage]] = time.perf_counter() - started
        if self.at.best:
            self.model.load_state_dict(self.at.best)
        self.log.curves = self.at.curves
        if self.at.evaluations:
            step, score = self.at.chosen
            self.log.choice = QatChoice(step, score, self.at.evaluations)
        return self.log

    def _train_stage(self, saved: Checkpoint | None) -> None:
        at, stage = self.at, self.at.stage
        steps, name = self.steps[stage], STAGES[stage]
        if at.step >= steps:
            return
        train = replace(
            TrainSettings.of(self.recipe), steps=steps, lr=self.recipe.qat_lr, warmup=self.recipe.qat_warmup
        )
        optimizer = LocalOptimizer([self.student.view], self.student.shared_parameters, train)
        if saved is not None:
            assert self.store is not None, "it gave the checkpoint"
            with self.store.fitting(CHECKPOINT):
                state = restore_optimizers(optimizer.state(), saved.tensors, saved.notes["numbers"])
                optimizer.load_state(state)
        schedule = BatchSchedule(self.training.lengths, train.batch_size, train.seed + stage)
        if stage == 0 and self.recipe.qat_relative:
            first = [schedule.at(step) for step in range(POWER_BATCHES)]
            parts = [part for indices in first for part in self._parts(indices)]
            self.powers = target_powers(self.teacher, map(self._batch, interrupt.steps(parts)))
        every = max(1, steps // CURVE_POINTS)
        curve = at.curves.setdefault(name, [])
        with bar(steps, f"qat {name.partition(':')[0]}", initial=at.step) as shown:
            while at.step < steps:
                interrupt.check()
                loss = self._step(schedule.at(at.step), optimizer)
                at.losses.append(loss)
                at.step += 1
                if at.step % every == 0 or at.step == steps:
                    curve.append((at.step - 1, sum(at.losses) / len(at.losses)))
                    at.losses.clear()
                shown.set_postfix_str(f"loss {loss:.4g}", refresh=False)
                shown.update()
                if stage == 1 and at.step in self.scored:
                    self._evaluate()
                checkpoint = self.recipe.checkpoint_steps
                if at.step == steps or (checkpoint and at.step % checkpoint == 0):
                    self._save(optimizer if at.step < steps else None)

    def _step(self, indices: np.ndarray, optimizer: LocalOptimizer) -> float:
        """One update; the loss of the batch is the sum over its micro-batches."""
        lengths = self.training.lengths
        whole, total = Amount.of(lengths[indices]), 0.0
        for part in self._parts(indices):
            loss = self._loss(self._batch(part), Amount.of(lengths[part]).share_of(whole))
            total += finite(loss, self.at.step)
            loss.backward()
        optimizer.apply(self.at.step)
        return total

    def _parts(self, indices: np.ndarray) -> list[np.ndarray]:
        """The micro-batches of a batch."""
        return np.array_split(indices, min(self.recipe.accumulate, len(indices)))

    def _batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        return {name: value.to(self.device) for name, value in self.training.batch(indices).items()}

    def _loss(self, batch: dict[str, torch.Tensor], share: Amount) -> torch.Tensor:
        mask = batch["attention_mask"]
        if self.at.stage == 0:
            with torch.no_grad():
                target = watch(self.teacher, batch)
            return imitation_loss(watch(self.student, batch), target, mask, share, self.powers)
        with torch.no_grad():
            target = self.teacher(None, batch)
        return prediction_loss(self.student(None, batch), target, mask, share)

    def _evaluate(self) -> None:
        started = time.perf_counter()
        score = self.score(self.model)
        better = not self.at.evaluations or score > self.at.chosen[1]
        self.at.evaluations.append((self.at.step, score))
        if better:
            self.at.best = {
                name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()
            }
        say(f"score {score:.2f} after step {self.at.step} of stage 2" + (", the best so far" * better))
        choosing = "of it choosing on the development set"
        seconds = self.log.seconds.get(choosing, 0.0) + time.perf_counter() - started
        self.log.seconds[choosing] = seconds

    def _save(self, optimizer: LocalOptimizer | None) -> None:
        """One file, so that weights, best state and bookkeeping always fit together."""
        if self.store is None:
            return
        tensors = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"best/{name}": value for name, value in self.at.best.items()}
        numbers: dict[str, float] = {}
        if optimizer is not None:
            states, numbers = flatten_optimizers(optimizer.state())
            tensors |= states
        self.store.save(CHECKPOINT, tensors, {**self.at.notes(), "numbers": numbers})

    def _restore(self) -> Checkpoint | None:
        """Continue from the last checkpoint, if any; returns it, for the optimizer."""
        found = self.store.load(CHECKPOINT) if self.store else None
        if self.store is None or found is None:
            return None
        with self.store.fitting(CHECKPOINT):
            notes = found.notes
            self.model.load_state_dict(found.under("model/"))
            curves = {name: [(step, loss) for step, loss in each] for name, each in notes["curves"].items()}
            scores = [(step, score) for step, score in notes["evaluations"]]
            self.at = Progress(
                notes["stage"], notes["step"], curves, notes["losses"], scores, found.under("best/")
            )
        return found
