"""One frozen model to one ONNX file."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

import mrem_deploy
from mrem_deploy.export.lower import Lowering
from mrem_deploy.export.profiles import IR_VERSIONS, choose_opset, find_profile
from mrem_deploy.export.skeleton import trace
from mrem_deploy.files import atomic_file
from mrem_deploy.freeze import FrozenModel

LARGEST_FILE = 2**31 - 2**20  # protobuf ends at 2 GiB; above, the tensors go into a file beside it


def export_onnx(frozen: FrozenModel, path: Path, profile: str = "ort-cpu", opset: int | None = None) -> Path:
    """Write `frozen` as ONNX; the file is either the old one or the whole new one."""
    model = to_onnx(frozen, profile, opset)
    with atomic_file(Path(path)) as temporary:
        onnx.save(model, temporary)
    return Path(path)


def to_onnx(frozen: FrozenModel, profile: str = "ort-cpu", opset: int | None = None) -> onnx.ModelProto:
    """The same in memory."""
    chosen = find_profile(profile)
    version = choose_opset(chosen, {weight.bits for weight in frozen.weights.values()}, opset)
    model, found = trace(frozen, version)
    Lowering(model.graph, frozen, found, chosen, version).run()
    _tidy(model)
    model.ir_version = IR_VERSIONS[version]
    model.producer_name, model.producer_version = "mrem_deploy", mrem_deploy.__version__
    notes = {key: str(value) for key, value in frozen.notes.items()}
    model.metadata_props.update({"profile": profile, "version": mrem_deploy.__version__, **notes})
    proto = ir.to_proto(model)
    for node in proto.graph.node:
        node.ClearField("name")  # an output's name says as much, and names are most of a graph's bytes
    del proto.graph.value_info[:]
    return proto


def _tidy(model: ir.Model) -> None:
    """Drop what nobody reads, and the exporter's notes on where in the source a node comes from."""
    passes.RemoveUnusedNodesPass()(model)
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    model.graph.sort()
