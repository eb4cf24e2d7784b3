"""Helper for writing ONNX nodes at one place of a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

CONTRIB = "com.microsoft"


class Builder:
    """Inserts nodes before an anchor node (without one: at the end); equal constants are stored once."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.anchor: ir.Node | None = None
        self._constants: dict[tuple[str, bytes, tuple[int, ...]], ir.Value] = {}

    def op(
        self,
        kind: str,
        *inputs: ir.Value | None,
        name: str,
        domain: str = "",
        overload: str = "",
        outputs: int = 1,
        **attributes: Any,
    ) -> Any:
        """One node; its output is called `name` (several: `name.0`, `name.1`, …)."""
        names = [name] if outputs == 1 else [f"{name}.{i}" for i in range(outputs)]
        node = ir.Node(
            domain,
            kind,
            inputs,
            ir.convenience.convert_attributes(attributes),
            overload=overload,
            outputs=[ir.Value(name=output) for output in names],
        )
        if self.anchor is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.anchor, node)
        if domain:
            self.graph.opset_imports.setdefault(domain, 1)
        return node.outputs[0] if outputs == 1 else node.outputs

    def initializer(self, tensor: ir.TensorProtocol) -> ir.Value:
        """A stored tensor under its name."""
        value = ir.Value(
            name=tensor.name,
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape(tensor.shape.numpy()),
            const_value=tensor,
        )
        self.graph.register_initializer(value)
        return value

    def constant(self, array: Any, dtype: type[np.generic] | np.dtype, name: str) -> ir.Value:
        """A constant; equal numbers are shared, under the name of their first use."""
        values = np.asarray(array, dtype=dtype)
        key = (str(values.dtype), values.tobytes(), values.shape)
        if key not in self._constants:
            self._constants[key] = self.initializer(ir.tensor(values, name=name))
        return self._constants[key]

    def replace(self, node: ir.Node, value: ir.Value) -> None:
        """Let every reader of a node's only output read `value`, and remove the node."""
        output = node.outputs[0]
        for index, graph_output in enumerate(self.graph.outputs):
            if graph_output is output:
                value.name, value.type, value.shape = output.name, output.type, output.shape
                self.graph.outputs[index] = value
        ir.convenience.replace_all_uses_with(output, value)
        self.graph.remove(node, safe=True)
