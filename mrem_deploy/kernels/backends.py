"""Which implementation runs.

Packing (NumPy arrays) has `cpp` and `reference`. Training (tensors) has `triton` for CUDA tensors, `cpp` for
float32 tensors on the CPU, and `reference`; each is a module with the functions of `reference`. `use_backend`
(the recipe's --kernels) or the environment variable MREM_BACKEND choose one by name, and a missing one is an
error. With `auto` the reference takes over, with one warning. Whether Triton can run on a GPU is found out
when a tensor there first needs it: by the GPU's compute capability, and by one real launch.

Note: a name says which module is called. What that module does not compute itself (`cpp`: float64, 16-bit
types, other devices) it passes on to the reference.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from mrem_deploy.base.errors import UserError

if TYPE_CHECKING:
    import torch

VARIABLE = "MREM_BACKEND"
TARGET_VARIABLE = "MREM_CPU_TARGET"  # the extension's instruction set: avx512, avx2 or scalar
BACKENDS = {
    "reference": "mrem_deploy.kernels.reference",
    "cpp": "mrem_deploy.kernels.cpu.ops",
    "triton": "mrem_deploy.kernels.gpu.ops",
}
CHOICES = ("auto", *BACKENDS)
INTERFACE = 3  # kInterface in kernels/cpu/bindings.cpp
LEAST_CAPABILITY = (8, 0)  # of Nvidia's GPUs: below it Triton does not compile the int8 matmul

WHAT_IS_SLOWER = (
    "training on the CPU is slower (a quantized step takes about a quarter longer), and so is packing of "
    "low-bit weights (saving or loading a BERT-base takes seconds, not a fraction of one)"
)
REMEDY = (
    "install a C++17 compiler (Debian: apt install g++; macOS: xcode-select --install) and install "
    "mrem_deploy again; `pip install -v` shows what the build says"
)

_chosen = "auto"
_measures_tiles = True


@dataclass(frozen=True)
class Extension:
    """The C++ extension, or why there is none."""

    module: ModuleType | None
    problem: str = ""


@functools.cache
def extension() -> Extension:
    """Import the C++ extension, once."""
    try:
        module = importlib.import_module("mrem_deploy.kernels.cpu._cpu")
    except ImportError as error:
        return Extension(None, f"the C++ extension could not be imported ({error})")
    found = getattr(module, "INTERFACE", None)
    if found != INTERFACE:
        return Extension(
            None, f"the C++ extension is from another version (interface {found}, not {INTERFACE})"
        )
    return Extension(module)


def active_target() -> str:
    """The instruction set of the extension, which must be present: avx512, avx2 or scalar."""
    module = extension().module
    assert module is not None
    try:
        return str(module.active_target())
    except ValueError as error:
        usable = ", ".join(name for name, runs in module.targets().items() if runs)
        raise UserError(str(error), f"unset {TARGET_VARIABLE}, or set it to one of: {usable}") from None


@functools.cache
def triton_problem() -> str:
    """Why there is no Triton backend; "" if there is one. Loads neither triton nor CUDA."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        present = importlib.util.find_spec(BACKENDS["triton"]) is not None
    except ModuleNotFoundError:
        present = False
    return "" if present else f"this build has no {BACKENDS['triton']}"


def gpu_problem(index: int | None = None) -> str:
    """Why Triton cannot run on that GPU (None: the current one); "" if it can, or if there is no GPU."""
    if problem := triton_problem():
        return problem
    if index is None:
        import torch

        if not torch.cuda.is_available():
            return ""
        index = torch.cuda.current_device()
    return _probed(index)


@functools.cache
def _probed(index: int) -> str:
    """Of each GPU once: the first question starts CUDA and compiles a kernel."""
    import torch

    name = torch.cuda.get_device_name(index)
    if torch.version.hip is None and (found := torch.cuda.get_device_capability(index)) < LEAST_CAPABILITY:
        needed, has = (".".join(map(str, version)) for version in (LEAST_CAPABILITY, found))
        return f"{name} has compute capability {has}, and the Triton kernels need {needed} or more"
    probe = importlib.import_module("mrem_deploy.kernels.gpu.probe")
    problem: str = probe.problem(torch.device("cuda", index))
    return f"on {name}: {problem}" if problem else ""


def problem_of(name: str) -> str:
    """Why a backend cannot be used on this machine; "" if it can."""
    return {"reference": lambda: "", "cpp": lambda: extension().problem, "triton": gpu_problem}[name]()


def remedy_of(name: str) -> str:
    """What to install for a backend that cannot be used; "" if nothing would help."""
    if name == "cpp":
        return REMEDY
    if name == "triton" and triton_problem():
        return "pip install triton (Linux, with an Nvidia or AMD GPU)"
    if name == "triton" and "C compiler" in gpu_problem():
        return "install a C compiler and Python's headers (Debian: apt install gcc python3-dev)"
    return ""


def measure_tiles(yes: bool) -> None:
    """Whether Triton's matmuls choose their tiles by measurement; otherwise they take the first. The choice
    changes the order of sums in gradients, so reproducible runs do not measure."""
    global _measures_tiles
    _measures_tiles = yes


def measures_tiles() -> bool:
    return _measures_tiles


def use_backend(name: str) -> None:
    """Choose a backend for this process; `auto` leaves it to MREM_BACKEND, or to what this machine has."""
    global _chosen
    _require(name, "the option --kernels")
    _chosen = name


def choice() -> str:
    """The name given to `use_backend`, else MREM_BACKEND, else `auto`."""
    if _chosen != "auto":
        return _chosen
    name = os.environ.get(VARIABLE) or "auto"
    if name != "auto":
        _require(name, VARIABLE)
    return name


def _require(name: str, asked_by: str) -> None:
    if name not in CHOICES:
        raise UserError(
            f"{asked_by} must be one of {', '.join(CHOICES)}; got {name!r}.",
            "choose one of these, or auto for the best that this machine has",
        )
    if name != "auto" and (problem := problem_of(name)):
        remedies = (remedy_of(name), "use auto to do without")
        raise UserError(f"{asked_by} asks for {name}, but {problem}.", "; or ".join(filter(None, remedies)))


def backend() -> str:
    """The backend for NumPy arrays: "cpp" or "reference"."""
    name = choice()
    if name == "reference" or extension().module is None:
        return "reference"
    return "cpp"


def implementation() -> ModuleType:
    """The module with the ops of `backend()`; warns once if only the reference is available."""
    if backend() == "cpp":
        module = extension().module
        assert module is not None
        return module
    if choice() != "reference":
        _warn_once()
    return importlib.import_module("mrem_deploy.kernels.reference_packing")


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        f"{extension().problem}; {WHAT_IS_SLOWER}. To have it: {REMEDY}.", RuntimeWarning, stacklevel=4
    )


@functools.cache
def _warn_of_gpu(problem: str) -> None:
    warnings.warn(
        f"{problem}; on the GPU plain torch computes, which is slower.", RuntimeWarning, stacklevel=4
    )


def ops_for(x: torch.Tensor) -> ModuleType:
    """The module with the training ops (contract: `reference`) for tensors like x."""
    # The ops take floating-point tensors only, and of those only float32 has four bytes.
    return _module(backend_for(x.device.type, x.dtype.itemsize == 4, x.device.index))


def backend_for(device: str, float32: bool = True, index: int | None = None) -> str:
    """The name of the backend for tensors of that kind."""
    name = choice()
    if name != "auto":
        return name
    if device == "cuda":
        if problem := gpu_problem(index):
            if index is not None:  # a tensor is there, not only a question
                _warn_of_gpu(problem)
            return "reference"
        return "triton"
    if device == "cpu" and float32:
        if extension().module is not None:
            return "cpp"
        _warn_once()
    return "reference"


@functools.cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(BACKENDS[name])


def describe_backend() -> str:
    """A sentence for people: what runs here; if it is not the fastest, also why and what to do."""
    if backend() == "cpp":
        return f"kernels: the C++ extension is in use (CPU target {active_target()})"
    if choice() == "reference":
        asked = VARIABLE + "=reference" if _chosen == "auto" else "it was asked for"
        return f"kernels: the plain reference is in use, because {asked}; {WHAT_IS_SLOWER}"
    return f"kernels: {extension().problem}; {WHAT_IS_SLOWER}\n  → {REMEDY}"
