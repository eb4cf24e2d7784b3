"""Starting the workers of a parallel run, with torch's elastic launcher.

A command started alone launches its own workers: one per device, at most one per module. A command
started by torchrun (or by anything else that sets RANK and WORLD_SIZE) is one of the workers already.
If a worker dies, all workers start again and continue from their checkpoints. A UserError is not
retried: it ends the run at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch

from mrem_deploy.base import cli, progress
from mrem_deploy.base.errors import UserError, WorkerFailed
from mrem_deploy.base.scratch import scratch_folder
from mrem_deploy.train.mrem_p import crew as crews
from mrem_deploy.train.mrem_p.crew import Crew

LOCALHOST = "127.0.0.1"
MONITOR_SECONDS = 0.2
SHUTDOWN_SECONDS = 10  # for a worker to leave by itself before it is killed


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


def launch(work: Callable[..., Any], arguments: tuple[Any, ...], workers: int, max_restarts: int) -> Any:
    """Run `work(*arguments)` in `workers` new processes; returns what rank 0 returns.

    `work` must be a function at the top level of a module: new processes import it by its name.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quiet_elastic()
    with (
        scratch_folder("workers") as logs,
        _environment(_child_environment()),
        _own_signals(),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
            run_id=f"mrem-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint=f"{LOCALHOST}:0",
            local_addr=LOCALHOST,
            max_restarts=max_restarts,
            monitor_interval=MONITOR_SECONDS,
            shutdown_timeout=SHUTDOWN_SECONDS,
        )
        try:
            results = elastic_launch(config, _worker)(work, arguments)
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            sys.exit(128 + int(stopped.sigval))
        except ChildFailedError as failed:
            raise WorkerFailed(_explain(failed)) from None
    for refusal, _ in results.values():
        if refusal is not None:
            raise UserError(*refusal)
    return results[0][1]


def _explain(failed: Any) -> str:
    """The error of the worker that died, without the launcher's own messages."""
    rank, failure = failed.get_first_failure()
    message = failure.message
    if isinstance(message, dict):
        message = message.get("extraInfo", {}).get("py_callstack") or message.get("message")
    if failure.exitcode < 0:
        message = f"{failure.signal_name()} ended it from outside; if that was not you, memory ran out"
    return f"worker {rank} failed: {message}"


def _worker(work: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[list[str] | None, Any]:
    """In a new process: (a UserError as [problem, remedy] or None, what the work returned)."""
    launcher = os.getppid()

    def interrupted(number: int, frame: FrameType | None) -> None:
        # Ctrl-C reaches all processes, and the launcher passes it on as SIGTERM: that one is obeyed. Linux
        # also sends SIGINT when the launcher itself was killed.
        if os.getppid() != launcher:
            _leave(number, frame)

    signal.signal(signal.SIGINT, interrupted)
    signal.signal(signal.SIGTERM, _leave)  # so that temporary files are removed
    try:
        return None, work(*arguments)
    except UserError as error:
        return [error.problem, error.remedy], None


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


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


def _child_environment() -> dict[str, str]:
    """What workers need before they import torch; values that the user has set stay.

    One machine needs no name resolution, which containers often lack. And threads that wait must not
    spin: the workers share the cores. The commands set that for themselves (`cli.set_environment`), but
    a caller of the Python API may not have.
    """
    changes = {}
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        changes["GLOO_SOCKET_IFNAME"] = loopback
    if not cli.PASSIVE_WAITING.keys() & os.environ.keys():
        changes |= cli.PASSIVE_WAITING
    return changes


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Variables that new processes inherit."""
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes:
            os.environ.pop(name, None)


@contextmanager
def _own_signals() -> Iterator[None]:
    """The elastic agent replaces the signal handlers of this process and does not restore them."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _quiet_elastic() -> None:
    """The command reports once what happened to a worker; the parts of the launcher stay silent."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
