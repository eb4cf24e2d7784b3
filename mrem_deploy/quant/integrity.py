"""Whether the content of a result folder can be right: types, shapes, ranges, and the layers of its model.

Digests notice what changed after writing. These checks notice the rest, also in folders without digests:
every function returns a sentence for each thing that is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from mrem_deploy.base.errors import UserError
from mrem_deploy.kernels.packing import PACKABLE_BITS, packed_size
from mrem_deploy.models.architectures import anatomy
from mrem_deploy.models.loading import HEADS, auto_class
from mrem_deploy.numerics import ACTIVATION_BITS, activation_grid
from mrem_deploy.quant import hot_rows
from mrem_deploy.quant.insert import activation_points
from mrem_deploy.quant.spec import QuantSpec

MIDRISE = "midrise"
GRID_KEYS = {"bits", "low", "high", "zero_point"}
WEIGHT_KEYS = {"bits", "shape", "grid", "hot_rows"}
LARGEST_SIZE = 2**31  # of a dimension


def manifest_findings(manifest: Mapping[str, Any]) -> list[str]:
    """Wrong entries of the manifest. Only where there are none can the tensors be looked at."""
    found = []
    if manifest.get("head") not in tuple(HEADS):
        found.append(f"the head {manifest.get('head')!r} is not one of {', '.join(HEADS)}")
    for key in ("weights", "steps", "notes"):
        if not isinstance(manifest.get(key), dict):
            found.append(f"the manifest has no table of {key}")
    if found:
        return found
    for name, entry in manifest["weights"].items():
        found += [f"the weight {name} {problem}" for problem in _weight_problems(entry)]
    for name, entry in manifest["steps"].items():
        found += [f"the activation {name} {problem}" for problem in _grid_problems(entry)]
    return found


def _weight_problems(entry: Any) -> list[str]:
    if not isinstance(entry, dict) or not {"bits", "shape"} <= entry.keys() <= WEIGHT_KEYS:
        return ["has no entry of bits and shape"]
    bits, shape, grid, hot = (entry.get(key) for key in ("bits", "shape", "grid", "hot_rows"))
    found = []
    if not _is_whole(bits) or bits not in PACKABLE_BITS:
        found.append(f"has {bits!r} bits; {', '.join(map(str, PACKABLE_BITS))} are known")
    sizes = shape if isinstance(shape, list) else []
    if len(sizes) != 2 or not all(_is_whole(size) and 0 < size < LARGEST_SIZE for size in sizes):
        found.append(f"has the shape {shape!r}; two whole numbers are expected")
    elif hot is not None and not (_is_whole(hot) and 0 < hot <= sizes[0]):
        found.append(f"has {hot!r} hot rows; a whole number from 1 to {sizes[0]} is expected")
    if grid not in (None, MIDRISE):
        found.append(f"is on a grid {grid!r} that this release does not know")
    elif grid == MIDRISE and bits != 2:
        found.append(f"is on a midrise grid of {bits!r} bits; only 2 are possible")
    return found


def _grid_problems(entry: Any) -> list[str]:
    if not isinstance(entry, dict) or entry.keys() != GRID_KEYS or not all(map(_is_whole, entry.values())):
        return [f"has no grid of whole numbers {', '.join(sorted(GRID_KEYS))}"]
    bits, low, high, zero = (entry[key] for key in ("bits", "low", "high", "zero_point"))
    if bits not in ACTIVATION_BITS[:-1]:
        return [f"has {bits} bits; {', '.join(map(str, ACTIVATION_BITS[:-1]))} are known"]
    signed, top = activation_grid(bits), 2**bits - 1
    if (low, high) not in ((signed.low, signed.high), (0, top)):
        return [f"has codes {low}..{high}; {signed.low}..{signed.high} or 0..{top} are expected"]
    if low == 0 and not 0 <= zero <= top:
        return [f"has the zero point {zero}; it must be in 0..{top}"]
    if low < 0 and zero != 0:
        return [f"has the zero point {zero}; with codes {low}..{high} it must be 0"]
    return []


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# -- tensors -----------------------------------------------------------------------------------------------


def tensor_findings(manifest: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Tensors that are missing, too many, or of another type or shape than the manifest says."""
    expected = _expected(manifest)
    found = [f"the tensor {name} is missing" for name in expected if name not in tensors]
    for name, tensor in tensors.items():
        if name in expected:
            found += [f"the tensor {name} {problem}" for problem in _kind_problems(tensor, *expected[name])]
        elif not name.startswith(("full/", "shift/")):
            found.append(f"the tensor {name} belongs to nothing in the manifest")
        elif tensor.dtype not in FLOATS:
            found.append(f"the tensor {name} has the type {_short(tensor.dtype)}; {FLOAT} is expected")
    kinds = sorted({_short(tensor.dtype) for tensor in tensors.values() if tensor.is_floating_point()})
    if len(kinds) > 1 and not found:
        found.append(f"the tensors have several types: {', '.join(kinds)}")
    return found


FLOAT = "float32 or float64"
FLOATS = (torch.float32, torch.float64)
Kind = tuple[torch.dtype | str, tuple[tuple[int, ...], ...]]  # type, and the shapes that are possible


def _expected(manifest: Mapping[str, Any]) -> dict[str, Kind]:
    """Every tensor that the manifest speaks of."""
    expected: dict[str, Kind] = {}
    for name, entry in manifest["weights"].items():
        rows, columns = entry["shape"]
        expected[f"codes/{name}"] = (torch.uint8, ((packed_size(rows * columns, entry["bits"]),),))
        hot = entry.get("hot_rows")
        expected[f"scale/{name}"] = (FLOAT, ((rows, 1),) if hot else ((), (rows, 1)))
        if hot:
            kinds: tuple[Kind, ...] = (
                (torch.int32, ((hot,),)),
                (torch.int8, ((hot, columns),)),
                (FLOAT, ((hot, 1),)),
            )
            expected |= dict(zip(hot_rows.tensor_names(name), kinds, strict=True))
    return expected | {f"step/{name}": (FLOAT, ((),)) for name in manifest["steps"]}


def _kind_problems(tensor: torch.Tensor, dtype: torch.dtype | str, shapes: Any) -> list[str]:
    fits = tensor.dtype in FLOATS if dtype == FLOAT else tensor.dtype == dtype
    if not fits:
        return [f"has the type {_short(tensor.dtype)}; {_short(dtype)} is expected"]
    if tuple(tensor.shape) not in shapes:
        return [f"has the shape {tuple(tensor.shape)}; {' or '.join(map(str, shapes))} is expected"]
    return []


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def value_findings(manifest: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Numbers outside their range, in tensors whose types and shapes are right; codes are not looked at."""
    found = []
    for name, tensor in tensors.items():
        kind, _, layer = name.partition("/")
        if kind in ("full", "shift"):
            found += _unless_finite(name, tensor)
        hot = kind == "scale" and manifest["weights"][layer].get("hot_rows")
        if kind in ("scale", "step") and not hot:
            found += _unless_positive(name, tensor)
    for layer, entry in manifest["weights"].items():
        if entry.get("hot_rows"):
            found += _hot_problems(layer, entry, tensors)
    return found


def _unless_finite(name: str, tensor: torch.Tensor) -> list[str]:
    bad = int((~torch.isfinite(tensor)).sum())
    return [f"the tensor {name} has {bad} NaN or Inf among {tensor.numel()} numbers"] if bad else []


def _unless_positive(name: str, scales: torch.Tensor) -> list[str]:
    bad = scales[~(torch.isfinite(scales) & (scales > 0))].reshape(-1)
    if not len(bad):
        return []
    which = f"{len(bad)} of {scales.numel()} scales, the first is {float(bad[0])!r}"
    return [f"the tensor {name} has a scale that is not finite and above 0: {which}"]


def _hot_problems(layer: str, entry: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Hot rows have a scale of 0 in the table itself, all others one above 0."""
    names = hot_rows.tensor_names(layer)
    ids, codes = tensors[names[0]].long(), tensors[names[1]]
    rows = entry["shape"][0]
    found = _unless_positive(names[2], tensors[names[2]])
    if bool((ids < 0).any()) or bool((ids >= rows).any()) or bool((ids.diff() <= 0).any()):
        return [*found, f"the tensor {names[0]} must hold rising rows from 0 to {rows - 1}"]
    if len(codes) and int(codes.min()) < hot_rows.GRID.low:
        found.append(f"the tensor {names[1]} has codes outside {hot_rows.GRID.low}..{hot_rows.GRID.high}")
    scales = tensors[f"scale/{layer}"].reshape(-1)
    if bool((scales[ids] != 0).any()):
        found.append(f"the tensor scale/{layer} must be 0 in its hot rows")
    others = torch.ones(rows, dtype=torch.bool).index_fill_(0, ids, False)
    return found + _unless_positive(f"scale/{layer}", scales[others])


def code_finding(name: str, codes: torch.Tensor, low: int, high: int) -> list[str]:
    """Codes of a weight outside their grid."""
    if not codes.numel() or (int(codes.min()) >= low and int(codes.max()) <= high):
        return []
    count = int(((codes < low) | (codes > high)).sum())
    return [f"the tensor codes/{name} has {count} codes outside {low}..{high}"]


def padding_finding(name: str, packed: torch.Tensor, bits: int, count: int) -> list[str]:
    """The last byte of packed codes may have bits that belong to no code; they are 0."""
    used = count * bits % 8
    if used and int(packed[-1]) >> used:
        return [f"the tensor codes/{name} has bits after its last code"]
    return []


# -- the model ---------------------------------------------------------------------------------------------


def model_findings(
    config: PretrainedConfig, manifest: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> list[str]:
    """Whether the tensors are those of the model that config.json describes. It is built without memory."""
    try:
        model = without_memory(config, manifest["head"])
    except UserError as error:
        return [error.problem]
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if "full/pooler.dense.bias" not in tensors:  # a bare encoder whose checkpoint had none
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith("pooler.")}
    parts = anatomy(model)
    for name in parts.tied:
        shapes.pop(f"{name}.weight")
    found = []
    for name, entry in manifest["weights"].items():
        if name not in (*parts.linears, parts.word_embedding):
            found.append(f"the weight {name} belongs to no layer of the model")
        elif shapes.pop(f"{name}.weight", None) != tuple(entry["shape"]):
            found.append(f"the weight {name} has not the shape that config.json describes")
    points = activation_points(parts, QuantSpec())
    found += [
        f"the activation {name} belongs to no layer of the model"
        for name in manifest["steps"]
        if name not in points
    ]
    full = {name.removeprefix("full/"): t for name, t in tensors.items() if name.startswith("full/")}
    found += [f"the tensor full/{name} is missing" for name in shapes if name not in full]
    for name, tensor in full.items():
        if name not in shapes:
            found.append(f"the tensor full/{name} belongs to no layer of the model")
        elif tuple(tensor.shape) != shapes[name]:
            found.append(f"the tensor full/{name} has the shape {tuple(tensor.shape)}, not {shapes[name]}")
    return found + _shift_findings(len(parts.blocks), config, tensors)


def without_memory(config: PretrainedConfig, head: str) -> PreTrainedModel:
    """The full-precision model that config.json describes, with shapes and no numbers."""
    try:
        with torch.device("meta"):
            auto = auto_class(head, config.model_type)
            return auto.from_config(copy.deepcopy(config), trust_remote_code=False)
    except Exception as error:  # what is in config.json decides what transformers raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"config.json describes no model that can be built: {reason}") from error


def _shift_findings(blocks: int, config: PretrainedConfig, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    found = []
    for name, tensor in tensors.items():
        kind, _, block = name.partition("/")
        if kind != "shift":
            continue
        if not block.isdecimal() or str(int(block)) != block or int(block) >= blocks:
            found.append(f"the tensor {name} belongs to no block of the model")
        elif tuple(tensor.shape) != (config.hidden_size,):
            found.append(f"the tensor {name} must hold {config.hidden_size} numbers")
    return found
