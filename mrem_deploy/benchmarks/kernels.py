"""Fake quantization, forward and backward: the C++ kernels against other ways to compute the same.

The rivals: the plain torch code (the reference, eager), `torch._fake_quantize_learnable_per_tensor_affine`
(PyTorch's own fused op), and torch.compile of the reference. A check before timing shows that all agree. The
limit is memory: each element moves 8 bytes forward (x, x̂) and 12 backward (gradient, x, gradient of x). As a
yardstick, a copy and a sum of two tensors, which move the same 20 bytes, take their turn with the others.
On a machine with a GPU, the Triton ops follow (kernels_gpu.py).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import shown
from mrem_deploy.benchmarks import options as opt
from mrem_deploy.benchmarks.kernels_rows import YARDSTICK, KernelRow
from mrem_deploy.benchmarks.output import Result, table

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


def add_options(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, read: Callable[[str], Any], help: str) -> None:
        opt.add_option(parser, flag, read, help, DEFAULTS)

    add("--sizes", opt.several(size, "--sizes", "1024x768,4096x3072"), "tensors, ROWSxCOLUMNS")
    add("--rounds", opt.whole("--rounds", 1), "timed rounds, one call of each implementation per round")
    add("--warmup", opt.whole("--warmup", 1), "rounds before the timed ones")
    parser.add_argument(
        "--threads",
        type=opt.whole("--threads", 0, opt.MOST_THREADS),
        default=0,
        help="CPU threads; 0: torch's choice",
    )
    opt.add_places(parser)


def size(text: str) -> tuple[int, int]:
    """An argparse type: '1024x768'."""
    parts = re.fullmatch(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,6})", text)
    if parts is None:
        raise UserError(f"--sizes must be ROWSxCOLUMNS; got {shown(text)}", "for example --sizes 1024x768")
    return int(parts[1]), int(parts[2])


def run(options: argparse.Namespace) -> Result:
    import torch

    from mrem_deploy.benchmarks import kernels_gpu
    from mrem_deploy.benchmarks.kernels_job import measure

    opt.fill_in(options, DEFAULTS)
    rows, absent = measure(options)
    on_gpu = kernels_gpu.run_gpu() if torch.cuda.is_available() else []
    if not on_gpu:
        absent["triton"] = "there is no GPU here"
    return Result(
        "kernels",
        {**opt.as_settings(options), "sizes": [list(shape) for shape in options.sizes], "absent": absent},
        [row.to_dict() for row in rows] + [row.to_dict() for row in on_gpu],
        "\n\n".join([_table(rows), *([kernels_gpu.as_table(on_gpu)] if on_gpu else [])]),
        _summary(rows, absent, torch.get_num_threads()),
        lambda: _draw(rows),
    )


def _table(rows: list[KernelRow]) -> str:
    head = ["size", "by", "ms", "GB/s", "of bandwidth", "times ours", "quartiles"]
    cells = [
        [
            row.shape,
            row.contender,
            f"{row.seconds * 1e3:.3f}",
            f"{row.gigabytes_per_second:.1f}",
            f"{row.of_bandwidth:.0%}",
            f"{row.times_ours.ratio:.2f}×",
            " – ".join(f"{value:.2f}" for value in row.times_ours.ratio_quartiles),
        ]
        for row in rows
    ]
    return table(head, cells)


def _summary(rows: list[KernelRow], absent: dict[str, str], threads: int) -> str:
    from mrem_deploy.kernels.backends import describe_backend

    rounds = len(rows[0].rounds)
    lines = [
        f"Forward and backward of 8-bit fake quantization, float32, {threads} thread(s), "
        f"{describe_backend().removeprefix('kernels: ')}; medians of {rounds} interleaved rounds.",
        f"Bandwidth is that of '{YARDSTICK}', which moves the same bytes.",
    ]
    return "\n".join(lines + [f"Not measured: {name}, {reason}." for name, reason in absent.items()])


def _draw(rows: list[KernelRow]) -> Figure:
    from mrem_deploy.report.plots import BLUE, ORANGE, new_figure

    figure, axes = new_figure(1.5 + 0.3 * len(rows))
    at = range(len(rows))
    colours = [ORANGE if row.contender == "cpp" else BLUE for row in rows]
    axes.barh(at, [row.gigabytes_per_second for row in rows], 0.6, color=colours)
    for place, row in zip(at, rows, strict=True):
        axes.annotate(
            f"{row.gigabytes_per_second:.1f}",
            (row.gigabytes_per_second, place),
            xytext=(4, -3),
            textcoords="offset points",
        )
    axes.set_yticks(at, [f"{row.shape} {row.contender}" for row in rows])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="GB/s, forward and backward", title="Fake quantization of float32")
    return figure
