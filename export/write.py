"""Write a frozen model as ONNX files, one for each profile.

Tracing takes most of the time and does not depend on the profile, so `export_all` traces once. Each profile
lowers a copy of the trace.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

import mrem_deploy
from mrem_deploy.base.digests import UNSEALED
from mrem_deploy.base.files import atomic_file, explained, sweep_unfinished
from mrem_deploy.base.progress import say
from mrem_deploy.export.lower import Lowering
from mrem_deploy.export.origin import FILE, RESULT, seal
from mrem_deploy.export.profiles import IR_VERSIONS, PROFILES, RUNTIME, choose_opset, find_profile
from mrem_deploy.export.skeleton import Skeleton, trace
from mrem_deploy.quant.frozen import FrozenModel

LARGEST_FILE = 2**31 - 2**24  # protobuf ends at 2 GiB; above, the tensors go into a file next to the graph


def export_all(
    frozen: FrozenModel,
    folder: Path,
    profiles: Sequence[str],
    opset: int | None = None,
    attention: str = "int8",
) -> list[Path]:
    """Write each profile's file into `folder`, all from one trace; returns the paths in the same order."""
    for name in profiles:  # a bad name or opset is refused before anything is written
        _opset(frozen, name, opset)
    for profile in PROFILES.values():  # what a killed export of any profile has left
        for file in profile.files:
            sweep_unfinished(Path(folder) / file)
    skeleton = trace(frozen) if profiles else None
    paths = []
    for name in profiles:
        say(f"exporting to ONNX, profile {name}")
        path = Path(folder) / find_profile(name).file_for(bits_of(frozen))
        paths.append(export_onnx(frozen, path, name, opset, skeleton, attention))
    return paths


def export_onnx(
    frozen: FrozenModel,
    path: Path,
    profile: str = "ort-cpu",
    opset: int | None = None,
    skeleton: Skeleton | None = None,
    attention: str = "int8",
) -> Path:
    """Write `frozen` as one ONNX file, which is replaced in one step: a reader sees the old or the new one.

    `skeleton` is the trace of this model, if there is one already; it is not changed. `attention` is how the
    operators of the CPU runtime compute it, if the profile has them: int8 or float.
    """
    path = Path(path)
    model = lowered(frozen, profile, opset, skeleton, attention)
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    pattern = f"{path.name}.*.data"
    stale = list(path.parent.glob(pattern))
    if size > LARGEST_FILE:
        # A new name each time: until the graph is replaced, the old one still finds its old tensors.
        data = path.with_name(pattern.replace("*", uuid.uuid4().hex[:8]))
        with explained(data), atomic_file(path) as temporary:
            ir.save(model, temporary, external_data=data.name)
            temporary.write_bytes(seal(temporary.read_bytes()))
    else:
        with atomic_file(path) as temporary:
            temporary.write_bytes(seal(compact_proto(model).SerializeToString()))
    for old in stale:
        old.unlink()
    return path


def lowered(
    frozen: FrozenModel,
    profile: str,
    opset: int | None = None,
    skeleton: Skeleton | None = None,
    attention: str = "int8",
) -> ir.Model:
    """The full graph with its tensors, in the profile's form."""
    version = _opset(frozen, profile, opset)
    skeleton = skeleton or trace(frozen)
    model = skeleton.copy()
    lowering = Lowering(model.graph, frozen, skeleton.anatomy, find_profile(profile), version, attention)
    lowering.run()
    for function in lowering.fusion.functions.made if lowering.fusion else ():
        model.functions[function.identifier()] = function
    _tidy(model)
    model.ir_version = IR_VERSIONS[version]
    model.producer_name, model.producer_version = "mrem_deploy", mrem_deploy.__version__
    notes = {key: str(value) for key, value in frozen.notes.items()}
    model.metadata_props.update({"profile": profile, "version": mrem_deploy.__version__, **notes})
    model.metadata_props.update({RESULT: frozen.digest, FILE: UNSEALED})
    return model


def compact_proto(model: ir.Model) -> onnx.ModelProto:
    """The model without what only costs bytes: node names (their outputs have names) and inner shapes.

    Types of what operators of the runtime give stay: a reader that lacks these cannot infer them. Shapes go
    there, too, or onnxruntime fuses additions with norms where it does not for `ort-cpu`, which is slower.
    """
    proto = ir.to_proto(model)
    unknown = {name for node in proto.graph.node if node.domain == RUNTIME for name in node.output}
    kept = [value for value in proto.graph.value_info if value.name in unknown]
    for part in (proto.graph, *proto.functions):
        for node in part.node:
            node.ClearField("name")
    del proto.graph.value_info[:]
    for value in kept:
        value.type.tensor_type.ClearField("shape")
    proto.graph.value_info.extend(kept)
    return proto


def bits_of(frozen: FrozenModel) -> set[int]:
    """The bits of its quantized weights."""
    return {weight.bits for weight in frozen.weights.values()}


def _opset(frozen: FrozenModel, profile: str, opset: int | None) -> int:
    return choose_opset(find_profile(profile), bits_of(frozen), opset)


def _tidy(model: ir.Model) -> None:
    """Drop unused nodes, and the exporter's notes on where in the source a node comes from."""
    passes.RemoveUnusedNodesPass()(model)
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    model.graph.sort()
