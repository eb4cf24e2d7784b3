"""One frozen model to one ONNX file."""

from __future__ import annotations

import uuid
from pathlib import Path

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

import mrem_deploy
from mrem_deploy.base.files import atomic_file, explained
from mrem_deploy.export.lower import Lowering
from mrem_deploy.export.profiles import IR_VERSIONS, choose_opset, find_profile
from mrem_deploy.export.skeleton import trace
from mrem_deploy.quant.frozen import FrozenModel

LARGEST_FILE = 2**31 - 2**24  # protobuf ends at 2 GiB; above, the tensors go into a file beside the graph


def export_onnx(frozen: FrozenModel, path: Path, profile: str = "ort-cpu", opset: int | None = None) -> Path:
    """Write `frozen` as ONNX; the file is either the old one or the whole new one."""
    path = Path(path)
    model = lowered(frozen, profile, opset)
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    beside = f"{path.name}.*.data"
    stale = list(path.parent.glob(beside))
    if size > LARGEST_FILE:
        # Under a name of its own: until the graph is replaced, the old one still finds its old tensors.
        data = path.with_name(beside.replace("*", uuid.uuid4().hex[:8]))
        with explained(data), atomic_file(path) as temporary:
            ir.save(model, temporary, external_data=data.name)
    else:
        with atomic_file(path) as temporary:
            onnx.save(_plain(model), temporary)
    for old in stale:
        old.unlink()
    return path


def to_onnx(frozen: FrozenModel, profile: str = "ort-cpu", opset: int | None = None) -> onnx.ModelProto:
    """The same in memory, for models below 2 GiB."""
    return _plain(lowered(frozen, profile, opset))


def lowered(frozen: FrozenModel, profile: str, opset: int | None) -> ir.Model:
    """The whole graph with its tensors, as the profile writes it."""
    chosen = find_profile(profile)
    version = choose_opset(chosen, {weight.bits for weight in frozen.weights.values()}, opset)
    model, found = trace(frozen)
    Lowering(model.graph, frozen, found, chosen, version).run()
    _tidy(model)
    model.ir_version = IR_VERSIONS[version]
    model.producer_name, model.producer_version = "mrem_deploy", mrem_deploy.__version__
    notes = {key: str(value) for key, value in frozen.notes.items()}
    model.metadata_props.update({"profile": profile, "version": mrem_deploy.__version__, **notes})
    return model


def _tidy(model: ir.Model) -> None:
    """Drop what nobody reads, and the exporter's notes on where in the source a node comes from."""
    passes.RemoveUnusedNodesPass()(model)
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    model.graph.sort()


def _plain(model: ir.Model) -> onnx.ModelProto:
    """Without what only costs bytes: names of nodes (their outputs have some), shapes inside."""
    proto = ir.to_proto(model)
    for node in proto.graph.node:
        node.ClearField("name")
    del proto.graph.value_info[:]
    return proto
