"""MREM-P on more devices than there are here: the real queues and schedule on a virtual clock.

`ModuleSchedule`, `StaleQueue` and `Outbox` are those of training; what is virtual is the duration of
a pass (a measured time with jitter) and of a transfer (latency plus size over bandwidth, one message
in flight, acknowledged). The pipelines to compare with follow their published schedules and get the
same durations.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from mrem_deploy.train.mrem_p.schedule import OUTBOX_ENTRIES, Action, ModuleSchedule, ScheduleRules
from mrem_deploy.train.mrem_p.stale_queue import Outbox, StaleQueue, draw, mean_age

BACKWARD_SHARE = 2 / 3  # of a training step of a pipeline stage; a backward pass is two forward passes


@dataclass(frozen=True)
class World:
    """What the simulated machines are like. Times in seconds, sizes in bytes, bandwidths in bytes/s."""

    step: tuple[float, ...]  # seconds of a training step, by module
    forward_share: float = 0.35  # of a step: a forward pass of teacher and student, for priming and serving
    jitter: float = 0.1  # standard deviation of a duration, relative to its mean
    parcel: float = 25e6  # both streams of one batch
    per_node: int = 8  # modules on one machine
    inside: float = 50e9  # bandwidth between devices of a machine
    between: float = 3e9  # bandwidth between machines
    latency: float = 1e-4
    seed: int = 0

    @property
    def modules(self) -> int:
        return len(self.step)

    def transfer(self, module: int) -> float:
        """From a module to the next."""
        same = module // self.per_node == (module + 1) // self.per_node
        return self.latency + self.parcel / (self.inside if same else self.between)


class Durations:
    """Gamma-distributed around the mean: never negative, and now and then long."""

    def __init__(self, world: World, stream: int) -> None:
        self._generator = np.random.default_rng([world.seed, stream])
        self._jitter = world.jitter
        self._drawn: list[float] = []

    def __call__(self, mean: float) -> float:
        if self._jitter <= 0:
            return mean
        if not self._drawn:  # many at once: one draw costs more than all else in an event
            shape = self._jitter**-2
            self._drawn = (self._generator.gamma(shape, size=1024) / shape).tolist()
        return mean * self._drawn.pop()


@dataclass
class Outcome:
    """One simulated run. Shares are of the time from the end of priming to a module's last step."""

    seconds: float  # until every module is trained
    priming: float  # seconds of it
    busy: float  # share of all devices' time until then spent on training steps
    waiting: list[float] = field(default_factory=list)  # share, by module
    mean_age: float = 0.0
    oldest: int = 0
    fresh: float = 1.0  # share of steps whose input had not been used before
    dropped: int = 0


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self._count += 1  # events of the same moment keep their order
        heapq.heappush(self._events, (self.now + seconds, self._count, call))

    def run(self) -> None:
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()


class _Link:
    """A module's outlet: the outbox, and one parcel on its way."""

    def __init__(self, clock: _Clock, seconds: float, durations: Durations, sender: _Worker) -> None:
        self.outbox: Outbox[int] = Outbox(OUTBOX_ENTRIES)
        self.receiver: _Worker
        self.successor_turns, self.successor_done = 0, False
        self._clock, self._seconds, self._durations, self._sender = clock, seconds, durations, sender
        self._busy = False

    @property
    def has_room(self) -> bool:
        return not self.outbox.full

    def put(self, turn: int) -> None:
        if not self.successor_done:
            self.outbox.put(turn, turn)
            self._send()

    def _send(self) -> None:
        if self._busy or not len(self.outbox):
            return
        self._busy = True
        entry = self.outbox.take()
        self._clock.after(self._durations(self._seconds), lambda: self._deliver(entry.turn))
        self._sender.poke()  # there is room in the outbox

    def _deliver(self, turn: int) -> None:
        receiver = self.receiver
        if receiver.schedule.rules.lockstep and receiver.queue is not None and receiver.queue.full:
            receiver.on_room = lambda: self._deliver(turn)  # no answer before the last one was taken
            return
        assert receiver.queue is not None
        receiver.queue.put(turn, turn)
        receiver.poke()
        self._answer()
        self._busy = False
        self._send()

    def _answer(self) -> None:
        """What the receiver's state is, the sender knows from here on."""
        self.successor_turns = self.receiver.schedule.turn
        self.successor_done = self.receiver.schedule.is_done(self.receiver.link)
        self._sender.poke()

    def ask(self) -> None:
        """A sender with nothing to send asks; here, whenever the answer would have changed."""
        if not self._busy:
            self._answer()


class _Worker:
    def __init__(self, index: int, world: World, rules: ScheduleRules, clock: _Clock) -> None:
        self.index, self.world, self.clock = index, world, clock
        self.schedule = ModuleSchedule(rules)
        self.queue: StaleQueue[int] | None = StaleQueue(rules.capacity) if index else None
        self.link: _Link | None = None
        self.before: _Worker | None = None
        self.on_room: Callable[[], None] | None = None
        self.training = self.waiting = self.finished = 0.0
        self.used: set[int] = set()
        self.released_at = 0.0
        self._durations = Durations(world, index)
        self._acting = False
        self._idle_since: float | None = 0.0

    def poke(self) -> None:
        """Something changed: act if there is something to do."""
        if self._acting:
            return
        action = self.schedule.next(self.queue, self.link)
        if action in (Action.WAIT, Action.DONE):
            if action is Action.DONE and self.before is not None and self.before.link is not None:
                self.before.link.ask()
            return
        if self._idle_since is not None and action is Action.TRAIN:
            self.waiting += self.clock.now - max(self._idle_since, self.released_at)
        self._acting, self._idle_since = True, None
        self._take(action)
        mean = self.world.step[self.index] * (1.0 if action is Action.TRAIN else self.world.forward_share)
        seconds = self._durations(mean)
        self.clock.after(seconds, lambda: self._finish(action, seconds))

    def _take(self, action: Action) -> None:
        if self.queue is None or action is Action.PRIME:
            return
        turn = self.schedule.turn
        if self.schedule.rules.lockstep:
            self.used.add(self.queue.take())
            if self.on_room is not None:
                arrived, self.on_room = self.on_room, None
                arrived()
        elif action is Action.TRAIN:
            self.used.add(self.queue.sample(draw(self.world.seed, self.index, turn)))

    def _finish(self, action: Action, seconds: float) -> None:
        stamp = self.schedule.stamp
        self.schedule.did(action, self.link)
        self._acting, self._idle_since = False, self.clock.now
        if action is Action.TRAIN:
            self.training += seconds
            self.finished = self.clock.now
        if self.link is not None:
            self.link.put(stamp)
        if self.before is not None and self.before.link is not None and self.before.schedule.trained:
            self.before.link.ask()
        self.poke()


def simulate(world: World, rules: ScheduleRules) -> Outcome:
    """One run of MREM-P (or, with `rules.lockstep`, of its deterministic form)."""
    clock = _Clock()
    workers = [_Worker(index, world, rules, clock) for index in range(world.modules)]
    for here, behind in pairwise(workers):
        here.link = _Link(
            clock, world.transfer(here.index), Durations(world, world.modules + here.index), here
        )
        here.link.receiver, behind.before = behind, here
    for worker in workers:
        worker.poke()
    clock.run()  # until nothing moves: all are primed, or, in lock-step, all is done
    priming = clock.now if not rules.lockstep else 0.0
    assert all(worker.schedule.is_primed(worker.queue, worker.link) for worker in workers)
    if not rules.lockstep:
        for worker in workers:
            worker.released_at = clock.now
            worker.schedule.release()
        for worker in workers:
            worker.poke()
        clock.run()
    assert all(worker.schedule.is_done(worker.link) for worker in workers)
    end = max(worker.finished for worker in workers)
    readers = [worker for worker in workers if worker.queue is not None]
    queues = [worker.queue for worker in readers if worker.queue is not None]
    return Outcome(
        seconds=end,
        priming=priming,
        busy=sum(worker.training for worker in workers) / (world.modules * end),
        waiting=[worker.waiting / (worker.finished - worker.released_at) for worker in workers],
        mean_age=float(np.mean([mean_age(queue.ages) for queue in queues])) if queues else 0.0,
        oldest=max((max(queue.ages, default=0) for queue in queues), default=0),
        fresh=float(np.mean([len(w.used) / rules.steps for w in readers])) if readers else 1.0,
        dropped=sum(worker.link.outbox.dropped for worker in workers if worker.link is not None),
    )


def gpipe(world: World, steps: int, micro_batches: int) -> Outcome:
    """Forward all micro-batches through all stages, then backward, then the next step (Huang et al.)."""
    durations = [Durations(world, index) for index in range(world.modules)]
    now, busy = 0.0, 0.0
    for _ in range(steps):
        free = np.full(world.modules, now)
        arrived = np.full(micro_batches, now)
        for order, share in ((range(world.modules), 1 - BACKWARD_SHARE), (None, BACKWARD_SHARE)):
            stages = order if order is not None else range(world.modules - 1, -1, -1)
            for stage in stages:
                link = _half_transfer(world, stage, backward=order is None) / micro_batches
                for number in range(micro_batches):
                    seconds = durations[stage](world.step[stage] * share / micro_batches)
                    free[stage] = max(free[stage], arrived[number]) + seconds
                    arrived[number] = free[stage] + link
                    busy += seconds
        now = float(free.max())
    return Outcome(now, 0.0, busy / (world.modules * now))


def gpipe_bubble(modules: int, micro_batches: int) -> float:
    """(N−1)/(N+M−1), the share of time lost with equal stages and no transfers."""
    return (modules - 1) / (modules + micro_batches - 1)


def pipedream(world: World, steps: int) -> Outcome:
    """One forward, one backward, without a flush (Narayanan et al.): at most N − i batches in stage i."""
    count = world.modules
    durations = [Durations(world, index) for index in range(count)]
    forward = np.full((count, steps), np.nan)
    backward = np.full((count, steps), np.nan)
    orders = [_one_forward_one_backward(count - stage, steps) for stage in range(count)]
    at, free, busy = [0] * count, [0.0] * count, 0.0
    moved = True
    while moved:
        moved = False
        for stage in range(count):
            while at[stage] < len(orders[stage]):
                is_forward, batch = orders[stage][at[stage]]
                if is_forward:
                    ready = 0.0 if stage == 0 else forward[stage - 1, batch]
                    ready += _half_transfer(world, stage - 1, False) if stage else 0.0
                else:
                    last = stage == count - 1
                    ready = forward[stage, batch] if last else backward[stage + 1, batch]
                    ready += 0.0 if last else _half_transfer(world, stage, False)
                if np.isnan(ready):
                    break
                share = 1 - BACKWARD_SHARE if is_forward else BACKWARD_SHARE
                seconds = durations[stage](world.step[stage] * share)
                free[stage] = max(free[stage], ready) + seconds
                (forward if is_forward else backward)[stage, batch] = free[stage]
                busy += seconds
                at[stage] += 1
                moved = True
    end = max(free)
    return Outcome(end, 0.0, busy / (count * end))


def _one_forward_one_backward(ahead: int, batches: int) -> list[tuple[bool, int]]:
    """The order of (forward?, batch) in a stage that may be `ahead` batches ahead of its backward passes."""
    order = [(True, batch) for batch in range(min(ahead, batches))]
    for batch in range(batches):
        order.append((False, batch))
        if batch + ahead < batches:
            order.append((True, batch + ahead))
    return order


def _half_transfer(world: World, stage: int, backward: bool) -> float:
    """A pipeline sends one stream where MREM sends two; nothing leaves the last (or first) stage."""
    link = stage - 1 if backward else stage
    if not 0 <= link < world.modules - 1:
        return 0.0
    wire = world.transfer(link) - world.latency
    return world.latency + wire / 2
