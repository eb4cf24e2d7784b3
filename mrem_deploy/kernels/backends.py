"""Which implementation runs.

In order of preference: `cpp` (the extension built from kernels/cpu), then `reference` (NumPy; always there,
the truth in the tests). The environment variable MREM_BACKEND overrides it: `auto`, `cpp` or `reference`. A
backend that was asked for by name and is missing is an error; under `auto` the reference takes over, with one
warning.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from mrem_deploy.errors import UserError

if TYPE_CHECKING:
    import torch

VARIABLE = "MREM_BACKEND"
CHOICES = ("auto", "cpp", "reference")
INTERFACE = 1  # kInterface in kernels/cpu/bindings.cpp

WHAT_IS_SLOWER = (
    "packing and unpacking of low-bit weights is slower "
    "(saving or loading a BERT-base takes seconds, not a fraction of one)"
)
REMEDY = (
    "install a C++17 compiler (Debian: apt install g++; macOS: xcode-select --install) and install "
    "mrem_deploy again; `pip install -v` shows what the build says"
)


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


def backend() -> str:
    """The backend that the next call uses: "cpp" or "reference"."""
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        raise UserError(
            f"{VARIABLE} must be one of {', '.join(CHOICES)}, but is {choice!r}.",
            f"unset {VARIABLE}, or set it to one of these.",
        )
    if choice == "reference":
        return "reference"
    if extension().module is not None:
        return "cpp"
    if choice == "cpp":
        raise UserError(
            f"{VARIABLE}=cpp, but {extension().problem}.", f"{REMEDY}; or unset {VARIABLE} to do without."
        )
    return "reference"


def implementation() -> ModuleType:
    """The module with the ops of `backend()`; warns once if that is the reference for want of a better."""
    if backend() == "cpp":
        module = extension().module
        assert module is not None
        return module
    if os.environ.get(VARIABLE) != "reference":
        _warn_once()
    return importlib.import_module("mrem_deploy.kernels.reference")


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        f"{extension().problem}; {WHAT_IS_SLOWER}. To have it: {REMEDY}.", RuntimeWarning, stacklevel=4
    )


def ops_for(x: torch.Tensor) -> ModuleType:
    """The module with the training ops (contract: `reference_ops`) that serves tensors like x."""
    return importlib.import_module("mrem_deploy.kernels.reference_ops")


def describe() -> str:
    """For people: what runs here, and if it is not the fastest, why and what to do."""
    if backend() == "cpp":
        return "kernels: the C++ extension is in use"
    if os.environ.get(VARIABLE) == "reference":
        return f"kernels: the NumPy reference is in use, because {VARIABLE}=reference; {WHAT_IS_SLOWER}"
    return f"kernels: {extension().problem}; {WHAT_IS_SLOWER}\n  → {REMEDY}"
