"""GELU as ONNX operators: one, or five where the opset has no Gelu."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from mrem_deploy.export.builder import Builder

GELU_OPSET = 20  # the first opset with Gelu


def lower_gelu(build: Builder, node: ir.Node, opset: int) -> None:
    """x · Φ(x) by the error function, as in the models."""
    x = node.inputs[0]
    assert x is not None
    name = f"{x.name}.gelu"
    if opset >= GELU_OPSET:
        build.replace(node, build.op("Gelu", x, name=name))
        return
    half, one, root = (build.constant(c, np.float32, f"gelu.{c:.3g}") for c in (0.5, 1.0, 2.0**0.5))
    error = build.op("Erf", build.op("Div", x, root, name=f"{name}.scaled"), name=f"{name}.erf")
    doubled = build.op("Mul", x, build.op("Add", error, one, name=f"{name}.one"), name=f"{name}.doubled")
    build.replace(node, build.op("Mul", doubled, half, name=name))
