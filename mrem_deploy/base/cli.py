"""What all commands share: settings that must precede torch, and exit codes instead of tracebacks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from mrem_deploy.base import early, interrupt
from mrem_deploy.base.errors import UserError, WorkerFailed
from mrem_deploy.base.outside import check_text, refusal
from mrem_deploy.base.resuming import command_after
from mrem_deploy.base.scratch import settle_temporary_folder

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # by Ctrl-C; 143 by SIGTERM

# By default a thread that waits for the others spins and keeps its core busy. With more threads than free
# cores the spinning threads hold up the one they wait for, and training becomes several times slower.
# libgomp (torch on Linux) reads the first two, the OpenMP of Intel and LLVM the first and the last. A few
# thousand spins, some microseconds, spare a free machine most of the sleeping and waking.
PASSIVE_WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "5000", "KMP_BLOCKTIME": "0"}


def set_environment() -> None:
    """Settings of the libraries under torch. They read them once, so this must run before torch is imported.

    A value that the user has set stays. The Python API cannot do this: who imports torch first sets
    OMP_WAIT_POLICY=passive in the shell instead.
    """
    # oneDNN trusts CPUID, which on some virtual machines promises instructions that then fault.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    if not PASSIVE_WAITING.keys() & os.environ.keys():
        os.environ.update(PASSIVE_WAITING)


def run(
    main: Callable[[list[str] | None], int], argv: list[str] | None = None, *, resumes: bool = False
) -> int:
    """Call a command's main and turn its exceptions into exit codes. `resumes`: it has --resume."""
    return early.finished(_run(main, argv, resumes))


def _run(main: Callable[[list[str] | None], int], argv: list[str] | None, resumes: bool) -> int:
    set_environment()
    settle_temporary_folder()
    try:
        for argument in sys.argv[1:] if argv is None else argv:
            check_text("an argument", argument)
        repeats = "RANK" in os.environ  # torchrun passes on what the terminal has sent already
        with interrupt.watched(hand_on=False, patient=repeats):
            return _obeying(main, argv)
    except UserError as error:
        _print(f"error: {error}")
        return EXIT_USER_ERROR
    except OSError as error:
        explained = refusal(error)
        if explained is None:
            raise
        _print(f"error: {explained}")
        return EXIT_USER_ERROR
    except WorkerFailed as error:
        command = command_after(error)
        _print(f"error: {error}" + (f"\n  → to continue: {command}" if command else ""))
        return EXIT_FAILED
    except KeyboardInterrupt as stop:
        if os.environ.get("RANK", "0") == "0":  # only the first of several workers prints
            _print(f"\ninterrupted{_what_is_kept(stop, resumes)}")
        return stop.exit_code if isinstance(stop, interrupt.Interrupted) else EXIT_INTERRUPTED


def _obeying(main: Callable[[list[str] | None], int], argv: list[str] | None) -> int:
    """An error after a signal follows from the signal: a closed terminal, a neighbour that has left."""
    try:
        return main(argv)
    except Exception:
        interrupt.check()
        raise


def _what_is_kept(stop: KeyboardInterrupt, resumes: bool) -> str:
    if kept := interrupt.kept_after(stop):
        return f"; {kept}"
    command = command_after(stop) or (command_after(stop.__context__) if stop.__context__ else None)
    if command:
        return f"; checkpoints are kept, to continue: {command}"
    return " before the first checkpoint" if resumes else ""


def _print(message: str) -> None:
    try:
        print(message, file=sys.stderr, flush=True)
    except OSError:  # the terminal is gone: what is still in buffers must not fail at the very end
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
