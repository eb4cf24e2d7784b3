"""Triton kernels, one op per file. Call them through `mrem_deploy.kernels`, which checks and chooses."""

from __future__ import annotations
