"""The operators of the CPU runtime as ONNX functions, whose bodies are the graph that `ort-cpu` has there.

Where the runtime's library is registered, its operators run; elsewhere onnxruntime puts the bodies in their
place, unpacks the weights while it loads the file, and runs what it runs for `ort-cpu`. Numbers (scales, zero
points, sizes) come from the node's attributes. Bodies that differ in more than numbers are overloads of one
operator; what they differ in is their form, a set of words:

    <weight>:odd       codes 2 apart                 <weight>:byte       8 bits: UINT8, zero point 128
    <weight>:ragged    sizes that leave gaps         clip:<activation>   a grid of fewer than 8 bits
    float              attention in float            type_ids, hot       what an embedding has
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from mrem_deploy.export.builder import CONTRIB, Builder
from mrem_deploy.export.ids import NOWHERE
from mrem_deploy.export.panels import COLUMNS, INPUTS
from mrem_deploy.export.profiles import RUNTIME

FORMAT = 1  # of nodes and weights; the library refuses another one than it knows
HEADS_FIRST = [0, 2, 1, 3]  # (B, T, heads, d) ↔ (B, heads, T, d)
LEAST = np.finfo(np.float32).min  # what the models add to the scores of padding
INT64, UINT8, INT8, FLOAT = ir.DataType.INT64, ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.FLOAT
Form = frozenset[str]

INPUTS_OF = {
    "LowBitLinear": ("x", "weight", "scale", "bias"),
    "AttentionBlock": (
        *("hidden", "mask", "qkv", "qkv.scale", "qkv.bias", "out", "out.scale", "out.bias", "gamma", "beta"),
    ),
    "FeedForwardBlock": (
        *("hidden", "mask", "up", "up.scale", "up.bias", "down", "down.scale", "down.bias", "gamma", "beta"),
    ),
    "PackedEmbedding": (
        *("ids", "mask", "position_ids", "type_ids", "codes", "scale", "positions", "types", "gamma", "beta"),
        *("hot_place", "hot_codes", "hot_scale"),
    ),
}


class Body:
    """One function while it is written."""

    def __init__(self, operator: str, form: Form) -> None:
        names = INPUTS_OF[operator]
        values = [ir.Value(name=name) for name in names]
        self.graph = ir.Graph(values, [], nodes=[], opset_imports={})
        self.form, self.inputs = form, dict(zip(names, values, strict=True))
        self.op: Callable[..., Any] = Builder(self.graph).op
        self._made: dict[str, ir.Value] = {}

    def constant(self, array: Any, kind: Any, name: str) -> ir.Value:
        if name not in self._made:
            self._made[name] = self.op("Constant", name=name, value=ir.tensor(np.asarray(array, dtype=kind)))
        return self._made[name]

    def number(self, name: str) -> ir.Value:
        """The node's attribute `name`, a FLOAT, as a scalar."""
        return self._given(name, "value_float", "FLOAT")

    def integer(self, name: str, kind: ir.DataType = INT64) -> ir.Value:
        """The node's attribute `name`, an INT, as a scalar of some type."""
        value, key = self._given(name, "value_int", "INT"), f"{name}.{kind.name.lower()}"
        if kind == INT64:
            return value
        if key not in self._made:
            self._made[key] = self.op("Cast", value, name=key, to=kind)
        return self._made[key]

    def _given(self, name: str, field: str, kind: str) -> ir.Value:
        key = f"{name}.given"
        if key not in self._made:
            attribute = ir.RefAttr(field, name, ir.AttributeType[kind])
            self._made[key] = self.op("Constant", name=key, **{field: attribute})
        return self._made[key]

    def shape(self, name: str, *sizes: ir.Value | int) -> ir.Value:
        """A shape of numbers and scalars."""
        one = self.constant([1], np.int64, "shape.1")
        parts = [
            self.constant([size], np.int64, f"shape.{size}")
            if isinstance(size, int)
            else self.op("Reshape", size, one, name=f"{name}.{number}")
            for number, size in enumerate(sizes)
        ]
        return self.op("Concat", *parts, name=name, axis=0)

    # -- activations ---------------------------------------------------------------------------------------

    def quantize(self, x: ir.Value, name: str) -> ir.Value:
        """The codes of an activation, UINT8."""
        scale = self.number(f"{name}_scale")
        if f"clip:{name}" in self.form:
            middle, bounds = self.integer(f"{name}_zero_point"), []
            for end in ("min", "max"):
                code = self.op("Sub", self.integer(f"{name}_{end}"), middle, name=f"{name}.{end}.code")
                code = self.op("Cast", code, name=f"{name}.{end}.float", to=FLOAT)
                bounds.append(self.op("Mul", code, scale, name=f"{name}.{end}"))
            x = self.op("Clip", x, *bounds, name=f"{name}.clipped")
        return self.op("QuantizeLinear", x, scale, self.zero_point(name), name=f"{name}.codes")

    def zero_point(self, name: str) -> ir.Value:
        return self.integer(f"{name}_zero_point", UINT8)

    # -- weights -------------------------------------------------------------------------------------------

    def codes(self, packed: ir.Value, name: str, attributes: str = "") -> ir.Value:
        """The codes in bytes, along a new last axis: UINT8 at 8 bits, INT8 below.

        They come out of a table of all 256 bytes. onnxruntime keeps whatever it computes while it folds
        constants until all are folded: shifts and masks of the weights would take twice the memory.
        """
        if f"{name}:byte" in self.form:
            return packed
        places = self.op("Cast", packed, name=f"{name}.places", to=ir.DataType.INT32)
        return self.op("Gather", self._table(name, attributes), places, name=f"{name}.codes", axis=0)

    def _table(self, name: str, attributes: str) -> ir.Value:
        """The codes in every byte, INT8 (256, F)."""
        zero, one = self.constant(0, np.int64, "int.0"), self.constant(1, np.uint8, "byte.1")
        eight = self.constant(8, np.int64, "int.8")
        every = self.constant(np.arange(256).reshape(-1, 1), np.uint8, "bytes")
        shifts = self.op("Range", zero, eight, self.integer(f"{attributes}bits"), name=f"{name}.shifts.int64")
        shifts = self.op("Cast", shifts, name=f"{name}.shifts", to=UINT8)
        moved = self.op("BitShift", every, shifts, name=f"{name}.moved", direction="RIGHT")
        bits = self.integer(f"{attributes}bits", UINT8)
        top = self.op("BitShift", one, bits, name=f"{name}.top", direction="LEFT")
        mask = self.op("Sub", top, one, name=f"{name}.mask")
        unsigned = self.op("BitwiseAnd", moved, mask, name=f"{name}.unsigned")
        codes = self.op("Cast", unsigned, name=f"{name}.stored", to=INT8)
        if f"{name}:odd" in self.form:
            codes = self.op("Add", codes, codes, name=f"{name}.doubled")
        return self.op("Add", codes, self.integer(f"{attributes}low", INT8), name=f"{name}.table")

    def matrix(self, name: str, attributes: str = "") -> tuple[ir.Value, ir.Value | None]:
        """Panels as a matrix (in, out), with its zero point if it has one."""
        byte = f"{name}:byte" in self.form
        parts = self.shape(f"{name}.parts", 0, 0, COLUMNS, INPUTS, *([1] if byte else []))
        panels = self.op("Reshape", self.inputs[name], parts, name=f"{name}.panels")
        codes = self.codes(panels, name, attributes)  # (P, S, 16, 4, F)
        turned = self.op("Transpose", codes, name=f"{name}.turned", perm=[1, 4, 3, 0, 2])
        count = self.op("Shape", self.inputs[name], name=f"{name}.count", start=0, end=1)
        columns = self.op("Mul", count, self.constant(COLUMNS, np.int64, "int.16"), name=f"{name}.columns")
        rest = self.constant([-1], np.int64, "shape.-1")
        flat = self.op("Concat", rest, columns, name=f"{name}.shape", axis=0)
        matrix = self.op("Reshape", turned, flat, name=f"{name}.matrix")
        sizes = [self.integer(f"{attributes}{end}") for end in ("in", "out")]
        if f"{name}:ragged" in self.form:
            ends = self.shape(f"{name}.corner", 0, 0), self.shape(f"{name}.sizes", *sizes)
            matrix = self.op("Slice", matrix, *ends, name=f"{name}.cut")
        if not byte:
            return matrix, None
        middle, width = self.constant(128, np.uint8, "middle"), self.shape(f"{name}.width", sizes[1])
        return matrix, self.op("Expand", middle, width, name=f"{name}.zero_point")

    def linear(self, x: ir.Value, activation: str, name: str, attributes: str = "") -> ir.Value:
        """x·W + b on integers."""
        scale, bias = (self.inputs[end if name == "weight" else f"{name}.{end}"] for end in ("scale", "bias"))
        matrix, zero_point = self.matrix(name, attributes)
        return self.op(
            "MatMulIntegerToFloat", x, matrix, self.number(f"{activation}_scale"), scale,
            self.zero_point(activation), zero_point, bias, name=f"{name}.sum", domain=CONTRIB,
        )  # fmt: skip

    def norm(self, x: ir.Value, residual: ir.Value, name: str) -> ir.Value:
        total = self.op("Add", x, residual, name=f"{name}.sum")
        return self.layer_norm(total)

    def layer_norm(self, x: ir.Value) -> ir.Value:
        epsilon = ir.RefAttr("epsilon", "epsilon", ir.AttributeType.FLOAT)
        gamma, beta = self.inputs["gamma"], self.inputs["beta"]
        return self.op("LayerNormalization", x, gamma, beta, name="y", axis=-1, epsilon=epsilon)


def _low_bit_linear(body: Body) -> ir.Value:
    return body.linear(body.quantize(body.inputs["x"], "x"), "x", "weight")


def _feed_forward(body: Body) -> ir.Value:
    hidden = body.inputs["hidden"]
    raised = body.linear(body.quantize(hidden, "x"), "x", "up", "up_")
    active = body.op("Gelu", raised, name="active")
    return body.norm(body.linear(body.quantize(active, "m"), "m", "down", "down_"), hidden, "ffn")


def _attention(body: Body) -> ir.Value:
    op, hidden, integers = body.op, body.inputs["hidden"], "float" not in body.form
    qkv = body.linear(body.quantize(hidden, "x"), "x", "qkv", "qkv_")
    parts = op("Split", qkv, name="part", axis=-1, outputs=3, num_outputs=3)
    heads, width = body.integer("heads"), body.integer("qkv_in")
    tokens, rest = (
        op("Shape", hidden, name="tokens", start=0, end=2),
        body.constant([-1], np.int64, "shape.-1"),
    )
    width = body.shape("head.width", op("Div", width, heads, name="head.size"))
    split = op("Concat", tokens, rest, width, name="heads.first", axis=0)
    turned = []
    for name, part in zip("qkv", parts, strict=True):
        part = body.quantize(part, name) if integers else part
        part = op("Reshape", part, split, name=f"{name}.heads", allowzero=1)
        turned.append(op("Transpose", part, name=f"{name}.turned", perm=HEADS_FIRST))
    query, key, value = turned
    key = op("Transpose", key, name="k.columns", perm=[0, 1, 3, 2])
    scores = _scores(body, query, key) if integers else _float_scores(body, query, key)
    probabilities = op("Softmax", op("Add", scores, _mask(body), name="masked"), name="p", axis=-1)
    if integers:
        context = op(
            "MatMulIntegerToFloat", body.quantize(probabilities, "p"), value,
            body.number("p_scale"), body.number("v_scale"), body.zero_point("p"), body.zero_point("v"),
            name="context", domain=CONTRIB,
        )  # fmt: skip
    else:
        context = op("MatMul", probabilities, value, name="context")
    context = op("Transpose", body.quantize(context, "o"), name="context.turned", perm=HEADS_FIRST)
    joined = op("Concat", tokens, rest, name="joined", axis=0)
    joined = op("Reshape", context, joined, name="context.joined", allowzero=1)
    return body.norm(body.linear(joined, "o", "out", "out_"), hidden, "attention")


def _scores(body: Body, query: ir.Value, key: ir.Value) -> ir.Value:
    return body.op(
        "MatMulIntegerToFloat", query, key, body.number("q_scaled"), body.number("k_scale"),
        body.zero_point("q"), body.zero_point("k"), name="scores", domain=CONTRIB,
    )  # fmt: skip


def _float_scores(body: Body, query: ir.Value, key: ir.Value) -> ir.Value:
    product = body.op("MatMul", query, key, name="scores.product")
    return body.op("Mul", product, body.number("scaling"), name="scores")


def _mask(body: Body) -> ir.Value:
    """The attention mask as what is added to the scores, (B, 1, 1, T)."""
    seen = body.op("Cast", body.inputs["mask"], name="mask.bool", to=ir.DataType.BOOL)
    seen = body.op("Unsqueeze", seen, body.shape("mask.axes", 1, 2), name="mask.wide")
    zero, least = (body.constant(n, np.float32, name) for n, name in ((0, "float.0"), (LEAST, "float.least")))
    return body.op("Where", seen, zero, least, name="mask.added")


def _embedding(body: Body) -> ir.Value:
    op, inputs, form = body.op, body.inputs, body.form
    ids = _checked(body, "ids")
    table, byte = body.codes(inputs["codes"], "codes"), "codes:byte" in form
    if not byte:
        table = op("Reshape", table, body.shape("table.shape", 0, -1), name="table")
    if "codes:ragged" in form:
        one, zero = (body.constant([n], np.int64, f"shape.{n}") for n in (1, 0))
        width = op("Shape", inputs["gamma"], name="table.width")
        table = op("Slice", table, zero, width, one, name="table.cut")
    looked_up = op("Gather", table, ids, name="rows.codes", axis=0)
    values = op("Cast", looked_up, name="rows.float", to=FLOAT)
    if byte:
        values = op("Add", values, body.integer("low", FLOAT), name="rows.signed")
    sums = op("Mul", values, _row_scales(body, "scale", ids), name="rows")
    if "hot" in form:
        place = op("Gather", inputs["hot_place"], ids, name="hot.place", axis=0)
        place = op("Cast", place, name="hot.place.int32", to=ir.DataType.INT32)
        hot = op("Gather", inputs["hot_codes"], place, name="hot.codes", axis=0)
        hot = op("Cast", hot, name="hot.float", to=FLOAT)
        hot = op("Mul", hot, _row_scales(body, "hot_scale", place), name="hot.rows")
        sums = op("Add", sums, hot, name="rows.all")
    if "type_ids" in form:
        types = op("Gather", inputs["types"], _checked(body, "type_ids"), name="type.rows", axis=0)
        sums = op("Add", sums, types, name="with.types")
    positions = op("Gather", inputs["positions"], inputs["position_ids"], name="position.rows", axis=0)
    return body.layer_norm(op("Add", sums, positions, name="with.positions"))


def _row_scales(body: Body, name: str, places: ir.Value) -> ir.Value:
    column = body.op("Reshape", body.inputs[name], body.shape(f"{name}.shape", -1, 1), name=f"{name}.column")
    return body.op("Gather", column, places, name=f"{name}.rows", axis=0)


def _checked(body: Body, name: str) -> ir.Value:
    """The guard of `ids.py`; the operator of the runtime has its own."""
    zero, nowhere = (body.constant(n, np.int64, f"int.{n}") for n in (0, NOWHERE))
    negative = body.op("Less", body.inputs[name], zero, name=f"{name}.negative")
    return body.op("Where", negative, nowhere, body.inputs[name], name=f"{name}.checked")


BODIES: dict[str, Callable[[Body], ir.Value]] = {
    "LowBitLinear": _low_bit_linear,
    "AttentionBlock": _attention,
    "FeedForwardBlock": _feed_forward,
    "PackedEmbedding": _embedding,
}


class Functions:
    """The functions of one model; the first form of an operator has no overload, others are numbered."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self._overloads: dict[tuple[str, Form], str] = {}
        self.made: list[ir.Function] = []

    def overload(self, operator: str, form: Form, attributes: Sequence[str]) -> str:
        """The overload of this form, whose function is written if it is the first of its kind."""
        key = (operator, form)
        if key not in self._overloads:
            count = sum(known == operator for known, _ in self._overloads)
            self._overloads[key] = str(count) if count else ""
            self.made.append(self._function(operator, form, self._overloads[key], attributes))
        return self._overloads[key]

    def _function(self, operator: str, form: Form, overload: str, attributes: Sequence[str]) -> ir.Function:
        body = Body(operator, form)
        body.graph.outputs.append(BODIES[operator](body))
        body.graph.opset_imports.update({"": self.opset, CONTRIB: 1})
        names = [value.name for node in body.graph for value in node.outputs] + list(body.inputs)
        assert len(names) == len(set(names)), f"{operator} has two values of one name"
        declared = [ir.Attr(name, ir.AttributeType.UNDEFINED, None) for name in attributes]
        return ir.Function(RUNTIME, operator, overload, graph=body.graph, attributes=declared)
