"""Which matmuls of an exported model really run on integers, counted in the graph onnxruntime optimized."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.scratch import scratch_folder
from mrem_deploy.deploy.providers import CPU, ON_CPU, Placement
from mrem_deploy.deploy.runtime import open_session, require, run_batch
from mrem_deploy.export.profiles import RUNTIME

# Matmuls by what they multiply. Both sets name operators of ONNX and of onnxruntime's own domain.
INTEGER_PRODUCTS = frozenset(
    {
        *("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul", "QGemm"),
        *("QAttention", "ConvInteger", "QLinearConv"),
    }
)
# Operators of the CPU runtime, by how many matmuls they are.
RUNTIME_PRODUCTS = {"AttentionBlock": 4, "FeedForwardBlock": 2, "LowBitLinear": 1}
FLOAT_ATTENTION = 2  # of an AttentionBlock with attention="float"

FLOAT_PRODUCTS = frozenset(
    {
        *("MatMul", "FusedMatMul", "Gemm", "FusedGemm", "GemmFloat8", "Einsum", "Conv", "FusedConv"),
        # Integer weights, but dequantized before a float matmul.
        *("MatMulNBits", "MatMulBnb4", "MatMulFpQ4"),
        *("Attention", "MultiHeadAttention", "GroupQueryAttention", "PackedAttention", "FlexAttention"),
    }
)


@dataclass(frozen=True)
class Census:
    """What runs after optimization: matmuls by operator, and nodes by execution provider.

    TensorRT compiles the graph; then there are no operators to count.
    """

    integer: dict[str, int]
    floating: dict[str, int]
    floating_nodes: list[str]
    providers: dict[str, int]

    @property
    def integer_count(self) -> int:
        return sum(self.integer.values())

    @property
    def floating_count(self) -> int:
        return sum(self.floating.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def census(
    model: Path,
    batch: Mapping[str, torch.Tensor],
    threads: int = 0,
    where: Placement = ON_CPU,
) -> Census:
    """Count what runs: the optimized graph for the operators, one profiled run for the providers.

    A provider that was asked for and ran nothing is an error.
    """
    require("onnx", "onnxruntime")
    import onnx
    import onnxruntime

    with scratch_folder("census") as folder:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # hides the warning that the optimized file is for this machine only
        if not where.compiles_graph:
            options.optimized_model_filepath = str(folder / "optimized.onnx")
            options.add_session_config_entry(
                "session.optimized_model_external_initializers_file_name", "weights.bin"
            )
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")
        session = open_session(model, threads, where, options)
        run_batch(session, batch)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        del session
        nodes = []
        if not where.compiles_graph:
            nodes = list(_nodes(onnx.load(folder / "optimized.onnx", load_external_data=False).graph))
    used = Counter(_provider(event) for event in events if event.get("cat") == "Node" and _provider(event))
    if where.first != CPU and where.first not in used:
        raise UserError(
            f"no node of {model.name} ran on {where.first}, only on {', '.join(used)}",
            "validate the profile that is made for it: --profile int8 for CUDA, tensorrt for TensorRT",
        )
    kinds = Counter(node.op_type for node in nodes)
    float_blocks = sum(map(_in_float, nodes))
    return Census(
        integer={kind: count for kind, count in sorted(kinds.items()) if kind in INTEGER_PRODUCTS}
        | _in_blocks(nodes),
        floating={kind: count for kind, count in sorted(kinds.items()) if kind in FLOAT_PRODUCTS}
        | ({"AttentionBlock": FLOAT_ATTENTION * float_blocks} if float_blocks else {}),
        floating_nodes=[node.name or node.output[0] for node in nodes if node.op_type in FLOAT_PRODUCTS],
        providers=dict(used),
    )


def _in_blocks(nodes: Sequence[Any]) -> dict[str, int]:
    """Matmuls on integers inside operators of the CPU runtime."""
    found: Counter[str] = Counter()
    for node in nodes:
        if node.domain == RUNTIME and node.op_type in RUNTIME_PRODUCTS:
            found[node.op_type] += RUNTIME_PRODUCTS[node.op_type] - FLOAT_ATTENTION * _in_float(node)
    return dict(sorted(found.items()))


def _in_float(node: Any) -> bool:
    return node.domain == RUNTIME and any(a.name == "attention" and a.s == b"float" for a in node.attribute)


def _nodes(graph: Any) -> Any:
    """Every node, also those inside If and Loop."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _provider(event: Mapping[str, Any]) -> str:
    return str(event.get("args", {}).get("provider", ""))
