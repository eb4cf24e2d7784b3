"""MREM-P: all modules at once, each fed by the stale queue of its predecessor (paper, algorithm 1).

A worker (process) owns one module or several consecutive ones and steps them in turn. The step, its
optimizer and its checkpoints are those of MREM-S. After start-up a worker holds only its own part of
teacher and student; at the end rank 0 gets the other parts back and continues like the other methods.

When all are trained, every module is brought into the state that did best on held-out sentences
(`best_states.py`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise

import torch

from mrem_deploy.base import interrupt
from mrem_deploy.base.progress import say
from mrem_deploy.models.partition import module_cuts
from mrem_deploy.models.parts import carve
from mrem_deploy.recipe import parse_modules
from mrem_deploy.train.job import Curve, TrainJob, TrainLog, WorkerReport, WorkerSeconds
from mrem_deploy.train.module import ModuleTrainer
from mrem_deploy.train.mrem_p.best_states import Snapshots, keep_best_states, report_kept
from mrem_deploy.train.mrem_p.checkpoints import AtOwnPace, Checkpoints, InStep
from mrem_deploy.train.mrem_p.crew import Crew, modules_of, owner_of
from mrem_deploy.train.mrem_p.edge import ConnectionLost, EdgeReceiver, EdgeSender, LocalOutlet, Wire
from mrem_deploy.train.mrem_p.schedule import Action, ScheduleRules
from mrem_deploy.train.mrem_p.shards import HeldParts
from mrem_deploy.train.mrem_p.status import StatusBoard
from mrem_deploy.train.mrem_p.worker import ModuleWorker

WAIT_SECONDS = 0.2  # between checks of what sends no notification, such as a lost connection
# A neighbour that dies closes its connections; wait this long for its own error, which is the one to show.
GRACE_SECONDS = 10.0
ABANDON_SECONDS = 2.0


def train_mrem_p(job: TrainJob, slowdown: Mapping[int, float] | None = None) -> TrainLog:
    """Train this worker's modules; on rank 0 the student is the entire trained model afterwards.

    `slowdown`: module -> times slower, for benchmarks with a slow worker.
    """
    started = time.perf_counter()
    crew, recipe, settings = job.crew, job.recipe, job.settings
    cuts = module_cuts(job.teacher, parse_modules(recipe.modules))
    parts = carve(job.teacher, cuts), carve(job.student, cuts)
    if 1 < crew.world < len(parts[0]):
        say(f"{len(parts[0])} modules on {crew.world} workers: {_shares(crew.world, len(parts[0]))}")
    held = HeldParts(crew, parts)
    held.release()
    mail = threading.Condition()
    rules = ScheduleRules(settings.steps, recipe.staleness, recipe.deterministic)
    forcing_steps = recipe.teacher_forcing * settings.steps  # T₀
    workers = [
        ModuleWorker(
            index,
            ModuleTrainer(parts[0][index], parts[1][index], settings),
            rules,
            job.data,
            forcing_steps,
            mail,
            Snapshots.of(job, index, parts[1][index].view),
            (slowdown or {}).get(index, 1.0),
        )
        for index in modules_of(crew.rank, crew.world, len(parts[0]))
    ]
    store, every = job.store, recipe.checkpoint_steps
    checkpoints = InStep(store, every, crew) if rules.lockstep else AtOwnPace(store, every)
    checkpoints.restore(workers)
    trained = all(worker.schedule.trained for worker in workers)
    rank = Rank(crew, workers, checkpoints, mail, len(parts[0]))
    if not all(crew.exchange("the work that is left", trained)):
        rank.connect(next(job.student.parameters()).dtype)
        try:
            with StatusBoard(crew, workers, mail, rank.refused):
                rank.prime()
                rank.train()
                rank.disconnect()
        except BaseException:
            rank.abandon()
            raise
    before_choice = time.perf_counter()
    heldout = keep_best_states(job, workers, len(parts[0]))
    choosing = time.perf_counter() - before_choice
    log = _gather_log(crew, rank, forcing_steps, heldout)
    held.collect()
    log.seconds["train all modules"] = time.perf_counter() - started - choosing
    if heldout:
        log.seconds["choose states"] = choosing
    return log


def _shares(world: int, modules: int) -> str:
    owned = [[str(index + 1) for index in modules_of(rank, world, modules)] for rank in range(world)]
    return "; ".join(f"worker {rank} steps {', '.join(names)} in turn" for rank, names in enumerate(owned))


class Rank:
    """The modules of one process, stepped in turn, and its connections to the neighbours."""

    def __init__(
        self,
        crew: Crew,
        workers: Sequence[ModuleWorker],
        checkpoints: Checkpoints,
        mail: threading.Condition,
        modules: int,
    ) -> None:
        self.crew, self.workers, self.modules = crew, workers, modules
        self.seconds = WorkerSeconds()
        self.priming_seconds = self.serving_seconds = 0.0
        self.refused = threading.Event()  # set by the status board's thread
        self.sender: EdgeSender | None = None
        self.receiver: EdgeReceiver | None = None
        self._checkpoints, self._mail = checkpoints, mail

    def connect(self, dtype: torch.dtype) -> None:
        """Link every module to its successor, in this process or another."""
        lossless = self.workers[0].schedule.rules.lockstep
        device = next(self.workers[0].trainer.student.parameters()).device
        for front, behind in pairwise(self.workers):
            assert behind.queue is not None
            front.outlet = LocalOutlet(behind.queue, behind.state, lossless)
        for module in range(self.modules - 1):  # all workers make all groups, in the same order
            here, there = (owner_of(index, self.crew.world, self.modules) for index in (module, module + 1))
            if here == there:
                continue
            wire = Wire.connect(here, there, device, timedelta(seconds=self.crew.timeout))
            if self.crew.rank == wire.sender:
                self.sender = EdgeSender(wire, self._mail, device)
                self.workers[-1].outlet = self.sender
            elif self.crew.rank == wire.receiver:
                first = self.workers[0]
                assert first.queue is not None
                self.receiver = EdgeReceiver(
                    wire, first.queue, first.state, lossless, self._mail, device, dtype
                )
        for thread in self._threads():
            thread.start()

    def disconnect(self) -> None:
        """Both ends have agreed that the edge is closed; the threads are about to end."""
        for thread in self._threads():
            while not thread.join(WAIT_SECONDS):
                self._check()
        self._check()

    def abandon(self) -> None:
        """Close the connections early, and get the threads out of torch's calls."""
        with self._mail:
            for thread in self._threads():
                thread.abandon()
        for thread in self._threads():
            thread.join(ABANDON_SECONDS)

    def prime(self) -> None:
        """Fill all queues, in order; no module trains before the last one is full."""
        started = time.perf_counter()
        while not all(worker.is_primed for worker in self.workers):
            self._round()
        self.crew.exchange("the end of priming", check=self._check)
        with self._mail:
            for worker in self.workers:
                worker.release()
            self._mail.notify_all()
        self.priming_seconds = time.perf_counter() - started
        self.seconds = WorkerSeconds()

    def train(self) -> None:
        """Until every module of this worker is done, and all behind it."""
        started = time.perf_counter()
        trained: WorkerSeconds | None = None
        while self._round():
            if trained is None and all(worker.schedule.trained for worker in self.workers):
                trained = self._seconds_since(started)
            self._checkpoints.after_round(self.workers, self._check)
        self.seconds = trained or self._seconds_since(started)
        self.serving_seconds = time.perf_counter() - started - self.seconds.whole

    def _seconds_since(self, started: float) -> WorkerSeconds:
        return WorkerSeconds(
            computing=sum(worker.seconds.computing for worker in self.workers),
            receiving=sum(worker.seconds.receiving for worker in self.workers),
            waiting=self.seconds.waiting,
            whole=time.perf_counter() - started,
        )

    def _round(self) -> bool:
        """Let every module do what it can; False when all are done."""
        self._check()
        acted = False
        for worker in interrupt.steps(self.workers):
            if self._checkpoints.holds(worker):
                continue
            with self._mail:
                action = worker.next()
            if action not in (Action.WAIT, Action.DONE):
                worker.act(action)
                acted = True
        if acted:
            return True
        with self._mail:
            actions = [worker.next() for worker in self.workers if not self._checkpoints.holds(worker)]
            if actions and all(action is Action.DONE for action in actions):
                return False
            if all(action in (Action.WAIT, Action.DONE) for action in actions):
                started = time.perf_counter()
                self._mail.wait(WAIT_SECONDS)
                self.seconds.waiting += time.perf_counter() - started
        return True

    def _threads(self) -> list[EdgeSender | EdgeReceiver]:
        return [thread for thread in (self.sender, self.receiver) if thread is not None]

    def _check(self) -> None:
        """Raise the error of a thread, the UserError of another worker, or that a signal came."""
        interrupt.check()
        if self.refused.is_set():
            self.crew.check_refusal()
        for thread in self._threads():
            if thread.error is not None:
                deadline = time.monotonic() + GRACE_SECONDS
                while time.monotonic() < deadline:
                    interrupt.check()
                    self.crew.check_refusal()
                    time.sleep(WAIT_SECONDS)
                raise ConnectionLost(
                    f"worker {self.crew.rank} lost its connection {thread.name}: {thread.error}"
                ) from thread.error

    def report(self) -> WorkerReport:
        return WorkerReport(
            modules=[worker.index + 1 for worker in self.workers],
            seconds=self.seconds,
            priming_seconds=self.priming_seconds,
            serving_seconds=self.serving_seconds,
            transfer_seconds=sum(thread.busy_seconds for thread in self._threads()),
            turns={worker.index: worker.schedule.turn for worker in self.workers},
            queue_mb=sum(worker.queue_mb for worker in self.workers),
            dropped=self.sender.outbox.dropped if self.sender else 0,
            training_seconds={worker.index: worker.training_seconds for worker in self.workers},
        )


def _gather_log(crew: Crew, rank: Rank, forcing_steps: float, heldout: dict[int, Curve]) -> TrainLog:
    """The loss curves, held-out losses, ages and reports of all workers."""
    own = {
        "report": rank.report().to_dict(),
        "curves": [(worker.index, worker.curve) for worker in rank.workers],
        "ages": [(worker.index, sorted(worker.ages.items())) for worker in rank.workers],
        "heldout": list(heldout.items()),
    }
    curves: dict[int, Curve] = {}
    losses: dict[int, Curve] = {}
    ages: dict[int, Counter[int]] = {}
    log = TrainLog(forcing_steps=forcing_steps)
    for theirs in crew.exchange("the end of training", own, patient=True):
        log.workers.append(WorkerReport.from_dict(theirs["report"]))
        curves |= {index: [(step, loss) for step, loss in curve] for index, curve in theirs["curves"]}
        losses |= {index: [(step, loss) for step, loss in curve] for index, curve in theirs["heldout"]}
        ages |= {index: Counter(dict(counted)) for index, counted in theirs["ages"]}
    for index in sorted(curves):
        name = f"module {index + 1}/{rank.modules}"
        log.curves[name] = curves[index]
        if index in losses:
            log.heldout[name] = losses[index]
            report_kept(name, losses[index])
        if index:
            log.ages[name] = ages[index]
    return log
