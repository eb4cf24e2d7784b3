"""On what an ONNX model runs: onnxruntime's execution providers, in order, with the options that each needs.

* CUDA has no integer matmul for QuantizeLinear and DequantizeLinear: it multiplies floats. So weights are
  dequantized once, when the model is loaded, instead of in every run, and TF32 is off, which would round the
  codes' products.
* TensorRT compiles the graph for a range of shapes, which must be given; its engines and timings are cached.
  What it cannot compile goes to CUDA, not to the CPU.

Note: where a provider's libraries are missing, onnxruntime prints a line and computes on the CPU. `started`
makes that an error. This module imports neither torch nor onnxruntime: the latency benchmark's processes use
it, and their memory is measured.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mrem_deploy.base.errors import UserError

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
NAMES = {"cpu": CPU, "cuda": CUDA, "tensorrt": TENSORRT, "openvino": "OpenVINOExecutionProvider"}
BUILDS = "onnxruntime-gpu, onnxruntime-openvino"
MISSING_LIBRARIES = {
    CUDA: "install the CUDA and cuDNN that it is built for: pip install 'onnxruntime-gpu[cuda,cudnn]'",
    TENSORRT: "install CUDA, cuDNN and TensorRT 10: pip install 'onnxruntime-gpu[cuda,cudnn]' tensorrt",
}
FOLD_WEIGHTS = {"session.disable_quant_qdq": "1"}  # else constant folding leaves DequantizeLinear alone
EXACT = {"use_tf32": "0"}
NVINFER = "libnvinfer.so.10"  # what onnxruntime's TensorRT provider is linked with
USUAL_TOKENS = 128  # TensorRT tunes an engine for one shape of its range


@dataclass(frozen=True)
class InputShapes:
    """The inputs of a model and the largest batch and sequence that it will get."""

    inputs: tuple[str, ...]
    batch: int
    tokens: int

    def spelled(self, batch: int, tokens: int) -> str:
        return ",".join(f"{name}:{batch}x{tokens}" for name in self.inputs)


@dataclass(frozen=True)
class Placement:
    """Providers in the order in which they are tried, each with its options; entries of the session."""

    providers: tuple[tuple[str, Mapping[str, str]], ...] = ((CPU, {}),)
    config: Mapping[str, str] = field(default_factory=dict)
    library: str | None = None  # operators to register: those of the CPU runtime

    @property
    def first(self) -> str:
        return self.providers[0][0]

    @property
    def compiles_graph(self) -> bool:
        """Whether the optimized graph holds engines, which cannot be written to a file."""
        return self.first == TENSORRT

    def for_session(self) -> list[tuple[str, dict[str, str]]]:
        return [(name, dict(options)) for name, options in self.providers]


ON_CPU = Placement()


def is_tensorrt(text: str) -> bool:
    return NAMES.get(text.lower(), text) == TENSORRT


def place(text: str, available: Sequence[str], shapes: InputShapes | None = None) -> Placement:
    """'cuda' → how a session runs there; `available` are the providers of the installed onnxruntime."""
    name = NAMES.get(text.lower(), text)
    if name not in available:
        raise UserError(
            f"--provider {text}: this onnxruntime has no {name}; it has {', '.join(available)}",
            f"choose among {', '.join(NAMES)}, or install the onnxruntime build that has it ({BUILDS})",
        )
    if name == CPU:
        return ON_CPU
    if name == CUDA:
        return Placement(((CUDA, EXACT), (CPU, {})), FOLD_WEIGHTS)
    if name == TENSORRT:
        if problem := tensorrt_problem():
            raise UserError(f"--provider {text}: {problem}", MISSING_LIBRARIES[TENSORRT])
        assert shapes is not None, "TensorRT needs to know the shapes"
        return Placement(((TENSORRT, tensorrt_options(shapes)), (CUDA, EXACT), (CPU, {})))
    return Placement(((name, {}), (CPU, {})))


def tensorrt_options(shapes: InputShapes, half: bool = False) -> dict[str, str]:
    """An engine for every batch and sequence up to the largest, kept in the cache folder; with `half`,
    layers that are not quantized may run in fp16."""
    from mrem_deploy.base.files import cache_folder

    folder = cache_folder() / "tensorrt"
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "trt_int8_enable": "1",
        "trt_fp16_enable": "1" if half else "0",
        "trt_profile_min_shapes": shapes.spelled(1, 1),
        "trt_profile_opt_shapes": shapes.spelled(shapes.batch, min(USUAL_TOKENS, shapes.tokens)),
        "trt_profile_max_shapes": shapes.spelled(shapes.batch, shapes.tokens),
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(folder),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(folder),
    }


def tensorrt_problem() -> str:
    """Why TensorRT 10 cannot be loaded; "" if it is loaded now, also from its Python package."""
    if sys.platform == "win32":
        return ""
    places = [NVINFER]
    package = find_spec("tensorrt_libs")
    if package is not None:
        places += [str(Path(folder) / NVINFER) for folder in package.submodule_search_locations or ()]
    for place in places:
        try:
            ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return ""
    return f"there is no {NVINFER}, the library of TensorRT 10"


def behind(provider: str) -> list[str]:
    """What takes the nodes that a provider leaves over."""
    return [CUDA, CPU] if provider == TENSORRT else [] if provider == CPU else [CPU]


def preload(onnxruntime: Any, provider: str) -> None:
    """Load the CUDA libraries of Python packages, where onnxruntime's own search would not find them."""
    if provider in (CUDA, TENSORRT) and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()


def started(session: Any, asked: str) -> None:
    """Refuse a session that silently runs elsewhere."""
    found = session.get_providers()[0]
    if found != asked:
        raise UserError(
            f"{asked} did not start; onnxruntime fell back to {found}",
            MISSING_LIBRARIES.get(asked, f"install what it needs, or use {CPU}"),
        )


def note_on(providers: Mapping[str, int]) -> str | None:
    """What a model is on these providers (with their counts of nodes), if not what its file suggests."""
    if TENSORRT in providers:
        return "TensorRT compiled the graph; which of its matmuls run on integers cannot be seen from outside"
    if CUDA in providers:
        return (
            "the CUDA provider multiplies floats, with weights dequantized to float32 when the model loads: "
            "this file is small, but not faster than full precision"
        )
    return None
