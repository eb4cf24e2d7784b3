"""When the modules of a parallel run are saved, and which checkpoints belong together.

*At their own pace*: each module replaces its checkpoint every so many of its steps, and continues from
its latest one. The modules of a run are never at the same step anyway.

*In step* (`--deterministic`): all workers save at the same step, and meet before the older set is
removed. So there is always one step at which every module has a checkpoint, and continuing from there
is exact: in lock-step, whatever was in transit between the modules is made again by these steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mrem_deploy.train.checkpoint import CheckpointStore
from mrem_deploy.train.mrem_p.crew import Crew
from mrem_deploy.train.mrem_p.worker import ModuleWorker
from mrem_deploy.train.mrem_s import ModuleCheckpoint

Check = Callable[[], None]


class Checkpoints(Protocol):
    def restore(self, workers: Sequence[ModuleWorker]) -> None:
        """Restore the modules from their checkpoints."""

    def holds(self, worker: ModuleWorker) -> bool:
        """Whether the module must wait until the others have reached the same step."""

    def after_round(self, workers: Sequence[ModuleWorker], check: Check) -> None:
        """Save what is due; `check` is called while waiting for others."""


class AtOwnPace:
    def __init__(self, store: CheckpointStore | None, every: int) -> None:
        self._store, self._every = store, every
        self._saved: dict[int, int] = {}

    def restore(self, workers: Sequence[ModuleWorker]) -> None:
        for worker in workers:
            keeper = self._keeper(worker)
            step, curve = keeper.restore()
            worker.start_at(step, curve, keeper.ages)
            self._saved[worker.index] = step

    def holds(self, worker: ModuleWorker) -> bool:
        return False

    def after_round(self, workers: Sequence[ModuleWorker], check: Check) -> None:
        for worker in workers:
            step, steps = worker.schedule.turn, worker.schedule.rules.steps
            due = step == steps or (self._every and step % self._every == 0)
            if due and self._saved[worker.index] < step <= steps:
                self._keeper(worker).save(step, worker.curve, sorted(worker.ages.items()))
                self._saved[worker.index] = step

    def _keeper(self, worker: ModuleWorker) -> ModuleCheckpoint:
        return ModuleCheckpoint(self._store, f"module-{worker.index}", worker.trainer)


class InStep:
    def __init__(self, store: CheckpointStore | None, every: int, crew: Crew) -> None:
        self._store, self._every, self._crew = store, every, crew
        self._next = 0  # the step to be saved at

    def restore(self, workers: Sequence[ModuleWorker]) -> None:
        own = [self._steps_of(worker) for worker in workers]
        everyone = [steps for theirs in self._crew.exchange("checkpoints", own) for steps in theirs]
        step = max(set.intersection(*map(set, everyone)), default=0)
        for worker in workers:
            keeper = self._keeper(worker, step)
            _, curve = keeper.restore() if step else (0, [])
            worker.start_at(step, curve, keeper.ages)
        self._next = self._after(step, workers[0].schedule.rules.steps)

    def holds(self, worker: ModuleWorker) -> bool:
        return worker.schedule.turn == self._next and not worker.schedule.trained

    def after_round(self, workers: Sequence[ModuleWorker], check: Check) -> None:
        step = self._next
        if any(worker.schedule.turn != step for worker in workers):
            return
        for worker in workers:
            self._keeper(worker, step).save(step, worker.curve, sorted(worker.ages.items()))
        self._crew.exchange("checkpoint", check=check)
        for worker in workers:
            self._discard_before(step, worker)
        self._next = self._after(step, workers[0].schedule.rules.steps)

    def _discard_before(self, step: int, worker: ModuleWorker) -> None:
        for older in self._steps_of(worker):
            if self._store is not None and older < step:
                self._store.discard(_name(worker, older))

    def _after(self, step: int, steps: int) -> int:
        """The next step to be saved at; beyond the last when there is none."""
        if step == steps or self._store is None:
            return steps + 1
        return min(step - step % self._every + self._every, steps) if self._every else steps

    def _steps_of(self, worker: ModuleWorker) -> list[int]:
        names = self._store.names(_name(worker, "*")) if self._store else []
        steps = (name.rpartition("-")[2] for name in names)
        return sorted(int(step) for step in steps if step.isdecimal())

    def _keeper(self, worker: ModuleWorker, step: int) -> ModuleCheckpoint:
        return ModuleCheckpoint(self._store, _name(worker, step), worker.trainer)


def _name(worker: ModuleWorker, step: int | str) -> str:
    return f"module-{worker.index}-at-{step}"
