"""`python -m mrem_deploy.kernels` tells which implementation runs on this machine, and what is slower."""

from __future__ import annotations

from mrem_deploy.kernels.backends import describe

if __name__ == "__main__":
    print(describe())
