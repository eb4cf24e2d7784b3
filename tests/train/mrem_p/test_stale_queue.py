"""The queue between modules: first in, first out, the least used sampled first, with ages."""

from __future__ import annotations

from collections import Counter

import pytest

from mrem_deploy.train.mrem_p.stale_queue import Outbox, StaleQueue, draw, mean_age


def filled(capacity: int, turns: list[int]) -> StaleQueue[str]:
    queue: StaleQueue[str] = StaleQueue(capacity)
    for turn in turns:
        queue.put(turn, f"output {turn}")
    return queue


def test_it_holds_the_last_outputs_in_order() -> None:
    queue = filled(3, [0, 1, 2, 3, 4])
    assert list(queue) == ["output 2", "output 3", "output 4"]
    assert queue.full
    assert queue.received == 5
    assert [queue.peek(i) for i in range(3)] == list(queue)
    assert not queue.ages  # looking is not using


def test_sampling_leaves_entries_in_place_and_counts_their_age() -> None:
    queue = filled(4, [10, 11, 12, 15])  # 13 and 14 were dropped on the way
    assert [queue.sample(u) for u in (0.5, 0.9999, 0.0, 0.5)] == [
        "output 12", "output 15", "output 10", "output 11",
    ]  # fmt: skip
    assert queue.ages == Counter({5: 1, 4: 1, 3: 1, 0: 1})
    assert len(queue) == 4
    assert mean_age(queue.ages) == pytest.approx(12 / 4)


def test_an_entry_is_used_again_only_when_all_were_used_as_often() -> None:
    queue = filled(3, [0, 1, 2])
    rounds = [
        sorted(queue.sample(draw(0, 1, turn)) for turn in range(start, start + 3)) for start in (0, 3, 6)
    ]
    assert rounds == [["output 0", "output 1", "output 2"]] * 3
    queue.put(3, "output 3")
    assert queue.sample(0.0) == "output 3"  # the others were used three times each


def test_a_queue_that_is_not_full_yet_is_sampled_as_far_as_it_is() -> None:
    queue = filled(8, [0, 1])
    assert {queue.sample(u / 10) for u in range(10)} == {"output 0", "output 1"}


def test_draws_reach_all_entries_about_equally_often() -> None:
    first = Counter(filled(8, list(range(8))).sample(draw(0, 1, turn)) for turn in range(4000))
    assert len(first) == 8
    # 500 expected, with a standard deviation of 21
    assert all(400 < times < 600 for times in first.values())


def test_beside_an_equally_fast_producer_almost_every_output_is_used() -> None:
    """Sampled evenly over the whole queue it would be two in three."""
    queue, used = filled(8, list(range(8))), set()
    for turn in range(8, 500):
        used.add(queue.sample(draw(0, 1, turn)))
        queue.put(turn, f"output {turn}")
    assert len(used) > 0.97 * 492


def test_draws_follow_from_the_turn_alone() -> None:
    assert draw(0, 1, 7) == draw(0, 1, 7)
    assert len({draw(seed, module, turn) for seed in (0, 1) for module in (1, 2) for turn in (0, 1)}) == 8


def test_taking_uses_each_entry_once_in_order() -> None:
    queue = filled(3, [0, 1, 2])
    assert [queue.take() for _ in range(3)] == ["output 0", "output 1", "output 2"]
    assert len(queue) == 0
    assert queue.ages == Counter({2: 1, 1: 1, 0: 1})


def test_a_full_outbox_drops_its_oldest() -> None:
    outbox: Outbox[str] = Outbox(2)
    for turn in range(5):
        outbox.put(turn, f"output {turn}")
    assert outbox.full
    assert outbox.dropped == 3
    assert [outbox.take() for _ in range(2)] == [(3, "output 3"), (4, "output 4")]
    assert len(outbox) == 0


def test_a_queue_holds_something() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        StaleQueue(0)


def test_nothing_used_has_no_age() -> None:
    assert mean_age(Counter()) == 0.0
