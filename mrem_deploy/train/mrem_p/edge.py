"""The connection from a module to its successor in another process.

Each side has one thread with blocking calls: gloo sees a message only inside `wait`, so polling
would never find one. Data and acknowledgements have a separate process group each, one per direction.
One message is in flight at a time. The acknowledgement says how many turns the successor has done, and
whether it and all modules behind it are done. Then the sender replies with an end marker and both
threads end. With nothing to send, the sender asks now and then, which also shows that it is alive.
A worker that must give up closes its edges by the same messages, and its neighbour learns from them
that the run is over. (A thread left inside a call would abort the process at its end.)

On GPUs the tensors go from device to device by NCCL, announced over gloo first: a receive without a
sender would occupy the GPU. Without NCCL they are staged in pinned host memory.

Note: each thread has a CUDA stream of its own, next to the stream that trains. torch reuses a tensor's memory
on the stream that allocated it as soon as nobody holds the tensor, and NCCL's calls return when they are
queued. So the sender holds a parcel until its stream has sent it, and the receiver tells torch that the
training stream reads what it has received.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mrem_deploy.train.mrem_p.schedule import OUTBOX_ENTRIES
from mrem_deploy.train.mrem_p.stale_queue import Outbox, StaleQueue

ASK_SECONDS = 0.05  # between questions of a sender that has nothing to send
HEADER = 5  # kind, turn, sentences, tokens, width


class Parcel(NamedTuple):
    """One batch at the cut between two modules; the three always travel together."""

    clean: torch.Tensor  # (B, T, H), the full-precision output
    noisy: torch.Tensor  # (B, T, H), the quantized output
    mask: torch.Tensor  # (B, T), 1 at real tokens

    @property
    def megabytes(self) -> float:
        return sum(t.numel() * t.element_size() for t in self) / 2**20


class Kind(IntEnum):
    PARCEL = 0
    ASK = 1  # how far are you?
    END = 2


class Need(IntEnum):
    """What the successor replies."""

    MORE = 0
    NOTHING = 1  # it and all behind it are done
    GIVEN_UP = 2


class ConnectionLost(Exception):
    """A neighbour's end of a connection is gone; its own error says why."""


@dataclass(frozen=True)
class Wire:
    """The process groups of one edge; every worker must make all edges in the same order."""

    sender: int  # ranks
    receiver: int
    announce: Any  # gloo, sender → receiver: headers, and tensors in host memory
    answer: Any  # gloo, receiver → sender
    tensors: Any | None  # NCCL, sender → receiver

    @classmethod
    def connect(cls, sender: int, receiver: int, device: torch.device, timeout: timedelta) -> Wire:
        pair = [sender, receiver]
        announce, answer = (dist.new_group(pair, timeout=timeout, backend="gloo") for _ in range(2))
        direct = device.type == "cuda" and dist.is_nccl_available()
        tensors = dist.new_group(pair, timeout=timeout, backend="nccl") if direct else None
        return cls(sender, receiver, announce, answer, tensors)


class _Thread(ABC):
    """A thread whose error is kept for the main thread to find."""

    def __init__(self, name: str, mail: threading.Condition, device: torch.device) -> None:
        self.name = name
        self.error: BaseException | None = None
        self.busy_seconds = 0.0  # moving tensors, at the same time as the training
        self._mail, self._device = mail, device
        self._abandoned = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # This runs in the thread that trains.
        self._training = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def abandon(self) -> None:
        """Close the edge at the next message, which is soon; call it under the lock."""
        self._abandoned = True
        self._mail.notify_all()

    def join(self, timeout: float) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _guarded(self) -> None:
        try:
            if self._stream is not None:
                torch.cuda.set_device(self._stream.device)  # a new thread begins on device 0
            with torch.cuda.stream(self._stream):  # nothing where there is no GPU
                self._run()
        except BaseException as error:  # noqa: BLE001 (the main thread raises it)
            with self._mail:
                self.error = error
                self._mail.notify_all()

    @abstractmethod
    def _run(self) -> None:
        """What the thread of one direction does until the edge is closed."""


class EdgeSender(_Thread):
    """The outlet of a module whose successor is in another process."""

    def __init__(self, wire: Wire, mail: threading.Condition, device: torch.device) -> None:
        super().__init__(f"to worker {wire.receiver}", mail, device)
        self.wire = wire
        self.outbox: Outbox[tuple[Parcel, Any]] = Outbox(OUTBOX_ENTRIES)
        self.successor_turns, self.successor_done = 0, False

    @property
    def has_room(self) -> bool:
        return not self.outbox.full

    def put(self, turn: int, parcel: Parcel) -> None:
        """Queue an output for sending; call it under the lock."""
        if self.successor_done:
            return
        ready = torch.cuda.current_stream(self._device).record_event() if self._stream else None
        self.outbox.put(turn, (parcel, ready))
        self._mail.notify_all()

    def _run(self) -> None:
        answer = torch.empty(2, dtype=torch.int64)
        while True:
            with self._mail:
                self._mail.wait_for(lambda: len(self.outbox) > 0 or self._abandoned, ASK_SECONDS)
                entry = self.outbox.take() if len(self.outbox) else None
            if self._abandoned:
                self._announce(Kind.END)
                return
            if entry is None:
                self._announce(Kind.ASK)
            else:
                started = time.perf_counter()
                self._send(entry.turn, *entry.item)
                del entry  # the next wait must not hold the tensors
                self.busy_seconds += time.perf_counter() - started
            dist.recv(answer, self.wire.receiver, group=self.wire.answer)
            with self._mail:
                self.successor_turns, self.successor_done = int(answer[0]), int(answer[1]) != Need.MORE
                self._mail.notify_all()
            if self.successor_done:
                self._announce(Kind.END)
                if int(answer[1]) == Need.GIVEN_UP:
                    raise ConnectionLost("the other end gave up")
                return

    def _announce(self, kind: Kind, turn: int = 0, shape: tuple[int, ...] = (0, 0, 0)) -> None:
        dist.send(torch.tensor([kind, turn, *shape]), self.wire.receiver, group=self.wire.announce)

    def _send(self, turn: int, parcel: Parcel, ready: Any) -> None:
        if self._stream is not None:
            self._stream.wait_event(ready)
        self._announce(Kind.PARCEL, turn, tuple(parcel.clean.shape))
        for tensor in parcel:
            if self.wire.tensors is not None:
                dist.send(tensor.contiguous(), self.wire.receiver, group=self.wire.tensors)
            else:
                dist.send(self._on_host(tensor), self.wire.receiver, group=self.wire.announce)
        if self._stream is not None:
            self._stream.synchronize()  # only then may the parcel be dropped

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._stream is None:
            return tensor.contiguous()
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return pinned


class EdgeReceiver(_Thread):
    """Fills the queue of a module whose predecessor is in another process.

    `state` returns the module's (turns, done), for the acknowledgement. With `lossless` an entry is
    acknowledged only once the queue had room for it, which makes the sender wait.
    """

    def __init__(
        self,
        wire: Wire,
        queue: StaleQueue[Parcel],
        state: Callable[[], tuple[int, bool]],
        lossless: bool,
        mail: threading.Condition,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(f"from worker {wire.sender}", mail, device)
        self.wire, self.queue = wire, queue
        self._state, self._lossless, self._dtype = state, lossless, dtype

    def _run(self) -> None:
        header = torch.empty(HEADER, dtype=torch.int64)
        while True:
            dist.recv(header, self.wire.sender, group=self.wire.announce)
            kind, turn, *shape = header.tolist()
            if kind == Kind.END:
                if not self._abandoned and not self._state()[1]:
                    raise ConnectionLost("the other end gave up")
                return
            if kind == Kind.PARCEL:
                started = time.perf_counter()
                parcel = Parcel(
                    self._receive(shape, self._dtype),
                    self._receive(shape, self._dtype),
                    self._receive(shape[:2], torch.int64),
                )
                self.busy_seconds += time.perf_counter() - started
                with self._mail:
                    if self._lossless:
                        self._mail.wait_for(lambda: not self.queue.full or self._abandoned)
                    self.queue.put(turn, parcel)
                    self._mail.notify_all()
            with self._mail:
                turns, done = self._state()
                need = Need.GIVEN_UP if self._abandoned else Need.NOTHING if done else Need.MORE
            dist.send(torch.tensor([turns, need]), self.wire.sender, group=self.wire.answer)

    def _receive(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        if self.wire.tensors is not None:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            dist.recv(tensor, self.wire.sender, group=self.wire.tensors)
        else:
            tensor = torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)
            dist.recv(tensor, self.wire.sender, group=self.wire.announce)
            tensor = tensor.to(self._device, non_blocking=True)
        if self._stream is not None and self._training is not None:
            tensor.record_stream(self._training)  # it was allocated on this thread's stream
            self._stream.synchronize()  # the training runs on another stream and must find it complete
        return tensor


class LocalOutlet:
    """The outlet of a module whose successor is in the same process."""

    def __init__(self, queue: StaleQueue[Parcel], state: Callable[[], tuple[int, bool]], lossless: bool):
        self._queue, self._state, self._lossless = queue, state, lossless

    @property
    def has_room(self) -> bool:
        # Priming passes on exactly as many entries as the queue holds, so only lock-step can run out of room.
        return not (self._lossless and self._queue.full)

    @property
    def successor_turns(self) -> int:
        return self._state()[0]

    @property
    def successor_done(self) -> bool:
        return self._state()[1]

    def put(self, turn: int, parcel: Parcel) -> None:
        self._queue.put(turn, parcel)
