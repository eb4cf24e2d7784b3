"""Replace the markers of a skeleton by ONNX operators, in the form of a profile.

All the rules:

1. The input of every quantized linear passes QuantizeLinear → DequantizeLinear with the learned scale. q, k
   and v share one scale, so their quantizer is written once.
2. A weight is stored as its integers, (in, out) for MatMul, with its scale in DequantizeLinear. Codes 2
   apart (midrise) are stored in INT2 as consecutive integers; two Adds, folded at load, make codes of them.
   Readers without such types get bytes with several codes in each (`bit_fields.py`).
3. Activations are in 8-bit types, symmetric ones shifted by a zero point of 128. 4-bit codes follow a Clip to
   their range, because no runtime has 4-bit matmuls.
4. Both operands of q·kᵀ and p·v are quantized like any other. The factor before the softmax is folded into
   the scale that dequantizes q. Heads that read the same keys are one matrix with more rows.
5. Quantizers commute with Reshape and Transpose, so q, k and v are quantized before they are rearranged: this
   moves bytes instead of floats.
6. Biases are added in float, as (1, 1, N) to three axes: onnxruntime turns other forms into a float Gemm.
7. Hot rows of the word embedding come from a table of their own (`hot_rows.py`).
8. Negative ids become a row that no table has, which is an error (`ids.py`).
9. Blocks that fit an operator of the CPU runtime become one node first (`fusion.py`), and linears, too.
10. Names: `hidden.i` is the output of block i (0: of the embeddings), `<quantizer>.codes` are its integers.
    The graph's outputs have Hugging Face's names, so a bare encoder's last block is `last_hidden_state`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from mrem_deploy.export import bit_fields
from mrem_deploy.export.builder import CONTRIB, Builder
from mrem_deploy.export.codes import Codes
from mrem_deploy.export.disentangled import disentangled_scores
from mrem_deploy.export.fusion import Fusion
from mrem_deploy.export.gelu import lower_gelu
from mrem_deploy.export.hot_rows import add_hot_rows
from mrem_deploy.export.ids import refuse_negative_ids
from mrem_deploy.export.linears import Linears, name_of
from mrem_deploy.export.moves import before_moves
from mrem_deploy.export.panels import stored_as
from mrem_deploy.export.profiles import Profile
from mrem_deploy.export.skeleton import DOMAIN
from mrem_deploy.export.tensors import PACKED_BITS, carrier, integer_tensor
from mrem_deploy.models.architectures import Anatomy
from mrem_deploy.numerics import to_stored
from mrem_deploy.quant.frozen import FrozenModel, FrozenScale, FrozenWeight

HEADS_FIRST = [0, 2, 1, 3]  # (B, T, heads, d) ↔ (B, heads, T, d)


class Lowering:
    """One walk over the skeleton, in the order of execution."""

    def __init__(
        self, graph: ir.Graph, frozen: FrozenModel, found: Anatomy, profile: Profile, opset: int,
        attention: str = "int8",
    ) -> None:  # fmt: skip
        self.graph, self.frozen, self.found, self.profile, self.opset = graph, frozen, found, profile, opset
        self.build = Builder(graph)
        self.linears = Linears(frozen, found, profile.merge_qkv)
        self.fusion = Fusion(self.build, self.linears, opset, attention) if profile.fused else None
        self._quantized: dict[tuple[ir.Value, str], Codes] = {}
        self._dequantized: dict[str, ir.Value] = {}

    def run(self) -> None:
        rules = {
            "Linear": self._linear,
            "Embedding": self._embedding,
            "Attention": self._attention,
            "DisentangledAttention": self._attention,
            "Gelu": lambda node: lower_gelu(self.build, node, self.opset),
            "Hidden": self._hidden,
        }
        if self.fusion:
            self.fusion.run()
        refuse_negative_ids(self.build, self.graph)
        for node in list(self.graph):
            if node.domain == DOMAIN and node.graph is not None:  # merged ones are gone already
                self.build.anchor = node
                rules[node.op_type](node)
        self.graph.opset_imports.pop(DOMAIN, None)
        self.graph.opset_imports[""] = self.opset

    # -- activations ---------------------------------------------------------------------------------------

    def quantize(self, x: ir.Value, name: str) -> Codes | None:
        """The integers of an activation, or None if it is not quantized."""
        frozen = self.frozen.scales.get(name)
        if frozen is None:
            return None
        key = (x, name)
        if key not in self._quantized:
            moved, moves = before_moves(x)
            codes = self._quantize_here(moved, name, frozen)
            value = codes.codes
            for number, move in enumerate(moves):
                value = self.build.op(
                    move.op_type, value, *move.inputs[1:], name=f"{name}.moved.{number}",
                    **{key: attribute.value for key, attribute in move.attributes.items()},
                )  # fmt: skip
            self._quantized[key] = replace(codes, codes=value)
        return self._quantized[key]

    def _quantize_here(self, x: ir.Value, name: str, frozen: FrozenScale) -> Codes:
        grid, build = frozen.grid, self.build
        scale = frozen.scale.float().numpy().reshape(())
        low, high, offset = grid.low - grid.zero_point, grid.high - grid.zero_point, 0.0
        shift, kind = 128 if grid.signed else grid.zero_point, np.uint8
        if not self.profile.zero_points:
            shift, kind = 0, np.int8
        if not self.profile.zero_points and not grid.signed:
            middle = 2 ** (grid.bits - 1)
            low, high, offset = -middle, middle - 1, float((middle - grid.zero_point) * scale)
            if offset:
                x = build.op(
                    "Sub", x, build.constant(offset, np.float32, f"{name}.offset"), name=f"{name}.shifted"
                )
        if grid.bits < 8:
            bounds = [build.constant(b * scale, np.float32, f"{name}.{b}") for b in (low, high)]
            x = build.op("Clip", x, *bounds, name=f"{name}.clipped")
        scale_value = build.constant(scale, np.float32, f"{name}.scale")
        zero_point = build.constant(shift, kind, f"{name}.zero_point")
        codes = build.op("QuantizeLinear", x, scale_value, zero_point, name=f"{name}.codes")
        return Codes(codes, scale_value, zero_point, float(scale), offset)

    def stored_codes(self, codes: ir.Value, name: str, frozen: FrozenScale) -> Codes:
        """The same for integers that are stored, on a symmetric grid, in the profile's form."""
        scale = frozen.scale.float().numpy().reshape(())
        kind, build = np.uint8 if self.profile.zero_points else np.int8, self.build
        zero_point = build.constant(128 if kind == np.uint8 else 0, kind, f"{name}.zero_point")
        return Codes(codes, build.constant(scale, np.float32, f"{name}.scale"), zero_point, float(scale))

    def _dequantize(self, quantized: Codes, name: str, factor: float = 1.0) -> ir.Value:
        if name not in self._dequantized:
            scale = quantized.scale
            if factor != 1.0:
                scale = self.build.constant(quantized.scale_number * factor, np.float32, f"{name}.scaled")
            self._dequantized[name] = self.build.op(
                "DequantizeLinear", quantized.codes, scale, quantized.zero_point, name=f"{name}.values"
            )
        return self._dequantized[name]

    # -- linears -------------------------------------------------------------------------------------------

    def _linear(self, node: ir.Node) -> None:
        group = self.linears.merge_with(node)
        names = [name_of(member) for member in group]
        attention = self.found.shared_inputs.get(names[0])
        quantizer = f"{attention or names[0]}.input_quantizer"
        merged = "qkv" if attention in self.found.attentions else "gate_up"
        title = names[0] if len(group) == 1 else f"{attention}.{merged}"
        x = node.inputs[0]
        assert x is not None
        sentence = x.shape is not None and len(x.shape) == 2  # (B, H): one vector per sentence
        if sentence:
            axis = self.build.constant([1], np.int64, "axis.1")
            x = self.build.op("Unsqueeze", x, axis, name=f"{title}.unsqueezed")
        y = self.fusion.linear(title, names, x, quantizer) if self.fusion else None
        if y is None:
            quantized = self.quantize(x, quantizer)
            bias = self.linears.bias(names, quantized.offset if quantized else 0.0)
            y = self._product(title, names, x, quantized, quantizer, bias)
        if sentence:
            y = self.build.op("Squeeze", y, axis, name=f"{title}.squeezed")
        if len(group) == 1:
            self.build.replace(node, y)
            return
        widths = [self.linears.width(name) for name in names]
        sizes = self.build.constant(widths, np.int64, f"{title}.widths")
        parts = self.build.op("Split", y, sizes, name=f"{title}.part", axis=-1, outputs=len(names))
        for member, part in zip(group, parts, strict=True):
            self.build.replace(member, part)

    def _product(
        self,
        title: str,
        names: list[str],
        x: ir.Value,
        quantized: Codes | None,
        quantizer: str,
        bias: np.ndarray | None,
    ) -> ir.Value:
        build = self.build
        weights = [self.frozen.weights[name] for name in names if name in self.frozen.weights]
        if weights and quantized and self.profile.contrib:
            codes, scale, zero_point = self._integer_weight(title, weights)
            flat = build.constant(bias, np.float32, f"{title}.bias") if bias is not None else None
            return build.op(
                "MatMulIntegerToFloat", quantized.codes, codes, quantized.scale, scale, quantized.zero_point,
                zero_point, flat, name=f"{title}.sum", domain=CONTRIB,
            )  # fmt: skip
        if weights:
            matrix = self._dequantized_weight(title, weights)
        else:
            joined = np.concatenate([self.linears.values(name).numpy() for name in names]).T
            matrix = build.constant(np.ascontiguousarray(joined), np.float32, f"{title}.weight")
        operand = self._dequantize(quantized, quantizer) if quantized else x
        y = build.op("MatMul", operand, matrix, name=f"{title}.product")
        if bias is None:
            return y
        return build.op(
            "Add", y, build.constant(bias[None, None, :], np.float32, f"{title}.bias"), name=f"{title}.sum"
        )

    def _dequantized_weight(self, title: str, weights: list[FrozenWeight]) -> ir.Value:
        codes, scale, zero_point = self._integer_weight(title, weights)
        if not self.profile.cast_weights:
            return self.build.op("DequantizeLinear", codes, scale, zero_point, name=f"{title}.weight", axis=1)
        # With a float activation, onnxruntime would take DequantizeLinear for a request to quantize the
        # activation to 8 bits as well. Plain arithmetic it folds to floats when loading.
        values = self.build.op("Cast", codes, name=f"{title}.weight.float", to=ir.DataType.FLOAT)
        if zero_point is not None:
            shift = self.build.constant(self._middle(weights[0]), np.float32, "middle")
            values = self.build.op("Sub", values, shift, name=f"{title}.weight.shifted")
        return self.build.op("Mul", values, scale, name=f"{title}.weight")

    def _integer_weight(
        self, title: str, weights: list[FrozenWeight]
    ) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """Codes (in, out) as the profile stores them, their scale (one, or one per output channel) and
        their zero point, if they have one."""
        codes = np.concatenate([weight.codes.numpy() for weight in weights]).T
        if len(weights) == 1 and weights[0].scale.numel() == 1:
            scales = weights[0].scale.float().numpy().reshape(())
        else:  # matrices side by side have a scale per channel, even if each has only one
            scales = np.concatenate(
                [np.broadcast_to(w.scale.float().numpy().reshape(-1), w.codes.shape[:1]) for w in weights]
            )
        scale = self.build.constant(scales, np.float32, f"{title}.weight.scale")
        kind = carrier(self.profile, weights[0].bits, self.opset, weights[0].spacing)
        zero_point = None
        if kind == ir.DataType.UINT8:
            middles = np.full(scales.shape, self._middle(weights[0]))
            zero_point = self.build.constant(middles, np.uint8, f"{title}.weight.zero_point")
        name = f"{title}.weight.codes"
        if self._in_fields(weights[0]):
            packed = bit_fields.stored(self.build, codes, weights[0], name)
            return bit_fields.unpack(self.build, packed, codes.shape[1], weights[0], name), scale, zero_point
        return self._stored(codes, weights[0], kind, name), scale, zero_point

    def _in_fields(self, weight: FrozenWeight) -> bool:
        return self.profile.bit_fields and weight.bits <= bit_fields.MOST_BITS

    def _middle(self, weight: FrozenWeight) -> int:
        """The UINT8 code that stands for 0."""
        return bit_fields.middle(weight) if self._in_fields(weight) else 128

    def _stored(self, codes: np.ndarray, weight: FrozenWeight, kind: ir.DataType, name: str) -> ir.Value:
        spacing = weight.spacing
        if self.fusion and kind in PACKED_BITS:
            return self.fusion.unpacked(codes, stored_as(weight.bits, spacing), name)
        build, odd = self.build, spacing == 2 and kind == ir.DataType.INT2
        stored = build.initializer(integer_tensor(to_stored(codes, spacing) if odd else codes, kind, name))
        if kind not in PACKED_BITS or not self.profile.cast_weights:
            return stored
        cast = build.op("Cast", stored, name=f"{name}.stored" if odd else f"{name}.int8", to=ir.DataType.INT8)
        if not odd:
            return cast
        # `from_stored` in bytes: 2t + 1. A Gather from the four codes folds too, but takes seconds to load.
        doubled = build.op("Add", cast, cast, name=f"{name}.doubled")
        return build.op("Add", doubled, build.constant(1, np.int8, "one"), name=f"{name}.int8")

    # -- the rest ------------------------------------------------------------------------------------------

    def _embedding(self, node: ir.Node) -> None:
        name, ids, build = name_of(node), node.inputs[0], self.build
        weight = self.frozen.weights.get(name)
        if weight is None:
            table = build.initializer(ir.tensor(self.linears.values(name).numpy(), name=f"{name}.weight"))
            self.build.replace(node, build.op("Gather", table, ids, name=f"{name}.rows", axis=0))
            return
        kind = carrier(self.profile, weight.bits, self.opset, weight.spacing)
        if kind == ir.DataType.UINT8:
            kind = ir.DataType.INT8  # rows are looked up, not multiplied, so they need no zero point
        title, fields = f"{name}.weight.codes", self._in_fields(weight)
        if fields:
            codes = bit_fields.stored(build, weight.codes.numpy(), weight, title)
        else:
            codes = self._stored(weight.codes.numpy(), weight, kind, title)
        scales = weight.scale.float().numpy().reshape(-1)
        if self.profile.lookup_codes:
            scale = build.initializer(ir.tensor(scales.reshape(-1, 1), name=f"{name}.weight.scale"))
            looked_up = build.op("Gather", codes, ids, name=f"{name}.rows.codes", axis=0)
            if fields:  # only the rows that are used are unpacked
                looked_up = bit_fields.unpack(build, looked_up, weight.codes.shape[1], weight, f"{name}.rows")
            values = build.op("Cast", looked_up, name=f"{name}.rows.float", to=ir.DataType.FLOAT)
            if fields:
                shift = build.constant(self._middle(weight), np.float32, "middle")
                values = build.op("Sub", values, shift, name=f"{name}.rows.centred")
            row_scale = build.op("Gather", scale, ids, name=f"{name}.rows.scale", axis=0)
            rows = build.op("Mul", values, row_scale, name=f"{name}.rows")
        else:
            scale = build.initializer(ir.tensor(scales, name=f"{name}.weight.scale"))
            table = build.op("DequantizeLinear", codes, scale, name=f"{name}.weight", axis=0)
            rows = build.op("Gather", table, ids, name=f"{name}.rows", axis=0)
        if weight.hot is not None:
            assert ids is not None
            rows = add_hot_rows(build, self.profile, name, ids, rows, weight.hot, len(weight.codes))
        build.replace(node, rows)

    def _attention(self, node: ir.Node) -> None:
        name, build = name_of(node), self.build
        query, key, value, *mask = node.inputs
        assert query is not None
        assert key is not None
        assert value is not None
        scaling = float(node.attributes["scaling"].value)
        heads, groups = _heads(query), _heads(key)
        if node.op_type == "DisentangledAttention":
            scores = disentangled_scores(self, name, query, key, mask.pop(), scaling)
        else:
            turned = build.op("Transpose", key, name=f"{name}.key.turned", perm=[0, 1, 3, 2])
            if heads != groups:
                query = self._in_heads(query, groups, f"{name}.query.grouped")
            scores = self._matmul(f"{name}.scores", query, turned, scaling)
        if heads != groups:
            scores = self._in_heads(scores, heads, f"{name}.scores.apart")
        if mask:
            scores = build.op("Add", scores, mask[0], name=f"{name}.masked")
        probabilities = build.op("Softmax", scores, name=f"{name}.probabilities", axis=-1)
        if heads != groups:
            probabilities = self._in_heads(probabilities, groups, f"{name}.probabilities.grouped")
        context = self._matmul(f"{name}.context", probabilities, value)
        if heads != groups:
            context = self._in_heads(context, heads, f"{name}.context.apart")
        self.build.replace(
            node, build.op("Transpose", context, name=f"{name}.context.turned", perm=HEADS_FIRST)
        )

    def _in_heads(self, x: ir.Value, heads: int, name: str) -> ir.Value:
        """(B, ·, ·, d) as (B, heads, ·, d): rows of heads that read the same keys are one after another."""
        shape = self.build.constant([0, heads, -1, 0], np.int64, f"in.{heads}.heads")
        return self.build.op("Reshape", x, shape, name=name)

    def _matmul(self, name: str, left: ir.Value, right: ir.Value, factor: float = 1.0) -> ir.Value:
        """left·right·factor, with operands quantized if they have scales."""
        a, b = self.quantize(left, f"{name}.left"), self.quantize(right, f"{name}.right")
        return self.multiply(name, left, a, right, b, factor)

    def multiply(
        self,
        name: str,
        left: ir.Value,
        a: Codes | None,
        right: ir.Value,
        b: Codes | None,
        factor: float = 1.0,
    ) -> ir.Value:
        """left·right·factor; where an operand has codes, these are read."""
        build = self.build
        if a is not None and b is not None and self.profile.contrib:
            scale = build.constant(a.scale_number * factor, np.float32, f"{name}.left.scaled")
            return build.op(
                "MatMulIntegerToFloat", a.codes, b.codes, scale, b.scale, a.zero_point, b.zero_point,
                name=name, domain=CONTRIB,
            )  # fmt: skip
        # Without a quantizer on the left there is no scale to fold the factor into.
        folded = factor if a is not None else 1.0
        first = self._dequantize(a, f"{name}.left", folded) if a is not None else left
        second = self._dequantize(b, f"{name}.right") if b is not None else right
        y = build.op("MatMul", first, second, name=f"{name}.product")
        if folded != factor:
            y = build.op(
                "Mul", y, build.constant(factor, np.float32, f"{name}.factor"), name=f"{name}.scaled"
            )
        if a is not None and a.offset:
            # The left operand was shifted by a constant: add it times the column sums of the right one.
            axis = build.constant([-2], np.int64, "axis.rows")
            sums = build.op("ReduceSum", second, axis, name=f"{name}.right.sums", keepdims=1)
            offset = build.constant(a.offset * factor, np.float32, f"{name}.left.offset")
            y = build.op("Add", y, build.op("Mul", sums, offset, name=f"{name}.shift"), name=f"{name}.sum")
        return y

    def _hidden(self, node: ir.Node) -> None:
        x = node.inputs[0]
        assert x is not None
        x.name = name_of(node)
        self.build.replace(node, x)


def _heads(x: ir.Value) -> int:
    heads = x.shape[1] if x.shape is not None else None  # (B, heads, ·, ·)
    assert isinstance(heads, int), f"{x.name} has no known number of heads"
    return heads
