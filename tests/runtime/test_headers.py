"""The runtime next to onnxruntime's own C and C++ headers, where they are: Debian's libonnxruntime-dev, or a
folder named by MREM_ORT_INCLUDE. No Python package has them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

ort = pytest.importorskip("onnxruntime")
runtime = pytest.importorskip("mrem_runtime", reason="mrem_runtime is not installed: make setup")

from fused import MODELS, fused  # noqa: E402
from tiny_models import FIRST_WORD  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = Path(os.environ.get("MREM_ORT_INCLUDE") or "/usr/include/onnxruntime")
COMPILER = shutil.which(os.environ.get("CXX") or "c++")
pytestmark = pytest.mark.skipif(
    not (INCLUDE / "onnxruntime_cxx_api.h").is_file() or COMPILER is None,
    reason="onnxruntime's headers (MREM_ORT_INCLUDE) or a C++ compiler are not here",
)


def compile_cpp(source: str, folder: Path, *options: str) -> None:
    (folder / "source.cpp").write_text(source)
    command = [str(COMPILER), "-std=c++17", "-Wall", "-Wextra", f"-I{INCLUDE}", "source.cpp", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_our_header_has_every_entry_at_its_place(tmp_path: Path) -> None:
    """ort_api.h is written by hand: its places, held against the header they were copied from."""
    own = (ROOT / "kernels" / "runtime" / "ort_api.h").read_text()
    places = re.findall(r"^MREM_ORT_PLACE\((\w+), (\d+)\);", own, re.MULTILINE)
    offsets = re.findall(r"^MREM_ORT_OFFSET\((\w+), (\d+)\);", own, re.MULTILINE)
    assert len(places) > 20
    assert len(offsets) > 10
    lines = ["#include <cstddef>", "#include <onnxruntime_c_api.h>"]
    lines += [f"static_assert(offsetof(OrtApi, {name}) == {n} * sizeof(void*));" for name, n in places]
    lines += [f"static_assert(offsetof(OrtCustomOp, {name}) == {n});" for name, n in offsets]
    compile_cpp("\n".join(lines), tmp_path, "-fsyntax-only")


def test_the_cpp_example_gives_what_python_gives(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "runtime.md").read_text()
    (example,) = re.findall(r"```cpp\n(.*?)```", page, re.DOTALL)
    words = [FIRST_WORD, FIRST_WORD + 1, FIRST_WORD + 2]  # the tiny model has no others
    ids = ", ".join(map(str, words))
    example = example.replace("{101, 7592, 102}", f"{{{ids}}}")
    assert ids in example
    opening = "#include <onnxruntime_cxx_api.h>\n#include <cstdio>\n#include <vector>\nint main() {\n"
    ending = 'std::printf("%.9g %.9g %.9g", logits[0], logits[1], logits[2]);\n}\n'
    library = next((Path(ort.__file__).parent / "capi").glob("libonnxruntime.so.*"))
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (tmp_path / name).symlink_to(library)
    (tmp_path / "libmrem_runtime.so").symlink_to(runtime.library())
    compile_cpp(opening + example + ending, tmp_path, "-L.", "-lonnxruntime", "-o", "example")
    model = fused(MODELS["2-2-8"]("bert"))
    (tmp_path / "model_mrem.onnx").write_bytes(model.SerializeToString())
    done = subprocess.run(
        ["./example"], cwd=tmp_path, env=os.environ | {"LD_LIBRARY_PATH": "."}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    session = runtime.session(tmp_path / "model_mrem.onnx", threads=4)
    feed = {"input_ids": [words], "attention_mask": [[1] * 3], "token_type_ids": [[0] * 3]}
    expected = session.run(None, {name: np.array(value) for name, value in feed.items()})[0]
    found = np.array([[np.float32(number) for number in done.stdout.split()]])
    assert np.array_equal(found, expected[:, :3])
