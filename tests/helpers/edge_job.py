"""Two processes and the edge between them, for test_edge.py: new processes import this by name."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch

from mrem_deploy.train.mrem_p.crew import Crew
from mrem_deploy.train.mrem_p.edge import EdgeReceiver, EdgeSender, Parcel, Wire
from mrem_deploy.train.mrem_p.launch import crew_of
from mrem_deploy.train.mrem_p.stale_queue import StaleQueue

CPU = torch.device("cpu")
PATIENCE = 120.0  # seconds
LAST = 19  # turn


class Setting:
    """Where the parcels are, and how they travel."""

    device = CPU
    direct = True  # on GPUs: by NCCL, else staged in pinned memory


def parcel_of(turn: int) -> Parcel:
    """Every number in it tells the turn; its shape changes from turn to turn. On a GPU it is large enough for
    a transfer to be under way while the next one is made."""
    sentences, tokens, width = (3, 2 + turn % 3, 4) if Setting.device == CPU else (32, 64 + turn % 3, 768)
    return Parcel(
        torch.full((sentences, tokens, width), float(turn), device=Setting.device),
        torch.full((sentences, tokens, width), turn + 0.5, device=Setting.device),
        torch.full((sentences, tokens), turn, dtype=torch.int64, device=Setting.device),
    )


def turn_of(parcel: Parcel) -> int:
    """Which turn's parcel it is; −1 where its tensors do not belong together."""
    turn = int(parcel.mask[0, 0])
    return turn if all(map(torch.equal, parcel, parcel_of(turn))) else -1


def exercise(kind: str = "cpu", direct: bool = True) -> dict[str, Any]:
    """All that is tried, one edge after another; everyone's results, by rank.

    With kind "cuda" each rank has a GPU, or both share one, over which NCCL does not work (`direct`).
    """
    with crew_of(PATIENCE) as crew:
        if kind == "cuda":
            Setting.device = torch.device("cuda", crew.rank % torch.cuda.device_count())
            torch.cuda.set_device(Setting.device)
        Setting.direct = direct
        came = {"free": _free(crew), "lossless": _lossless(crew), "given up": _give_up(crew)}
        return {"ranks": crew.exchange("the results", came)}


class Side:
    """One end of an edge, with what belongs to it."""

    def __init__(self, crew: Crew, capacity: int, lossless: bool) -> None:
        self.mail = threading.Condition()
        self.queue: StaleQueue[Parcel] = StaleQueue(capacity)
        self.seen: list[int] = []
        self.done = False
        device = Setting.device
        wire = Wire.connect(0, 1, device if Setting.direct else CPU, timedelta(seconds=PATIENCE))
        self.sender = EdgeSender(wire, self.mail, device)
        self.receiver = EdgeReceiver(
            wire, self.queue, lambda: (len(self.seen), self.done), lossless, self.mail, device, torch.float32
        )
        self.own = self.sender if crew.leads else self.receiver
        self.own.start()

    def wait(self, ready: Any) -> None:
        with self.mail:
            if not self.mail.wait_for(lambda: ready() or self.own.error, PATIENCE):
                raise TimeoutError("nothing came")


def _free(crew: Crew) -> dict[str, Any]:
    """A sender that never waits: the receiver gets some of it, in order, and the last."""
    side = Side(crew, capacity=4, lossless=False)
    if crew.leads:
        for turn in range(LAST + 1):
            with side.mail:
                side.sender.put(turn, parcel_of(turn))
        side.wait(lambda: side.sender.successor_done)
        closed = side.own.join(PATIENCE)
        return {
            "closed": closed,
            "dropped": side.sender.outbox.dropped,
            "turns": side.sender.successor_turns,
        }
    while LAST not in side.seen:
        side.wait(lambda: side.queue.received > 0 and turn_of(list(side.queue)[-1]) not in side.seen)
        with side.mail:
            side.seen.append(turn_of(list(side.queue)[-1]))
    with side.mail:
        side.done = True
    return {"closed": side.own.join(PATIENCE), "seen": side.seen, "received": side.queue.received}


def _lossless(crew: Crew) -> dict[str, Any]:
    """A sender that minds the room, and a slow receiver: everything arrives, once and in order."""
    side = Side(crew, capacity=1, lossless=True)
    if crew.leads:
        for turn in range(LAST + 1):
            side.wait(lambda: side.sender.has_room)
            with side.mail:
                side.sender.put(turn, parcel_of(turn))
        return {"closed": side.own.join(PATIENCE), "dropped": side.sender.outbox.dropped}
    while len(side.seen) <= LAST:
        side.wait(lambda: len(side.queue) > 0)
        time.sleep(0.005)
        with side.mail:
            side.seen.append(turn_of(side.queue.take()))
            side.done = len(side.seen) > LAST
            side.mail.notify_all()
    return {"closed": side.own.join(PATIENCE), "seen": side.seen}


def _give_up(crew: Crew) -> dict[str, Any]:
    """A receiver that must leave: the sender learns it, and both threads end."""
    side = Side(crew, capacity=4, lossless=False)
    if not crew.leads:
        with side.mail:
            side.own.abandon()
    closed = side.own.join(PATIENCE)
    return {"closed": closed, "error": None if side.own.error is None else repr(side.own.error)}
