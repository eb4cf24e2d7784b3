"""The queue between two neighbouring modules, and the outbox in front of a slow connection.

Plain data structures: they know nothing of quantization, processes or time, and they are not
thread-safe. Training drives them under one lock, the simulator with a virtual clock.

Note: the oldest entry is dropped in two places. The *queue* is the paper's: the last t₀ outputs of the
predecessor, from which the successor samples. The *outbox* holds what a connection has not taken yet;
it drops the oldest so that a slow neighbour gets recent outputs and not a growing backlog.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")


class Stamped(NamedTuple, Generic[T]):
    """An output with the turn of its producer that made it; turns only grow."""

    turn: int
    item: T


@dataclass
class Held(Generic[T]):
    """An entry of the queue, and how often it was used."""

    turn: int
    item: T
    uses: int = 0


class StaleQueue(Generic[T]):
    """The last `capacity` outputs of a module, first in, first out (paper, section "Accelerated
    Parallel Training": I = {f^t, …, f^(t−t₀+1)}).

    An entry stays when it is used, so no module waits for a new one; but those used least come first.
    With equal chances for all, a third of the outputs would leave each queue unused: the fourth of four
    modules would see the sentences of only 4 in 10 batches."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a queue holds at least 1 entry, got {capacity}")
        self.capacity = capacity
        self.received = 0
        self.ages: Counter[int] = Counter()  # age of a used entry -> how often
        self._entries: deque[Held[T]] = deque(maxlen=capacity)
        self._newest = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        """From the oldest to the newest."""
        return (entry.item for entry in self._entries)

    @property
    def full(self) -> bool:
        return len(self._entries) == self.capacity

    def put(self, turn: int, item: T) -> None:
        """Add the newest output; when full, the oldest leaves."""
        self._entries.append(Held(turn, item))
        self._newest = turn
        self.received += 1

    def peek(self, position: int) -> T:
        """The entry at `position` from the oldest, left in place and not counted as used."""
        return self._entries[position].item

    def sample(self, draw: float) -> T:
        """One of the least used entries with equal chance, left in place; `draw` is a number in [0, 1)."""
        fewest = min(entry.uses for entry in self._entries)
        least_used = [entry for entry in self._entries if entry.uses == fewest]
        return self._use(least_used[int(draw * len(least_used))])

    def take(self) -> T:
        """The oldest entry, removed: in lock-step each output is used once, in order."""
        return self._use(self._entries.popleft())

    def _use(self, entry: Held[T]) -> T:
        entry.uses += 1
        # In turns of the producer: by how much its weights may have changed since.
        self.ages[self._newest - entry.turn] += 1
        return entry.item


class Outbox(Generic[T]):
    """What waits to be sent: a full outbox drops its oldest entry and counts it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.dropped = 0
        self._entries: deque[Stamped[T]] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        return len(self._entries) == self.capacity

    def put(self, turn: int, item: T) -> None:
        self.dropped += self.full
        self._entries.append(Stamped(turn, item))

    def take(self) -> Stamped[T]:
        """The oldest entry that was not dropped."""
        return self._entries.popleft()


def draw(seed: int, module: int, turn: int) -> float:
    """The random number in [0, 1) by which a module samples in a turn.

    It depends on the turn alone, as the batches do: so a checkpoint needs no random state besides the
    step number.
    """
    return float(np.random.default_rng([seed, module, turn]).random())


def mean_age(ages: Counter[int]) -> float:
    used = sum(ages.values())
    return sum(age * times for age, times in ages.items()) / used if used else 0.0
