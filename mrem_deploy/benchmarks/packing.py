"""Micro-benchmark of packing: `python -m mrem_deploy.benchmarks.packing`.

Checks that both backends agree, then times them on the word embeddings of BERT-base. The limit is memory: one
byte per code on one side and bits/8 on the other, so a plain copy of the codes is shown as the yardstick.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from mrem_deploy.kernels import backends, packing, reference_packing

CODES = 30522 * 768  # word embeddings of BERT-base


def best_seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """The fastest of some runs after one to warm up: noise on a shared machine only ever adds time."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> int:
    print(
        f"{platform.processor() or platform.machine()}, NumPy {np.__version__}, one thread, {CODES:,} codes"
    )
    print(backends.describe_backend())
    backs = {"reference": reference_packing, "cpp": backends.extension().module}
    copy = np.zeros(CODES, np.int8)
    print(f"copying the codes: {CODES / best_seconds(copy.copy) / 1e9:.2f} G codes/s")
    random = np.random.default_rng(0)
    for bits in packing.PACKABLE_BITS:
        half = 1 << (bits - 1)
        codes = random.integers(-half, half, CODES, dtype=np.int8)
        truth = reference_packing.pack(codes, bits)
        for name, back in backs.items():
            if back is None:
                continue
            if not np.array_equal(back.pack(codes, bits), truth) or not np.array_equal(
                back.unpack(truth, bits, CODES), codes
            ):
                raise AssertionError(f"{name} differs from the reference at {bits} bits")
            packing_rate = CODES / best_seconds(partial(back.pack, codes, bits)) / 1e9
            unpacking_rate = CODES / best_seconds(partial(back.unpack, truth, bits, CODES)) / 1e9
            print(
                f"{bits} bits  {name:<9}  pack {packing_rate:6.3f}  unpack {unpacking_rate:6.3f}  G codes/s"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
