"""The kernels as everyone calls them: each op with its checks, written once; implementations behind it.

Nobody calls an implementation directly. `backends` says which one runs. Importing this package loads neither
NumPy nor torch: a name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mrem_deploy.kernels.backends import backend, describe_backend

if TYPE_CHECKING:
    from mrem_deploy.kernels.ops import fake_quant, fake_quant_linear, fake_quant_matmul, laq, midrise, twn
    from mrem_deploy.kernels.packing import PACKABLE_BITS, pack, packed_size, unpack

__all__ = [
    "PACKABLE_BITS",
    "backend",
    "describe_backend",
    "fake_quant",
    "fake_quant_linear",
    "fake_quant_matmul",
    "laq",
    "midrise",
    "pack",
    "packed_size",
    "twn",
    "unpack",
]
_PACKING = ("PACKABLE_BITS", "pack", "packed_size", "unpack")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "packing" if name in _PACKING else "ops"
    return getattr(importlib.import_module(f"mrem_deploy.kernels.{module}"), name)
