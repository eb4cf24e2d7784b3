"""Golden hashes: tiny runs of every method, bit setting and head, whose results must not change by accident.

    python tests/helpers/golden.py record        write tests/helpers/golden.json from this code
    python tests/helpers/golden.py check         compare; exit code 1 and the list of what differs
    python tests/helpers/golden.py check --few   one run for each method and head: what the test suite does

Each run leaves two digests per file: of its *structure* (names, shapes, types, key order, operators), which
holds on every machine, and of its *values*. Values depend on the arithmetic of torch and onnxruntime, which
differs between processors. So runs use torch's plainest code paths (see ARITHMETIC), and `fingerprint` says
whether two machines compute alike; values are compared only where it is equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FILE = HERE / "golden.json"

# The same sums in the same order on every x86 processor, as far as the libraries can be asked for it.
ARITHMETIC = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F",
}
METHODS = ("mrem-s", "mrem-p", "rem", "ptq", "qat")
BITS = ("4-4-8", "2-2-8", "auto-8")
HEADS = ("text-classification", "squad", "token-classification")
PROFILES = "ort-cpu,qdq,int8,tensorrt"
BUDGETS_MIB = {"text-classification": 0.0165, "squad": 0.0165, "token-classification": 0.0165}
FEW = [
    ("mrem-s", "4-4-8", "text-classification"),
    ("mrem-s", "2-2-8", "squad"),
    ("mrem-s", "auto-8", "token-classification"),
    ("mrem-p", "2-2-8", "token-classification"),
    ("rem", "4-4-8", "squad"),
    ("ptq", "auto-8", "text-classification"),
    ("qat", "2-2-8", "text-classification"),
]
# What tells nothing about the model: times, memory, places and the machine.
# The recipe's digest names the folders of the run; `recipe_digest` below is that of a fixed recipe.
NOT_COMPARED = ("environment", "cost", "recipe_digest", "version")
# Keys of metrics.json and validation.json that are younger than the record.
NOT_COMPARED += ("kl", "kl_error", "flips", "flips_error", "fidelity", "scored_by", "torch_examples")
NOT_COMPARED += ("drift",)
NOT_COMPARED += ("digests", "result_digest", "file_sha256", "changed_since_export")
# And of config.json: what tells transformers that the weights are packed.
NOT_COMPARED += ("quantization_config", "transformers_weights")
# So are these two entries of an ONNX file: its size is compared without their bytes.
DIGEST_MIB = 164 / 2**20
SIZES = ("onnx_mb", "size_mb")
# So is the guard against negative ids in ONNX files: all of it is compared as if there were none.
GUARD = (".negative", ".checked")  # end the names of what its nodes make
GUARD_CONSTANTS = ("ids.zero", "ids.nowhere")
GUARD_NODES = {"CPUExecutionProvider": 4}  # two for the ids and two for their types, where nodes are counted
# The options that there were when golden.json was recorded. The lines of younger ones in recipe.yaml are not
# compared; where the default of a younger one changes a result, `run_cell` names the value that does not.
RECORDED_OPTIONS = (
    "model", "task", "data", "out", "bits", "budget_mb", "sensitivity", "method", "modules", "steps",
    "calib_size", "batch_size", "max_length", "lr", "step_lr", "seed", "per_channel", "symmetric",
    "keep_fp", "weight_quantizer", "curvature", "text_column", "text_pair_column", "label_column",
    "eval_data", "eval_size", "staleness", "teacher_forcing", "deterministic", "workers", "max_restarts",
    "worker_timeout", "train_size", "qat_epochs", "qat_lr", "qat_evals", "accumulate", "init_batches",
    "checkpoint_steps", "cache_dir", "max_memory", "export", "validate", "threads", "device", "kernels",
)  # fmt: skip


def cells() -> list[tuple[str, str, str]]:
    return [(method, bits, head) for head in HEADS for bits in BITS for method in METHODS]


def cell_name(cell: tuple[str, str, str]) -> str:
    return " ".join(cell)


def run_cell(cell: tuple[str, str, str], root: Path) -> Path:
    """One run of `mrem quantize` in this process; returns its result folder."""
    from mrem_deploy import quantize

    method, bits, head = cell
    out = root / "-".join(cell)
    options: dict[str, Any] = {
        "model": root / f"model-{head}",
        "data": root / f"data-{head}",
        "out": out,
        "task": head,
        "bits": bits,
        "method": method,
        "modules": 2,
        "checkpoint-steps": 4,
        "calib-size": 32,
        "batch-size": 8,
        "max-length": 32,
        "init-batches": 2,
        "kernels": "reference",
        "scored-by": "torch",
        "holdout": 0,
        "teacher-cache": "never",
        "hot-rows": 0,
        "embedding-rate": 1,
        "output-loss": "mse",
        # Every method freezes to the same kind of model: one of them shows what the export makes of it.
        "export": PROFILES if method == "mrem-s" else "none",
    }
    if method == "qat":
        options |= {"qat-epochs": "1+1", "train-size": 32, "qat-warmup": 0}
        options |= {"steps": 4000, "lr": 5e-5} if head == "squad" else {"steps": 2000, "lr": 5e-4}  # unused
    else:
        options |= {"steps": 6, "lr": 1e-3}
    if bits.startswith("auto"):
        options["budget-mb"] = BUDGETS_MIB[head]
    if bits != "4-4-8":
        options["weight-quantizer"] = "twn"
    argv = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    argv += ["--no-per-channel", "--no-qat-relative"]
    if method == "mrem-p":
        argv += ["--deterministic", "--workers", "2" if (bits, head) == ("4-4-8", "squad") else "1"]
    code = quantize.main(argv)
    assert code == 0, f"{cell_name(cell)} ended with {code}"
    return out


def make_inputs(root: Path) -> None:
    """A tiny model and data for every head."""
    from tiny_job import save_model, write_reviews
    from tiny_squad import TAGS, write_conll, write_reading

    save_model(root / "model-text-classification")
    save_model(root / "model-squad", "BertForQuestionAnswering")
    names = dict(enumerate(TAGS))
    save_model(
        root / "model-token-classification",
        "BertForTokenClassification",
        id2label=names,
        label2id={name: i for i, name in names.items()},
    )
    write_reviews(root / "data-text-classification")
    write_reading(root / "data-squad")
    write_conll(root / "data-token-classification")


# -- digests -----------------------------------------------------------------------------------------------


def digest(value: Any) -> str:
    text = value if isinstance(value, bytes) else json.dumps(value, sort_keys=False).encode()
    return hashlib.sha256(text).hexdigest()[:16]


def describe_result(folder: Path, root: Path) -> dict[str, dict[str, str]]:
    """{"structure": {file: digest}, "values": {file: digest}} of a result folder."""
    names = sorted(str(path.relative_to(folder)) for path in files_of(folder))
    guards = dict(guard_mib(path) for path in folder.glob("*.onnx"))
    structure: dict[str, str] = {"files": digest(names)}
    values: dict[str, str] = {}
    for path in files_of(folder):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            structure[name], values[name] = digest(tensor_shapes(path)), digest(tensor_bytes(path))
        elif path.suffix == ".onnx":
            structure[name], values[name] = digest(graph_shape(path)), digest(graph_bytes(path))
        elif path.suffix == ".json" and "token" not in name:
            content = json.loads(path.read_text(encoding="utf-8").replace(str(root), "ROOT"))
            structure[name] = digest(shape_of(content))
            values[name] = digest(comparable(content, guards))
        elif name == "recipe.yaml":
            values[name] = digest(recorded_lines(path).replace(str(root), "ROOT"))
    return {"structure": structure, "values": values}


def recorded_lines(path: Path) -> str:
    """A recipe.yaml without the options that are younger than the record; each option is one line.

    What was the quantizer of 2 bits without being named has to be named now.
    """
    text = path.read_text(encoding="utf-8").replace("weight_quantizer: twn", "weight_quantizer: auto")
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if line.partition(":")[0] in RECORDED_OPTIONS)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def tensor_shapes(path: Path) -> list[Any]:
    from safetensors import safe_open

    with safe_open(path, "np") as kept:
        return [
            [n, kept.get_slice(n).get_dtype(), kept.get_slice(n).get_shape()] for n in sorted(kept.keys())
        ]


def tensor_bytes(path: Path) -> bytes:
    """The tensors without the header, in which a version may stand."""
    from safetensors import safe_open

    with safe_open(path, "np") as kept:
        return b"".join(kept.get_tensor(name).tobytes() for name in sorted(kept.keys()))


def without_guard(path: Path) -> Any:
    """The model of an ONNX file as it would be without the guard against negative ids."""
    import onnx

    model = onnx.load(path)
    kept = [node for node in model.graph.node if not node.output[0].endswith(GUARD)]
    for node in kept:
        node.input[:] = [name.removesuffix(GUARD[1]) for name in node.input]
    tensors = [tensor for tensor in model.graph.initializer if tensor.name not in GUARD_CONSTANTS]
    for field, rest in ((model.graph.node, kept), (model.graph.initializer, tensors)):
        rest = [type(one).FromString(one.SerializeToString()) for one in rest]
        del field[:]
        field.extend(rest)
    return model


def guard_mib(path: Path) -> tuple[float, float]:
    """(size of an ONNX file, what the guard adds to it)."""
    size, rest = path.stat().st_size, without_guard(path).ByteSize()
    return size / 2**20, (size - rest) / 2**20


def graph_shape(path: Path) -> list[Any]:
    model = without_guard(path)
    nodes = [[n.op_type, n.domain, list(n.input), list(n.output)] for n in model.graph.node]
    tensors = [[t.name, t.data_type, list(t.dims)] for t in model.graph.initializer]
    return [[[o.domain, o.version] for o in model.opset_import], nodes, tensors]


def graph_bytes(path: Path) -> bytes:
    model = without_guard(path)
    kept = [entry for entry in model.metadata_props if entry.key not in NOT_COMPARED]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    model.producer_version = ""
    return bytes(model.SerializeToString(deterministic=True))


def shape_of(content: Any) -> Any:
    """Keys in their order, and the types of what they hold; of lists the first element."""
    if isinstance(content, dict):
        return [[key, shape_of(value)] for key, value in content.items() if key not in NOT_COMPARED]
    if isinstance(content, list):
        return ["list", shape_of(content[0]) if content else None]
    return "number" if isinstance(content, int | float) else type(content).__name__


def comparable(content: Any, guards: dict[float, float] | None = None) -> Any:
    """Without what tells nothing. guards: what the guard adds to ONNX files, by their sizes, in MiB."""
    if isinstance(content, dict):
        found = {key: content[key] for key in SIZES if isinstance(content.get(key), float)}
        sized: dict[str, float] = {
            key: content[key] - more for key, more in GUARD_NODES.items() if key in content
        }
        sized |= {key: size - (guards or {}).get(size, 0.0) - DIGEST_MIB for key, size in found.items()}
        return {k: comparable(v, guards) for k, v in (content | sized).items() if k not in NOT_COMPARED}
    return [comparable(value, guards) for value in content] if isinstance(content, list) else content


def fingerprint() -> str:
    """A digest of how this machine and its libraries compute: torch, onnxruntime and their versions."""
    import numpy as np
    import onnxruntime
    import torch
    from tiny_onnx import save_tiny_onnx

    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(37, 48, generator=draw), torch.randn(64, 48, generator=draw)
    w.requires_grad_(True)
    y = torch.nn.functional.linear(x, w)
    parts = [y, y.softmax(-1), torch.nn.functional.gelu(y), torch.tanh(y), y.exp(), y.abs().log(), y.erf()]
    parts += [torch.nn.functional.layer_norm(y, (64,)), y.double().sum(0), (y @ w).sum(1)]
    optimizer = torch.optim.AdamW([w], lr=1e-2, fused=True)
    sum(part.float().sum() for part in parts).backward()
    optimizer.step()
    hasher = hashlib.sha256()
    for part in [*parts, w]:
        hasher.update(part.detach().numpy().tobytes())
    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny_onnx(Path(folder) / "tiny.onnx")
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        ids = np.arange(24, dtype=np.int64).reshape(2, 12) % 40
        for output in session.run(None, {"input_ids": ids, "token_type_ids": ids % 2}):
            hasher.update(output.tobytes())
    from importlib.metadata import version

    for package in ("torch", "transformers", "onnx", "onnxscript", "onnxruntime", "numpy"):
        hasher.update(f"{package} {version(package)}".encode())
    return hasher.hexdigest()[:16]


# -- commands ----------------------------------------------------------------------------------------------


def run_all(chosen: list[tuple[str, str, str]]) -> dict[str, Any]:
    """In a process whose environment has ARITHMETIC."""
    found: dict[str, Any] = {"fingerprint": fingerprint(), "cells": {}}
    root = Path(tempfile.mkdtemp(prefix="mrem-golden-")).resolve()
    os.environ["MREM_CACHE"] = str(root / "cache")
    try:
        make_inputs(root)
        for cell in chosen:
            found["cells"][cell_name(cell)] = describe_result(run_cell(cell, root), root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return found


def differences(found: dict[str, Any], recorded: dict[str, Any]) -> list[str]:
    """What differs, a line each; values only where both machines compute alike."""
    kinds = ["structure", *(["values"] if found["fingerprint"] == recorded["fingerprint"] else [])]
    lines = []
    for cell, now in found["cells"].items():
        before = recorded["cells"].get(cell)
        if before is None:
            lines.append(f"{cell}: not recorded")
            continue
        for kind in kinds:
            for name in sorted({*now[kind], *before[kind]}):
                if now[kind].get(name) != before[kind].get(name):
                    lines.append(f"{cell}: {kind} of {name} differs")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", choices=("record", "check", "show"))
    parser.add_argument("--few", action="store_true", help="one run for each method and head")
    arguments = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ARITHMETIC.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ARITHMETIC)
    found = run_all(FEW if arguments.few else cells())
    if arguments.command == "record":
        FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    if arguments.command == "show":
        print(json.dumps(found, indent=1))
        return 0
    recorded = json.loads(FILE.read_text(encoding="utf-8"))
    if found["fingerprint"] != recorded["fingerprint"]:
        print("note: this machine computes differently from the recorded one; values are not compared")
    lines = differences(found, recorded)
    print("\n".join(lines) or f"{len(found['cells'])} runs: nothing differs")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
