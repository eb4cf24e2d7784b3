"""MREM-S: modules in order, each trained on cached outputs of its trained predecessors."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from mrem_deploy.base.progress import bar, say, track
from mrem_deploy.data.encoded import BatchSchedule, Encoded, sorted_batches
from mrem_deploy.models.architectures import Part, carve
from mrem_deploy.train.checkpoint import CheckpointStore, flatten_optimizers, restore_optimizers
from mrem_deploy.train.module import ModuleTrainer, TrainSettings
from mrem_deploy.train.streams import ActivationCache


@dataclass(frozen=True)
class CacheSettings:
    max_memory_mb: float
    folder: Path | None = None


@dataclass
class TrainLog:
    """What the report shows: loss curves by module (or matrix product) and seconds by stage.

    Then, for modules trained in parallel: what every worker reports, by rank; by module, how often
    entries of each age were used; and the step at which teacher forcing ended. For QAT: the scores on
    the development set by which the result was chosen.
    """

    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    workers: list[dict[str, Any]] = field(default_factory=list)
    ages: dict[str, Counter[int]] = field(default_factory=dict)
    forcing_steps: float = 0.0
    choice: dict[str, Any] = field(default_factory=dict)


class Streams:
    """The full-precision and the quantized stream at the current cut, over the calibration set."""

    def __init__(self, calibration: Encoded, width: int, settings: CacheSettings, batch_size: int) -> None:
        self.calibration = calibration
        self.batch_size = batch_size
        self.cache: ActivationCache | None = None
        self._width, self._settings = width, settings

    def batch(
        self, indices: np.ndarray, device: torch.device
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None, torch.Tensor | None]:
        """The token batch with both inputs of the module; None for the first module's."""
        tokens = self.calibration.batch(indices)
        tokens.pop("labels", None)
        clean = noisy = None
        if self.cache is not None:
            clean, noisy = self.cache.get(indices, tokens["input_ids"].shape[1])
            clean, noisy = clean.to(device), noisy.to(device)
        return {name: value.to(device) for name, value in tokens.items()}, clean, noisy

    @torch.no_grad()
    def advance(self, teacher: Part, student: Part, label: str) -> None:
        """Replace the inputs of a trained module by its outputs."""
        device = next(student.parameters()).device
        target = self.cache or ActivationCache(
            self.calibration.lengths, self._width, self._settings.max_memory_mb, self._settings.folder
        )
        if target.on_disk and self.cache is None:
            say(f"activation cache: {target.megabytes:.0f} MB, memory-mapped on disk")
        try:
            for indices in track(sorted_batches(self.calibration.lengths, self.batch_size), label):
                tokens, clean, noisy = self.batch(indices, device)
                target.put(indices, teacher(clean, tokens).hidden[-1], student(noisy, tokens).hidden[-1])
        except BaseException:
            target.close()  # `close` does not know it yet, and its files may be gigabytes
            raise
        self.cache = target

    def close(self) -> None:
        if self.cache is not None:
            self.cache.close()


def train_sequential(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    cuts: list[int],
    calibration: Encoded,
    settings: TrainSettings,
    cache: CacheSettings,
    store: CheckpointStore | None = None,
    checkpoint_steps: int = 0,
) -> TrainLog:
    """Train every module of `student` in place."""
    log = TrainLog()
    width = teacher.config.hidden_size
    teachers, students = carve(teacher, cuts), carve(student, cuts)
    streams = Streams(calibration, width, cache, settings.batch_size)
    try:
        for index, (full, quantized) in enumerate(zip(teachers, students, strict=True)):
            name = f"module {index + 1}/{len(students)}"
            started = time.perf_counter()
            log.curves[name] = train_module(
                full, quantized, index, name, streams, settings, store, checkpoint_steps
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
) -> list[tuple[int, float]]:
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

    def save(self, step: int, curve: list[tuple[int, float]]) -> None:
        if self.store is None:
            return
        tensors = {f"model/{key}": value for key, value in self.trainer.student.view.state_dict().items()}
        numbers: dict[str, Any] = {}
        if step < self.trainer.settings.steps:
            states, numbers = flatten_optimizers(self.trainer.optimizer.state())
            tensors.update(states)
        self.store.save(self.name, tensors, {"step": step, "curve": curve, "numbers": numbers})

    def restore(self) -> tuple[int, list[tuple[int, float]]]:
        """The step to go on from (0 without a checkpoint) and the curve so far."""
        found = self.store.load(self.name) if self.store else None
        if found is None:
            return 0, []
        tensors, notes = found
        weights = {
            key.removeprefix("model/"): value for key, value in tensors.items() if key.startswith("model/")
        }
        self.trainer.student.view.load_state_dict(weights)
        optimizer = self.trainer.optimizer
        if notes["step"] < self.trainer.settings.steps:
            optimizer.load_state(restore_optimizers(optimizer.state(), tensors, notes["numbers"]))
        return notes["step"], [(step, loss) for step, loss in notes["curve"]]
