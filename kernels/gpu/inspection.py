"""What the kernels compile to, on any machine: `python -m mrem_deploy.kernels.gpu.inspection sm_90`.

Calls the ops as training does, at the shapes of BERT-base, but every launch only compiles (see `launching`),
with every tile of the list. With --few: only the calls that have matmuls, with the smallest tile. Reports
registers, spills, shared memory and matrix instructions. Note: none of this is a measurement. A kernel that
looks right here may still be slow.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from mrem_deploy.base.errors import UserError
from mrem_deploy.kernels.gpu import linear as linear_op
from mrem_deploy.kernels.gpu import ops
from mrem_deploy.kernels.gpu.codes import int8_range, make_codes
from mrem_deploy.kernels.gpu.launching import INTERPRETED, Compiled, DoesNotCompile, compiling_for
from mrem_deploy.kernels.quantized import Quantized
from mrem_deploy.numerics import activation_grid, asymmetric_grid, midrise_grid, symmetric_grid

KIB = 1024


@dataclass(frozen=True)
class Device:
    """A target and what one block may use of it."""

    target: GPUTarget
    shared: int  # bytes of shared memory (LDS on AMD) that one block can have
    registers: int  # of a thread
    register_file: int  # 32-bit registers that all threads of a block share


def _nvidia_device(capability: int, shared: int) -> Device:
    return Device(GPUTarget("cuda", capability, 32), shared * KIB, 255, 65536)


DEVICES = {
    "sm_75": _nvidia_device(75, 64),  # T4: the int8 matmul does not compile
    "sm_80": _nvidia_device(80, 163),  # A100
    "sm_86": _nvidia_device(86, 99),  # RTX 30, A10
    "sm_89": _nvidia_device(89, 99),  # RTX 40, L4, L40
    "sm_90": _nvidia_device(90, 227),  # H100
    "sm_100": _nvidia_device(100, 227),  # B200
    "sm_120": _nvidia_device(120, 99),  # RTX 50
    "gfx942": Device(GPUTarget("hip", "gfx942", 64), 64 * KIB, 512, 4 * 512 * 64),  # MI300: four SIMDs
}


@dataclass(frozen=True)
class Report:
    call: str
    kernel: str
    constants: dict[str, Any]
    warps: int
    stages: int
    registers: int
    spills: int  # accesses to thread-local memory (NVIDIA), spilled vector registers and scratch bytes (AMD)
    shared: int
    matrix: dict[str, int]  # matrix instructions, by their name
    divisions: dict[str, int]

    def problems(self, device: Device) -> list[str]:
        """What keeps the kernel from running, or from running well."""
        wide = self.registers * self.warps * device.target.warp_size
        found = {
            f"{self.spills} spills": self.spills > 0,
            f"{self.shared} B of shared memory, {device.shared} allowed": self.shared > device.shared,
            f"{self.registers} registers per thread, {device.registers} allowed": self.registers
            > device.registers,
            f"{wide} registers per block, {device.register_file} allowed": wide > device.register_file,
            "an approximate division": any(re.search("approx|full", name) for name in self.divisions),
        }
        return [problem for problem, present in found.items() if present]

    def __str__(self) -> str:
        tile = "×".join(
            str(self.constants[key]) for key in ("BLOCK_M", "BLOCK_N", "BLOCK_K") if key in self.constants
        )
        matrix = ", ".join(f"{count} {name}" for name, count in self.matrix.items()) or "–"
        return (
            f"| {self.call} | {self.kernel} | {tile or '–'} | {self.warps} | {self.stages} | "
            f"{self.registers} | {self.spills} | {self.shared} | {matrix} |"
        )


HEAD = (
    "| call | kernel | tile | warps | stages | registers | spills | shared, B | matrix instructions |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def calls() -> dict[str, Callable[[], object]]:
    """Each op in the variants that compile differently: type, scale, offset, thresholds."""
    x, weight, bias = torch.zeros(512, 768), torch.zeros(768, 768), torch.zeros(768)
    heads = torch.zeros(2, 128, 12, 64).transpose(1, 2)
    scores = torch.zeros(2, 12, 128, 128)
    scale, scales = torch.ones(()), torch.ones(768, 1)
    low = symmetric_grid(4)
    signed, unsigned = Quantized(scale, activation_grid(8)), Quantized(scale, asymmetric_grid(8, 9))
    per_row = Quantized(scales, symmetric_grid(8), learned=True)
    ternary = Quantized(scale, symmetric_grid(2), threshold=scale)
    midrise, odd = Quantized(scales, midrise_grid(), threshold=scales), int8_range(midrise_grid())
    assert odd is not None
    half, brain = torch.float16, torch.bfloat16
    return {
        "fake_quant": lambda: ops.fake_quant(x, scale, signed.grid),
        "fake_quant_backward": lambda: ops.fake_quant_backward(x, x, scale, signed.grid),
        "fake_quant_backward per row fp16": lambda: ops.fake_quant_backward(
            weight.to(half), weight.to(half), scales, low
        ),
        "linear codes": lambda: linear_op.linear(x, weight, bias, unsigned, per_row, codes=True),
        "linear fused bf16 ternary": lambda: linear_op.linear(
            x.to(brain), weight.to(brain), bias.to(brain), signed, ternary, codes=False
        ),
        "codes by threshold": lambda: make_codes(weight, scales.view(-1), scales.view(-1), odd),
        "linear_backward of x midrise": lambda: ops.linear_backward(
            x, x, weight, signed, midrise, True, False
        ),
        "linear_backward of x": lambda: ops.linear_backward(x, x, weight, signed, per_row, True, False),
        "linear_backward of weight bf16": lambda: ops.linear_backward(
            x.to(brain), x.to(brain), weight.to(brain), signed, per_row, False, True
        ),
        "matmul scores·values": lambda: ops.matmul(scores, heads, unsigned, signed),
        "matmul_backward fp16": lambda: ops.matmul_backward(
            scores.to(half), heads.to(half), heads.to(half).mT, signed, signed
        ),
        "twn": lambda: (ops.twn(weight, False), ops.twn(weight, True)),
        "midrise": lambda: (ops.midrise(weight, False), ops.midrise(weight, True)),
        "laq": lambda: (
            ops.laq(weight, scale, weight, low, 1, False),
            ops.laq(weight, scales, None, low, 1, True),
        ),
    }


FEW = ("linear codes", "linear fused bf16 ternary", "linear_backward of x", "matmul_backward fp16", "twn")


def inspect(
    device: Device, call: str, run: Callable[[], object], most_tiles: int | None = None
) -> list[Report]:
    """Compile what `run` would launch; each kernel is reported once. Raises DoesNotCompile."""
    with compiling_for(device.target, most_tiles) as dry_run:
        run()
    different = {id(compiled.kernel): compiled for compiled in dry_run.compiled}
    return [_report(call, compiled) for compiled in different.values()]


def _report(call: str, compiled: Compiled) -> Report:
    kernel = compiled.kernel
    resources = _nvidia(kernel) if "cubin" in kernel.asm else _amd(kernel)
    constants, options = compiled.constants, compiled.options
    return Report(
        call,
        compiled.name,
        constants,
        options["num_warps"],
        options["num_stages"],
        shared=kernel.metadata.shared,
        **resources,
    )


def _nvidia(kernel: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        used = _output(knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        instructions = _output(knobs.nvidia.nvdisasm.path, "-c", file.name)
    registers = re.search(r"REG:(\d+)", used)
    assert registers is not None, used
    return {
        "registers": int(registers[1]),
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", instructions)),
        "matrix": _count(r"(tcgen05\.mma\.\S+|wgmma\.mma_async\.\S+|mma\.sync\.\S+)", kernel.asm["ptx"]),
        "divisions": _count(r"\b(div\.\w+(?:\.ftz)?\.f\d+)", kernel.asm["ptx"]),
    }


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _amd(kernel: Any) -> dict[str, Any]:
    assembly = kernel.asm["amdgcn"]
    numbers = {name: int(count) for name, count in re.findall(r"\.(\w+_count|\w+_size): +(\d+)", assembly)}
    return {
        "registers": numbers["vgpr_count"] + numbers["agpr_count"],
        "spills": numbers["vgpr_spill_count"] + numbers["private_segment_fixed_size"],
        "matrix": _count(r"\b(v_mfma_\w+)", assembly),
        "divisions": _count(r"\b(v_div_fixup_f\d+)", assembly),  # the end of a correctly rounded division
    }


def _count(pattern: str, text: str) -> dict[str, int]:
    return dict(sorted(Counter(re.findall(pattern, text)).items()))


def inspect_all(name: str, few: bool = False) -> list[Report]:
    if INTERPRETED:
        raise UserError("TRITON_INTERPRET is set, so nothing would be compiled", "unset it")
    if name not in DEVICES:
        raise UserError(f"there is no target {name!r}", f"choose among {', '.join(DEVICES)}")
    chosen = {call: run for call, run in calls().items() if not few or call in FEW}
    most = 1 if few else None
    return [report for call, run in chosen.items() for report in inspect(DEVICES[name], call, run, most)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mrem_deploy.kernels.gpu.inspection", description=__doc__)
    parser.add_argument("target", help=" or ".join(DEVICES))
    parser.add_argument("--few", action="store_true", help="only matmuls, each with its smallest tile")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    try:
        reports = inspect_all(options.target, options.few)
    except DoesNotCompile as error:
        raise UserError(
            f"Triton {triton.__version__} cannot compile the kernels for {options.target}: {error}",
            "on such a GPU, --kernels auto computes in plain torch",
        ) from error
    if options.json:
        json.dump([asdict(report) for report in reports], sys.stdout)
        return 0
    print(HEAD, *reports, sep="\n")
    problems = [(report, report.problems(DEVICES[options.target])) for report in reports]
    for report, found in problems:
        if found:
            print(f"{report.call}, {report.kernel} {report.constants}: {', '.join(found)}")
    return int(any(found for _, found in problems))


if __name__ == "__main__":
    from mrem_deploy.base import cli

    raise SystemExit(cli.run(main))
