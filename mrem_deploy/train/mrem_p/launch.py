"""Who works in a parallel run, and with what: workers, devices, threads.

A command started alone launches its own workers (`team.launch`): one per device, at most one per module. A
command started by torchrun (or by anything else that sets RANK and WORLD_SIZE) is one of the workers already.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mrem_deploy.base import progress
from mrem_deploy.base.errors import UserError
from mrem_deploy.train.mrem_p import crew as crews
from mrem_deploy.train.mrem_p.crew import Crew


def is_worker() -> bool:
    """Whether this process was started as one of several, by torchrun or by `launch`."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_restarted() -> bool:
    """Whether workers of this run have died before, so that there are checkpoints to continue from."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def devices(device: torch.device) -> int:
    """How many workers can each have a separate device; a GPU given by its number is one."""
    if device.type == "cuda":
        return 1 if _is_numbered(device) else torch.cuda.device_count()
    return usable_cores()


def _is_numbered(device: torch.device) -> bool:
    return ":" in str(device)


def device_of(device: torch.device, crew: Crew) -> torch.device:
    """Ranks are devices: NCCL refuses two ranks on one GPU."""
    if device.type != "cuda" or crew.world == 1 or _is_numbered(device):
        return device
    if crew.local_world > torch.cuda.device_count():
        raise UserError(
            f"{crew.local_world} workers were started for {torch.cuda.device_count()} GPUs",
            "start one worker per GPU; a worker trains several modules in turn",
        )
    torch.cuda.set_device(crew.local_rank)
    return torch.device("cuda", crew.local_rank)


def threads_each(asked: int, workers: int) -> int:
    """CPU threads for each of `workers` on this machine; `asked` is their total, 0 means all cores."""
    return max(1, (asked or usable_cores()) // workers)


@contextmanager
def crew_of(timeout: float) -> Iterator[Crew]:
    """This process's place in the run, read from the environment; a crew of one outside of a run."""
    if not is_worker() or os.environ["WORLD_SIZE"] == "1":
        yield Crew()
        return
    crew = crews.join(timeout)
    progress.silence(not crew.leads)
    try:
        yield crew
    except UserError as error:
        crew.refuse(error)
        raise
    else:
        crews.leave(crew)
