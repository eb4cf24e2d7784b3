"""What a run holds from start to end: its place among the workers, its device, checkpoints and clock."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mrem_deploy.base import interrupt
from mrem_deploy.base.machine import keep_large_blocks
from mrem_deploy.base.place import hold, new_token
from mrem_deploy.base.progress import say
from mrem_deploy.base.resuming import COMMAND, resumable, work_folder
from mrem_deploy.preflight import export_profiles, resolve_device, select_backend
from mrem_deploy.recipe import Recipe
from mrem_deploy.result import RECIPE
from mrem_deploy.train.checkpoint import CheckpointStore, open_store
from mrem_deploy.train.mrem_p import launch
from mrem_deploy.train.mrem_p.crew import Crew


@dataclass(frozen=True)
class Begin:
    """How a run begins, the same for all its workers."""

    resume: bool = False  # say so if there is no interrupted run to continue
    fresh: bool = False  # remove the checkpoints of an interrupted run
    by_torchrun: bool = False
    token: str = field(default_factory=new_token)  # by which its processes know each other


@dataclass
class Run:
    """One process of a run. Of several workers the leader finishes it: it evaluates and writes."""

    recipe: Recipe
    out: Path
    begin: Begin
    crew: Crew
    device: torch.device
    profiles: tuple[str, ...]  # of the ONNX files to write
    started: float = field(default_factory=time.perf_counter)
    _store: CheckpointStore | None = None

    @classmethod
    @contextmanager
    def start(cls, recipe: Recipe, out: Path, begin: Begin) -> Iterator[Run]:
        """Join the other workers, if there are any, and make this process what the recipe asks for."""
        with launch.crew_of(recipe.worker_timeout) as crew:
            if launch.is_restarted():
                say("a worker died; all workers start again from their last checkpoints")
                begin = replace(begin, resume=True, fresh=False)
            if crew.world > 1:
                torch.set_num_threads(launch.threads_each(recipe.threads, crew.local_world))
            elif recipe.threads:
                torch.set_num_threads(recipe.threads)
            keep_large_blocks()
            device = launch.device_of(resolve_device(recipe.device), crew)
            # In every worker: the choice belongs to a process.
            select_backend(recipe.kernels, device, recipe.deterministic)
            yield cls(recipe, out, begin, crew, device, export_profiles(recipe))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other runs away from the result's place; all workers hold it, with the leader's token."""
        token = self.crew.exchange("the lock of the result", self.begin.token)[0]
        with hold(self.out, token), resumable(self.out):
            yield

    @property
    def store(self) -> CheckpointStore:
        assert self._store is not None, "open_checkpoints comes first"
        return self._store

    def open_checkpoints(self, identity: dict[str, Any]) -> None:
        """Continue an interrupted run of this identity. One worker after another: the first on each machine
        removes what is not to be continued there."""
        place = 0 if self.crew.leads else 1 if self.crew.local_rank == 0 else 2
        beside = {RECIPE: self.recipe.to_yaml(), COMMAND: self._continued_by() + "\n"}
        for turn in range(3 if self.crew.world > 1 else 1):
            if turn == place:
                fresh = self.begin.fresh and place < 2
                self._store = open_store(self.out, identity, beside, resume=self.begin.resume, fresh=fresh)
            self.crew.exchange("the checkpoints' folder")

    def _continued_by(self) -> str:
        """The command that continues this run after an interruption, from any folder."""
        config = shlex.quote(str(work_folder(self.out) / RECIPE))
        if self.begin.by_torchrun:
            return f"torchrun … -m mrem_deploy.quantize --config {config}"
        return f"mrem quantize --config {config}"

    def continue_within(self, part: str) -> None:
        """From now on checkpoints are those of one of several trainings."""
        self._store = self.store.within(part)

    def seconds(self) -> float:
        """Since the start, the interrupted runs that this one continues included."""
        return time.perf_counter() - self.started + self.store.earlier_seconds

    def use_all_cores(self) -> None:
        """The other workers have finished training: the leader evaluates with their cores as well."""
        if self.crew.world > 1:
            torch.set_num_threads(launch.threads_each(self.recipe.threads, 1))

    def follow(self) -> None:
        """What a worker that does not lead does after training: wait for the leader to finish."""
        self.crew.wait_for_leader("the result")
        if self.crew.local_rank == 0:  # the first on another machine, with its own checkpoints
            self.store.remove()

    def finish(self) -> None:
        """The result is written: checkpoints are no longer needed, and the other workers may leave."""
        with interrupt.held():
            self.store.remove()
            self.crew.dismiss("the result")
