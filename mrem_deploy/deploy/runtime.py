"""ONNX models in onnxruntime: sessions, inputs and predictions.

Note: the nodes of the file are not the nodes that run. onnxruntime folds and fuses them when it loads the
file; `census` counts what is left. onnx and onnxruntime are optional packages, imported when a function needs
them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.options import MOST_THREADS
from mrem_deploy.base.outside import shown
from mrem_deploy.deploy import own_runtime, providers
from mrem_deploy.deploy.optimizers import check_optimizers
from mrem_deploy.deploy.providers import ON_CPU, InputShapes, Placement
from mrem_deploy.evaluate.predict import Predictor

EXPORT_PACKAGES = ("onnx", "onnx_ir", "onnxscript")
INSTALL = 'pip install "mrem-deploy[cpu]"'
UNKNOWN_OPERATOR = re.compile(r"mrem\.runtime:\w+\S* is not a registered")  # one that the library lacks
TOO_OLD = ("Unsupported model IR version", "opset", "Could not find an implementation", "is not a registered")


def missing_packages(*needed: str) -> list[str]:
    """Which of these packages are not installed. Imports none of them."""
    return [name for name in needed if find_spec(name) is None]


def require(*needed: str) -> None:
    missing = missing_packages(*needed)
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(f"{' and '.join(missing)} {verb} not installed", INSTALL)


def placement(provider: str, model: Path, batch: int, tokens: int) -> Placement:
    """How the model runs on a provider ('cuda'), with at most that many sentences and tokens at once.

    On the CPU with the operators of the CPU runtime, if the model has any and the package is installed.
    """
    require("onnxruntime")
    import onnxruntime

    shapes = None
    if providers.is_tensorrt(provider):
        names = tuple(entry.name for entry in open_session(model).get_inputs())
        shapes = InputShapes(names, batch, tokens)
    where = providers.place(provider, onnxruntime.get_available_providers(), shapes)
    return own_runtime.placed(where, model)


def open_session(
    model: Path | bytes,
    threads: int = 0,
    where: Placement = ON_CPU,
    options: Any = None,
    title: str = "",
    disabled_optimizers: Sequence[str] = (),
) -> Any:
    """An InferenceSession with onnxruntime's default options, except for the threads (0: its choice) and what
    the provider needs. A provider that does not start is an error.

    `options` are SessionOptions to start from instead of the defaults; `title` names the model in messages
    if it is given as bytes.
    """
    require("onnxruntime")
    import onnxruntime

    if isinstance(model, Path) and not model.is_file():
        raise UserError(f"there is no ONNX model {model}", f"write it first: {_export_command(model.parent)}")
    check_optimizers(disabled_optimizers)
    if isinstance(threads, bool) or not isinstance(threads, int) or not 0 <= threads <= MOST_THREADS:
        raise UserError(
            f"threads must be a whole number from 0 to {MOST_THREADS}; got {shown(threads)}",
            "0 leaves the number to onnxruntime",
        )
    options = onnxruntime.SessionOptions() if options is None else options
    if threads:
        options.intra_op_num_threads = threads
    if where.library is not None:
        options.register_custom_ops_library(where.library)
    for key, value in where.config.items():
        options.add_session_config_entry(key, value)
    source = model if isinstance(model, bytes) else str(model)
    providers.preload(onnxruntime, where.first)
    try:
        session = onnxruntime.InferenceSession(
            source,
            options,
            providers=where.for_session(),
            disabled_optimizers=list(disabled_optimizers) or None,
        )
    except _errors_of(onnxruntime) as error:
        raise _not_loaded(model, title or str(model), error, onnxruntime.__version__) from error
    providers.started(session, where.first)
    return session


def _errors_of(onnxruntime: Any) -> tuple[type[Exception], ...]:
    """onnxruntime's exceptions have no common base class."""
    found = inspect.getmembers(onnxruntime.capi.onnxruntime_pybind11_state, inspect.isclass)
    return tuple(kind for _, kind in found if issubclass(kind, Exception))


def _export_command(folder: Path) -> str:
    return f"python -m mrem_deploy.export {folder}"


def _not_loaded(model: Path | bytes, title: str, error: Exception, version: str) -> UserError:
    reason = _in_short(str(error))
    folder = model.parent if isinstance(model, Path) else Path(title).parent
    if "update mrem-runtime" in reason or UNKNOWN_OPERATOR.search(reason):
        return UserError(
            f"{title} was made for a newer mrem-runtime than the one installed here: {reason}",
            f"update it: {own_runtime.INSTALL}; or export it again: {_export_command(folder)} --profile "
            "mrem-cpu",
        )
    written = _opset(model)
    if written and any(sign in reason for sign in TOO_OLD):
        oldest = _oldest_runtime(Path(title), written[0])
        return UserError(
            f"{title} has opset {written[0]} and IR version {written[1]}; the installed onnxruntime "
            f"{version} cannot run it: {reason}",
            f"install {f'onnxruntime {oldest} or newer' if oldest else 'a newer onnxruntime'}, or write the "
            f"model for old runtimes: {_export_command(folder)} --profile int8",
        )
    return UserError(
        f"{title} cannot be loaded by onnxruntime {version}: {reason}",
        f"if the file is cut short, copy it again or export it again: {_export_command(folder)}",
    )


def _in_short(text: str) -> str:
    """Without the error code and the place in onnxruntime's C++ sources, which fill a line each."""
    first = (text.strip() or "it gives no reason").splitlines()[0]
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", first)
    return re.sub(r"/\S*onnxruntime\S*:\d+ .*\) ", " ", text).strip()


def _opset(model: Path | bytes) -> tuple[int, int] | None:
    """(opset, IR version) of the file; None if it is no ONNX file."""
    if missing_packages("onnx"):
        return None
    import onnx
    from google.protobuf.message import DecodeError

    try:
        graph = (
            onnx.load_model_from_string(model)
            if isinstance(model, bytes)
            else onnx.load(model, load_external_data=False)
        )
    except DecodeError:
        return None
    versions = [entry.version for entry in graph.opset_import if entry.domain in ("", "ai.onnx")]
    return (versions[0], graph.ir_version) if versions else None


def _oldest_runtime(file: Path, opset: int) -> str | None:
    """The oldest onnxruntime for a file of ours, where that is known."""
    if missing_packages(*EXPORT_PACKAGES):
        return None
    from mrem_deploy.export.profiles import INT2_OPSET, INT2_RUNTIME, PROFILES, name_in_result

    profile = next((profile for profile in PROFILES.values() if name_in_result(file) in profile.files), None)
    known = {profile.opset: profile.oldest_runtime, INT2_OPSET: INT2_RUNTIME} if profile else {}
    return known.get(opset)


def feed(session: Any, batch: Mapping[str, torch.Tensor | np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs that the session has, as int64.

    Token types are all 0 if the tokenizer gives none, as in the torch model. Negative ids are refused: ONNX
    counts them from the end of the table, without an error.
    """
    given = {
        name: (value.cpu().numpy() if isinstance(value, torch.Tensor) else value).astype(np.int64)
        for name, value in batch.items()
    }
    given.setdefault("token_type_ids", np.zeros_like(given["input_ids"]))
    for name in ("input_ids", "token_type_ids"):
        if (given[name] < 0).any():
            raise UserError(
                f"{name} must be 0 or more; got {given[name].min()}",
                "check the tokenizer: an ONNX graph reads a negative id from the end of its table",
            )
    names = [entry.name for entry in session.get_inputs()]
    if unknown := sorted(set(names) - given.keys()):
        raise UserError(
            f"the model has an input {shown(unknown[0])}, which no tokenizer gives; those here are "
            f"{', '.join(given)}",
            "give a model that mrem export wrote",
        )
    return {name: given[name] for name in names}


def run_batch(session: Any, batch: Mapping[str, torch.Tensor | np.ndarray]) -> list[np.ndarray]:
    """The outputs of an ONNX model for a padded batch, in the order of the file."""
    import onnxruntime

    inputs = feed(session, batch)
    try:
        return session.run(None, inputs)
    except _errors_of(onnxruntime) as error:  # ids beyond the vocabulary, among others
        raise UserError(
            f"onnxruntime {onnxruntime.__version__} cannot run the model on this batch: "
            f"{_in_short(str(error))}",
            "check that the tokenizer belongs to the model; if the memory is full, give a smaller batch",
        ) from error


def onnx_predictor(session: Any) -> Predictor:
    """The outputs of an ONNX model in the order of the file, for each example or each of its tokens."""

    def predict(batch: Mapping[str, torch.Tensor]) -> list[np.ndarray]:
        outputs = run_batch(session, batch)
        if not _are_predictions(outputs, tuple(batch["input_ids"].shape)):
            found = ", ".join(f"{value.dtype} {list(value.shape)}" for value in map(np.asarray, outputs))
            raise UserError(
                f"for {' x '.join(map(str, batch['input_ids'].shape))} tokens the model gives {found}: no "
                "floats for each example or token",
                "give a model that mrem export wrote",
            )
        return outputs

    return predict


def _are_predictions(outputs: Sequence[Any], tokens: tuple[int, ...]) -> bool:
    """Whether outputs are (B, N), (B, T, N), or several (B, T)."""
    if not outputs or not all(isinstance(value, np.ndarray) and value.dtype.kind == "f" for value in outputs):
        return False
    shapes = [value.shape for value in outputs]
    if len(shapes) > 1:
        return set(shapes) == {tokens}
    return shapes[0][:1] == tokens[:1] if len(shapes[0]) == 2 else shapes[0][:-1] == tokens


def check_alike(title: str, rows: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> None:
    """Refuse a model whose predictions cannot be compared with those of another for the same examples."""
    for own, other in zip(rows, reference, strict=True):
        if own.shape != other.shape:
            raise UserError(
                f"{title} gives {' x '.join(map(str, own.shape))} numbers for an example, the model that it "
                f"is compared with gives {' x '.join(map(str, other.shape))}",
                "it was exported from another model: export it again",
            )


def with_outputs(model: Path, wanted: Sequence[str]) -> tuple[bytes, Any]:
    """A copy of the model in memory with inner values as further outputs, and options to open it.

    Names that the graph lacks are left out; the session's outputs show which are there.
    """
    require("onnx", "onnxruntime")
    import onnx
    import onnxruntime

    copy = onnx.load(model, load_external_data=False)
    there = {name for node in copy.graph.node for name in node.output}
    own = {value.name for value in copy.graph.output}
    for name in wanted:
        if name in there - own:
            shape = ["batch", "sequence", None]
            copy.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    options = onnxruntime.SessionOptions()
    folder = str(model.resolve().parent)  # weights of more than 2 GiB are files next to the model
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    return copy.SerializeToString(), options
