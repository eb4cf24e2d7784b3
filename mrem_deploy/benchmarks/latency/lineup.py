"""Which models are timed: our exported ones and the rivals that rivals.py makes, on a CPU or a GPU.

The headline compares all models at onnxruntime's default options. A second entry of ours has the session
options that help (`--options`); its name says so, and no verdict counts it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.progress import say
from mrem_deploy.benchmarks.latency import rivals
from mrem_deploy.benchmarks.latency.contenders import Contender
from mrem_deploy.benchmarks.latency.peers import peer_contenders
from mrem_deploy.benchmarks.latency.settings import INTEGER, PEERS, RIVALS, SessionOptions, Shape
from mrem_deploy.benchmarks.latency.subject import Subject
from mrem_deploy.deploy.providers import (
    CUDA,
    FOLD_WEIGHTS,
    TENSORRT,
    InputShapes,
    tensorrt_options,
    tensorrt_problem,
)
from mrem_deploy.quant.frozen import FrozenModel

HEADLINE_PROFILE = "ort-cpu"
RUNTIME_PROFILE = "mrem-cpu"  # opened by our own runtime; with --profiles also without it
RUNTIME = "mrem_runtime"
RUNTIME_ROWS = "ours, mrem-runtime"
NEEDED = ("onnx", "onnxruntime", "onnxscript")


def check_installed(peers: tuple[str, ...]) -> None:
    """Refuse an unknown peer or a missing package before anything is made."""
    unknown = [peer for peer in peers if peer not in PEERS]
    if unknown:
        raise UserError(f"there is no peer {unknown[0]!r}", f"choose among {', '.join(PEERS)}")
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            raise UserError(f"the package {package} is not installed", 'pip install "mrem-deploy[cpu]"')
    for peer in peers:
        for package in PEERS[peer].packages:
            if importlib.util.find_spec(package) is None:
                raise UserError(f"--peers {peer}: the package {package} is not installed", PEERS[peer].remedy)


def choose_profiles(asked: tuple[str, ...] | None, folder: Path | None) -> tuple[str, ...]:
    """Those asked for; otherwise the headline's profile and all that were exported into the result folder."""
    from mrem_deploy.export import PROFILES

    if asked is None:
        present = [p.name for p in PROFILES.values() if folder is not None and p.path_in(folder).is_file()]
        own_rows = (HEADLINE_PROFILE, RUNTIME_PROFILE)
        return (HEADLINE_PROFILE, *(name for name in present if name not in own_rows))
    for name in asked:
        if name not in PROFILES:
            raise UserError(f"there is no export profile {name!r}", f"choose among {', '.join(PROFILES)}")
    return asked


def cpu_lineup(
    subject: Subject,
    profiles: tuple[str, ...],
    tuned: SessionOptions | None,
    peers: tuple[str, ...],
    work: Path,
    chosen: tuple[str, ...] = RIVALS,
    attention: tuple[str, ...] = (INTEGER,),
) -> list[Contender]:
    """Full precision first, then its quantized rivals, then ours."""
    say("making the rivals: torch.onnx.export")
    fp32 = rivals.export_fp32(subject.model, work / "fp32.onnx")
    lineup = [Contender("ORT fp32", fp32), *_by_onnxruntime(subject, fp32, chosen, work)]
    if "openvino" in peers:
        lineup += _openvino(subject, fp32, work)
    lineup += peer_contenders(subject.model, peers, work)
    own_runtime = _has_runtime()
    for bits, frozen in subject.frozen.items():
        for profile in profiles:
            path = exported(subject, frozen, bits, profile, work)
            name = f"ours {bits}" if profile == HEADLINE_PROFILE else f"ours {bits}, profile {profile}"
            lineup.append(Contender(name, path, ours=True))
            if tuned is not None and profile == HEADLINE_PROFILE:
                lineup.append(
                    Contender(
                        f"ours {bits}, with --options",
                        path,
                        disabled_optimizers=tuned.disabled_optimizers,
                        config=tuned.config,
                        ours=True,
                    )
                )
        if own_runtime:
            beside = f"ours {bits}" if HEADLINE_PROFILE in profiles else None
            for kind in attention:
                path = exported(subject, frozen, bits, RUNTIME_PROFILE, work, kind)
                name = f"ours {bits}, mrem-runtime" + (f", {kind} attention" if kind != INTEGER else "")
                lineup.append(Contender(name, path, RUNTIME, ours=True, beside=beside))
    return lineup


def _has_runtime() -> bool:
    """Whether our operators can be loaded; says why not."""
    if importlib.util.find_spec(RUNTIME) is None:
        say(f"left out: {RUNTIME_ROWS}: the package is not installed (pip install mrem-runtime)")
        return False
    try:
        say(f"mrem-runtime computes with {runtime_target()} here")
    except OSError as error:
        say(f"left out: {RUNTIME_ROWS}: {error}")
        return False
    return True


def runtime_target() -> str | None:
    """The instruction set that our operators use here; None where they are not installed."""
    if importlib.util.find_spec(RUNTIME) is None:
        return None
    import mrem_runtime

    found: str = mrem_runtime.target()
    return found


def _by_onnxruntime(subject: Subject, fp32: Path, chosen: tuple[str, ...], work: Path) -> list[Contender]:
    """The rivals that onnxruntime's own quantizers make."""
    found = []
    for key, name, per_channel in (
        ("dynamic", "quantize_dynamic", False),
        ("dynamic-per-channel", "quantize_dynamic, per channel", True),
    ):
        if key in chosen:
            say(f"making the rivals: {name}")
            path = work / f"{key}.onnx"
            found.append(Contender(name, rivals.quantize_dynamically(fp32, path, per_channel)))
    for key, name, unsigned in (
        ("static", "quantize_static QDQ", False),
        ("static-uint8", "quantize_static QDQ, uint8", True),
    ):
        if key in chosen:
            say(f"making the rivals: {name}")
            path = work / f"{key}.onnx"
            found.append(Contender(name, rivals.quantize_statically(fp32, path, subject.tokens, unsigned)))
    return found


def _openvino(subject: Subject, fp32: Path, work: Path) -> list[Contender]:
    lineup = [Contender("OpenVINO fp32", fp32, "openvino")]
    if importlib.util.find_spec("nncf") is None:
        say("nncf is not installed: OpenVINO runs the model of quantize_static instead of its own int8")
        static = work / "static.onnx"
        if not static.is_file():
            rivals.quantize_statically(fp32, static, subject.tokens)
        return [*lineup, Contender("OpenVINO, quantize_static QDQ", static, "openvino")]
    say("making the rivals: NNCF for OpenVINO")
    path = rivals.quantize_by_nncf(fp32, work / "nncf.xml", subject.tokens)
    return [*lineup, Contender("OpenVINO int8 by NNCF", path, "openvino")]


def exported(
    subject: Subject, frozen: FrozenModel, bits: str, profile: str, work: Path, attention: str = INTEGER
) -> Path:
    """The file in the result folder, if it is this model's; else one made for this run."""
    from mrem_deploy.export import PROFILES, export_onnx

    if attention != INTEGER:
        say(f"exporting {bits} for {profile}, {attention} attention")
        return export_onnx(frozen, work / f"{bits}-{profile}-{attention}.onnx", profile, attention=attention)
    if subject.folder is not None:
        path = PROFILES[profile].path_in(subject.folder)
        if path.is_file() and _same_recipe(path, frozen):
            return path
        reason = "is from another run" if path.is_file() else "does not exist"
        say(f"{path.name} {reason}: exported for this measurement only (mrem export {subject.folder})")
    say(f"exporting {bits} for {profile}")
    return export_onnx(frozen, work / f"{bits}-{profile}.onnx", profile)


def _same_recipe(path: Path, frozen: FrozenModel) -> bool:
    import onnx

    properties = {item.key: item.value for item in onnx.load(path, load_external_data=False).metadata_props}
    return properties.get("recipe_digest") == str(frozen.notes.get("recipe_digest"))


def why_no_gpu(gpu: str | None) -> str | None:
    """What is missing for a measurement on a GPU, if anything is."""
    import onnxruntime

    available = onnxruntime.get_available_providers()
    if CUDA not in available:
        return (
            f"this onnxruntime has no CUDA provider, only {', '.join(available)}; "
            'it comes with onnxruntime-gpu (pip install "mrem-deploy[gpu]")'
        )
    return None if gpu else "no NVIDIA GPU was found"


def gpu_lineup(subject: Subject, shapes: tuple[Shape, ...], work: Path) -> list[Contender]:
    """Full precision, half precision and ours on the CUDA provider, and on TensorRT if it is available.

    `work` holds what `cpu_lineup` made. On the CUDA provider matmuls of quantized models run in float; their
    weights are dequantized when they are loaded, as their names say.
    """
    fp32, static = work / "fp32.onnx", work / "static.onnx"
    half = rivals.convert_to_fp16(fp32, work / "fp16.onnx")
    lineup = [
        Contender("CUDA fp32", fp32, provider=CUDA),
        Contender("CUDA fp16", half, provider=CUDA),
        *([_folded_on_cuda("quantize_static QDQ", static)] if static.is_file() else []),
    ]
    for bits, path in _ours("CUDA", "int8", subject, work).items():
        lineup.append(_folded_on_cuda(f"ours {bits}", path, ours=True))
    return lineup + _tensorrt_lineup(subject, shapes, work, fp32)


def _folded_on_cuda(name: str, path: Path, ours: bool = False) -> Contender:
    title = f"CUDA {name}, float matmuls"
    return Contender(title, path, provider=CUDA, needed_config=FOLD_WEIGHTS, ours=ours)


def _tensorrt_lineup(subject: Subject, shapes: tuple[Shape, ...], work: Path, fp32: Path) -> list[Contender]:
    import onnxruntime

    if TENSORRT not in onnxruntime.get_available_providers():
        say("TensorRT is left out: this onnxruntime does not have its provider")
        return []
    if problem := tensorrt_problem():
        say(f"TensorRT is left out: {problem}")
        return []
    largest = max(shape.batch for shape in shapes), max(shape.sequence for shape in shapes)

    def options(path: Path, half: bool) -> dict[str, str]:
        return tensorrt_options(InputShapes(_inputs(path), *largest), half)

    lineup = [
        Contender("TensorRT fp32", fp32, provider=TENSORRT, provider_options=options(fp32, half=False)),
        Contender("TensorRT fp16", fp32, provider=TENSORRT, provider_options=options(fp32, half=True)),
    ]
    for bits, path in _ours("TensorRT", "tensorrt", subject, work).items():
        own = options(path, half=True)
        lineup.append(
            Contender(f"TensorRT ours {bits}", path, provider=TENSORRT, provider_options=own, ours=True)
        )
    return lineup


def _inputs(path: Path) -> tuple[str, ...]:
    import onnx

    return tuple(value.name for value in onnx.load(path, load_external_data=False).graph.input)


def _ours(device: str, profile: str, subject: Subject, work: Path) -> dict[str, Path]:
    """Our files in a profile, by bits; a model that the profile cannot carry is left out, with the reason."""
    found = {}
    for bits, frozen in subject.frozen.items():
        try:
            found[bits] = exported(subject, frozen, bits, profile, work)
        except UserError as error:
            say(f"left out: ours {bits} on {device}: {error}")
    return found
