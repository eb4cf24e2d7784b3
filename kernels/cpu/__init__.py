"""C++ kernels for the CPU. Call them through `mrem_deploy.kernels`, which checks and chooses."""

from __future__ import annotations
