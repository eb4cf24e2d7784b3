"""MREM-S: modules in order, each trained on cached outputs of its trained predecessors.

Before a module trains, the teacher runs once over the calibration sentences and its hidden states are kept
as targets (`Streams.look_ahead`); after it has trained, its outputs replace its inputs. A module ends in
the state that did best on the held-out sentences. With a rate that falls to 0 that is nearly always the
last one; where it is not, the rate was too high or the sentences too few.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from mrem_deploy.base import interrupt
from mrem_deploy.base.progress import bar, say
from mrem_deploy.data.encoded import BatchSchedule
from mrem_deploy.models.partition import module_cuts
from mrem_deploy.models.parts import carve
from mrem_deploy.recipe import parse_modules
from mrem_deploy.train.activation_cache import NoSpace
from mrem_deploy.train.checkpoint import Checkpoint, CheckpointStore, flatten_optimizers, restore_optimizers
from mrem_deploy.train.heldout import BestState, budgets, heldout_loss, looks, module_names
from mrem_deploy.train.job import Curve, TrainJob, TrainLog
from mrem_deploy.train.module import ModuleTrainer
from mrem_deploy.train.streams import Streams, used_examples

Ages = Sequence[tuple[int, int]]  # mrem-p: (age of an entry when it was used, how often)
BEST = "best/"  # begins the names of the best state's tensors in a checkpoint


def train_mrem_s(job: TrainJob) -> TrainLog:
    """Train every module of the student in place."""
    run = _Run(job)
    try:
        for index in range(len(run.students)):
            run.module(index)
    finally:
        run.close()
    return run.log


class _Run:
    def __init__(self, job: TrainJob) -> None:
        self.job, self.log, settings = job, TrainLog(), job.settings
        cuts = module_cuts(job.teacher, parse_modules(job.recipe.modules))
        self.teachers, self.students = carve(job.teacher, cuts), carve(job.student, cuts)
        self.names = module_names(len(self.students))
        self.keeps_targets = job.recipe.teacher_cache != "never"
        self.used = [np.ones(len(job.data), dtype=bool) for _ in self.students]  # sentences, by module
        if self.keeps_targets:
            schedules = [self._schedule(index) for index in range(len(self.students))]
            self.used = [used_examples(schedule, settings.steps, len(job.data)) for schedule in schedules]
        width, size = job.teacher.config.hidden_size, settings.batch_size
        device = next(job.student.parameters()).device
        space = budgets(job.recipe, (job.data, job.holdout), device)
        self.streams = Streams(job.data, width, space[0], size, np.logical_or.reduce(self.used))
        self.held = Streams(job.holdout, width, space[1], size) if job.holdout is not None else None

    def module(self, index: int) -> None:
        """Train one module unless a checkpoint has it; pass its outputs on if a later one needs them."""
        name, full, quantized = self.names[index], self.teachers[index], self.students[index]
        waiting = any(self._unfinished(later) for later in range(index + 1, len(self.students)))
        started = time.perf_counter()
        if waiting or self._unfinished(index):
            self._look_ahead(index)
            if self.keeps_targets:
                self.log.seconds[f"targets {name}"] = time.perf_counter() - started
        trainer = ModuleTrainer(full, quantized, self.job.settings)
        started, best = time.perf_counter(), BestState()
        keeper = ModuleCheckpoint(self.job.store, f"module-{index}", trainer, best)
        every = self.job.recipe.checkpoint_steps
        self.log.curves[name] = train_module(
            trainer, name, self.streams, self._schedule(index), keeper, every, self.held
        )
        if best.curve:
            self.log.heldout[name] = best.curve
        self.log.seconds[f"train {name}"] = time.perf_counter() - started
        if waiting:
            started = time.perf_counter()
            if self.held is not None:
                self.held.advance(full, quantized)
            self.streams.advance(full, quantized, f"cache after {name}", self._later(index))
            self.log.seconds[f"cache {name}"] = time.perf_counter() - started

    def _look_ahead(self, index: int) -> None:
        """Run the teacher of a module over the sentences it needs, as far as its outputs can be kept."""
        teacher, name = self.teachers[index], self.names[index]
        if self.held is not None:
            self.held.look_ahead(teacher)
        if not self.keeps_targets:
            return
        used = self.used[index]
        keep = used if self._unfinished(index) else np.zeros_like(used)
        try:
            self.streams.look_ahead(teacher, f"targets of {name}", keep, used | self._later(index))
        except NoSpace as error:
            say(f"the full-precision model runs in every step of {name}, because {error.problem}")

    def _later(self, index: int) -> np.ndarray:
        """The sentences that modules behind this one use."""
        return np.logical_or.reduce([np.zeros(len(self.job.data), dtype=bool), *self.used[index + 1 :]])

    def _schedule(self, index: int) -> BatchSchedule:
        settings = self.job.settings
        return BatchSchedule(self.job.data.lengths, settings.batch_size, settings.seed + 1 + index)

    def _unfinished(self, index: int) -> bool:
        """Whether a module still has steps to do, and so needs its inputs cached."""
        store, name = self.job.store, f"module-{index}"
        notes = store.notes(name) if store else None
        if store is None or notes is None:
            return True
        with store.fitting(name):
            return bool(notes["step"] < self.job.settings.steps)

    def close(self) -> None:
        self.streams.close()
        if self.held is not None:
            self.held.close()


def train_module(
    trainer: ModuleTrainer,
    name: str,
    streams: Streams,
    schedule: BatchSchedule,
    keeper: ModuleCheckpoint,
    checkpoint_steps: int = 0,
    held: Streams | None = None,
) -> Curve:
    """Train one module, from its checkpoint where there is one; returns the loss curve.

    With held-out sentences, which have looked ahead, it ends in the state that did best on them.
    """
    steps, best = trainer.settings.steps, keeper.best
    first, curve = keeper.restore()
    if first == steps:
        return curve
    device = next(trainer.student.parameters()).device
    view = trainer.student.view
    due = set(looks(steps, trainer.settings.batch_size, len(held.examples))) if held is not None else set()

    def look(step: int) -> None:
        if held is not None and step in due:
            best.add(step, heldout_loss(trainer.student, held, trainer.settings.output_loss), view)

    if first == 0:
        look(0)
    with bar(steps, f"train {name}", initial=first) as shown:
        for step in interrupt.steps(range(first, steps)):
            tokens, clean, noisy = streams.batch(indices := schedule.at(step), device)
            target = streams.target(indices, tokens["attention_mask"].shape[1], device)
            result = trainer.step(step, tokens, clean, noisy, 0.0, target)
            curve.append((step, result.loss))
            look(step + 1)
            heldout = f"  held-out {best.latest:.4g}" if best.curve else ""
            shown.set_postfix_str(f"loss {result.loss:.4g}{heldout}", refresh=False)
            shown.update()
            if checkpoint_steps and (step + 1) % checkpoint_steps == 0 and step + 1 < steps:
                keeper.save(step + 1, curve)
    if best.curve and best.step < steps:
        say(f"{name}: the held-out loss was least after step {best.step} of {steps}; that state is kept")
        best.restore(view)
    keeper.save(steps, curve)
    return curve


class ModuleCheckpoint:
    """Weights, optimizer, step, curves and best state of one module; once trained, without the optimizer.

    In mrem-p also the ages of the entries that it has used: the report of a continued run is about all steps.
    """

    def __init__(
        self,
        store: CheckpointStore | None,
        name: str,
        trainer: ModuleTrainer,
        best: BestState | None = None,
    ) -> None:
        self.store, self.name, self.trainer = store, name, trainer
        self.best = best or BestState()
        self.ages: Ages = ()  # of the checkpoint that was restored

    def save(self, step: int, curve: Curve, ages: Ages = ()) -> None:
        if self.store is None:
            return
        tensors = {f"model/{key}": value for key, value in self.trainer.student.view.state_dict().items()}
        notes = {"step": step, "curve": curve, "numbers": {}}
        if self.best.curve:
            notes["heldout"] = self.best.curve
        if ages:
            notes["ages"] = ages
        if step < self.trainer.settings.steps:
            states, notes["numbers"] = flatten_optimizers(self.trainer.optimizer.state())
            tensors.update(states)
            if self.best.curve and self.best.step < step:  # otherwise it is the state of the module itself
                tensors.update({BEST + key: value for key, value in self.best.state.items()})
        self.store.save(self.name, tensors, notes)

    def restore(self) -> tuple[int, Curve]:
        """The step to continue from (0 without a checkpoint) and the curve so far."""
        found = self.store.load(self.name) if self.store else None
        if self.store is None or found is None:
            return 0, []
        with self.store.fitting(self.name):
            return self._take(found)

    def _take(self, found: Checkpoint) -> tuple[int, Curve]:
        tensors, notes = found
        view, optimizer, step = self.trainer.student.view, self.trainer.optimizer, notes["step"]
        view.load_state_dict(found.under("model/"))
        self.best.resume(notes.get("heldout", []), found.under(BEST) or found.under("model/"))
        if step < self.trainer.settings.steps:
            optimizer.load_state(restore_optimizers(optimizer.state(), tensors, notes["numbers"]))
        self.ages = [(int(age), int(times)) for age, times in notes.get("ages", [])]
        return step, [(step, loss) for step, loss in notes["curve"]]
