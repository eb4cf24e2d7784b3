"""Initial scales: observe the full-precision model on a few batches, then search each scale.

One pass over the calibration batches, with hooks at every point that will get an activation quantizer;
padding is left out. The scale (and, where asymmetric, the integer zero point, which is fixed from then
on) is the one of least squared error on the values seen. They are static, as export needs them.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mrem_deploy.base import interrupt
from mrem_deploy.models.architectures import Anatomy
from mrem_deploy.numerics import (
    Grid,
    activation_grid,
    asymmetric_grid,
    dequantize,
    quantize,
)
from mrem_deploy.quant.insert import activation_points
from mrem_deploy.quant.quantizers import LearnedScale, search_scale
from mrem_deploy.quant.spec import QuantSpec

VALUES_PER_BATCH = 1 << 15  # a random subset of each tensor is enough for a one-dimensional search


def _valid(x: torch.Tensor, mask: torch.Tensor, sequence_dim: int | None) -> torch.Tensor:
    """Elements at real tokens; `sequence_dim` is the dimension of the tokens, if any. Pooled tensors pass."""
    if x.dim() < 3 or sequence_dim is None:
        return x
    x = x.movedim(sequence_dim, 1)
    return x[mask] if x.shape[:2] == mask.shape else x


class _Watcher:
    """Collects a fixed number of values per batch at one point, the same ones for the same seed."""

    def __init__(self, name: str) -> None:
        self.values: list[torch.Tensor] = []
        self.smallest, self.largest = float("inf"), float("-inf")
        self.generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def see(self, x: torch.Tensor) -> None:
        flat = x.detach().reshape(-1)
        self.smallest = min(self.smallest, float(flat.min()))
        self.largest = max(self.largest, float(flat.max()))
        if flat.numel() > VALUES_PER_BATCH:
            picks = torch.randint(flat.numel(), (VALUES_PER_BATCH,), generator=self.generator)
            flat = flat[picks.to(flat.device)]
        self.values.append(flat.clone())

    def sample(self) -> torch.Tensor:
        """The values seen and the two extremes, which a random subset would miss."""
        seen = torch.cat(self.values)
        return torch.cat([seen, seen.new_tensor([self.smallest, self.largest])])


def observe(
    model: PreTrainedModel,
    found: Anatomy,
    spec: QuantSpec,
    batches: Iterable[dict[str, torch.Tensor]],
    names: Collection[str] | None = None,
) -> dict[str, _Watcher]:
    """Run the prepared full-precision model and record what each activation quantizer would see.

    With `names` only those are observed.
    """
    points = activation_points(found, spec)
    watchers = {name: _Watcher(name) for name in points if names is None or name in names}
    mask = torch.empty(0, dtype=torch.bool)
    handles = []

    def watch(module: nn.Module, watched: list[tuple[str, int, int | None]]) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for name, argument, sequence_dim in watched:
                x = args[argument] if args else kwargs["hidden_states"]
                if name in watchers:
                    watchers[name].see(_valid(x, mask, sequence_dim))

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    for owner in dict.fromkeys(found.shared_inputs.get(name, name) for name in found.linears):
        if f"{owner}.input_quantizer" in points:
            watch(model.get_submodule(owner), [(f"{owner}.input_quantizer", 0, 1)])
    for name in found.attentions:
        if f"{name}.scores.left" in points:
            # q and p are (B, heads, T, ·), k arrives transposed (B, heads, d, T), v is (B, heads, T, d)
            watch(
                model.get_submodule(f"{name}.scores"),
                [(f"{name}.scores.left", 0, 2), (f"{name}.scores.right", 1, 3)],
            )
            watch(
                model.get_submodule(f"{name}.context"),
                [(f"{name}.context.left", 0, 2), (f"{name}.context.right", 1, 2)],
            )
            for product in found.positions.products:  # positions are no tokens: all of them count
                watch(model.get_submodule(f"{name}.{product}"), [(f"{name}.{product}.right", 1, None)])
        if (point := f"{name}.position_quantizer") in points:
            watch(model.get_submodule(point), [(point, 0, None)])
    try:
        with torch.no_grad():
            for batch in interrupt.steps(batches):
                mask = batch["attention_mask"].bool()
                model(**{name: value for name, value in batch.items() if name != "labels"})
    finally:
        for handle in handles:
            handle.remove()
    return watchers


def initial_scales(
    model: PreTrainedModel,
    found: Anatomy,
    spec: QuantSpec,
    batches: Iterable[dict[str, torch.Tensor]],
    names: Collection[str] | None = None,
) -> dict[str, LearnedScale]:
    """Initial activation quantizers by name, all or those of `names`; empty when activations stay in full
    precision."""
    if not spec.quantizes_activations:
        return {}
    points = activation_points(found, spec)
    watchers = observe(model, found, spec, batches, names)
    return {
        name: search_activation_scale(watcher.sample(), spec.activation_bits, points[name])
        for name, watcher in interrupt.steps(watchers.items())
    }


def search_activation_scale(values: torch.Tensor, bits: int, asymmetric: bool) -> LearnedScale:
    """The scale, and for an asymmetric quantizer the zero point, of least squared error on `values`."""
    if not asymmetric:
        grid = activation_grid(bits)
        return LearnedScale(search_scale(values, grid), grid)
    smallest = min(float(values.min()), 0.0)
    best: tuple[float, Grid, torch.Tensor] | None = None
    # For softmax the minimum is 0 and only z = 0 is tried; GELU reaches −0.17 and gets a few codes.
    for zero_point in sorted({0} if smallest == 0 else {0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32}):
        if zero_point >= 2 ** (bits - 1):
            continue
        grid = asymmetric_grid(bits, zero_point)
        scale = search_scale(values, grid)
        error = float((dequantize(quantize(values, scale, grid), scale, grid) - values).square().sum())
        if best is None or error < best[0]:
            best = (error, grid, scale)
    assert best is not None
    return LearnedScale(best[2], best[1])
