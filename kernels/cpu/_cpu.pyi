"""The C++ extension as bindings.cpp defines it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

INTERFACE: int

def pack(codes: NDArray[np.int8], bits: int) -> NDArray[np.uint8]: ...
def unpack(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.int8]: ...
