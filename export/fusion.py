"""Blocks of the skeleton as operators of the CPU runtime (profile `mrem-cpu`).

Whatever fits an operator becomes one node, which is also a function (`functions.py`):

    PackedEmbedding    word, type and position embeddings with their LayerNorm
    AttentionBlock     q, k, v → attention → output → + input → LayerNorm
    FeedForwardBlock   linear → GELU → linear → + input → LayerNorm
    LowBitLinear       any other linear whose weight and input are quantized

What does not fit stays as it is and is lowered to standard operators: attention with a bias of its own or
with positions in it, norms in front, gates, q, k and v of different bits, activations that are not quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from mrem_deploy.export import panels
from mrem_deploy.export.builder import Builder
from mrem_deploy.export.functions import FORMAT, HEADS_FIRST, LEAST, Functions
from mrem_deploy.export.hot_rows import hot_tables
from mrem_deploy.export.linears import Linears, name_of
from mrem_deploy.export.panels import Stored, stored_as
from mrem_deploy.export.profiles import RUNTIME
from mrem_deploy.export.skeleton import DOMAIN

MASK = "attention_mask"


class Fusion:
    """Replaces markers of a graph; the others are for `lower.py`."""

    def __init__(self, build: Builder, linears: Linears, opset: int, attention: str) -> None:
        self.build, self.linears, self.attention = build, linears, attention
        self.graph, self.frozen = build.graph, linears.frozen
        self.functions = Functions(opset)
        self.mask = next((value for value in self.graph.inputs if value.name == MASK), None)

    def run(self) -> None:
        rules = {"Embedding": self._embedding, "Attention": self._attention, "Gelu": self._feed_forward}
        for node in list(self.graph):
            if node.domain == DOMAIN and node.op_type in rules and node.graph is not None:
                rules[node.op_type](node)

    # -- blocks --------------------------------------------------------------------------------------------

    def _embedding(self, node: ir.Node) -> None:
        name = name_of(node)
        weight = self.frozen.weights.get(name)
        inner, tables = [node], []
        add = _only_reader(node)
        while add is not None and add.op_type == "Add":
            gather = _other(add, inner[-1].outputs[0]).producer()
            if gather is None or gather.op_type != "Gather" or not _looks_up(gather):
                return
            tables.append(gather)
            inner.append(add)
            add = _only_reader(add)
        norm = add
        if weight is None or norm is None or not _is_norm(norm) or len(tables) not in (1, 2) or not self.mask:
            return
        types, positions = (tables[0] if len(tables) == 2 else None), tables[-1]
        places = positions.inputs[1]
        if places is None or places.is_graph_input():  # NomicBERT's types: they need a guard
            return
        stored = stored_as(weight.bits, weight.spacing)
        form = _weight_form("codes", stored, weight.codes.shape[1] % stored.per_byte > 0)
        form |= {"type_ids"} if types else set()
        codes = ir.tensor(panels.rows(weight.codes.numpy(), stored), name=f"{name}.weight.codes")
        scales = weight.scale.float().numpy().reshape(-1)
        inputs = [
            node.inputs[0],
            self.mask,
            places,
            types.inputs[1] if types else None,
            self.build.initializer(codes),
            self.build.initializer(ir.tensor(scales, name=f"{name}.weight.scale")),
            positions.inputs[0],
            types.inputs[0] if types else None,
            *norm.inputs[1:],
        ]
        if weight.hot is not None:
            form |= {"hot"}
            inputs += hot_tables(self.build, name, weight.hot, len(weight.codes))
        attributes = stored.attributes() | {"epsilon": norm.attributes["epsilon"].value}
        self.build.anchor = norm
        y = self._call("PackedEmbedding", inputs, attributes, form, f"{name}.embedded")
        self._swap(norm, y, inner)

    def _attention(self, node: ir.Node) -> None:
        name = name_of(node)
        *operands, mask = node.inputs
        shape = node.outputs[0].shape
        sources = [_linear_behind(value) for value in operands]
        heads = shape[2] if shape is not None else None  # (B, T, heads, d)
        if len(operands) != 3 or not self._is_mask(mask) or not isinstance(heads, int) or None in sources:
            return
        linears = [source[-1] for source in sources if source]
        x, joined = linears[0].inputs[0], _only_reader(node)
        out = _only_reader(joined) if joined is not None and joined.op_type == "Reshape" else None
        tail = self._tail(out, x)
        if out is None or tail is None or x is None or self.linears.merge_with(linears[0]) != linears:
            return
        qkv, outs = [name_of(linear) for linear in linears], [name_of(out)]
        points = {"x": f"{name}.input_quantizer", "o": f"{outs[0]}.input_quantizer"}
        products = {"q": "scores.left", "k": "scores.right", "p": "context.left", "v": "context.right"}
        if self.attention == "int8":
            points |= {key: f"{name}.{product}" for key, product in products.items()}
        if not self._quantized(qkv + outs, points.values()):
            return
        scaling = float(node.attributes["scaling"].value)
        attributes, form = self._activations(points)
        attributes |= {"heads": heads, "scaling": scaling, "attention": self.attention}
        if self.attention == "int8":
            attributes["q_scaled"] = float(np.float32(attributes["q_scale"] * scaling))
        else:
            form |= {"float"}
        self._block(
            "AttentionBlock", name, x, attributes, form, tail, {"qkv": qkv, "out": outs},
            [out, joined, node, *(part for source in sources for part in source or ())],
        )  # fmt: skip

    def _feed_forward(self, node: ir.Node) -> None:
        value, down = node.inputs[0], _only_reader(node)
        up = value.producer() if value is not None else None
        if up is None or not _is_linear(up) or _only_reader(up) is not node:
            return
        x, tail = up.inputs[0], self._tail(down, up.inputs[0])
        if x is None or tail is None or down is None:
            return
        names = [name_of(up), name_of(down)]
        points = {"x": f"{names[0]}.input_quantizer", "m": f"{names[1]}.input_quantizer"}
        if not self._quantized(names, points.values()):
            return
        title = names[1].rpartition(".")[0]
        attributes, form = self._activations(points)
        weights = {"up": names[:1], "down": names[1:]}
        self._block("FeedForwardBlock", title, x, attributes, form, tail, weights, [down, node, up])

    def _block(
        self,
        operator: str,
        title: str,
        x: ir.Value,
        attributes: dict[str, Any],
        form: set[str],
        tail: tuple[ir.Node, ir.Node],
        weights: Mapping[str, list[str]],
        inner: Sequence[ir.Node | None],
    ) -> None:
        """`tail` are the addition and the norm at the end, `inner` the other nodes, from last to first."""
        add, norm = tail
        self.build.anchor = norm
        inputs: list[ir.Value | None] = [x, self.mask]
        for key, names in weights.items():
            first = f"{title}.qkv" if len(names) == 3 else names[0]
            tensors, more, words = self._weight(first, names, key)
            inputs += tensors
            attributes |= more
            form |= words
        inputs += norm.inputs[1:]
        attributes["epsilon"] = norm.attributes["epsilon"].value
        y = self._call(operator, inputs, attributes, form, f"{title}.block")
        self._swap(norm, y, [node for node in (*reversed(inner), add) if node is not None])

    def linear(self, title: str, names: list[str], x: ir.Value, quantizer: str) -> ir.Value | None:
        """A linear as an operator of its own, or linears side by side; None if it is not quantized."""
        if not self._quantized(names, [quantizer]):
            return None
        tensors, more, words = self._weight(title, names, "weight")
        attributes, form = self._activations({"x": quantizer})
        attributes |= {key.removeprefix("weight_"): value for key, value in more.items()}
        y = self._call("LowBitLinear", [x, *tensors], attributes, form | words, f"{title}.sum")
        y.type = ir.TensorType(ir.DataType.FLOAT)
        if x.shape is not None:
            y.shape = ir.Shape([*x.shape[:-1], attributes["out"]])
        return y

    # -- parts of them -------------------------------------------------------------------------------------

    def _tail(self, linear: ir.Node | None, x: ir.Value | None) -> tuple[ir.Node, ir.Node] | None:
        """The addition of `x` to the output of a linear, and the LayerNorm after it."""
        if linear is None or not _is_linear(linear):
            return None
        add = _only_reader(linear)
        if add is None or add.op_type != "Add" or _other(add, linear.outputs[0]) is not x:
            return None
        norm = _only_reader(add)
        return (add, norm) if norm is not None and _is_norm(norm) and self.mask is not None else None

    def _is_mask(self, value: ir.Value | None) -> bool:
        """Whether it adds 0 where `attention_mask` is not 0, and the least float elsewhere."""
        where = value.producer() if value is not None else None
        if where is None or where.op_type != "Where" or where.inputs[0] is None:
            return False
        seen, kinds = where.inputs[0], []
        while (node := seen.producer()) is not None and node.op_type in ("Unsqueeze", "Cast"):
            kinds.append((node.op_type, _numbers(node.inputs[1]) if node.op_type == "Unsqueeze" else None))
            assert node.inputs[0] is not None
            seen = node.inputs[0]
        added = [_numbers(value) for value in where.inputs[1:]]
        return (
            seen is self.mask
            and sorted(kinds) == [("Cast", None), ("Unsqueeze", [1, 2])]
            and added == [[0.0], [float(LEAST)]]
        )

    def _quantized(self, names: Sequence[str], points: Any) -> bool:
        return all(name in self.frozen.weights for name in names) and all(
            point in self.frozen.scales for point in points
        )

    def _activations(self, points: Mapping[str, str]) -> tuple[dict[str, Any], set[str]]:
        """Attributes and words of quantizers; codes are unsigned, signed ones around 128."""
        attributes: dict[str, Any] = {}
        for key, point in points.items():
            frozen = self.frozen.scales[point]
            grid = frozen.grid
            middle = 128 if grid.signed else grid.zero_point
            shift = middle - grid.zero_point
            attributes |= {
                f"{key}_scale": float(frozen.scale.float()),
                f"{key}_zero_point": middle,
                f"{key}_min": grid.low + shift,
                f"{key}_max": grid.high + shift,
            }
        return attributes, {
            f"clip:{key}" for key, point in points.items() if self.frozen.scales[point].grid.bits < 8
        }

    def _weight(
        self, title: str, names: list[str], key: str
    ) -> tuple[list[ir.Value], dict[str, int], set[str]]:
        """Codes, scales and biases of linears side by side."""
        weights = [self.frozen.weights[name] for name in names]
        codes = np.concatenate([weight.codes.numpy() for weight in weights]).T
        scales = np.concatenate(
            [np.broadcast_to(w.scale.float().numpy().reshape(-1), w.codes.shape[:1]) for w in weights]
        )
        bias = self.linears.bias(names, 0.0)
        stored = stored_as(weights[0].bits, weights[0].spacing)
        tensors = [
            self.build.initializer(ir.tensor(panels.panels(codes, stored), name=f"{title}.weight.codes")),
            self.build.constant(scales, np.float32, f"{title}.weight.scale"),
            self.build.constant(
                np.zeros(codes.shape[1]) if bias is None else bias, np.float32, f"{title}.bias"
            ),
        ]
        attributes = {f"{key}_in": codes.shape[0], f"{key}_out": codes.shape[1]}
        ragged = codes.shape[0] % (panels.INPUTS * stored.per_byte) or codes.shape[1] % panels.COLUMNS
        form = _weight_form(key, stored, ragged > 0)
        return tensors, attributes | stored.attributes(f"{key}_"), form

    def unpacked(self, codes: np.ndarray, stored: Stored, name: str) -> ir.Value:
        """Codes below 8 bits that no operator reads, INT8; standard operators unpack them at load."""
        build, fields = self.build, stored.per_byte
        packed = build.initializer(ir.tensor(panels.rows(codes, stored), name=name))
        places = build.op("Cast", packed, name=f"{name}.places", to=ir.DataType.INT32)
        table = build.constant(stored.table(), np.int8, f"codes.{stored.bits}.{stored.spacing}")
        values = build.op("Gather", table, places, name=f"{name}.fields", axis=0)
        flat = build.constant([0, -1], np.int64, "rows.flat")
        values = build.op("Reshape", values, flat, name=f"{name}.stored")
        if codes.shape[1] % fields:
            ends = [build.constant([n], np.int64, f"end.{n}") for n in (0, codes.shape[1], 1)]
            values = build.op("Slice", values, *ends, name=f"{name}.int8")
        return values

    # -- the graph -----------------------------------------------------------------------------------------

    def _call(
        self,
        operator: str,
        inputs: list[ir.Value | None],
        attributes: dict[str, Any],
        form: set[str],
        name: str,
    ) -> ir.Value:
        attributes = {**attributes, "format": FORMAT}
        overload = self.functions.overload(operator, frozenset(form), tuple(attributes))
        y = self.build.op(operator, *inputs, name=name, domain=RUNTIME, overload=overload, **attributes)
        assert isinstance(y, ir.Value)
        return y

    def _swap(self, norm: ir.Node, y: ir.Value, inner: list[ir.Node]) -> None:
        """Let `y` be the output of a norm; `inner`, from first to last, is what led to it."""
        y.type, y.shape = norm.outputs[0].type, norm.outputs[0].shape
        self.build.replace(norm, y)
        for node in reversed(inner):
            self.graph.remove(node, safe=True)


def _weight_form(key: str, stored: Stored, ragged: bool) -> set[str]:
    words = {"byte": stored.bits == 8, "odd": stored.spacing == 2, "ragged": ragged}
    return {f"{key}:{word}" for word, fits in words.items() if fits}


def _is_linear(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type == "Linear"


def _is_norm(node: ir.Node) -> bool:
    """A LayerNorm over the last axis, with gamma and beta."""
    axis = node.attributes.get("axis")
    return (
        node.op_type == "LayerNormalization" and len(node.inputs) == 3 and None not in node.inputs
        and (axis is None or axis.value == -1) and "epsilon" in node.attributes
    )  # fmt: skip


def _only_reader(node: ir.Node) -> ir.Node | None:
    """What reads a node's only output, if nothing else does."""
    value = node.outputs[0]
    readers = value.consumers()
    return readers[0] if len(readers) == 1 and not value.is_graph_output() else None


def _other(add: ir.Node, value: ir.Value) -> ir.Value:
    other = add.inputs[1] if add.inputs[0] is value else add.inputs[0]
    assert other is not None
    return other


def _numbers(value: ir.Value | None) -> list[Any] | None:
    """A constant as a list."""
    if value is None or value.const_value is None:
        return None
    return list(value.const_value.numpy().reshape(-1).tolist())


def _looks_up(gather: ir.Node) -> bool:
    """Rows of a stored table, by ids with a batch and a sequence."""
    table, ids = gather.inputs
    if table is None or table.const_value is None or ids is None or ids.shape is None:
        return False
    return len(ids.shape) == 2 and gather.attributes["axis"].value == 0


def _linear_behind(value: ir.Value | None) -> list[ir.Node] | None:
    """Transpose, Reshape and the linear whose output they arrange into heads, if nothing else reads it."""
    found: list[ir.Node] = []
    for kind in ("Transpose", "Reshape", "Linear"):
        node = value.producer() if value is not None else None
        if node is None or node.op_type != kind or (found and _only_reader(node) is not found[-1]):
            return None
        found.append(node)
        value = node.inputs[0]
    perm = list(found[0].attributes["perm"].value)
    return found if perm == HEADS_FIRST and _only_reader(found[0]) is not None else None
