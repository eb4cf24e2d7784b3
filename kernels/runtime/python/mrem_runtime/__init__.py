"""Operators of few bits for onnxruntime on CPUs: runs the ONNX files that mrem_deploy exports for it.

    import mrem_runtime

    session = mrem_runtime.session("model_mrem.onnx", threads=4)
    session.run(None, {"input_ids": ids, "attention_mask": mask})

Elsewhere (C++, Rust, Java) register the shared library `library()` in onnxruntime's session options.
Needs onnxruntime and numpy. MREM_CPU_TARGET chooses the instruction set: scalar, avx2, avx512vnni, …
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnxruntime

__version__ = "0.1.0"
__all__ = ["library", "newest_format", "options", "session", "target", "version"]

MOST_THREADS = 4096  # as in the library; onnxruntime would try to start any number
FILES = {"win32": "mrem_runtime.dll", "darwin": "libmrem_runtime.dylib"}


def library() -> Path:
    """The shared library, which exports `RegisterCustomOps`. It is in this package and nowhere else."""
    path = Path(__file__).resolve().with_name(FILES.get(sys.platform, "libmrem_runtime.so"))
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: install mrem-runtime where there is a C++17 compiler")
    return path


def options(
    threads: int = 0, start_from: onnxruntime.SessionOptions | None = None
) -> onnxruntime.SessionOptions:
    """Session options with the operators registered. `threads`: 0 is onnxruntime's choice, one for each core.

    onnxruntime's arena stays on: the operators reuse its few blocks, so that memory peaks lower with it than
    without. It keeps what the largest batch took; the run option `memory.enable_memory_arena_shrinkage` with
    "cpu:0" gives that back after a run.
    """
    return _registered(threads, start_from)


def _registered(threads: int, start_from: onnxruntime.SessionOptions | None) -> onnxruntime.SessionOptions:
    import onnxruntime

    if not isinstance(threads, int) or not 0 <= threads <= MOST_THREADS:
        raise ValueError(f"threads must be a whole number from 0 to {MOST_THREADS}; got {threads!r}")
    made = onnxruntime.SessionOptions() if start_from is None else start_from
    if threads:
        made.intra_op_num_threads = threads
    if made.intra_op_num_threads > 0:  # the operators cannot ask onnxruntime
        made.add_session_config_entry("mrem.threads", str(made.intra_op_num_threads))
    made.register_custom_ops_library(os.fspath(library()))
    return made


def session(
    model: str | os.PathLike[str] | bytes,
    threads: int = 0,
    *,
    options: onnxruntime.SessionOptions | None = None,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    **more: Any,
) -> onnxruntime.InferenceSession:
    """An onnxruntime session in which the operators run; `options` are changed, `more` is passed on."""
    import onnxruntime

    chosen = _registered(threads, options)
    source = model if isinstance(model, bytes) else os.fspath(model)
    try:
        return onnxruntime.InferenceSession(source, chosen, providers=list(providers), **more)
    except Exception as error:  # onnxruntime's exceptions have no common class
        unknown = re.search(r"mrem\.runtime:(\w+)\S* is not a registered", str(error))
        if unknown is None:
            raise
        raise type(error)(
            f"mrem-runtime {version()} has no operator {unknown[1]}: the file was made by a newer "
            "mrem_deploy; update mrem-runtime"
        ) from error


def version() -> str:
    """The version of the library, which is that of this package unless they were mixed."""
    return _text("mrem_runtime_version")


def target() -> str:
    """The instruction set that the operators use on this machine, such as avx512vnni."""
    return _text("mrem_runtime_target")


def newest_format() -> int:
    """The newest format of files that the library reads."""
    return int(_loaded().mrem_runtime_format())


def _loaded() -> ctypes.CDLL:
    return ctypes.CDLL(os.fspath(library()))


def _text(function: str) -> str:
    called = getattr(_loaded(), function)
    called.restype = ctypes.c_char_p
    text = called()
    if text is None:
        raise ValueError(f"MREM_CPU_TARGET={os.environ.get('MREM_CPU_TARGET')} cannot run on this machine")
    return str(text.decode())
