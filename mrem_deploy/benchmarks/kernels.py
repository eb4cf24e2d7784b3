"""Fake quantization, forward and backward: the C++ kernels against other ways to compute the same.

The rivals: the plain torch code (the reference, eager), `torch._fake_quantize_learnable_per_tensor_affine`
(PyTorch's own fused op), and torch.compile of the reference. Before timing, all are shown to agree. The limit
is memory: 8 bytes of every element move forward (x, x̂) and 12 backward (gradient, x, gradient of x). As a
yardstick a copy and a sum of two tensors, which move the same 20 bytes, take their turn with the others.
Where there is a GPU, the Triton ops follow (kernels_gpu.py).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.machine import keep_large_blocks
from mrem_deploy.base.progress import bar, say
from mrem_deploy.benchmarks import kernels_gpu
from mrem_deploy.benchmarks import options as opt
from mrem_deploy.benchmarks.output import Result, table
from mrem_deploy.benchmarks.timing import Comparison, interleave, timed
from mrem_deploy.kernels import backends, ops, reference
from mrem_deploy.numerics import activation_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLES = """\
examples:
  python -m mrem_deploy.benchmark kernels --threads 1
  python -m mrem_deploy.benchmark kernels --sizes 4096x3072 --rounds 50 --out results
  MREM_CPU_TARGET=avx2 python -m mrem_deploy.benchmark kernels --quick
"""
DEFAULTS = {
    "sizes": opt.Default(((1024, 768), (4096, 768), (4096, 3072), (8192, 3072)), ((512, 768),)),
    "rounds": opt.Default(21, 5),
    "warmup": opt.Default(3, 1),
}
STEP = 0.02
GRID = activation_grid(8)
BYTES = 20  # per element, forward and backward together
YARDSTICK = "copy + sum"
RARELY = 1e-3  # share of elements that may round the other way where x·(1/s) stands for x/s

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # x̂, gradient of x, gradient of the step
Contender = Callable[[torch.Tensor, torch.Tensor], Gradients]


def add_options(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, read: Callable[[str], Any], help: str) -> None:
        opt.add_option(parser, flag, read, help, DEFAULTS)

    add("--sizes", opt.several(size, "--sizes", "1024x768,4096x3072"), "tensors, ROWSxCOLUMNS")
    add("--rounds", opt.whole("--rounds", 1), "timed rounds, each one call of everybody")
    add("--warmup", opt.whole("--warmup", 1), "rounds before the clock counts")
    parser.add_argument(
        "--threads", type=opt.whole("--threads", 0), default=0, help="CPU threads; 0 leaves torch's choice"
    )
    opt.add_places(parser)


def size(text: str) -> tuple[int, int]:
    """An argparse type: '1024x768'."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise UserError(f"--sizes must be ROWSxCOLUMNS; got {text!r}", "for example --sizes 1024x768")
    return int(parts[0]), int(parts[1])


def run(options: argparse.Namespace) -> Result:
    opt.fill_in(options, DEFAULTS)
    keep_large_blocks()  # as a real run does
    everybody, absent = contenders()
    rows: list[dict[str, Any]] = []
    with bar(len(options.sizes) * (len(everybody) + 1) * (options.rounds + options.warmup), "calls") as shown:
        for shape in options.sizes:
            say(f"{shape[0]} × {shape[1]}")
            rows += compare(shape, everybody, options, shown.update)
    on_gpu = kernels_gpu.run_gpu() if torch.cuda.is_available() else []
    if not on_gpu:
        absent["triton"] = "there is no GPU here"
    return Result(
        "kernels",
        {**opt.as_settings(options), "sizes": [list(shape) for shape in options.sizes], "absent": absent},
        rows + on_gpu,
        "\n\n".join([_table(rows), *([kernels_gpu.as_table(on_gpu)] if on_gpu else [])]),
        _summary(rows, absent),
        lambda: _draw(rows),
    )


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
            x, step = x.detach().requires_grad_(), torch.tensor(STEP, requires_grad=True)
            y = ops.fake_quant(x, step, GRID)
            y.backward(grad)
        finally:
            backends.use_backend("auto")
        assert x.grad is not None
        assert step.grad is not None
        return y, x.grad, step.grad

    return call


def _learnable(x: torch.Tensor, grad: torch.Tensor) -> Gradients:
    x, step = x.detach().requires_grad_(), torch.tensor([STEP], requires_grad=True)
    zero_point = torch.zeros(1, requires_grad=True)
    y = torch._fake_quantize_learnable_per_tensor_affine(x, step, zero_point, GRID.low, GRID.high, 1.0)
    y.backward(grad)
    assert x.grad is not None
    assert step.grad is not None
    return y, x.grad, step.grad


def _compiled() -> Contender:
    """Forward and backward compiled, and joined by autograd as the others are."""
    forward = torch.compile(lambda x, step: reference.fake_quant(x, step, GRID), fullgraph=True)
    backward = torch.compile(
        lambda grad, x, step: reference.fake_quant_backward(grad, x, step, GRID), fullgraph=True
    )

    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, step)
            return forward(x, step)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return backward(grads[0], *ctx.saved_tensors)

    def call(x: torch.Tensor, grad: torch.Tensor) -> Gradients:
        x, step = x.detach().requires_grad_(), torch.tensor(STEP, requires_grad=True)
        y = Compiled.apply(x, step)
        y.backward(grad)
        assert x.grad is not None
        assert step.grad is not None
        return y, x.grad, step.grad

    return call


def compare(
    shape: tuple[int, int],
    everybody: dict[str, Contender],
    options: argparse.Namespace,
    after_call: Callable[[], object],
) -> list[dict[str, Any]]:
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
        {
            "size": list(shape),
            "contender": name,
            "seconds": statistics.median(seconds),
            "gigabytes_per_second": moved / statistics.median(seconds) / 1e9,
            "of_bandwidth": Comparison(seconds, times[YARDSTICK]).ratio,
            "times_ours": Comparison(times[ours], seconds).ratio_dict(),
            "rounds": list(seconds),
        }
        for name, seconds in times.items()
    ]


def check_agrees(name: str, came: Gradients, truth: Gradients) -> None:
    """Ours gives the reference's numbers exactly; the others, which may multiply by 1/s, nearly always."""
    y, grad_x, grad_step = came
    differ = [float((a != b).float().mean()) for a, b in ((y, truth[0]), (grad_x, truth[1]))]
    allowed = 0.0 if name in ("cpp", "eager") else RARELY
    step_error = abs(float(grad_step) - float(truth[2])) / (float(truth[0].numel()) ** 0.5)
    if max(differ) > allowed or not step_error <= 1e-2:
        raise AssertionError(
            f"{name} computes something else: {differ[0]:g} of the values and {differ[1]:g} of the gradients "
            f"differ, the step's gradient is {float(grad_step)}, not {float(truth[2])}"
        )


def _table(rows: list[dict[str, Any]]) -> str:
    head = ["size", "by", "ms", "GB/s", "of bandwidth", "times ours", "quartiles"]
    cells = [
        [
            "×".join(map(str, row["size"])),
            row["contender"],
            f"{row['seconds'] * 1e3:.3f}",
            f"{row['gigabytes_per_second']:.1f}",
            f"{row['of_bandwidth']:.0%}",
            f"{row['times_ours']['ratio']:.2f}×",
            " – ".join(f"{value:.2f}" for value in row["times_ours"]["ratio_quartiles"]),
        ]
        for row in rows
    ]
    return table(head, cells)


def _summary(rows: list[dict[str, Any]], absent: dict[str, str]) -> str:
    rounds = len(rows[0]["rounds"])
    lines = [
        f"Forward and backward of 8-bit fake quantization, float32, {torch.get_num_threads()} thread(s), "
        f"{backends.describe_backend().removeprefix('kernels: ')}; medians of {rounds} interleaved rounds.",
        f"Bandwidth is that of '{YARDSTICK}', which moves the same bytes.",
    ]
    return "\n".join(lines + [f"Not measured: {name}, {reason}." for name, reason in absent.items()])


def _draw(rows: list[dict[str, Any]]) -> Figure:
    from mrem_deploy.report.plots import BLUE, ORANGE, new_figure

    figure, axes = new_figure(1.5 + 0.3 * len(rows))
    at = range(len(rows))
    colours = [ORANGE if row["contender"] == "cpp" else BLUE for row in rows]
    axes.barh(at, [row["gigabytes_per_second"] for row in rows], 0.6, color=colours)
    for place, row in zip(at, rows, strict=True):
        axes.annotate(
            f"{row['gigabytes_per_second']:.1f}",
            (row["gigabytes_per_second"], place),
            xytext=(4, -3),
            textcoords="offset points",
        )
    axes.set_yticks(at, [f"{'×'.join(map(str, row['size']))} {row['contender']}" for row in rows])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="GB/s, forward and backward", title="Fake quantization of float32")
    return figure
