"""The measurement of `benchmark kernels`: implementations of fake quantization, compared and then timed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from mrem_deploy.base.machine import keep_large_blocks
from mrem_deploy.base.progress import bar, say
from mrem_deploy.benchmarks.kernels_rows import YARDSTICK, KernelRow
from mrem_deploy.benchmarks.timing import interleave, timed
from mrem_deploy.kernels import backends, ops, reference
from mrem_deploy.numerics import activation_grid

SCALE = 0.02
GRID = activation_grid(8)
BYTES = 20  # per element, forward and backward together
RARELY = 1e-3  # share of elements that may round the other way where x·(1/s) stands for x/s

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # x̂, gradient of x, gradient of the scale
Contender = Callable[[torch.Tensor, torch.Tensor], Gradients]


def measure(options: argparse.Namespace) -> tuple[list[KernelRow], dict[str, str]]:
    """A row for each size and implementation; and which ones cannot run here, with the reason."""
    keep_large_blocks()  # as a real run does
    everybody, absent = contenders()
    rows: list[KernelRow] = []
    with bar(len(options.sizes) * (len(everybody) + 1) * (options.rounds + options.warmup), "calls") as shown:
        for shape in options.sizes:
            say(f"{shape[0]} × {shape[1]}")
            rows += compare(shape, everybody, options, shown.update)
    return rows, absent


def contenders() -> tuple[dict[str, Contender], dict[str, str]]:
    """Ours first; and those that cannot run here, with the reason."""
    found: dict[str, Contender] = {}
    absent: dict[str, str] = {}
    if problem := backends.problem_of("cpp"):
        absent["cpp"] = problem
    else:
        backends.active_target()  # a wrong MREM_CPU_TARGET is explained before anything is timed
        found["cpp"] = _registered("cpp")
    found["eager"] = _registered("reference")
    found["learnable"] = _learnable
    try:
        compiled = _compiled()
        compiled(torch.ones(4, 4), torch.ones(4, 4))
    except Exception as error:  # noqa: BLE001 - the compiler's own errors are many; all mean the same here
        absent["compile"] = f"torch.compile does not work here ({type(error).__name__})"
    else:
        found["compile"] = compiled
    return found, absent


def _registered(backend: str) -> Contender:
    """The op as training calls it, autograd included."""

    def call(x: torch.Tensor, grad: torch.Tensor) -> Gradients:
        backends.use_backend(backend)
        try:
            x, scale = x.detach().requires_grad_(), torch.tensor(SCALE, requires_grad=True)
            y = ops.fake_quant(x, scale, GRID)
            y.backward(grad)
        finally:
            backends.use_backend("auto")
        assert x.grad is not None
        assert scale.grad is not None
        return y, x.grad, scale.grad

    return call


def _learnable(x: torch.Tensor, grad: torch.Tensor) -> Gradients:
    x, scale = x.detach().requires_grad_(), torch.tensor([SCALE], requires_grad=True)
    zero_point = torch.zeros(1, requires_grad=True)
    y = torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero_point, GRID.low, GRID.high, 1.0)
    y.backward(grad)
    assert x.grad is not None
    assert scale.grad is not None
    return y, x.grad, scale.grad


def _compiled() -> Contender:
    """Forward and backward compiled, and joined by autograd as the others are."""
    forward = torch.compile(lambda x, scale: reference.fake_quant(x, scale, GRID), fullgraph=True)
    backward = torch.compile(
        lambda grad, x, scale: reference.fake_quant_backward(grad, x, scale, GRID), fullgraph=True
    )

    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, scale)
            return forward(x, scale)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return backward(grads[0], *ctx.saved_tensors)

    def call(x: torch.Tensor, grad: torch.Tensor) -> Gradients:
        x, scale = x.detach().requires_grad_(), torch.tensor(SCALE, requires_grad=True)
        y = Compiled.apply(x, scale)
        y.backward(grad)
        assert x.grad is not None
        assert scale.grad is not None
        return y, x.grad, scale.grad

    return call


def compare(
    shape: tuple[int, int],
    everybody: dict[str, Contender],
    options: argparse.Namespace,
    after_call: Callable[[], object],
) -> list[KernelRow]:
    generator = torch.Generator().manual_seed(options.seed)
    x, grad = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    truth = everybody["eager"](x, grad)
    for name, call in everybody.items():
        check_agrees(name, call(x, grad), truth)
    out = torch.empty_like(x)

    def yardstick() -> None:
        out.copy_(x)
        torch.add(x, grad, out=out)

    calls = {name: timed(lambda call=call: call(x, grad)) for name, call in everybody.items()}  # type: ignore[misc]
    calls[YARDSTICK] = timed(yardstick)
    times = interleave(calls, options.rounds, options.warmup, after_call)
    ours = "cpp" if "cpp" in times else "eager"
    moved = BYTES * x.numel()
    return [
        KernelRow(shape, name, moved, seconds, times[YARDSTICK], times[ours])
        for name, seconds in times.items()
    ]


def check_agrees(name: str, got: Gradients, truth: Gradients) -> None:
    """Ours gives the reference's numbers exactly; the others, which may multiply by 1/s, nearly always."""
    y, grad_x, grad_scale = got
    differ = [float((a != b).float().mean()) for a, b in ((y, truth[0]), (grad_x, truth[1]))]
    allowed = 0.0 if name in ("cpp", "eager") else RARELY
    scale_error = abs(float(grad_scale) - float(truth[2])) / (float(truth[0].numel()) ** 0.5)
    if max(differ) > allowed or not scale_error <= 1e-2:
        raise AssertionError(
            f"{name} computes something else: {differ[0]:g} of the values and {differ[1]:g} of the gradients "
            f"differ, the scale's gradient is {float(grad_scale)}, not {float(truth[2])}"
        )
