"""The ops with more than one implementation: their checks, the plain reference, and the choice between them.

Everyone calls the ops from here; nobody calls an implementation directly. See `backends` for the choice.
"""

from __future__ import annotations

from mrem_deploy.kernels.backends import backend, describe
from mrem_deploy.kernels.ops import fake_quant, fake_quant_linear, fake_quant_matmul, laq, twn
from mrem_deploy.kernels.packing import PACKABLE_BITS, pack, packed_size, unpack

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
