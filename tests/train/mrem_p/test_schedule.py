"""What a module does next, in every phase, without tensors, processes or a clock."""

from __future__ import annotations

from dataclasses import dataclass

from mrem_deploy.train.mrem_p.schedule import Action, ModuleSchedule, ScheduleRules
from mrem_deploy.train.mrem_p.stale_queue import StaleQueue

RULES = ScheduleRules(steps=4, staleness=2)
LOCKSTEP = ScheduleRules(steps=4, staleness=2, lockstep=True)


@dataclass
class FakeOutlet:
    has_room: bool = True
    successor_turns: int = 0
    successor_done: bool = False


def queue_of(rules: ScheduleRules, entries: int) -> StaleQueue[int]:
    queue: StaleQueue[int] = StaleQueue(rules.capacity)
    for turn in range(entries):
        queue.put(turn, turn)
    return queue


def do(schedule: ModuleSchedule, queue: StaleQueue[int] | None, outlet: FakeOutlet | None) -> Action:
    action = schedule.next(queue, outlet)
    if action in (Action.PRIME, Action.TRAIN, Action.SERVE):
        schedule.did(action, outlet)
    return action


def test_the_first_module_primes_then_waits_for_the_others() -> None:
    schedule, outlet = ModuleSchedule(RULES), FakeOutlet()
    stamps = []
    for _ in range(2):
        stamps.append(schedule.stamp)
        assert do(schedule, None, outlet) is Action.PRIME
    assert stamps == [-2, -1]  # before those of the training steps
    assert schedule.is_primed(None, outlet)
    assert do(schedule, None, outlet) is Action.WAIT
    schedule.release()
    assert schedule.stamp == 0
    assert do(schedule, None, outlet) is Action.TRAIN


def test_priming_goes_in_order_and_loses_nothing() -> None:
    schedule, outlet, queue = ModuleSchedule(RULES), FakeOutlet(), queue_of(RULES, 0)
    assert do(schedule, queue, outlet) is Action.WAIT  # nothing has come yet
    queue.put(0, 0)
    assert do(schedule, queue, outlet) is Action.PRIME
    assert do(schedule, queue, outlet) is Action.WAIT  # the second has not come yet
    queue.put(1, 1)
    outlet.has_room = False  # a full outbox would drop what the successor's queue needs
    assert do(schedule, queue, outlet) is Action.WAIT
    outlet.has_room = True
    assert do(schedule, queue, outlet) is Action.PRIME
    assert schedule.is_primed(queue, outlet)


def test_the_last_module_is_primed_when_its_queue_is_full() -> None:
    schedule, queue = ModuleSchedule(RULES), queue_of(RULES, 1)
    assert not schedule.is_primed(queue, None)
    queue.put(1, 1)
    assert schedule.is_primed(queue, None)
    assert do(schedule, queue, None) is Action.WAIT
    schedule.release()
    assert [do(schedule, queue, None) for _ in range(5)] == [Action.TRAIN] * 4 + [Action.DONE]


def test_once_primed_training_never_waits_for_anybody() -> None:
    """Neither for new entries nor for room: a full outbox drops."""
    schedule, outlet, queue = ModuleSchedule(RULES), FakeOutlet(has_room=False), queue_of(RULES, 2)
    schedule.release()
    assert [do(schedule, queue, outlet) for _ in range(4)] == [Action.TRAIN] * 4


def test_a_finished_module_serves_at_its_successors_pace() -> None:
    schedule, outlet = ModuleSchedule(RULES, first_step=4), FakeOutlet(successor_turns=1)
    schedule.release()
    assert schedule.trained
    assert do(schedule, None, outlet) is Action.SERVE
    assert do(schedule, None, outlet) is Action.WAIT
    outlet.successor_turns = 2
    assert do(schedule, None, outlet) is Action.SERVE
    assert schedule.turn == 6  # its own successors see that it goes on
    outlet.successor_done = True
    assert do(schedule, None, outlet) is Action.DONE


def test_a_module_that_is_not_trained_goes_on_when_those_behind_it_are_done() -> None:
    schedule, outlet = ModuleSchedule(RULES, first_step=3), FakeOutlet(successor_done=True)
    schedule.release()
    assert do(schedule, None, outlet) is Action.TRAIN
    assert do(schedule, None, outlet) is Action.DONE


def test_lock_step_needs_an_input_and_room_for_every_step() -> None:
    schedule, outlet, queue = ModuleSchedule(LOCKSTEP), FakeOutlet(), queue_of(LOCKSTEP, 0)
    assert schedule.is_primed(queue, outlet)
    assert do(schedule, queue, outlet) is Action.WAIT
    queue.put(0, 0)
    outlet.has_room = False
    assert do(schedule, queue, outlet) is Action.WAIT
    outlet.has_room = True
    assert do(schedule, queue, outlet) is Action.TRAIN
    queue.take()
    assert do(schedule, queue, outlet) is Action.WAIT


def test_lock_step_does_not_serve() -> None:
    schedule, outlet = ModuleSchedule(LOCKSTEP, first_step=4), FakeOutlet(successor_turns=3)
    assert do(schedule, None, outlet) is Action.WAIT
    outlet.successor_done = True
    assert do(schedule, None, outlet) is Action.DONE
