"""Which state of every module is the result: the one that does best on held-out sentences, as in MREM-S.

While the modules train, the input of each changes with its predecessors: its held-out losses at two moments
are losses on two inputs, and the best states of different moments never met. So during the training states
are only set aside (`Snapshots`), at the steps at which MREM-S takes the held-out loss. They are compared when
all modules are trained (`keep_best_states`): in order, each on what its predecessors give in the states that
were chosen for them. These are the losses that MREM-S would measure, so both methods compare by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from mrem_deploy.base.progress import say
from mrem_deploy.train.activation_cache import CacheSettings
from mrem_deploy.train.checkpoint import CheckpointStore
from mrem_deploy.train.heldout import BestState, State, heldout_loss, looks
from mrem_deploy.train.job import Curve, TrainJob
from mrem_deploy.train.mrem_p.crew import modules_of, pass_on
from mrem_deploy.train.mrem_p.worker import ModuleWorker
from mrem_deploy.train.streams import Streams


class Snapshots:
    """Earlier states of one module by the steps that led to them: on disk, or in memory without a store."""

    def __init__(
        self, store: CheckpointStore | None, index: int, view: nn.Module, due: Sequence[int]
    ) -> None:
        self._store, self._index, self._view, self._due = store, index, view, due
        self._kept: dict[int, State] = {}

    @classmethod
    def of(cls, job: TrainJob, index: int, view: nn.Module) -> Snapshots:
        """For a module of the job; none are taken without held-out sentences. The last state needs none."""
        settings, due = job.settings, [0]
        if job.holdout is not None:
            due = looks(settings.steps, settings.batch_size, len(job.holdout))
        return cls(job.store, index, view, due[:-1])

    def take(self, step: int) -> None:
        """Set the state after `step` steps aside, if it is due."""
        if step not in self._due:
            return
        if self._store is not None:
            self._store.save(self._name(step), self._view.state_dict(), {"step": step})
        else:
            self._kept[step] = _copy(self._view)

    def states(self) -> Iterator[tuple[int, State]]:
        """Those that were taken, in order."""
        for step in self._due:
            if self._store is not None:
                found = self._store.load(self._name(step))
                if found is not None:
                    yield step, found.tensors
            elif step in self._kept:
                yield step, self._kept[step]

    def _name(self, step: int) -> str:
        return f"state-{self._index}-at-{step}"


def keep_best_states(job: TrainJob, workers: Sequence[ModuleWorker], modules: int) -> dict[int, Curve]:
    """Bring the modules of this worker into their best states; returns their held-out losses by index.

    All workers must call it. They go one after another: each passes what its last module gives to the next.
    """
    if job.holdout is None:
        return {}
    crew, recipe, curves = job.crew, job.recipe, {}
    held = Streams(job.holdout, job.teacher.config.hidden_size, CacheSettings.of(recipe), recipe.batch_size)
    try:
        for rank in range(crew.world):
            if rank == crew.rank:
                curves = {worker.index: _keep_best(worker, held) for worker in workers}
            crew.exchange("the held-out sentences", patient=True)
            passed = modules_of(rank, crew.world, modules).stop
            if passed < modules and crew.rank in (rank, rank + 1):
                pass_on(crew, held.arrays_at(passed), rank, rank + 1)
    finally:
        held.close()
    return curves


def _keep_best(worker: ModuleWorker, held: Streams) -> Curve:
    """The held-out losses of one module in all its states, the last one included; it ends in the best."""
    teacher, student = worker.trainer.teacher, worker.trainer.student
    settings, view, best = worker.trainer.settings, student.view, BestState()
    held.look_ahead(teacher)
    last = _copy(view)
    for step, state in (*worker.snapshots.states(), (settings.steps, last)):
        view.load_state_dict(state)
        best.add(step, heldout_loss(student, held, settings.output_loss), view)
    best.restore(view)
    if not student.last:
        held.advance(teacher, student)
    return best.curve


def report_kept(name: str, curve: Curve) -> None:
    """Print where a module did better before the end of its training."""
    step = min(curve, key=lambda point: point[1])[0]
    if step < curve[-1][0]:
        say(f"{name}: the held-out loss was least after step {step} of {curve[-1][0]}; that state is kept")


def _copy(view: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in view.state_dict().items()}
