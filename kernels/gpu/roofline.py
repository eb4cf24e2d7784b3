"""Lower bounds on the time of each matmul of BERT-base: `python -m mrem_deploy.kernels.gpu.roofline`.

Estimates, not measurements: operations and bytes counted from shapes, divided by the published peaks of the
hardware; the largest time is the bound. Bytes count every tensor once, as if all tiles found it in the cache.
Note: quantizing has a separate bound. A true division, clamp and rounding take about QUANTIZE instructions of
the ordinary float units, which are some thirty times slower than the matrix units; and every tile quantizes
the elements that it reads, unless codes are made once.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

QUANTIZE = 20  # instructions for one element, most of them for the division
TILE = 128


@dataclass(frozen=True)
class Hardware:
    """Published dense peaks: operations per second in 1e12, memory in 1e9 bytes per second."""

    name: str
    memory: float
    float32: float  # a fused multiply-add counts as two
    tf32: float
    float16: float
    int8: float


A100 = Hardware("A100 80 GB SXM", memory=2039, float32=19.5, tf32=156, float16=312, int8=624)
H100 = Hardware("H100 SXM", memory=3350, float32=67, tf32=494.5, float16=989.5, int8=1979)


@dataclass(frozen=True)
class Work:
    """One kernel, or with codes three, at one shape."""

    name: str
    operations: float  # of the matrix units, in `unit`
    unit: str
    bytes: float
    quantized: float  # elements, counted each time they are quantized

    @property
    def intensity(self) -> float:
        return self.operations / self.bytes

    def times(self, hardware: Hardware) -> dict[str, float]:
        """Microseconds, by the unit that is the limit."""
        return {
            "matrix": self.operations / (getattr(hardware, self.unit) * 1e6),
            "memory": self.bytes / (hardware.memory * 1e3),
            "quantize": self.quantized * QUANTIZE / (hardware.float32 / 2 * 1e6),
        }

    def bound(self, hardware: Hardware) -> tuple[float, str]:
        times = self.times(hardware)
        limit = max(times, key=lambda name: times[name])
        return times[limit], limit


@dataclass(frozen=True)
class Product:
    """(rows, summed) by (summed, columns), `batch` times, of float32 tensors."""

    name: str
    batch: int
    rows: int
    columns: int
    summed: int

    def work(self) -> list[Work]:
        left, right = self.batch * self.rows * self.summed, self.batch * self.summed * self.columns
        result = self.batch * self.rows * self.columns
        operations = 2.0 * self.batch * self.rows * self.columns * self.summed
        again_left, again_right = math.ceil(self.columns / TILE), math.ceil(self.rows / TILE)
        fused = Work(
            f"{self.name}, fused",
            operations,
            "int8",
            4 * (left + right + result),
            left * again_left + right * again_right,
        )
        # Codes are written once and read once, a byte each.
        codes = Work(f"{self.name}, codes", operations, "int8", 6 * (left + right) + 4 * result, left + right)
        # A float32 is multiplied as two TF32 numbers; the epilogue also divides, and reads what it masks.
        by_left = Work(
            f"{self.name}, gradient of the left",
            2 * operations,
            "tf32",
            4 * (result + right + 2 * left),
            right * again_right + left,
        )
        by_right = Work(
            f"{self.name}, gradient of the right",
            2 * operations,
            "tf32",
            4 * (result + left + 2 * right),
            left * again_left + right,
        )
        return [fused, codes, by_left, by_right] if self.batch == 1 else [fused, by_left, by_right]


def bert_base(sentences: int, length: int) -> list[Product]:
    tokens, heads = sentences * length, sentences * 12
    return [
        Product("768 → 768", 1, tokens, 768, 768),
        Product("768 → 3072", 1, tokens, 3072, 768),
        Product("3072 → 768", 1, tokens, 768, 3072),
        Product("q·kᵀ", heads, length, length, 64),
        Product("p·v", heads, length, 64, length),
    ]


def table(sentences: int, length: int, hardware: tuple[Hardware, ...] = (A100, H100)) -> str:
    """Markdown: one line for each kernel."""
    names = " | ".join(f"{one.name}, µs ≥ (bound by)" for one in hardware)
    lines = [
        f"| product | G operations | MB | operations per byte | {names} |",
        "|---|--:|--:|--:|" + "--:|" * len(hardware),
    ]
    for product in bert_base(sentences, length):
        for work in product.work():
            bounds = (work.bound(one) for one in hardware)
            cells = " | ".join(f"{time:.1f} ({limit})" for time, limit in bounds)
            size = f"{work.operations / 1e9:.2f} | {work.bytes / 1e6:.1f} | {work.intensity:.0f}"
            lines.append(f"| {work.name} | {size} | {cells} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mrem_deploy.kernels.gpu.roofline", description=__doc__)
    parser.add_argument("--sentences", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args(argv)
    print(table(options.sentences, options.length))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
