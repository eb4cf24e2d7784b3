"""The façade of the kernels: each op with its checks, once; implementations behind it.

Everyone calls the ops from here; nobody calls an implementation directly. See `backends` for which one runs.
Packing needs no torch, so the ops of training are imported when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mrem_deploy.kernels.backends import backend, describe
from mrem_deploy.kernels.packing import PACKABLE_BITS, pack, packed_size, unpack

if TYPE_CHECKING:
    from mrem_deploy.kernels.ops import fake_quant, fake_quant_linear, fake_quant_matmul, laq, twn

__all__ = [
    "PACKABLE_BITS",
    "backend",
    "describe",
    "fake_quant",
    "fake_quant_linear",
    "fake_quant_matmul",
    "laq",
    "pack",
    "packed_size",
    "twn",
    "unpack",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("mrem_deploy.kernels.ops"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
