"""Proof, before timing, that a quantized module quantizes: a fast step that does nothing is not a result.

Checked on one forward pass: (1) every linear of the module has a weight quantizer and every operand of a
matmul an activation quantizer, as the bits require; (2) each of them was used; (3) every matmul multiplies
its operands on their grids (an integer times a scale, no more values than the grid has), recomputed here by
other code; (4) the module's output differs from the full-precision one and is finite.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mrem_deploy.models.architectures import anatomy
from mrem_deploy.models.parts import Part
from mrem_deploy.numerics import UNQUANTIZED_BITS, dequantize
from mrem_deploy.quant.insert import activation_points
from mrem_deploy.quant.layers import Matmul, QuantEmbedding, QuantLinear
from mrem_deploy.quant.spec import QuantSpec

ROWS = 8  # rows of each tensor in which distinct values are counted
ROUNDING = 1e-5  # relative RMS between matmuls of integers and of the values that they stand for
LEAST_DIFFERENCE = 1e-4  # relative RMS; 8 bits give about a hundred times that


def names_outside(model: nn.Module, part: Part) -> tuple[str, ...]:
    """Everything that could be quantized outside of the part."""
    found = anatomy(model)
    inside = tuple(f"{block}." for block in found.blocks[part.start : part.stop])
    in_any = tuple(f"{block}." for block in found.blocks)
    outside = [name for name in (*found.linears, *found.attentions) if not name.startswith(inside)]
    if part.last:  # the pooler follows the blocks and belongs to the last module
        outside = [name for name in outside if name.startswith(in_any)]
    return (*outside, *(() if part.first else (found.word_embedding,)))


def expected_quantizers(model: nn.Module, spec: QuantSpec) -> dict[str, int]:
    """How many quantizers the spec asks for, counted on the full-precision model."""
    found = anatomy(model)
    linears = [name for name in found.linears if not spec.keeps(name)]
    return {
        "weights": len(linears) if spec.weight_bits != UNQUANTIZED_BITS else 0,
        "activations": len(activation_points(found, spec)) if spec.activation_bits != UNQUANTIZED_BITS else 0,
        "embeddings": int(spec.embedding_bits != UNQUANTIZED_BITS and not spec.keeps(found.word_embedding)),
    }


def check_quantized(
    full: Part,
    quantized: Part,
    expected: dict[str, int],
    batch: dict[str, torch.Tensor],
    hidden: torch.Tensor | None,
) -> dict[str, float]:
    """Raise AssertionError where a rule is broken; returns what was counted and measured."""
    weights = {m.weight_quantizer for m in quantized.modules() if isinstance(m, QuantLinear)}
    weights = {m for m in weights if not isinstance(m, nn.Identity)}
    tables = [m for m in quantized.modules() if isinstance(m, QuantEmbedding)]
    row_quantizers = {m.weight_quantizer for m in tables}
    every = {m for m in quantized.modules() if hasattr(m, "grid")}
    activations = every - weights - row_quantizers
    counted = {"weights": len(weights), "activations": len(activations), "embeddings": len(tables)}
    if counted != expected:
        raise AssertionError(f"expected quantizers {expected}, found {counted}")

    seen: set[nn.Module] = set()

    def on_grid(quantizer: Any, x: torch.Tensor) -> torch.Tensor:
        """The values that the quantizer makes of x."""
        if isinstance(quantizer, nn.Identity):
            return x
        codes, scale = quantizer.codes_and_scale(x)
        grid = quantizer.grid
        if not torch.equal(codes, codes.round()) or codes.min() < grid.low or codes.max() > grid.high:
            raise AssertionError(f"{quantizer} gives values off its grid")
        values = dequantize(codes, scale, grid)
        _check_levels(values, quantizer)
        seen.add(quantizer)
        return values

    def watch_linear(linear: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        x = on_grid(linear.input_quantizer, args[0])
        _check_product(F.linear(x, on_grid(linear.weight_quantizer, linear.weight), linear.bias), output)

    def watch_matmul(product: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        _check_product(on_grid(product.left, args[0]) @ on_grid(product.right, args[1]), output)

    def watch_shared(quantizer: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if not torch.equal(output, on_grid(quantizer, args[0])):
            raise AssertionError(f"{quantizer} gives values off its grid")

    def watch_table(table: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        hot = table.hot_quantizer
        cold = output if hot is None else output[~hot.is_hot(args[0])]  # hot rows have 8 bits
        _check_levels(cold, table.weight_quantizer)
        seen.add(table.weight_quantizer)

    watchers = {QuantLinear: watch_linear, Matmul: watch_matmul}
    handles = [m.register_forward_hook(watchers[type(m)]) for m in quantized.modules() if type(m) in watchers]
    handles += [quantizer.register_forward_hook(watch_shared) for quantizer in activations]
    handles += [table.register_forward_hook(watch_table) for table in tables]
    try:
        with torch.no_grad():
            output = quantized(hidden, batch).hidden[-1]
            reference = full(hidden, batch).hidden[-1]
    finally:
        for handle in handles:
            handle.remove()
    if seen != every:
        raise AssertionError(f"{len(every - seen)} quantizers of the module did not run")
    difference = float((output - reference).square().mean().sqrt() / reference.square().mean().sqrt())
    if not LEAST_DIFFERENCE < difference < float("inf"):
        raise AssertionError(f"quantization changes the output by {difference:g} of its size")
    return {**counted, "relative_difference": difference}


def _check_product(expected: torch.Tensor, got: torch.Tensor) -> None:
    """Only rounding may differ."""
    error = float((got - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    if not error <= ROUNDING:
        raise AssertionError(f"a matmul differs by {error:g} of its size from that of its quantized operands")


def _check_levels(output: torch.Tensor, quantizer: Any) -> None:
    """Each row takes at most as many values as the grid has codes."""
    grid = quantizer.grid
    for row in output.detach().reshape(-1, output.shape[-1])[:ROWS]:
        levels = row.unique().numel()
        if levels > (grid.high - grid.low) // grid.spacing + 1:
            raise AssertionError(f"{quantizer}: {levels} values where {grid.bits} bits allow fewer")
