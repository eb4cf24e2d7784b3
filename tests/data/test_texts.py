"""Which rows of a split are drawn to calibrate on, and which are set apart."""

from __future__ import annotations

import numpy as np
import pytest

from mrem_deploy.data.texts import Texts, drawn_rows, sample, split_rows


@pytest.mark.parametrize(("count", "size"), [(100, 40), (100, 100), (30, 100)])
def test_the_drawn_rows_are_those_of_sample(count: int, size: int) -> None:
    texts = Texts([str(i) for i in range(count)], None, None, ())
    assert [int(text) for text in sample(texts, size, 3).first] == drawn_rows(count, size, 3).tolist()


def test_rows_are_set_apart_from_those_that_are_left() -> None:
    """The calibration rows stay what they are without any held-out ones."""
    rows, apart = split_rows(1000, 400, 50, seed=1)
    assert rows.tolist() == drawn_rows(1000, 400, 1).tolist()
    assert len(set(apart.tolist())) == 50
    assert not np.isin(apart, rows).any()
    again, other = split_rows(1000, 400, 50, seed=1), split_rows(1000, 400, 50, seed=2)
    assert again[1].tolist() == apart.tolist() != other[1].tolist()


def test_at_most_an_eighth_is_set_apart() -> None:
    rows, apart = split_rows(100, 60, 256, seed=0)
    assert (len(rows), len(apart)) == (60, 12)
    assert not np.isin(apart, rows).any()


@pytest.mark.parametrize(("count", "size"), [(100, 100), (100, 4096), (103, 100)])
def test_where_too_few_are_left_an_eighth_of_the_drawn_ones_is_set_apart(count: int, size: int) -> None:
    drawn = drawn_rows(count, size, 0)
    rows, apart = split_rows(count, size, 256, seed=0)
    assert len(apart) == len(drawn) // 8
    assert sorted([*rows, *apart]) == sorted(drawn)
    assert [row for row in drawn.tolist() if row in set(rows.tolist())] == rows.tolist()  # the order is kept
    assert sorted(apart) != sorted(drawn)[-len(apart) :]  # a file may be sorted by label: not its end
    assert len(split_rows(count, size, 5, seed=0)[1]) == 5


@pytest.mark.parametrize("count", [1, 7, 100])
def test_none_are_set_apart_if_none_are_asked_for_or_too_few_are_there(count: int) -> None:
    rows, apart = split_rows(count, 4096, 0 if count == 100 else 256, seed=0)
    assert rows.tolist() == list(range(count))
    assert len(apart) == 0
