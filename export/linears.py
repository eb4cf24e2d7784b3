"""Which linears are written as one matrix, and what stands in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch

from mrem_deploy.export.skeleton import DOMAIN
from mrem_deploy.models.architectures import Anatomy
from mrem_deploy.numerics import UNQUANTIZED_BITS
from mrem_deploy.quant.frozen import FrozenModel


@dataclass(frozen=True)
class Linears:
    """The linears of one model; `merge` q, k and v where they fit."""

    frozen: FrozenModel
    found: Anatomy
    merge: bool

    def merge_with(self, node: ir.Node) -> list[ir.Node]:
        """The linears to write as one matrix: q, k and v if the profile merges them, else this one."""
        attention = self.found.shared_inputs.get(name_of(node))
        if not self.merge or attention is None:
            return [node]
        x = node.inputs[0]
        assert x is not None
        group = [
            reader
            for reader in x.consumers()
            if reader.domain == DOMAIN
            and reader.op_type == "Linear"
            and self.found.shared_inputs.get(name_of(reader)) == attention
        ]
        grids = {self.grid(name_of(member)) for member in group}
        with_bias = {f"{name_of(member)}.bias" in self.frozen.full for member in group}
        return group if len(grids) == 1 and len(with_bias) == 1 else [node]

    def width(self, name: str) -> int:
        weight = self.frozen.weights.get(name)
        return (weight.codes if weight else self.frozen.full[f"{name}.weight"]).shape[0]

    def bias(self, names: list[str], offset: float) -> np.ndarray | None:
        """Biases side by side, plus what a shifted input adds (in profiles without zero points)."""
        parts = []
        for name in names:
            bias = self.frozen.full.get(f"{name}.bias")
            part = np.zeros(self.width(name), np.float32) if bias is None else bias.float().numpy()
            if offset:
                part = (part + offset * self.values(name).double().sum(dim=1).numpy()).astype(np.float32)
            parts.append(part)
        if not offset and not any(f"{name}.bias" in self.frozen.full for name in names):
            return None
        return np.concatenate(parts)

    def values(self, name: str) -> torch.Tensor:
        weight = self.frozen.weights.get(name)
        return (weight.values() if weight else self.frozen.full[f"{name}.weight"]).float()

    def grid(self, name: str) -> tuple[int, int]:
        """Bits and spacing of a weight's codes."""
        weight = self.frozen.weights.get(name)
        return (weight.bits, weight.spacing) if weight else (UNQUANTIZED_BITS, 1)


def name_of(node: ir.Node) -> str:
    """The name that a marker carries."""
    return str(node.attributes["name"].value)
