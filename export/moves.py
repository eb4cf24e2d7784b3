"""Operators that only move elements: an activation is quantized before them, so that they move bytes."""

from __future__ import annotations

import onnx_ir as ir


def before_moves(x: ir.Value) -> tuple[ir.Value, list[ir.Node]]:
    """The value before Reshape and Transpose nodes that only move elements, and those nodes in order.

    Only if nothing else reads the rearranged floats: otherwise they would be needed anyway."""
    moves: list[ir.Node] = []
    while True:
        node = x.producer()
        if node is None or node.op_type not in ("Reshape", "Transpose") or len(x.consumers()) > 1:
            return x, moves
        moves.insert(0, node)
        source = node.inputs[0]
        assert source is not None
        x = source
