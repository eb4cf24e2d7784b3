"""The rivals, made from the same full-precision model, each as its documentation says.

1. ORT fp32: `torch.onnx.export` of the Hugging Face model, dynamic batch and sequence.
2. `quantize_dynamic`, at its defaults and per channel: int8 weights, activations quantized as they come.
3. `quantize_static`, QDQ after its own pre-processing, calibrated on a few sentences: at its defaults (int8
   activations) and with uint8 activations, because on x86 processors half of the int8 matmuls run in float.
4. fp16 for GPUs, by the converter that comes with onnxruntime.
5. OpenVINO's int8: by NNCF where that is installed, else the QDQ model of 3 in OpenVINO's runtime.

Every function fails if its model has nothing quantized: a rival that silently stayed in full precision would
be easy to beat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mrem_deploy.base.errors import UserError
from mrem_deploy.export.tracing import INPUTS, quiet_tools, traced

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mrem_deploy.data.encoded import Encoded

CALIBRATION_BATCH = 4
LARGEST_FILE = 2**31  # bytes of one protobuf
FLOAT_PRODUCTS = ("MatMul", "Gemm")


def export_fp32(model: PreTrainedModel, path: Path) -> Path:
    """The model as onnxruntime users export it."""
    size = sum(value.numel() * value.element_size() for value in model.parameters())
    if size >= LARGEST_FILE:
        raise UserError(
            f"the full-precision model has {size / 2**30:.1f} GiB; rivals are single files of at most 2 GiB",
            "measure a smaller model, or the geometry of this one with fewer layers",
        )
    # Both forms of attention run equally fast in onnxruntime; this one has fewer nodes to be quantized.
    model.set_attn_implementation("eager")
    traced(model).save(path, external_data=False)
    _drop_shapes_of_weights(path)
    return path


def _drop_shapes_of_weights(path: Path) -> None:
    """onnxruntime's quantizers transpose the weight of a Gemm but not its noted shape, and then refuse
    the file. The weight itself has the shape anyway."""
    import onnx

    model = onnx.load(path)
    weights = {weight.name for weight in model.graph.initializer}
    kept = [value for value in model.graph.value_info if value.name not in weights]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)
    onnx.save(model, path)


def quantize_dynamically(fp32: Path, path: Path, per_channel: bool) -> Path:
    from onnxruntime.quantization import quantize_dynamic

    with quiet_tools():
        quantize_dynamic(fp32, path, per_channel=per_channel)
    _check_nodes(path, "quantize_dynamic", "MatMulInteger")
    return path


def quantize_statically(
    fp32: Path,
    path: Path,
    tokens: Encoded,
    unsigned: bool = False,
    operators: Sequence[str] | None = None,
) -> Path:
    """`operators` are the kinds of operators to quantize; None: every kind, its default."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Sentences(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = calibration_batches(tokens)

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.batches, None)

    prepared = path.with_name(f"prepared-{path.name}")
    with quiet_tools():
        # Its symbolic shape inference does not get through torch's graphs ("Incomplete symbolic shape
        # inference"); the optimization and onnx's own shape inference are done.
        quant_pre_process(fp32, prepared, skip_symbolic_shape=True)
        kind = QuantType.QUInt8 if unsigned else QuantType.QInt8  # the second is its default
        quantize_static(
            prepared,
            path,
            Sentences(),
            activation_type=kind,
            op_types_to_quantize=operators and list(operators),
        )
    prepared.unlink()
    _check_nodes(path, "quantize_static", "QuantizeLinear")
    return path


def convert_to_fp16(fp32: Path, path: Path) -> Path:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with quiet_tools():
        half = convert_float_to_float16(onnx.load(fp32), keep_io_types=True)
    onnx.save(half, path)
    weights = {weight.data_type for weight in half.graph.initializer}
    if onnx.TensorProto.FLOAT16 not in weights:
        raise AssertionError("the fp16 model has no fp16 weights")
    return path


def quantize_by_nncf(fp32: Path, path: Path, tokens: Encoded) -> Path:
    """NNCF's post-training quantization for transformers, saved as OpenVINO's own format (.xml and .bin)."""
    import nncf
    import openvino

    with quiet_tools():
        model = openvino.Core().read_model(fp32)
        batches = list(calibration_batches(tokens))
        quantized = nncf.quantize(
            model,
            nncf.Dataset(batches),
            subset_size=len(batches),
            model_type=nncf.ModelType.TRANSFORMER,
        )
        openvino.save_model(quantized, path, compress_to_fp16=False)
    kinds = Counter(node.get_type_name() for node in quantized.get_ops())
    if not kinds["FakeQuantize"]:
        raise AssertionError("NNCF quantized nothing")
    return path


def calibration_batches(tokens: Encoded) -> Iterator[dict[str, np.ndarray]]:
    for start in range(0, len(tokens), CALIBRATION_BATCH):
        batch = tokens.batch(np.arange(start, min(start + CALIBRATION_BATCH, len(tokens))))
        yield {name: batch[name].numpy() for name in INPUTS if name in batch}


def node_kinds(path: Path) -> Counter[str]:
    import onnx

    return Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


def _check_nodes(path: Path, maker: str, kind: str) -> None:
    kinds = node_kinds(path)
    if not kinds[kind]:
        products = ", ".join(f"{kinds[name]} {name}" for name in FLOAT_PRODUCTS)
        raise AssertionError(f"{maker} left no {kind} in its model, but {products}: it quantized nothing")
