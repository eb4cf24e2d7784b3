"""`mrem verify DIR`: is a result as it was written, and can it be right?

Checks the SHA-256 of every tensor, of config.json and of the manifest, the ranges of scales, zero points and
codes, the ONNX files next to them (all there, unchanged, and exported from this result) and, where a run
was interrupted, its checkpoints. It changes nothing. Exit code 0: all is well; 1: something is damaged;
2: wrong options, or no such folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mrem_deploy.base import cli
from mrem_deploy.base.outside import path_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mrem_deploy.result.verification import Check

EXAMPLES = """\
examples:
  mrem verify result
  mrem verify .result.work      (the checkpoints of a run that was interrupted)
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mrem verify",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", help="result folder of quantize, or its work folder")
    return parser


def main(argv: list[str] | None = None) -> int:
    folder = path_of("DIR", build_parser().parse_args(argv).folder)

    from mrem_deploy.result.verification import verify

    checks = verify(folder)
    print(summary(folder, checks))
    return cli.EXIT_FAILED if any(check.findings for check in checks) else 0


def summary(folder: Path, checks: Sequence[Check]) -> str:
    """The lines to print: what was checked, each finding below it, and the verdict."""
    lines = []
    for check in checks:
        lines.append(f"{'DAMAGED' if check.findings else 'ok':<9}{check.what} ({check.checked})")
        lines += [f"         - {finding}" for finding in check.findings]
    count = sum(len(check.findings) for check in checks)
    if not count:
        return "\n".join([*lines, f"verdict: {folder} is as it was written"])
    things = "thing is" if count == 1 else "things are"
    return "\n".join(
        [*lines, f"verdict: DAMAGED, {count} {things} wrong; copy the folder again, or make it again"]
    )


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
