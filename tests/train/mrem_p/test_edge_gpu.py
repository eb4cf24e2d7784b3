"""The edge on a GPU: which stream waits for what, with CUDA and NCCL replaced by fakes that write a log."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mrem_deploy.train.mrem_p.edge import HEADER, EdgeReceiver, EdgeSender, Kind, Need, Parcel, Wire
from mrem_deploy.train.mrem_p.stale_queue import StaleQueue

DEVICE = torch.device("cuda", 1)
ANNOUNCE, ANSWER, NCCL = "gloo announce", "gloo answer", "nccl"


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.device, self._log = name, DEVICE, log

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return f"an event of {self.name}"

    def synchronize(self) -> None:
        self._log.append(f"synchronize {self.name}")


class Received(torch.Tensor):
    """A tensor in host memory that stands for one on the GPU."""

    log: list[str]

    def record_stream(self, stream: Any) -> None:
        self.log.append(f"record {stream.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in order."""
    found: list[str] = []
    Received.log = found
    training = FakeStream("the training stream", found)

    @contextmanager
    def within(stream: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("the edge's stream", found))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: training)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append(f"set device {device.index}"))
    plain = torch.empty

    def empty(*shape: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            found.append("pinned")
        value = plain(*shape, **options)
        return value.as_subclass(Received) if device is not None or pin_memory else value

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(Received, "to", lambda self, device, non_blocking: self)
    return found


def parcel() -> Parcel:
    """The full-precision output is a view that is not contiguous."""
    return Parcel(
        torch.ones(3, 2, 4).transpose(0, 1), torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.int64)
    )


def wire(tensors: str | None) -> Wire:
    return Wire(0, 1, ANNOUNCE, ANSWER, tensors)


def send_one(monkeypatch: pytest.MonkeyPatch, log: list[str], tensors: str | None) -> list[bool]:
    """One parcel, after which the successor is done; whether the parcel was alive at each `synchronize`."""
    sent = parcel()
    watched = weakref.ref(sent.noisy)
    alive: list[bool] = []

    def send(tensor: torch.Tensor, rank: int, group: str) -> None:
        assert tensor.is_contiguous()
        log.append(f"send {group}")

    def answer(tensor: torch.Tensor, rank: int, group: str) -> None:
        gc.collect()
        log.append(f"the parcel is {'held' if watched() is not None else 'dropped'}")
        tensor.copy_(torch.tensor([1, Need.NOTHING]))

    monkeypatch.setattr(dist, "send", send)
    monkeypatch.setattr(dist, "recv", answer)
    monkeypatch.setattr(
        FakeStream,
        "synchronize",
        lambda self: (log.append("synchronize"), alive.append(watched() is not None)),
    )
    mail = threading.Condition()
    edge = EdgeSender(wire(tensors), mail, DEVICE)
    with mail:
        edge.put(0, sent)
    del sent
    edge.start()
    assert edge.join(30.0)
    assert edge.error is None
    return alive


def test_with_nccl_a_parcel_is_held_until_its_stream_has_sent_it(
    monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    alive = send_one(monkeypatch, log, NCCL)
    assert log == [
        "set device 1",
        "the edge's stream waits for an event of the training stream",
        f"send {ANNOUNCE}",
        *[f"send {NCCL}"] * 3,
        "synchronize",
        "the parcel is dropped",
        f"send {ANNOUNCE}",  # the end
    ]
    assert alive == [True]


def test_without_nccl_a_parcel_is_staged_in_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    alive = send_one(monkeypatch, log, None)
    staged = ["pinned", "synchronize", f"send {ANNOUNCE}"]
    assert log[2:13] == [f"send {ANNOUNCE}", *staged * 3, "synchronize"]
    assert alive == [True] * 4


@pytest.mark.parametrize("tensors", [NCCL, None])
def test_what_is_received_belongs_to_the_training_stream_too(
    monkeypatch: pytest.MonkeyPatch, log: list[str], tensors: str | None
) -> None:
    sent = parcel()
    headers = iter([[Kind.PARCEL, 7, *sent.clean.shape], [Kind.END, 0, 0, 0, 0]])
    contents = iter(sent)

    def receive(tensor: torch.Tensor, rank: int, group: str) -> None:
        if tensor.shape == (HEADER,):
            tensor.copy_(torch.tensor(next(headers)))
            return
        assert group == (tensors or ANNOUNCE)
        tensor.copy_(next(contents))

    monkeypatch.setattr(dist, "recv", receive)
    monkeypatch.setattr(dist, "send", lambda tensor, rank, group: log.append(f"send {group}"))
    queue: StaleQueue[Parcel] = StaleQueue(2)
    mail = threading.Condition()
    edge = EdgeReceiver(wire(tensors), queue, lambda: (0, True), False, mail, DEVICE, torch.float32)
    edge.start()
    assert edge.join(30.0)
    assert edge.error is None
    one = [*([] if tensors else ["pinned"]), "record the training stream", "synchronize the edge's stream"]
    assert log == ["set device 1", *one * 3, f"send {ANSWER}"]
    assert all(map(torch.equal, queue.peek(0), sent))
