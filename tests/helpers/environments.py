"""`make optimum` and `make oldest`: exported models in environments other than ours.

    python tests/environments.py result FOLDER        a tiny quantized model with the file of every profile
    python tests/environments.py oldest FOLDER …      each file in the oldest onnxruntime its profile names

Not a test module: it installs packages. What runs inside those environments stands in `plain_runtime.py` and
`optimum_label.py`, which import nothing of ours.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from tiny_job import job_in, sentences, workshop_in
from transformers import AutoTokenizer

from mrem_deploy.export.profiles import INT2_OPSET, INT2_RUNTIME, PROFILES

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build"
# Old wheels exist for old interpreters only. OLD_PYTHON names one that is not on the path.
INTERPRETERS = (os.environ.get("OLD_PYTHON", ""), sys.executable, "python3.11", "python3.10", "python3.9")
RESULTS = (("4-4-8", "auto", "4-4-8"), ("2-2-8", "twn", "2-2-8"), ("2-2-8", "midrise", "2-2-8-midrise"))
# What the library needs, what it must refuse, and what a file may have that the former reads.
LIBRARY_RUNTIME, TOO_OLD, OLD_IR, OLD_OPSET = "1.17.0", "1.16.3", 9, 20
TOLERANCE = 0.05  # of the largest logit: rounding flips of a few activations between two releases


def make_result(root: Path) -> None:
    """Tiny models at 4-4-8 and 2-2-8 (which needs INT2; ternary and midrise), in files of every profile."""
    shutil.rmtree(root, ignore_errors=True)
    with workshop_in(root):
        for bits, quantizer, out in RESULTS:
            options = {"bits": bits, "weight_quantizer": quantizer, "export": ",".join(PROFILES)}
            if job_in(root, out, method="ptq", **options).run() != 0:
                raise SystemExit("error: the tiny model could not be quantized and exported")
            print(f"made {root / out}")


def oldest(folders: list[Path]) -> bool:
    """Load and run every exported file in the oldest onnxruntime; compare with the one installed here."""
    passed = True
    for folder in folders:
        inputs = _inputs(folder)
        np.savez(BUILD / "inputs.npz", **inputs)
        for profile in PROFILES.values():
            path = profile.path_in(folder)
            if not path.is_file():
                print(f"{path}: not there, so not checked")
                continue
            opset = next(o.version for o in onnx.load(path).opset_import if o.domain == "")
            version = INT2_RUNTIME if opset >= INT2_OPSET else profile.oldest_runtime
            passed &= _check(path, f"{profile.name}, opset {opset}", version, inputs)
            if profile.fused:
                passed &= _check_library(path, version, inputs)
    return passed


def _check_library(path: Path, version: str, inputs: dict[str, np.ndarray]) -> bool:
    """The file with the library of mrem_runtime: in the oldest onnxruntime of the file, in that of the
    library (a copy that it can read), and in an older one, which must be refused by name."""
    if find_spec("mrem_runtime") is None:
        print(f"{path}: mrem_runtime is not installed, so its library is not checked")
        return True
    import mrem_runtime

    library, old = str(mrem_runtime.library()), BUILD / "model_for_the_oldest.onnx"
    model = onnx.load(path)
    del model.functions[:]
    model.ir_version = OLD_IR
    for entry in model.opset_import:
        entry.version = OLD_OPSET if entry.domain == "" else entry.version
    onnx.save(model, old)
    passed = _check(path, "mrem-cpu with its operators", version, inputs, library)
    passed &= _check(old, f"only operators, opset {OLD_OPSET}", LIBRARY_RUNTIME, inputs, library)
    refused = (
        f"mrem-runtime needs onnxruntime {LIBRARY_RUNTIME.rpartition('.')[0]} or newer; this is {TOO_OLD}"
    )
    done = _run(old, TOO_OLD, library)
    said = done is not None and done.returncode != 0 and refused in done.stderr
    print(f"{'passed' if said else 'FAILED'} the library in onnxruntime {TOO_OLD} is refused: {refused}")
    return passed and said


def _inputs(folder: Path) -> dict[str, np.ndarray]:
    texts = [row["text"] for row in sentences(4, seed=3)]
    tokens = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="np")
    return {name: value.astype(np.int64) for name, value in tokens.items()}


def _check(
    path: Path, told: str, version: str, inputs: dict[str, np.ndarray], library: str | None = None
) -> bool:
    options = onnxruntime.SessionOptions()
    if library is not None:
        options.register_custom_ops_library(library)
    here = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    truth = here.run(None, {entry.name: inputs[entry.name] for entry in here.get_inputs()})[0]
    done = _run(path, version, library)
    if done is None:
        print(f"FAILED {path.name} ({told}): no interpreter found for which onnxruntime {version} exists")
        return False
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        print(f"FAILED {path.name} ({told}) in onnxruntime {version}: {reason}")
        return False
    assert done.stdout.split() == [version], f"expected onnxruntime {version}, {done.stdout} ran"
    came = np.load(BUILD / "answers.npy")
    error = float(np.abs(came - truth).max() / np.abs(truth).max())
    same = bool((came.argmax(-1) == truth.argmax(-1)).all()) and error < TOLERANCE
    print(
        f"{'passed' if same else 'FAILED'} {path.name} ({told}) in onnxruntime {version}: largest difference "
        f"to {onnxruntime.__version__} is {error:.1e} of the largest logit"
    )
    return same


def _run(path: Path, version: str, library: str | None) -> subprocess.CompletedProcess[str] | None:
    """The file in another onnxruntime; None if there is none to be had."""
    python = environment_of(version)
    if python is None:
        return None
    answers = BUILD / "answers.npy"
    answers.unlink(missing_ok=True)  # of the file before
    files = [str(path), str(BUILD / "inputs.npz"), str(answers), *([library] if library else [])]
    return subprocess.run(
        [str(python), str(HERE / "plain_runtime.py"), *files], capture_output=True, text=True
    )


def environment_of(version: str) -> Path | None:
    """The interpreter of an environment with that onnxruntime; made on first use."""
    folder = BUILD / f"onnxruntime-{version}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists():
        return python
    for interpreter in filter(None, INTERPRETERS):
        shutil.rmtree(folder, ignore_errors=True)
        packages = [f"onnxruntime=={version}", "numpy<2"]  # old releases were built against NumPy 1
        try:
            subprocess.run([interpreter, "-m", "venv", str(folder)], check=True, capture_output=True)
            install = [str(python), "-m", "pip", "install", "--quiet", "--only-binary", ":all:", *packages]
            subprocess.run(install, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue  # no such interpreter, or no wheel for it: the next one
        print(f"made {folder.name} with {interpreter}")
        ready.touch()
        return python
    shutil.rmtree(folder, ignore_errors=True)
    return None


if __name__ == "__main__":
    verb, *places = sys.argv[1:]
    BUILD.mkdir(exist_ok=True)
    if verb == "result":
        make_result(Path(places[0]).absolute())
    else:
        sys.exit(0 if oldest([Path(place) for place in places]) else 1)
