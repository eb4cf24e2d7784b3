"""`python -m mrem_deploy.kernels` prints which implementation runs on this machine, and what is slower.

`mrem doctor` says more.
"""

from __future__ import annotations

from mrem_deploy.base import cli
from mrem_deploy.kernels.backends import describe_backend


def main(argv: list[str] | None = None) -> int:
    print(describe_backend())
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
