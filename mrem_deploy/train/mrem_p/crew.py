"""The workers of one run as each of them sees the others: ranks, meeting points, small messages.

Everything here goes through a key-value store, polled: a wait can be interrupted, names the missing
workers when it times out, and ends at once when a worker has ended the run. The messages are JSON. On one
machine the store is a private folder, across machines torch's. Tensors go by other ways (`edge.py`,
`gather` below), as plain numbers: nothing that a worker receives is ever unpickled.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from mrem_deploy.base import interrupt
from mrem_deploy.base.errors import UserError
from mrem_deploy.train.mrem_p.meeting import MEETING_PLACE, FolderStore, Store

POLL_SECONDS = 0.05
FOLLOW_SECONDS = 0.5  # between looks at a leader that evaluates
LEAVE_SECONDS = 30.0
REFUSED = "refused"


class Refused(UserError):
    """Another worker raised a UserError: this one ends without a message of its own."""


@dataclass
class Crew:
    """This worker's place among all. A crew of one has no store and needs no process group."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    timeout: float = 600.0  # seconds
    store: Store | None = None
    _meetings: dict[str, int] = field(default_factory=dict)

    @property
    def leads(self) -> bool:
        """Rank 0 freezes, evaluates, saves and reports."""
        return self.rank == 0

    def exchange(
        self,
        label: str,
        value: Any = None,
        check: Callable[[], None] = lambda: None,
        patient: bool = False,
    ) -> list[Any]:
        """Meet all others at `label` and return everyone's `value` (plain data), by rank.

        `check` is called while waiting. With `patient` there is no time-out: the work of the others may
        take hours.
        """
        if self.store is None:  # a crew of one
            return [value]
        count = self._meetings[label] = self._meetings.get(label, 0) + 1
        keys = [f"{label}/{count}/{rank}" for rank in range(self.world)]
        self.store.set(keys[self.rank], json.dumps(value))
        self._wait(keys, label, check, float("inf") if patient else self.timeout)
        return [json.loads(self.store.get(key)) for key in keys]

    def _wait(self, keys: Sequence[str], label: str, check: Callable[[], None], timeout: float) -> None:
        assert self.store is not None
        deadline = time.monotonic() + timeout
        while not self.store.check(list(keys)):
            interrupt.check()
            check()
            self.check_refusal()
            if time.monotonic() > deadline:
                missing = [str(rank) for rank, key in enumerate(keys) if not self.store.check([key])]
                raise UserError(
                    f"worker {', '.join(missing)} of {self.world} did not reach {label!r} within "
                    f"{self.timeout:g} s",
                    "look at its own messages; if it is only slow, raise --worker-timeout",
                )
            time.sleep(POLL_SECONDS)

    def dismiss(self, label: str) -> None:
        """Rank 0 has reached `label`, for which the others waited; it leaves last, with the store."""
        if self.store is None:
            return
        self.store.set(label, "")
        seen = [f"{label}/{rank}" for rank in range(1, self.world)]
        deadline = time.monotonic() + LEAVE_SECONDS
        while not self.store.check(seen) and time.monotonic() < deadline and not interrupt.pending():
            time.sleep(POLL_SECONDS)

    def wait_for_leader(self, label: str) -> None:
        """Without a time-out: rank 0 may evaluate for an hour. If it dies, the store or the run ends too."""
        assert self.store is not None
        while not self.store.check([label]):
            interrupt.check()
            self.check_refusal()
            time.sleep(FOLLOW_SECONDS)
        self.store.set(f"{label}/{self.rank}", "")

    def refuse(self, error: UserError) -> None:
        """Tell the others that the run ends here, by an error that a restart would not fix."""
        if self.store is not None and not isinstance(error, Refused):
            self.store.set(REFUSED, json.dumps([error.problem, error.remedy]))

    def check_refusal(self) -> None:
        if self.store is not None and self.store.check([REFUSED]):
            raise Refused(*json.loads(self.store.get(REFUSED)))


def modules_of(rank: int, world: int, modules: int) -> range:
    """The consecutive modules that a rank owns; the first ranks get one more if they do not divide evenly."""
    share, extra = divmod(modules, world)
    start = rank * share + min(rank, extra)
    return range(start, start + share + (rank < extra))


def owner_of(module: int, world: int, modules: int) -> int:
    return next(rank for rank in range(world) if module in modules_of(rank, world, modules))


def join(timeout: float) -> Crew:
    """Become a worker of the run that the environment describes, as torchrun and similar tools set it."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=timeout)
    place = os.environ.get(MEETING_PLACE)
    if place is not None:
        store, group_store = _on_one_machine(Path(place), world)
    else:
        store, group_store = _across_machines(rank, world, limit)
    crew = Crew(
        rank,
        world,
        int(os.environ.get("LOCAL_RANK", rank)),
        int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        timeout,
        store,
    )
    crew.exchange("the start")
    dist.init_process_group("gloo", store=group_store, rank=rank, world_size=world, timeout=limit)
    return crew


def _on_one_machine(place: Path, world: int) -> tuple[Store, Any]:
    """For our messages, and for the addresses that torch's process groups exchange."""
    return FolderStore(place), dist.FileStore(str(place / "groups"), world)  # type: ignore[attr-defined]


def _across_machines(rank: int, world: int, limit: timedelta) -> tuple[Store, Any]:
    """The same for both: a server in the first worker or in torchrun. Anyone who reaches its port can write
    to it: on a trusted network only."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, rank, world = next(rendezvous("env://", rank, world, timeout=limit))
    except (dist.DistError, ValueError, RuntimeError) as error:
        said = str(error).splitlines()[0]
        problem = f"worker {rank} of {world} cannot reach the first one at {where}: {said}"
        if rank == 0:
            seconds = limit.total_seconds()
            problem = f"not all of {world} workers reached {where} within {seconds:g} s: {said}"
        raise UserError(problem, "start all workers, and check MASTER_ADDR and MASTER_PORT") from error
    # The launcher's store outlives a restart: addresses of dead workers must not be found in it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"mrem/attempt {attempt}", store)  # type: ignore[attr-defined]
    return store, store


def leave(crew: Crew) -> None:
    if crew.world > 1 and dist.is_initialized():
        dist.destroy_process_group()


def gather(crew: Crew, tensors: Sequence[torch.Tensor], owner: int) -> None:
    """Copy tensors from their owner to rank 0, where they have the same shapes."""
    if owner == 0:
        return
    for tensor in tensors:
        if crew.rank == owner:
            dist.send(tensor.detach().cpu().contiguous(), 0)
        elif crew.leads:
            host = tensor.data if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
            dist.recv(host, owner)
            tensor.data.copy_(host)


def pass_on(crew: Crew, tensors: Sequence[torch.Tensor], source: int, target: int) -> None:
    """Copy tensors of the host from one rank into those of another, which have the same shapes."""
    for tensor in tensors:
        if crew.rank == source:
            dist.send(tensor, target)
        elif crew.rank == target:
            dist.recv(tensor, source)
