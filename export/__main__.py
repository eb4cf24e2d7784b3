"""`mrem export` (`python -m mrem_deploy.export`): a result folder to ONNX, one file for each profile."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.units import MIB
from mrem_deploy.export.profiles import ATTENTIONS, INT2_OPSET, INT2_RUNTIME, PROFILES, find_profile

EXAMPLES = """\
examples:
  mrem export result                           (result/model.onnx, for onnxruntime on CPUs)
  mrem export result --profile int8,tensorrt   (result/model_int8.onnx and result/model_tensorrt.onnx)
  mrem export result --profile qdq --opset 25 --out elsewhere.onnx
  mrem export result --profile web             (result/onnx/model_q4.onnx, _q2 or _quantized, by the bits)
  mrem export result --profile web --out site/models/mine   (a whole folder for transformers.js)
"""


def build_parser() -> argparse.ArgumentParser:
    rows = [
        f"  {p.name:<10}{p.audience} (opset {p.opset}, onnxruntime ≥ {p.oldest_runtime}"
        + (f"; with 2-bit weights {INT2_OPSET} and {INT2_RUNTIME})" if p.packed and p.two_bit_types else ")")
        for p in PROFILES.values()
    ]
    parser = argparse.ArgumentParser(
        prog="mrem export",
        description="Write a quantized model as ONNX, with its learned scales and packed integers.",
        epilog="profiles:\n" + "\n".join(rows) + "\n\n" + EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", help="result folder of `mrem quantize`")
    parser.add_argument(
        "--profile",
        default="ort-cpu",
        metavar="NAME[,NAME]",
        help="which forms to write, with commas between them (default ort-cpu; see below)",
    )
    parser.add_argument(
        "--attention",
        choices=ATTENTIONS,
        default=ATTENTIONS[0],
        help="how operators of mrem-cpu multiply inside attention (default int8, as the model was trained)",
    )
    parser.add_argument("--opset", type=int, help="opset to write (default: the profile's)")
    parser.add_argument(
        "--out",
        metavar="PATH",
        help="where to write a single profile: a file, for web a folder (default: the profile's name in DIR)",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    names = list(dict.fromkeys(name.strip() for name in options.profile.split(",")))
    for name in names:
        find_profile(name)
    if options.out and len(names) > 1:
        raise UserError(
            f"--out names one file, but --profile asks for {len(names)}: {', '.join(names)}",
            "leave --out out, or export one profile at a time",
        )

    if options.attention != ATTENTIONS[0] and not any(find_profile(name).fused for name in names):
        raise UserError(
            f"--attention {options.attention} is for the operators of mrem-cpu; --profile asks for "
            f"{', '.join(names)}",
            "add --profile mrem-cpu, or leave --attention out",
        )

    from mrem_deploy.export import export_all, export_onnx
    from mrem_deploy.quant.frozen import FrozenModel

    layout = bool(options.out) and find_profile(names[0]).layout
    if layout:
        from mrem_deploy.export import transformers_js
        from mrem_deploy.preflight import check_out

        out = check_out(options.out, {}, marker=transformers_js.NOTE)
    frozen = FrozenModel.read(options.folder)
    if layout:
        result = Path(options.folder)
        card = _card(result)
        paths = [transformers_js.write_layout(frozen, result, out, options.opset, card=card)]
    elif options.out:
        paths = [export_onnx(frozen, Path(options.out), names[0], options.opset, None, options.attention)]
    else:
        paths = export_all(frozen, Path(options.folder), names, options.opset, options.attention)
    for path in paths:
        size = path.stat().st_size / MIB
        print(f"{path}: {size:.1f} MiB (full precision {frozen.full_precision_mb():.1f} MiB)")
    return 0


def _card(result: Path) -> Callable[[str, str], str] | None:
    """The model card of the folder; None where nothing was measured (a model saved from Python)."""
    from mrem_deploy.report.card import browser_card
    from mrem_deploy.result import METRICS, Metrics

    if not (result / METRICS).is_file():
        return None
    return partial(browser_card, result, Metrics.read(result))


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
