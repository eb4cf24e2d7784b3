"""The connection between modules in two processes, over real process groups."""

from __future__ import annotations

from typing import Any

import edge_job
import pytest

from mrem_deploy.train.mrem_p.team import launch


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What the sender (rank 0) and the receiver saw; two processes are started once for all tests."""
    return launch(edge_job.exercise, (), workers=2, max_restarts=0)["ranks"]


def test_parcels_arrive_whole_in_order_and_the_newest_is_never_lost(ranks: list[dict[str, Any]]) -> None:
    sender, receiver = (rank["free"] for rank in ranks)
    assert receiver["seen"] == sorted(set(receiver["seen"]))
    assert receiver["seen"][0] >= 0  # −1: tensors of different batches in one parcel
    assert receiver["seen"][-1] == edge_job.LAST
    # What was put either arrived or was dropped before sending: one message in flight, acknowledged.
    assert receiver["received"] + sender["dropped"] == edge_job.LAST + 1


def test_the_sender_learns_how_far_its_successor_is(ranks: list[dict[str, Any]]) -> None:
    sender, receiver = (rank["free"] for rank in ranks)
    assert sender["turns"] == len(receiver["seen"])


def test_a_lossless_edge_holds_the_sender_back(ranks: list[dict[str, Any]]) -> None:
    sender, receiver = (rank["lossless"] for rank in ranks)
    assert sender["dropped"] == 0
    assert receiver["seen"] == list(range(edge_job.LAST + 1))


def test_both_ends_leave_when_the_successor_is_done(ranks: list[dict[str, Any]]) -> None:
    assert all(rank[what]["closed"] for rank in ranks for what in ("free", "lossless"))


def test_an_end_that_gives_up_is_told_apart_from_one_that_is_done(ranks: list[dict[str, Any]]) -> None:
    sender, receiver = (rank["given up"] for rank in ranks)
    assert sender["closed"]
    assert receiver["closed"]
    assert "ConnectionLost" in sender["error"]
    assert receiver["error"] is None
