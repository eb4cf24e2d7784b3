"""`mrem doctor`: show what this machine has, which kernels will run, and what to install.

It starts CUDA, which takes a few hundred MiB of GPU memory until the command ends, and runs one small kernel
there, to find out whether Triton works. It computes nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable

from mrem_deploy.base import cli
from mrem_deploy.base import machine as environment
from mrem_deploy.base.errors import UserError
from mrem_deploy.deploy import own_runtime
from mrem_deploy.kernels import backends

EXAMPLES = """\
examples:
  mrem doctor
  MREM_CPU_TARGET=avx2 mrem doctor      (what a processor without AVX-512 would use)
"""
WHAT = {
    "cpp": "training ops for float32 on the CPU, packing",
    "triton": "training ops on a GPU",
    "reference": "everything else, in plain torch and NumPy; the tests compare the others with it",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="mrem doctor",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(argv)
    sections = {
        "machine": machine(),
        "packages": packages(),
        "kernels": kernels(),
        "what will run": choices(),
    }
    for title, lines in sections.items():
        print(f"{title}\n" + "\n".join(f"  {line}" for line in lines))
    advice = remedies()
    print("to install\n" + "\n".join(f"  {line}" for line in advice or ["nothing missing"]))
    return 0


def machine() -> list[str]:
    found = environment.describe_machine()
    lines = [
        f"{found['cpu']}, {found['cpu_count']} of {found['cpu_count_machine']} cores usable, "
        f"{found['ram_mb']} MiB of memory, {found['platform']}",
        f"torch uses {found['torch_threads']} thread(s)",
    ]
    extension = backends.extension().module
    if extension is not None:
        lines += instruction_sets(extension.cpu_features())
    lines.append(f"GPU: {gpu()}")
    return lines


def instruction_sets(features: dict[str, bool]) -> list[str]:
    """An instruction set needs the processor and the operating system."""

    def line(name: str, processor: bool, system: bool) -> str:
        if processor and system:
            return f"{name}: yes"
        reason = (
            "the processor has none" if not processor else "the operating system does not save its registers"
        )
        return f"{name}: no, {reason}"

    return [
        line("AVX2", features["cpuid_avx2"], features["os_avx"]),
        line("AVX-512", features["cpuid_avx512f"], features["os_avx512"]),
    ]


def gpu() -> str:
    import torch

    if torch.cuda.is_available():
        return ", ".join(map(_described, range(torch.cuda.device_count())))
    if torch.version.cuda is None and torch.version.hip is None:
        return "none that torch can use: this is the CPU build of torch"
    return "none that torch sees"


def _described(index: int) -> str:
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return f"{torch.cuda.get_device_name(index)} (compute capability {major}.{minor})"


def packages() -> list[str]:
    found = environment.describe_machine()
    lines = [
        f"{name} {found[name] or 'is not installed'}" for name in ("mrem_deploy", "torch", "transformers")
    ]
    if found["onnxruntime"]:
        import onnxruntime

        providers = ", ".join(onnxruntime.get_available_providers())
        lines.append(f"onnxruntime {found['onnxruntime']} with {providers}")
    else:
        lines.append("onnxruntime is not installed: ONNX models can be neither exported nor validated")
    absent = own_runtime.problem()
    lines.append(f"{absent}: ONNX models run without its operators" if absent else own_runtime.describe())
    lines.append(f"triton {environment.version('triton') or 'is not installed'}")
    return lines


def kernels() -> Iterable[str]:
    """Every backend: whether it can run, or why not."""
    for name, what in WHAT.items():
        problem = backends.problem_of(name)
        detail = f"no, {problem}" if problem else "yes"
        if name == "cpp" and not problem:
            detail = f"yes, {_cpu_target()}"
        yield f"{name} ({what}): {detail}"


def _cpu_target() -> str:
    extension = backends.extension().module
    assert extension is not None
    try:
        active = backends.active_target()
    except UserError as error:
        return f"but {error.problem}"
    others = [
        f"{name}{'' if runs else ' (not on this machine)'}" for name, runs in extension.targets().items()
    ]
    threads = "as many threads as torch" if extension.THREADS else "one thread: it was built without OpenMP"
    return f"CPU target {active} of {', '.join(others)}; {threads}"


def choices() -> list[str]:
    try:
        asked = backends.choice()
    except UserError as error:
        return [f"nothing: {error.problem}"]
    return [
        "chosen automatically:" if asked == "auto" else f"chosen by {backends.VARIABLE}={asked}:",
        f"float32 on the CPU: {backends.backend_for('cpu')}",
        f"float64 and 16-bit types on the CPU: {backends.backend_for('cpu', float32=False)}",
        f"on a GPU: {backends.backend_for('cuda')}",
        f"packing: {backends.backend()}",
    ]


def remedies() -> list[str]:
    advice = [
        f"for {name}: {remedy}"
        for name in WHAT
        if backends.problem_of(name)
        and (name != "triton" or _has_gpu())
        and (remedy := backends.remedy_of(name))
    ]
    try:
        importlib.import_module("onnxruntime")
    except ImportError:
        advice.append('for export and validation: pip install "mrem-deploy[cpu]"')
    if own_runtime.problem():
        advice.append(f"for faster ONNX models on CPUs: {own_runtime.INSTALL}")
    if not _has_gpu() and environment.describe_machine()["gpu"]:
        advice.append("for the GPU: a CUDA build of torch (make setup-gpu)")
    return advice


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


if __name__ == "__main__":
    sys.exit(cli.run(main))
