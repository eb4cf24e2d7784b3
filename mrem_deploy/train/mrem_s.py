"""MREM-S: modules in order, each trained on cached outputs of its trained predecessors."""

from __future__ import annotations

import time

from mrem_deploy.base.progress import bar
from mrem_deploy.data.encoded import BatchSchedule
from mrem_deploy.models.partition import module_cuts
from mrem_deploy.models.parts import Part, carve
from mrem_deploy.recipe import parse_modules
from mrem_deploy.train.checkpoint import CheckpointStore, flatten_optimizers, restore_optimizers
from mrem_deploy.train.job import Curve, TrainJob, TrainLog, TrainSettings
from mrem_deploy.train.module import ModuleTrainer
from mrem_deploy.train.streams import CacheSettings, Streams


def train_mrem_s(job: TrainJob) -> TrainLog:
    """Train every module of the student in place."""
    log, settings, store = TrainLog(), job.settings, job.store
    cuts = module_cuts(job.teacher, parse_modules(job.recipe.modules))
    teachers, students = carve(job.teacher, cuts), carve(job.student, cuts)
    cache = CacheSettings.of(job.recipe)
    streams = Streams(job.data, job.teacher.config.hidden_size, cache, settings.batch_size)
    try:
        for index, (full, quantized) in enumerate(zip(teachers, students, strict=True)):
            name = f"module {index + 1}/{len(students)}"
            started = time.perf_counter()
            log.curves[name] = train_module(
                full, quantized, index, name, streams, settings, store, job.recipe.checkpoint_steps
            )
            log.seconds[f"train {name}"] = time.perf_counter() - started
            if any(_unfinished(store, later, settings.steps) for later in range(index + 1, len(students))):
                started = time.perf_counter()
                streams.advance(full, quantized, f"cache after {name}")
                log.seconds[f"cache {name}"] = time.perf_counter() - started
    finally:
        streams.close()
    return log


def _unfinished(store: CheckpointStore | None, index: int, steps: int) -> bool:
    """Whether a module still has steps to do, and so needs its inputs cached."""
    notes = store.notes(f"module-{index}") if store else None
    return notes is None or notes["step"] < steps


def train_module(
    teacher: Part,
    student: Part,
    index: int,
    name: str,
    streams: Streams,
    settings: TrainSettings,
    store: CheckpointStore | None,
    checkpoint_steps: int,
) -> Curve:
    """Train one module, from its checkpoint where there is one; returns the loss curve."""
    device = next(student.parameters()).device
    trainer = ModuleTrainer(teacher, student, settings)
    keeper = ModuleCheckpoint(store, f"module-{index}", trainer)
    first, curve = keeper.restore()
    if first < settings.steps:
        schedule = BatchSchedule(streams.calibration.lengths, settings.batch_size, settings.seed + 1 + index)
        with bar(settings.steps, f"train {name}", initial=first) as shown:
            for step in range(first, settings.steps):
                result = trainer.step(step, *streams.batch(schedule.at(step), device))
                curve.append((step, result.loss))
                shown.set_postfix_str(f"loss {result.loss:.4g}", refresh=False)
                shown.update()
                if checkpoint_steps and (step + 1) % checkpoint_steps == 0 and step + 1 < settings.steps:
                    keeper.save(step + 1, curve)
        keeper.save(settings.steps, curve)
    return curve


class ModuleCheckpoint:
    """Weights, optimizer, step and curve of one module; once trained, without the optimizer."""

    def __init__(self, store: CheckpointStore | None, name: str, trainer: ModuleTrainer) -> None:
        self.store, self.name, self.trainer = store, name, trainer

    def save(self, step: int, curve: Curve) -> None:
        if self.store is None:
            return
        tensors = {f"model/{key}": value for key, value in self.trainer.student.view.state_dict().items()}
        numbers: dict[str, float] = {}
        if step < self.trainer.settings.steps:
            states, numbers = flatten_optimizers(self.trainer.optimizer.state())
            tensors.update(states)
        self.store.save(self.name, tensors, {"step": step, "curve": curve, "numbers": numbers})

    def restore(self) -> tuple[int, Curve]:
        """The step to continue from (0 without a checkpoint) and the curve so far."""
        found = self.store.load(self.name) if self.store else None
        if found is None:
            return 0, []
        tensors, notes = found
        self.trainer.student.view.load_state_dict(found.under("model/"))
        optimizer = self.trainer.optimizer
        if notes["step"] < self.trainer.settings.steps:
            optimizer.load_state(restore_optimizers(optimizer.state(), tensors, notes["numbers"]))
        return notes["step"], [(step, loss) for step, loss in notes["curve"]]
