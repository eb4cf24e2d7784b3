"""The export profiles: one row for each kind of reader.

How a profile writes integers is data (types, zero points, forms of a few subgraphs). `lower.py` reads it and
has no branch on a profile's name.

8-bit codes are stored in UINT8 with a zero point wherever the reader allows one. On processors without VNNI
onnxruntime multiplies INT8 matrices with 16-bit sums that saturate: with codes over the full range hardly any
result is right. With UINT8 matrices it is exact and as fast. Codes of 4 bits and less never saturate.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from mrem_deploy.base.errors import UserError

INT2_OPSET = 25  # the first opset with INT2
INT2_RUNTIME = "1.24.1"  # the first onnxruntime that reads it (there is no 1.24.0 on PyPI)
INT4_OPSET = 21  # the first opset with INT4 and UINT4
RUNTIME = "mrem.runtime"  # domain of the CPU runtime (kernels/runtime)
ATTENTIONS = ("int8", "float")  # how operators of the CPU runtime multiply inside attention
# The IR version that belongs to an opset; a reader refuses a newer one than it knows.
IR_VERSIONS = {18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11, 24: 12, 25: 13}


@dataclass(frozen=True)
class Profile:
    """How integers are written, for one kind of reader."""

    name: str
    file: str  # its name in a result folder
    audience: str
    opset: int  # raised if the type of the weights needs more
    oldest_runtime: str  # the oldest onnxruntime that loads it at `opset`
    packed: bool = True  # weights below 8 bits in INT4/INT2, else in INT8
    two_bit_types: bool = True  # 2-bit weights in INT2, else in INT4
    cast_weights: bool = False  # Cast(INT8) after a packed initializer: folds at load, runs as integers
    contrib: bool = False  # use onnxruntime's own operators where they are faster
    merge_qkv: bool = False
    lookup_codes: bool = False  # gather integer rows and scale them, instead of dequantizing the table
    zero_points: bool = True  # 8-bit codes in UINT8; False: in INT8 with zero point 0 only
    fused: bool = False  # blocks as operators of the CPU runtime, packed weights in UINT8
    bit_fields: bool = False  # weights below 8 bits in plain bytes, unpacked by shifts and masks
    smaller: tuple[tuple[int, str], ...] = ()  # (bits, file): other names if no weight has more bits
    layout: bool = False  # --out names a folder, which also gets the configuration and the tokenizer

    @property
    def files(self) -> tuple[str, ...]:
        """Every name that its file may have."""
        return (*(file for _, file in self.smaller), self.file)

    def file_for(self, bits: Collection[int]) -> str:
        """The name of its file for a model with weights of these bits."""
        return next((file for most, file in self.smaller if bits and max(bits) <= most), self.file)

    def path_in(self, folder: Path) -> Path:
        """Its file in a folder; where there is none, what the usual one would be called."""
        found = [folder / file for file in self.files if (folder / file).is_file()]
        return found[0] if found else folder / self.file


INT8 = Profile(
    name="int8",
    file="model_int8.onnx",
    audience="OpenVINO, old runtimes and the CUDA provider (float matmuls): INT8 weights, an old opset",
    opset=18,
    oldest_runtime="1.14.0",
    packed=False,
    merge_qkv=True,
    lookup_codes=True,
)
ORT_CPU = Profile(
    name="ort-cpu",
    file="model.onnx",
    audience="onnxruntime on CPUs: integer matmuls, packed file",
    opset=21,
    oldest_runtime="1.23.0",  # older ones cannot cast INT4 to INT8
    cast_weights=True,
    contrib=True,
    merge_qkv=True,
    lookup_codes=True,
)
PROFILES = {
    profile.name: profile
    for profile in (
        ORT_CPU,
        replace(
            ORT_CPU,
            name="mrem-cpu",
            file="model_mrem.onnx",
            audience="the runtime mrem_runtime in onnxruntime on CPUs, the fastest; without it as ort-cpu",
            two_bit_types=False,
            fused=True,
        ),
        Profile(
            name="qdq",
            file="model_qdq.onnx",
            audience="other tools: standard operators only, the textbook form with packed weights",
            opset=21,
            oldest_runtime="1.20.0",
            two_bit_types=False,
        ),
        INT8,
        replace(
            INT8,
            name="tensorrt",
            file="model_tensorrt.onnx",
            audience="TensorRT: as int8, with zero points of 0 only",
            zero_points=False,
        ),
        replace(
            ORT_CPU,
            name="web",
            file="onnx/model_quantized.onnx",
            smaller=((2, "onnx/model_q2.onnx"), (4, "onnx/model_q4.onnx")),
            oldest_runtime="1.20.0",
            two_bit_types=False,
            bit_fields=True,  # onnxruntime-web's build for WebGPU has no Cast from INT4 and INT2
            layout=True,
            audience="browsers (onnxruntime-web, transformers.js): integer matmuls, weights packed in bytes",
        ),
    )
}


def find_profile(name: str) -> Profile:
    if name not in PROFILES:
        raise UserError(f"there is no export profile {name!r}", f"choose among {', '.join(PROFILES)}")
    return PROFILES[name]


def name_in_result(path: Path) -> str:
    """What a result folder calls the file at `path`: with the folder it is in, if its profile has one."""
    names = [file for profile in PROFILES.values() for file in profile.files]
    return next((name for name in names if f"/{path.as_posix()}".endswith(f"/{name}")), path.name)


def choose_opset(profile: Profile, bits: set[int], asked: int | None) -> int:
    """The opset to write: the given one, or the lowest at which every weight is packed."""
    if asked is None:
        needs_int2 = profile.packed and profile.two_bit_types and 2 in bits
        return max(profile.opset, INT2_OPSET) if needs_int2 else profile.opset
    least = profile.opset
    if asked not in IR_VERSIONS or asked < least:
        choices = [str(opset) for opset in IR_VERSIONS if opset >= least]
        raise UserError(
            f"profile {profile.name} cannot be written at opset {asked}", f"choose among {', '.join(choices)}"
        )
    return asked
