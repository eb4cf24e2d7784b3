"""How kernels are started: on a GPU, in Triton's interpreter, or only compiled, for a GPU that is absent.

Note: floating-point fusion is off for every kernel. A product that is rounded before the bias is added (rule
3 of `reference`) differs from a fused one in the last bit, and a fused a·b + c before a rounding moves ties.
Denormals are kept for the same reason.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDAOptions
from triton.compiler.errors import CompilationError
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources, PTXASError

from mrem_deploy.base.progress import say

INTERPRETED = bool(knobs.runtime.interpret)  # triton.jit reads it when it decorates: fixed from here on
KEEPS_DENORMALS = hasattr(CUDAOptions, "enable_reflect_ftz")  # older Tritons have no such option
# What Triton raises for a kernel that it cannot make for a GPU. MLIR and LLVM raise a bare RuntimeError.
COMPILER_ERRORS = (CompilationError, OutOfResources, PTXASError)
COMPILER_MESSAGES = ("PassManager::run failed", "failed to translate module")
# Rows of a matrix per program, where rows are summed; the interpreter is faster with few programs.
ROWS = 64 if INTERPRETED else 4


class DoesNotCompile(Exception):
    """A kernel that Triton cannot make for this GPU."""


class Compiled(NamedTuple):
    """A kernel that a launch would have run: its name, constants and options, and Triton's result."""

    name: str
    constants: dict[str, Any]
    options: dict[str, Any]
    kernel: Any


@dataclass
class DryRun:
    """Launches only compile for `target`; their outputs stay uninitialised."""

    target: GPUTarget
    compiled: list[Compiled] = field(default_factory=list)
    most_tiles: int | None = None  # only that many of each list, the last ones, which are small; None: all

    # The driver's functions that Triton calls while compiling.
    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target)  # kernels are cached by device

    def get_current_stream(self, device: str) -> int:
        return 0


_dry_run: DryRun | None = None


@contextmanager
def compiling_for(target: GPUTarget, most_tiles: int | None = None) -> Iterator[DryRun]:
    """Inside, ops on CPU tensors compile each kernel that they would launch, with every tile."""
    global _dry_run
    _dry_run = DryRun(target, most_tiles=most_tiles)
    before = driver._active
    driver.set_active(_dry_run)  # type: ignore[arg-type, unused-ignore]
    try:
        yield _dry_run
    finally:
        driver._active = before
        _dry_run = None


def dry_run() -> DryRun | None:
    """The one that is under way, if any."""
    return _dry_run


def vendor() -> str:
    """ "cuda" or "hip"."""
    if _dry_run is not None:
        return str(_dry_run.target.backend)
    return "hip" if torch.version.hip else "cuda"


def launch(
    kernel: Any, programs: int, *arguments: Any, warps: int = 4, stages: int = 2, **constants: Any
) -> None:
    """Run `programs` instances of a kernel on the device of its first tensor.

    Raises DoesNotCompile where Triton cannot make the kernel for that device.
    """
    options: dict[str, Any] = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    if INTERPRETED:
        kernel[(programs,)](*arguments, **constants)
        return
    if vendor() == "cuda" and KEEPS_DENORMALS:
        options["enable_reflect_ftz"] = False  # otherwise division flushes denormals
    with _explained(kernel.__name__):
        if _dry_run is not None:
            made = kernel.warmup(*arguments, grid=(programs,), **constants, **options)
            _dry_run.compiled.append(Compiled(kernel.__name__, constants, options, made))
            return
        announce()
        tensor = next(argument for argument in arguments if isinstance(argument, torch.Tensor))
        with torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext():
            kernel[(programs,)](*arguments, **constants, **options)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Tell a kernel that cannot be made from all other errors, such as a full memory."""
    try:
        yield
    except COMPILER_ERRORS as error:
        raise DoesNotCompile(f"{name}: {_first_line(error)}") from error
    except RuntimeError as error:
        if not any(message in str(error) for message in COMPILER_MESSAGES):
            raise
        raise DoesNotCompile(f"{name}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@functools.cache
def announce() -> None:
    """Say once why the first steps take longer."""
    say("compiling kernels for the GPU: the first step of each shape takes longer, unless they are cached")


def blocks(count: int, block: int) -> int:
    return int(triton.cdiv(count, block))
