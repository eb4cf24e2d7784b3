"""What all commands share: settings that must precede torch, and exit codes instead of tracebacks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from mrem_deploy.base.errors import UserError, WorkerFailed
from mrem_deploy.base.outside import check_text, refusal
from mrem_deploy.base.resuming import command_after

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

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
    set_environment()
    try:
        for argument in sys.argv[1:] if argv is None else argv:
            check_text("an argument", argument)
        return main(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except OSError as error:
        explained = refusal(error)
        if explained is None:
            raise
        print(f"error: {explained}", file=sys.stderr)
        return EXIT_USER_ERROR
    except WorkerFailed as error:
        command = command_after(error)
        print(f"error: {error}" + (f"\n  → to continue: {command}" if command else ""), file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt as error:
        print(f"\ninterrupted{_what_is_kept(error) if resumes else ''}", file=sys.stderr)
        return EXIT_INTERRUPTED


def _what_is_kept(error: BaseException) -> str:
    command = command_after(error)
    return f"; checkpoints are kept, to continue: {command}" if command else " before the first checkpoint"
