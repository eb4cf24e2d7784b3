"""One module in the parallel phase: where its inputs come from, its passes, and where they go."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from mrem_deploy.data.encoded import BatchSchedule, Encoded
from mrem_deploy.train.job import Curve, WorkerSeconds
from mrem_deploy.train.module import ModuleTrainer, teacher_forcing
from mrem_deploy.train.mrem_p.edge import Parcel
from mrem_deploy.train.mrem_p.schedule import Action, ModuleSchedule, Outlet, ScheduleRules
from mrem_deploy.train.mrem_p.stale_queue import StaleQueue, draw, mean_age


@dataclass(frozen=True)
class ModuleStatus:
    """What the display shows of one module."""

    module: int  # counted from 0
    steps: int  # in all
    step: int
    loss: float | None  # None: before the first step
    forcing: float | None  # λ; None for the first module, which has no queue
    mean_age: float
    oldest: int
    serving: bool

    def line(self) -> str:
        """The numbers behind the module's bar; the bar itself has its speed and the time left."""
        parts = []
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4g}")
        if self.forcing is not None:
            parts.append(f"λ {self.forcing:.2f}")
            parts.append(f"age {self.mean_age:.1f} (max {self.oldest})")
        if self.serving:
            parts.append("done, serving")
        return ", ".join(parts)


class ParcelOutlet(Outlet, Protocol):
    def put(self, turn: int, parcel: Parcel) -> None: ...


class StateKeeper(Protocol):
    """Sets states of a module aside while it trains; see `best_states.py`."""

    def take(self, step: int) -> None: ...

    def states(self) -> Iterable[tuple[int, dict[str, torch.Tensor]]]: ...


class ModuleWorker:
    """Trains module `index`; its queue is filled and its outlet emptied by others, under `mail`."""

    def __init__(
        self,
        index: int,
        trainer: ModuleTrainer,
        rules: ScheduleRules,
        calibration: Encoded,
        forcing_steps: float,
        mail: threading.Condition,
        snapshots: StateKeeper,
        slowdown: float = 1.0,
    ) -> None:
        self.index, self.trainer, self.forcing_steps = index, trainer, forcing_steps
        self.snapshots = snapshots
        self.schedule = ModuleSchedule(rules)
        self.queue: StaleQueue[Parcel] | None = None
        if not trainer.student.first:
            self.queue = StaleQueue(rules.capacity)
        self.outlet: ParcelOutlet | None = None
        self.curve: Curve = []
        self.seconds = WorkerSeconds()
        self.queue_mb = 0.0  # the most that its queue held
        self.training_seconds = 0.0  # from the end of priming to its last training step
        self._released_at = time.perf_counter()
        self._calibration, self._mail, self._slowdown = calibration, mail, slowdown
        self._device = next(trainer.student.parameters()).device
        settings = trainer.settings
        lengths, size, seed = calibration.lengths, settings.batch_size, settings.seed
        self._batches = BatchSchedule(lengths, size, seed + 1 + index)
        self._priming_batches = BatchSchedule(lengths, size, seed)  # those of the initial scales

    def start_at(self, step: int, curve: Curve, ages: Iterable[tuple[int, int]] = ()) -> None:
        """Continue from a checkpoint, or begin."""
        self.schedule = ModuleSchedule(self.schedule.rules, step)
        self.curve = curve
        if self.queue is not None:
            self.queue.ages = Counter(dict(ages))
        if step == 0:
            self.snapshots.take(0)

    def release(self) -> None:
        """All modules are primed."""
        self.schedule.release()
        self.seconds = WorkerSeconds()
        self._released_at = time.perf_counter()

    def next(self) -> Action:
        """What to do now; call it under the lock."""
        return self.schedule.next(self.queue, self.outlet)

    def state(self) -> tuple[int, bool]:
        """(turns, done), for the predecessor; call it under the lock."""
        return self.schedule.turn, self.schedule.is_done(self.outlet)

    @property
    def is_primed(self) -> bool:
        return self.schedule.is_primed(self.queue, self.outlet)

    @property
    def forcing(self) -> float:
        return teacher_forcing(self.schedule.turn, self.forcing_steps)

    def act(self, action: Action) -> None:
        """One pass through the module: with an update when training, forward only otherwise."""
        started = time.perf_counter()
        step, forcing = self.schedule.turn, self.forcing
        batch, clean, noisy = self._input(action)
        fetched = time.perf_counter()
        if action is Action.TRAIN:
            result = self.trainer.step(step, batch, clean, noisy, forcing)
            self.curve.append((step, result.loss))
            clean, noisy = result.clean, result.noisy
        else:
            clean, noisy = self.trainer.outputs(batch, clean, noisy, forcing)
        if self._slowdown > 1.0:
            time.sleep((self._slowdown - 1.0) * (time.perf_counter() - fetched))
        if action is not Action.PRIME:
            self.seconds.receiving += fetched - started
            self.seconds.computing += time.perf_counter() - fetched
        with self._mail:
            stamp = self.schedule.stamp
            self.schedule.did(action, self.outlet)
            if self.outlet is not None:
                self.outlet.put(stamp, Parcel(clean, noisy, batch["attention_mask"]))
            self._mail.notify_all()
        if action is Action.TRAIN:
            self.snapshots.take(step + 1)
            self.training_seconds = time.perf_counter() - self._released_at

    def _input(
        self, action: Action
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None, torch.Tensor | None]:
        turn = self.schedule.turn
        if self.queue is None:
            priming = action is Action.PRIME
            indices = self._priming_batches.at(self.schedule.primed) if priming else self._batches.at(turn)
            tokens = self._calibration.batch(indices)
            return {name: value.to(self._device) for name, value in tokens.items()}, None, None
        with self._mail:
            self.queue_mb = max(self.queue_mb, sum(parcel.megabytes for parcel in self.queue))
            if action is Action.PRIME:
                parcel = self.queue.peek(self.schedule.primed)
            elif self.schedule.rules.lockstep:
                parcel = self.queue.take()
                self._mail.notify_all()  # there is room now
            else:
                parcel = self.queue.sample(draw(self.trainer.settings.seed, self.index, turn))
        return {"attention_mask": parcel.mask}, parcel.clean, parcel.noisy

    @property
    def ages(self) -> Counter[int]:
        """How old the entries used were, in turns of the predecessor; empty for the first module."""
        return self.queue.ages if self.queue is not None else Counter()

    def status(self) -> ModuleStatus:
        """For the display; call it under the lock."""
        turn, steps = self.schedule.turn, self.schedule.rules.steps
        return ModuleStatus(
            module=self.index,
            steps=steps,
            step=min(turn, steps),
            loss=self.curve[-1][1] if self.curve else None,
            forcing=self.forcing if self.queue is not None else None,
            mean_age=mean_age(self.ages),
            oldest=max(self.ages, default=0),
            serving=turn > steps,
        )
