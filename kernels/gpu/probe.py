"""Whether Triton's kernels run on this machine's GPU: one real launch, before a run depends on them.

Triton builds a small launcher with a C compiler when a kernel runs for the first time. Without a compiler, or
without Python's headers, every kernel fails; so does one on a GPU that Triton or its driver do not know.
"""

from __future__ import annotations

import subprocess

import torch

from mrem_deploy.kernels import reference
from mrem_deploy.kernels.gpu import fake_quant
from mrem_deploy.kernels.gpu.launching import DoesNotCompile
from mrem_deploy.numerics import activation_grid

VALUES = (-7.3, -0.5, 0.0, 0.5, 1.5, 200.0)  # ties and a value beyond the grid among them


def problem(device: torch.device) -> str:
    """Why kernels do not run there; "" if one did and gave the reference's numbers."""
    x, scale = torch.tensor(VALUES, device=device), torch.tensor(1.0, device=device)
    grid = activation_grid(8)
    try:
        found = fake_quant.fake_quant(x, scale, grid)
        agrees = torch.equal(found, reference.fake_quant(x, scale, grid))
    except subprocess.CalledProcessError as error:
        how = f"{error.cmd[0]}, exit code {error.returncode}"
        return f"the C compiler that Triton needs at run time failed ({how})"
    except (DoesNotCompile, RuntimeError, OSError) as error:
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if "C compiler" in said:
            return "Triton needs a C compiler at run time, and there is none"
        return f"a first Triton kernel does not run there ({said})"
    return "" if agrees else "a first Triton kernel gives other numbers than plain torch"
