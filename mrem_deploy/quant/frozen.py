"""Fake-quant model → FrozenModel: integers and scales, no nn.Module; and back to a runnable model.

`build(freeze(model))` gives the outputs of `model` bit for bit: the frozen layers multiply the same
integers and scale them once, by the same code.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from mrem_deploy.base import digests
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.units import MIB
from mrem_deploy.kernels import pack, unpack
from mrem_deploy.kernels.reference import integers, scale_once
from mrem_deploy.models.architectures import Anatomy
from mrem_deploy.models.loading import auto_class
from mrem_deploy.models.parts import HIDDEN_SHIFTS
from mrem_deploy.numerics import Grid, dequantize, from_stored, quantize, symmetric_grid, to_stored
from mrem_deploy.quant import artifact, integrity
from mrem_deploy.quant.artifact import Artifact
from mrem_deploy.quant.hot_rows import HotRows
from mrem_deploy.quant.insert import place_products, prepare, replace_module, share_inputs
from mrem_deploy.quant.layers import ATTENTION, QuantEmbedding, QuantLinear, input_scale
from mrem_deploy.quant.quantizers import LearnedScale

SAVING = "save_pretrained"
GRIDS = {2: integrity.MIDRISE}  # by spacing: how the manifest names a grid whose codes are not consecutive


@dataclass
class FrozenWeight:
    """ŵ = codes · scale; scale is one number, or one per channel (shape (rows, 1)).

    Codes `spacing` apart are stored as consecutive integers (`numerics.to_stored`): only those fit the bits.
    """

    codes: torch.Tensor  # int8
    scale: torch.Tensor
    bits: int
    spacing: int = 1  # 2: a midrise grid
    hot: HotRows | None = None  # rows of an embedding with 8 bits; here their scale is 0

    def values(self) -> torch.Tensor:
        values = self.codes.to(self.scale.dtype) * self.scale
        return values if self.hot is None else values.index_copy_(0, self.hot.ids.long(), self.hot.values())


@dataclass
class FrozenScale:
    """A static activation quantizer."""

    scale: torch.Tensor
    grid: Grid


@dataclass
class FrozenModel:
    """Everything that a deployment needs; names are those of the Hugging Face model."""

    config: PretrainedConfig
    head: str
    weights: dict[str, FrozenWeight] = field(default_factory=dict)  # by layer
    scales: dict[str, FrozenScale] = field(default_factory=dict)  # by activation point
    full: dict[str, torch.Tensor] = field(default_factory=dict)  # what stays full precision
    shifts: dict[int, torch.Tensor] = field(default_factory=dict)  # by block; see centring.py
    notes: dict[str, Any] = field(default_factory=dict)  # JSON for the manifest: recipe digest and so on

    def build(self) -> PreTrainedModel:
        """A runnable model of the Hugging Face class, in evaluation mode, on the CPU."""
        return build(self)

    def save(
        self,
        folder: str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        beside: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Write the model into `folder`, with its tokenizer if given; `read` and `load` give it back.

        `beside` are further files of the model: those of sentence-transformers.
        """
        folder = Path(folder)
        artifact.write(Artifact(self._manifest(), self._tensors(), self.config), folder, tokenizer, beside)
        return folder

    @classmethod
    def read(cls, folder: str | Path) -> FrozenModel:
        """The frozen model in a result folder; a UserError if the folder is not one, or is damaged."""
        found = inspect(Path(folder))
        artifact.refuse_damaged(Path(folder), found.findings)
        assert found.frozen is not None, "without findings there is a model"
        return found.frozen

    @property
    def digest(self) -> str:
        """Names this model, the same before it is saved and after it is read. ONNX files carry it."""
        return artifact.result_digest(self._manifest(), digests.lines_of(self._tensors()))

    def _fill(self, manifest: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Unpack tensors that are as the manifest says; returns what is wrong with the codes."""
        found = []
        for name, entry in manifest["weights"].items():
            packed, bits, count = tensors[f"codes/{name}"], entry["bits"], math.prod(entry["shape"])
            spacing = next((spacing for spacing, known in GRIDS.items() if known == entry.get("grid")), 1)
            stored = torch.from_numpy(unpack(packed.numpy(), bits, count))
            grid = symmetric_grid(bits)
            if spacing == 1:  # elsewhere all codes of these bits are on the grid
                found += integrity.code_finding(name, stored, grid.low, grid.high)
            found += integrity.padding_finding(name, packed, bits, count)
            codes = from_stored(stored, spacing).reshape(entry["shape"])
            hot = HotRows.read(tensors, name) if entry.get("hot_rows") else None
            self.weights[name] = FrozenWeight(codes, tensors[f"scale/{name}"], bits, spacing, hot)
        for name, entry in manifest["steps"].items():
            self.scales[name] = FrozenScale(tensors[f"step/{name}"], Grid(**entry))
        self.full = _under("full/", tensors)
        shifts = {block: value for block, value in _under("shift/", tensors).items() if block.isdecimal()}
        self.shifts = {int(block): value for block, value in shifts.items()}
        return found

    def _tensors(self) -> dict[str, torch.Tensor]:
        """By the names of the artifact, with the codes packed."""
        tensors: dict[str, torch.Tensor] = {}
        for name, weight in self.weights.items():
            stored = to_stored(weight.codes.numpy().reshape(-1), weight.spacing)
            tensors[f"codes/{name}"] = torch.from_numpy(pack(stored, weight.bits))
            tensors[f"scale/{name}"] = weight.scale
            tensors |= weight.hot.tensors(name) if weight.hot else {}
        for name, activation in self.scales.items():
            tensors[f"step/{name}"] = activation.scale
        tensors |= {f"shift/{block}": value for block, value in self.shifts.items()}
        return tensors | {f"full/{name}": value for name, value in self.full.items()}

    def _manifest(self) -> dict[str, Any]:
        weights = {
            name: {"bits": weight.bits, "shape": list(weight.codes.shape)}
            | ({"grid": GRIDS[weight.spacing]} if weight.spacing in GRIDS else {})
            | ({"hot_rows": len(weight.hot.ids)} if weight.hot else {})
            for name, weight in self.weights.items()
        }
        grids = {name: _grid_entry(activation.grid) for name, activation in self.scales.items()}
        return {"head": self.head, "weights": weights, "steps": grids, "notes": self.notes}

    def formula_mb(self) -> float:
        """Σ quantized elements · bits/8 + 4 bytes for the rest: the paper's way of counting. Hot rows count
        twice, with few bits and with 8, as they are stored."""
        packed = sum(weight.codes.numel() * weight.bits / 8 for weight in self.weights.values())
        packed += sum(weight.hot.codes.numel() for weight in self.weights.values() if weight.hot)
        return (packed + 4 * sum(value.numel() for value in self.full.values())) / MIB

    @property
    def hot_rows(self) -> int:
        """Rows of the word embedding that have 8 bits instead of its few."""
        return sum(len(weight.hot.ids) for weight in self.weights.values() if weight.hot)

    def full_precision_mb(self) -> float:
        """The same model with every parameter in 4 bytes."""
        count = sum(weight.codes.numel() for weight in self.weights.values())
        return 4 * (count + sum(value.numel() for value in self.full.values())) / MIB


@dataclass(frozen=True)
class Inspection:
    """What reading a result folder showed; `findings` is empty if all is well."""

    frozen: FrozenModel | None  # None where the findings leave nothing to build
    findings: tuple[str, ...]
    has_digests: bool
    tensors: int


def inspect(folder: Path) -> Inspection:
    """Read a result folder and check all of it: digests, types, shapes and ranges, and the model's layers.

    A UserError if it is not one, or if a file cannot be read at all.
    """
    stored = artifact.read(folder)
    manifest, tensors, config = stored.artifact.manifest, stored.artifact.tensors, stored.artifact.config
    findings, frozen = list(stored.findings), None
    wrong = integrity.manifest_findings(manifest) or integrity.tensor_findings(manifest, tensors)
    if not wrong:
        frozen = FrozenModel(config, manifest["head"], notes=manifest["notes"])
        wrong = frozen._fill(manifest, tensors) + integrity.value_findings(manifest, tensors)
        wrong += integrity.model_findings(config, manifest, tensors)
    findings += [problem for problem in wrong if problem not in findings]
    return Inspection(frozen, tuple(findings), stored.has_digests, len(tensors))


def _under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _grid_entry(grid: Grid) -> dict[str, int]:
    """Of an activation, whose integers are always consecutive."""
    assert grid.spacing == 1
    return {name: value for name, value in asdict(grid).items() if name != "spacing"}


@torch.no_grad()
def freeze(model: PreTrainedModel, head: str) -> FrozenModel:
    """Read the integers out of a fake-quant model. The model is not changed."""
    frozen = FrozenModel(config=model.config, head=head)
    for name, part in model.named_modules():
        if isinstance(part, QuantLinear | QuantEmbedding) and hasattr(
            part.weight_quantizer, "codes_and_scale"
        ):
            codes, scale = part.weight_quantizer.codes_and_scale(part.weight)
            grid = part.weight_quantizer.grid
            weight = FrozenWeight(codes.to("cpu", torch.int8), scale.cpu().clone(), grid.bits, grid.spacing)
            hot = part.hot_quantizer if isinstance(part, QuantEmbedding) else None
            frozen.weights[name] = weight if hot is None else with_hot_rows(weight, hot.freeze(part.weight))
        if isinstance(part, LearnedScale) and not name.endswith("weight_quantizer"):
            frozen.scales[name] = FrozenScale(part.scale.detach().cpu().clone(), part.grid)
    packed = {f"{name}.weight" for name in frozen.weights}
    for name, value in model.state_dict().items():
        if name not in packed and "_quantizer." not in name and name.rpartition(".")[0] not in frozen.scales:
            frozen.full[name] = value.detach().cpu().clone()
    frozen.shifts = {block: z.cpu().clone() for block, z in getattr(model, HIDDEN_SHIFTS, {}).items()}
    return frozen


def with_hot_rows(weight: FrozenWeight, hot: HotRows) -> FrozenWeight:
    """The weight with these hot rows, whose codes of few bits now count for nothing: files hold zeros."""
    ids, nothing = hot.ids.long(), from_stored(0, weight.spacing)
    codes = weight.codes.index_fill(0, ids, nothing)
    return replace(weight, codes=codes, scale=weight.scale.index_fill(0, ids, 0), hot=hot)


class FixedScale(nn.Module):
    """An activation quantizer that no longer learns."""

    def __init__(self, frozen: FrozenScale) -> None:
        super().__init__()
        self.grid = frozen.grid
        self.register_buffer("scale", frozen.scale)
        self.scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dequantize(quantize(x, self.scale, self.grid), self.scale, self.grid)


class FrozenLinear(nn.Module):
    """A linear that multiplies integers; if weight or input stays in full precision, real numbers.

    If both operands are integers, `weight` holds them (as floating-point numbers) next to `scale`; else
    it holds the weight's values.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        bias: nn.Parameter | None,
        input_quantizer: nn.Module,
        shares: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = bias
        self.input_quantizer = input_quantizer
        self._shares = (shares,)
        self.weight: torch.Tensor
        self.scale: torch.Tensor | None

    def forward(self, x: torch.Tensor, shares: nn.Module | None = None) -> torch.Tensor:
        scale = input_scale(self.input_quantizer, shares or self._shares[0])
        if self.scale is None or scale is None:
            return F.linear(self.input_quantizer(x), self.weight, self.bias)
        return scale_once(integers(x, *scale) @ self.weight.T, scale[0], self.scale, self.bias)


def frozen_linear(
    frozen: FrozenModel, name: str, bias: Any, own: nn.Module, shared: nn.Module | None = None
) -> FrozenLinear:
    """One linear of the model; `own` quantizes its input, or `shared` has done so before."""
    packed = frozen.weights.get(name)
    if packed is None:
        return FrozenLinear(frozen.full[f"{name}.weight"], None, bias, own)
    if input_scale(own, shared) is None:
        return FrozenLinear(packed.values(), None, bias, own)
    return FrozenLinear(packed.codes.to(packed.scale.dtype), packed.scale, bias, own, shared)


def shell(frozen: FrozenModel, attention: str = ATTENTION) -> tuple[PreTrainedModel, Anatomy]:
    """The Hugging Face model with all that stays full precision loaded; other weights are still random."""
    # A copy: the attention function is chosen in the config, and other models may be built from the same one.
    config = copy.deepcopy(frozen.config)
    auto = auto_class(frozen.head, config.model_type)
    model = auto.from_config(config, trust_remote_code=False).eval()
    return model, fill_shell(frozen, model, attention)


def fill_shell(frozen: FrozenModel, model: PreTrainedModel, attention: str = ATTENTION) -> Anatomy:
    """Load all that stays full precision into a model of the Hugging Face class, in place."""
    if getattr(model, "pooler", None) is not None and "pooler.dense.bias" not in frozen.full:
        model.pooler = None  # a bare encoder whose checkpoint had none
    found = prepare(model, attention)
    setattr(model, HIDDEN_SHIFTS, dict(frozen.shifts))
    dtype = next(iter(frozen.full.values())).dtype
    model.to(dtype)
    missing, unexpected = model.load_state_dict(frozen.full, strict=False)
    lacking = [name for name in missing if name.removesuffix(".weight") not in frozen.weights]
    if lacking or unexpected:
        raise ValueError(f"tensors do not fit the model: missing {lacking}, unexpected {unexpected}")
    return found


def build(frozen: FrozenModel) -> PreTrainedModel:
    """A runnable model of the Hugging Face class, in evaluation mode, on the CPU."""
    model, found = shell(frozen)
    return fill_layers(frozen, model, found)


def fill_layers(frozen: FrozenModel, model: PreTrainedModel, found: Anatomy) -> PreTrainedModel:
    """Put the quantized layers into a model that `fill_shell` has filled, in place."""
    points = {name: FixedScale(scale) for name, scale in frozen.scales.items()}
    for name in found.linears:
        own = points.get(f"{name}.input_quantizer", nn.Identity())
        shared = points.get(f"{found.shared_inputs.get(name)}.input_quantizer")
        replace_module(model, name, frozen_linear(frozen, name, model.get_submodule(name).bias, own, shared))
    if found.word_embedding in frozen.weights:
        embedding = model.get_submodule(found.word_embedding)
        embedding.weight = nn.Parameter(frozen.weights[found.word_embedding].values(), requires_grad=False)
    share_inputs(model, found, points)
    for name in found.attentions:
        place_products(found, name, model.get_submodule(name), points)
    setattr(model, SAVING, refuse_saving)
    return model.requires_grad_(False)


def refuse_saving(*_: Any, **__: Any) -> None:
    """Instead of save_pretrained, which would write the layers' integers as if they were weights."""
    raise UserError(
        "save_pretrained cannot write a quantized model.",
        "Copy the result folder, or use FrozenModel.read(folder).save(new_folder, tokenizer).",
    )


def load(folder: str | Path) -> PreTrainedModel:
    """The quantized model of a result folder, in torch: call it like the original."""
    return FrozenModel.read(folder).build()
