"""What every command shares: a user's mistake prints a message and exits with 2, no traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from mrem_deploy.base.errors import UserError, WorkerFailed

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def run(main: Callable[[list[str] | None], int], argv: list[str] | None = None) -> int:
    """Call a command's main and turn its exceptions into exit codes."""
    # oneDNN trusts CPUID, which on some virtual machines promises instructions that then fault.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    try:
        return main(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except WorkerFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("\ninterrupted; the last checkpoint is kept, continue with --resume", file=sys.stderr)
        return EXIT_INTERRUPTED
