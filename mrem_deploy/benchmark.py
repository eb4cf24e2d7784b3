"""`mrem benchmark WHAT` (`python -m mrem_deploy.benchmark WHAT`): time and memory, measured on this machine.

To add one: a file in `mrem_deploy/benchmarks/` with `EXAMPLES`, `add_options(parser)` and
`run(options) -> Result`, and a line in `VERBS`. The file is imported to build the parser, so it loads torch
and runtimes only inside `run`; the measurement itself is in a second file, such as `step_job.py`.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError

VERBS = {
    "batches": "whether a sentence has the same vector in any batch, next to quantize_dynamic",
    "compare": "accuracy, size and speed of results next to onnxruntime's own quantizers, in one picture",
    "footprint": "peak memory of a quantized training step, fused ops against ordinary autograd",
    "kernels": "fake quantization by the C++ kernels against eager, PyTorch's own op and torch.compile",
    "latency": "exported models against ORT fp32, its quantizers and other runtimes: latency, memory, size",
    "memory": "peak memory of MREM-S training by number of modules, and of its activation cache",
    "parallel": "MREM-P against MREM-S: speed, where workers spend their time, and a slow worker",
    "schedule": "MREM-P on many devices, simulated, against synchronous pipelines",
    "step": "a training step of a quantized module against the same step unquantized",
}
MODULES = {"latency": "latency.verb"}  # where the module has another name
EXAMPLES = """\
examples:
  python -m mrem_deploy.benchmark compare result --out results
  python -m mrem_deploy.benchmark kernels --threads 1
  python -m mrem_deploy.benchmark latency result --out results
  python -m mrem_deploy.benchmark memory --quick
  python -m mrem_deploy.benchmark memory --modules 1,2,4 --fill --out results
  python -m mrem_deploy.benchmark parallel --modules 2 --out results
  python -m mrem_deploy.benchmark schedule --out results
  python -m mrem_deploy.benchmark step --bits 4-4-8,2-2-8 --out results
"""


def usage() -> str:
    lines = [f"  {verb:<11}{what}" for verb, what in VERBS.items()]
    return (
        "usage: mrem benchmark WHAT [options]\n\n"
        + "\n".join(lines)
        + f"\n\n{EXAMPLES}\n`mrem benchmark WHAT --help` says more"
    )


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    verb = arguments[0]
    if verb not in VERBS:
        raise UserError(f"there is no benchmark {verb!r}", f"choose among {', '.join(VERBS)}")
    benchmark = importlib.import_module(f"mrem_deploy.benchmarks.{MODULES.get(verb, verb)}")
    parser = argparse.ArgumentParser(
        prog=f"mrem benchmark {verb}",
        description=benchmark.__doc__,
        epilog=benchmark.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benchmark.add_options(parser)
    options = parser.parse_args(arguments[1:])

    import torch

    from mrem_deploy.base import machine
    from mrem_deploy.benchmarks import output

    folder = output.check_folder(options.out)
    if getattr(options, "threads", 0):  # torch's; a benchmark of other runtimes has none
        torch.set_num_threads(options.threads)
    load = output.load_average()
    result = benchmark.run(options)
    print(f"{result.table}\n\n{result.summary}")
    if folder is not None:
        for path in output.write(result, folder, machine.describe_machine(), load):
            print(f"written: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
