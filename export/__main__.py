"""`python -m mrem_deploy.export`: a result folder to ONNX, one file per profile."""

from __future__ import annotations

import argparse
from pathlib import Path

from mrem_deploy.base import cli

EXAMPLES = """\
examples:
  python -m mrem_deploy.export result                       (result/model.onnx, for onnxruntime on CPUs)
  python -m mrem_deploy.export result --profile int8        (result/model_int8.onnx)
  python -m mrem_deploy.export result --profile qdq --opset 25 --out elsewhere.onnx
"""


def build_parser() -> argparse.ArgumentParser:
    from mrem_deploy.export.profiles import INT2_OPSET, INT2_RUNTIME, PROFILES

    rows = [
        f"  {p.name:<10}{p.audience} (opset {p.opset}, onnxruntime ≥ {p.oldest_runtime}"
        + (f"; with 2-bit weights {INT2_OPSET} and {INT2_RUNTIME})" if p.packed and p.two_bit_types else ")")
        for p in PROFILES.values()
    ]
    parser = argparse.ArgumentParser(
        prog="mrem export",
        description="Write a quantized model as ONNX, with its learned steps and packed integers.",
        epilog="profiles:\n" + "\n".join(rows) + "\n\n" + EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", help="result folder of `mrem quantize`")
    parser.add_argument("--profile", default="ort-cpu", help="for which reader (default ort-cpu; see below)")
    parser.add_argument("--opset", type=int, help="opset to write (default: the profile's)")
    parser.add_argument("--out", metavar="FILE", help="where to write (default: the profile's name in DIR)")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)

    from mrem_deploy.base.progress import say
    from mrem_deploy.export import export_onnx
    from mrem_deploy.export.profiles import find_profile
    from mrem_deploy.quant import artifact

    profile = find_profile(options.profile)
    frozen = artifact.read(options.folder)
    path = Path(options.out or Path(options.folder) / profile.file)
    say(f"exporting for {profile.name}")
    export_onnx(frozen, path, profile.name, options.opset)
    print(
        f"{path}: {path.stat().st_size / 2**20:.1f} MiB (full precision {frozen.full_precision_mb():.1f} MiB)"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
