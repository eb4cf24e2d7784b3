"""The Triton ops on this machine's GPU against the reference in plain torch on the same GPU.

Each op is checked against the reference before it is timed; then both take turns, one call of each per round,
timed by the device's clock. The bounds of `kernels.gpu.roofline` are estimates, not measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mrem_deploy.base.errors import UserError
from mrem_deploy.benchmarks.output import table
from mrem_deploy.benchmarks.timing import Comparison, interleave
from mrem_deploy.kernels import reference
from mrem_deploy.kernels.quantized import Quantized
from mrem_deploy.numerics import activation_grid, asymmetric_grid, symmetric_grid

HIDDEN, WIDE, HEADS, HEAD = 768, 3072, 12, 64  # BERT-base
GRADIENT_ERROR = 1e-4  # RMS of the difference over RMS of the reference, which is float32 as well


@dataclass(frozen=True)
class GpuKernelRow:
    """One op: Triton against plain torch."""

    op: str
    device: str
    compared: Comparison
    agrees: bool

    @property
    def milliseconds(self) -> float:
        return 1e3 * self.compared.seconds

    def to_dict(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "device": self.device,
            "milliseconds": self.milliseconds,
            "torch_milliseconds": 1e3 * self.compared.base_seconds,
            "agrees": self.agrees,
            **self.compared.ratio_dict(),
        }


def run_gpu(tokens: int = 4096, length: int = 128, rounds: int = 30, warmup: int = 5) -> list[GpuKernelRow]:
    """One row for each op: median milliseconds of both, their ratio by round, and whether they agree."""
    if not torch.cuda.is_available():
        raise UserError("there is no CUDA or ROCm device here", "run it on a machine with a GPU")
    from mrem_deploy.kernels.gpu import ops

    rows = []
    for name, call in _cases(tokens, length).items():
        agrees = _agrees(call(ops), call(reference))
        contenders = {"triton": _timed(call, ops), "torch": _timed(call, reference)}
        seconds = interleave(contenders, rounds, warmup)
        compared = Comparison(base=seconds["torch"], other=seconds["triton"])
        rows.append(GpuKernelRow(name, torch.cuda.get_device_name(), compared, agrees))
    return rows


def as_table(rows: list[GpuKernelRow]) -> str:
    head = ["op", "Triton, ms", "torch, ms", "times faster", "agrees"]
    cells = [
        [
            row.op,
            f"{row.milliseconds:.3f}",
            f"{1e3 * row.compared.base_seconds:.3f}",
            f"{1 / row.compared.ratio:.2f}×",
            "yes" if row.agrees else "NO",
        ]
        for row in rows
    ]
    return table(head, cells)


def _cases(tokens: int, length: int, device: str = "cuda") -> dict[str, Callable[[Any], Any]]:
    """Calls of the ops of one backend, at the shapes of BERT-base."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    scale, w_grid = torch.tensor(0.03, device=device), symmetric_grid(4)
    signed, unsigned = Quantized(scale, activation_grid(8)), Quantized(scale, asymmetric_grid(8, 9))
    cases: dict[str, Callable[[Any], Any]] = {}
    for inputs, outputs in ((HIDDEN, HIDDEN), (HIDDEN, WIDE), (WIDE, HIDDEN)):
        x, weight, grad = random(tokens, inputs), random(outputs, inputs), random(tokens, outputs)
        x_quant = unsigned if inputs == WIDE else signed
        w_quant = Quantized(torch.full((outputs, 1), 0.3, device=device), w_grid, learned=True)
        name = f"linear {inputs} → {outputs}"
        cases[name] = _call("linear", x, weight, None, x_quant, w_quant)
        cases[f"{name}, backward"] = _call("linear_backward", grad, x, weight, x_quant, w_quant, True, True)
    sentences = max(tokens // length, 1)
    query, key, value = (random(sentences, length, HEADS, HEAD).transpose(1, 2) for _ in range(3))
    scores = torch.rand(sentences, HEADS, length, length, device=device)
    products = {
        "q·kᵀ": (query, key.transpose(-1, -2), signed, scores),
        "p·v": (scores, value, unsigned, query),
    }
    for name, (a, b, a_quant, grad) in products.items():
        cases[name] = _call("matmul", a, b, a_quant, signed)
        cases[f"{name}, backward"] = _call("matmul_backward", grad, a, b, a_quant, signed)
    weight = random(WIDE, HIDDEN)
    cases["fake_quant"] = _call("fake_quant", weight, scale, w_grid)
    cases["fake_quant, backward"] = _call("fake_quant_backward", weight, weight, scale, w_grid)
    start = torch.tensor(0.3, device=device)
    cases["twn, one scale"] = _call("twn", weight, False)
    cases["midrise, one scale"] = _call("midrise", weight, False)
    cases["laq, one scale"] = _call("laq", weight, start, None, w_grid, 2, False)
    return cases


def _call(op: str, *arguments: Any) -> Callable[[Any], Any]:
    return lambda backend: getattr(backend, op)(*arguments)


def _agrees(got: Any, expected: Any) -> bool:
    """Whether every tensor is the reference's, up to the rounding of float32 sums in another order."""
    pairs = zip(*((one,) if isinstance(one, torch.Tensor) else one for one in (got, expected)), strict=True)
    return all(
        left.shape == right.shape
        and bool((left - right).norm() <= GRADIENT_ERROR * right.norm() + torch.finfo(right.dtype).tiny)
        for left, right in pairs
    )


def _timed(call: Callable[[Any], Any], backend: Any) -> Callable[[], float]:
    """Seconds on the device between two events around the call."""

    def measure() -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call(backend)
        stop.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    return measure
