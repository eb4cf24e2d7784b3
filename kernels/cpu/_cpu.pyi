"""The C++ extension as bindings.cpp defines it. `threads` never changes a result."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

INTERFACE: int
THREADS: bool  # built with OpenMP: more than one thread has an effect

Floats = NDArray[np.float32]

def pack(codes: NDArray[np.int8], bits: int) -> NDArray[np.uint8]: ...
def unpack(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.int8]: ...

# Instruction sets.
def targets() -> dict[str, bool]: ...
def cpu_features() -> dict[str, bool]: ...
def active_target() -> str: ...
def use_target(name: str) -> None: ...

# Training. Only `x` may be strided; outputs are written in place.
def quantize(
    x: Floats, scale: Floats, low: int, high: int, dequantize: bool, out: Floats, threads: int
) -> None: ...
def quantize_backward(
    grad: Floats,
    x: Floats,
    scale: Floats,
    low: int,
    high: int,
    grad_x: Floats,
    grad_scale: Floats,
    threads: int,
) -> None: ...
def quantize_by_threshold(
    weight: Floats,
    threshold: Floats,
    inner: int,
    outer: int,
    factor: Floats | None,
    out: Floats,
    threads: int,
) -> None: ...
def scale_product(product: Floats, scale: Floats, bias: Floats | None, threads: int) -> None: ...
def twn(weight: Floats, per_row: bool, threshold: Floats, scale: Floats, threads: int) -> None: ...
def midrise(weight: Floats, per_row: bool, threshold: Floats, scale: Floats, threads: int) -> None: ...
def laq(
    weight: Floats,
    start: Floats,
    diagonal: Floats | None,
    low: int,
    high: int,
    iterations: int,
    per_row: bool,
    scale: Floats,
    threads: int,
) -> None: ...
