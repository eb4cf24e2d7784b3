"""The wheel of mrem_runtime: what it holds, and that it works with nothing but onnxruntime and numpy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

ort = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

from fused import MODELS, fused  # noqa: E402
from tiny_models import tiny_batch  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kernels" / "runtime" / "python"
NO_TOOLCHAIN = 3


def setup(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """setup.py; the switches of the developer's environment are not inherited."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MREM_")}
    return subprocess.run(
        [sys.executable, "setup.py", *arguments],
        cwd=PACKAGE, env=inherited | environment, capture_output=True, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as pip does it, except that nothing but the library's own build folder is in the repository."""
    if setup("toolchain").returncode == NO_TOOLCHAIN and not os.environ.get("MREM_REQUIRE_EXT"):
        pytest.skip("no C++ toolchain")
    folder = tmp_path_factory.mktemp("wheel")
    done = setup(
        *("egg_info", "--egg-base", str(folder), "build", "--build-base", str(folder / "build")),
        *("bdist_wheel", "--bdist-dir", str(folder / "bdist"), "--dist-dir", str(folder / "dist")),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_it_holds_one_module_and_the_library(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith("/METADATA"))).decode().splitlines()
    held = {name for name in names if ".dist-info/" not in name}
    library = {name for name in held if re.fullmatch(r"mrem_runtime/\S*mrem_runtime\.(so|dll|dylib)", name)}
    assert held - library == {"mrem_runtime/__init__.py", "mrem_runtime/py.typed"}
    assert len(library) == 1
    assert re.fullmatch(r"mrem_runtime-[\d.]+-py3-none-(?!any)\w+\.whl", wheel.name), (
        "any Python 3, one platform"
    )
    needs = [line.split(":")[1].strip() for line in metadata if line.startswith("Requires-Dist")]
    assert [re.split(r"\W", need)[0] for need in needs] == ["onnxruntime", "numpy"]


ALONE = """
import json, sys
import numpy as np
import mrem_runtime

assert not {"torch", "onnx", "mrem_deploy", "transformers"} & set(sys.modules)
session = mrem_runtime.session("model.onnx", threads=1)
given = np.load("batch.npz")
outputs = session.run(None, {entry.name: given[entry.name] for entry in session.get_inputs()})
try:
    import onnx
except ImportError:
    facts = [mrem_runtime.version(), mrem_runtime.target(), mrem_runtime.newest_format()]
    print(json.dumps([*facts, outputs[0].tolist()]))
"""


def test_it_needs_only_onnxruntime_and_numpy(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    for module in (ort, np):  # and what their wheels put beside them
        home = Path(module.__file__).parent
        for path in home.parent.glob(f"{home.name}*"):
            (tmp_path / "site" / path.name).symlink_to(path)
    model, batch = fused(MODELS["2-2-8"]("bert")), tiny_batch("bert")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    np.savez(tmp_path / "batch.npz", **{name: value.numpy() for name, value in batch.items()})
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n{ALONE}"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    version, target, newest, logits = json.loads(done.stdout)
    assert version == wheel.name.split("-")[1]
    assert target in ("scalar", "avx2", "avxvnni", "avx512vnni", "amx")
    assert newest == 1
    plain = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = plain.run(None, {entry.name: batch[entry.name].numpy() for entry in plain.get_inputs()})[0]
    np.testing.assert_allclose(np.array(logits), expected, rtol=0, atol=5e-6)  # as in tests/runtime


def test_without_a_compiler_the_setup_says_so(tmp_path: Path) -> None:
    absent = {"CC": str(tmp_path / "no-cc"), "CXX": str(tmp_path / "no-cxx"), "PATH": str(tmp_path)}
    absent |= {"MREM_RUNTIME_BUILD": str(tmp_path / "build")}
    done = setup("toolchain", **absent)
    assert done.returncode == NO_TOOLCHAIN, done.stdout + done.stderr
    assert "the CPU runtime is not built: " in done.stdout
    required = setup("toolchain", **absent, MREM_REQUIRE_EXT="1")
    assert required.returncode == 1
    assert "MREM_REQUIRE_EXT is set, but" in required.stderr
    assert setup("toolchain", MREM_NO_EXT="1").returncode == NO_TOOLCHAIN


def test_a_library_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "mrem_runtime").mkdir()
    source = (PACKAGE / "mrem_runtime" / "__init__.py").read_text()
    (tmp_path / "mrem_runtime" / "__init__.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-c", "import mrem_runtime; mrem_runtime.library()"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert "is missing: install mrem-runtime where there is a C++17 compiler" in done.stderr
