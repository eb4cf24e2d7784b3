"""What a module does next: the schedule of MREM-P, without tensors, threads or clocks.

Each module goes through three phases. *Priming*: the first t₀ batches pass all modules in order,
forward only, to fill the queues. *Training*: one step per turn on an input sampled from the queue,
which is never empty from now on, so no module waits. *Serving*: a module that has finished continues
with forward passes, one per turn of its successor, until all modules behind it are done. Without
them the successor would overfit the last t₀ entries.

In lock-step there is no priming: each output is used once, in order, so the run is deterministic.

`rank.py` uses these classes with real tensors, `benchmarks/simulator.py` with a virtual clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from mrem_deploy.train.mrem_p.stale_queue import StaleQueue

# Entries waiting for a connection. One is enough if the connection is faster than the steps; the second
# absorbs jitter. More would only make the entries older when they arrive.
OUTBOX_ENTRIES = 2


class Action(Enum):
    PRIME = "prime"
    TRAIN = "train"
    SERVE = "serve"
    WAIT = "wait"  # something outside must change first
    DONE = "done"


@dataclass(frozen=True)
class ScheduleRules:
    """What all modules of a run have in common."""

    steps: int
    staleness: int  # t₀, the entries of a queue
    lockstep: bool = False

    @property
    def capacity(self) -> int:
        return 1 if self.lockstep else self.staleness


class Outlet(Protocol):
    """A module's way to its successor."""

    @property
    def has_room(self) -> bool: ...  # whether an output put now is sure not to drop another

    @property
    def successor_turns(self) -> int: ...  # turns that the successor is known to have done

    @property
    def successor_done(self) -> bool: ...  # whether it and all behind it need nothing any more


class ModuleSchedule:
    """The state of one module's walk through the phases; `turn` counts its passes, training first."""

    def __init__(self, rules: ScheduleRules, first_step: int = 0) -> None:
        self.rules = rules
        self.turn = first_step
        self._primed = 0
        self._released = rules.lockstep
        self._answered = -1  # the successor's turns at the last served pass

    def is_primed(self, queue: StaleQueue[Any] | None, outlet: Outlet | None) -> bool:
        """Whether its own queue is full and it has passed on all that its successor's queue needs."""
        received = queue is None or queue.received >= self.rules.staleness
        return self.rules.lockstep or (received and (outlet is None or self._primed == self.rules.staleness))

    @property
    def primed(self) -> int:
        """Priming passes done so far."""
        return self._primed

    @property
    def trained(self) -> bool:
        return self.turn >= self.rules.steps

    def release(self) -> None:
        """All modules are primed: the parallel phase begins."""
        self._released = True

    def next(self, queue: StaleQueue[Any] | None, outlet: Outlet | None) -> Action:
        """What to do now; `queue` is None for the first module, `outlet` for the last."""
        if not self._released:
            ready = outlet is not None and self._primed < self.rules.staleness and outlet.has_room
            return Action.PRIME if ready and (queue is None or queue.received > self._primed) else Action.WAIT
        if self.is_done(outlet):
            return Action.DONE
        if queue is not None and not len(queue):
            return Action.WAIT  # in lock-step; a primed queue is never empty
        if not self.trained:
            blocked = self.rules.lockstep and outlet is not None and not outlet.has_room
            return Action.WAIT if blocked else Action.TRAIN
        assert outlet is not None  # the last module is done when it is trained
        behind = outlet.successor_turns > self._answered
        return Action.SERVE if behind and not self.rules.lockstep else Action.WAIT

    def is_done(self, outlet: Outlet | None) -> bool:
        return self._released and self.trained and (outlet is None or outlet.successor_done)

    def did(self, action: Action, outlet: Outlet | None) -> None:
        """Count a finished pass."""
        if action is Action.PRIME:
            self._primed += 1
            return
        if action is Action.SERVE and outlet is not None:
            self._answered = outlet.successor_turns
        self.turn += 1

    @property
    def stamp(self) -> int:
        """The turn of an output made now; outputs of priming have turns before the first step's."""
        return self.turn if self._released else self.turn - self.rules.staleness + self._primed
