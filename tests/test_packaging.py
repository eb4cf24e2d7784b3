"""The package as a user gets it: what imports load, what the wheel holds, how it does without a compiler."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD_INPUT = ("setup.py", "pyproject.toml", "CMakeLists.txt", "MANIFEST.in", "README.md", "LICENSE")
FOLDERS = {
    "mrem_deploy": "mrem_deploy",
    "kernels/cpu": "mrem_deploy/kernels/cpu",
    "kernels/gpu": "mrem_deploy/kernels/gpu",
    "export": "mrem_deploy/export",
}


def python(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter; the extension's own switches are never inherited."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MREM_")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=inherited | environment, capture_output=True, text=True
    )


def output(code: str, cwd: Path = ROOT) -> str:
    done = python("-c", code, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def source_tree(folder: Path) -> Path:
    """A copy of what a build reads, so that nothing is built in the working tree."""
    for name in BUILD_INPUT:
        shutil.copy2(ROOT / name, folder / name)
    skip = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd", "*.egg-info")
    for name in ("mrem_deploy", "kernels", "export"):
        shutil.copytree(ROOT / name, folder / name, ignore=skip)
    return folder


def run_from_wheel(wheel: Path, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code with the wheel's content first on the path, and (-S) no editable install's import hook."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    paths = [str(folder), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return python("-S", "-c", f"import sys; sys.path[:0] = {paths!r}\n{code}", cwd=folder)


ROUND_TRIP = """
import numpy as np
from mrem_deploy import kernels
codes = np.array([-4, 3, -1, 1], np.int8)
assert kernels.pack(codes, 3).tolist() == [0xDC, 0x03]
assert kernels.unpack(kernels.pack(codes, 3), 3, 4).tolist() == codes.tolist()
print(kernels.backend())
"""


# -- imports -----------------------------------------------------------------------------------------------


def test_the_folder_kernels_does_not_shadow_the_package_of_that_name() -> None:
    # `python -c` puts the current folder, here the repository's root, first on the path, as `python -m` does.
    # A namespace package (origin None) yields to a real package `kernels` anywhere on the path.
    found = output("import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else None)")
    assert found == "None" or not Path(found).is_relative_to(ROOT)
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_mapped_folders_are_importable_from_the_root_and_from_elsewhere(tmp_path: Path) -> None:
    code = (
        "import mrem_deploy.kernels.cpu as c, mrem_deploy.kernels.gpu as g, mrem_deploy.export as e\n"
        "print(*(m.__file__ for m in (c, g, e)), sep='\\n')"
    )
    expected = [str(ROOT / folder / "__init__.py") for folder in ("kernels/cpu", "kernels/gpu", "export")]
    for cwd in (ROOT, tmp_path):
        assert output(code, cwd).splitlines() == expected, "expected an editable install (make setup)"


def test_import_is_lean() -> None:
    heavy = [
        "torch",
        "transformers",
        "triton",
        "datasets",
        "matplotlib",
        "onnxruntime",
        "sklearn",
        "pybind11",
    ]
    code = (
        "import sys, mrem_deploy, mrem_deploy.kernels\n"
        f"print([name for name in {heavy} if name in sys.modules])\n"
        "torch = sys.modules.get('torch')\n"
        "print(bool(torch and torch.cuda.is_initialized()))"
    )
    assert output(code).splitlines() == ["[]", "False"]


def test_unknown_attribute_is_an_ordinary_error() -> None:
    import mrem_deploy

    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        _ = mrem_deploy.lod


# -- the wheel ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built as `pip install .` does it; with the extension, where this machine has a compiler."""
    tree = source_tree(tmp_path_factory.mktemp("tree"))
    done = python("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", "wheels", ".", cwd=tree)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (tree / "wheels").glob("*.whl")
    return built


def test_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
        scripts = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    expected = set()
    for folder, package in FOLDERS.items():
        for pattern in ("*.py", "*.pyi"):
            for file in (ROOT / folder).rglob(pattern):
                expected.add(f"{package}/{file.relative_to(ROOT / folder).as_posix()}")
    # The page that `mrem web` writes is data of the package.
    web = ROOT / "mrem_deploy" / "web"
    page = [*(web / "page").iterdir(), web / "npm" / "package.json", web / "npm" / "package-lock.json"]
    expected |= {file.relative_to(ROOT).as_posix() for file in page}
    extension = {name for name in held if re.fullmatch(r"mrem_deploy/kernels/cpu/_cpu\..*(so|pyd)", name)}
    assert held - extension == expected  # no C++ sources, no tests, no top-level `kernels` or `export`
    assert len(extension) == 1 or not os.environ.get("MREM_REQUIRE_EXT")
    assert "mrem = mrem_deploy.__main__:main" in scripts
    for line in ("Name: mrem-deploy", "License-Expression: Apache-2.0", "Requires-Python: >=3.10"):
        assert line in text.splitlines()
    assert {"cpu", "gpu", "dev", "st"} == set(re.findall(r"^Provides-Extra: (\w+)$", text, re.MULTILINE))


def test_wheel_works_by_itself(wheel: Path, tmp_path: Path) -> None:
    done = run_from_wheel(wheel, tmp_path, ROUND_TRIP)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(wheel) as archive:
        compiled = any("/_cpu." in name and not name.endswith(".pyi") for name in archive.namelist())
    assert done.stdout.strip() == ("cpp" if compiled else "reference")


# -- without a compiler ------------------------------------------------------------------------------------


@pytest.fixture
def no_compiler(tmp_path: Path) -> dict[str, str]:
    """An environment where CMake finds no compiler."""
    empty = tmp_path / "no-tools"
    empty.mkdir()
    return {"CC": str(empty / "no-cc"), "CXX": str(empty / "no-cxx"), "PATH": str(empty)}


def build_wheel(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return python("setup.py", "bdist_wheel", "--dist-dir", "wheels", cwd=tree, **environment)


def test_without_a_compiler_it_installs_and_says_what_is_slower(
    tmp_path: Path, no_compiler: dict[str, str]
) -> None:
    (tmp_path / "tree").mkdir()
    tree = source_tree(tmp_path / "tree")
    done = build_wheel(tree, **no_compiler)
    assert done.returncode == 0, done.stderr
    assert "without its C++ extension: no working C++ compiler" in done.stderr
    assert "training on the CPU is slower" in done.stderr
    assert "install a C++17 compiler" in done.stderr
    (built,) = (tree / "wheels").glob("*.whl")
    used = run_from_wheel(built, tmp_path / "site", ROUND_TRIP)
    assert used.returncode == 0, used.stderr
    assert used.stdout.strip() == "reference"
    assert "RuntimeWarning" in used.stderr
    assert "slower" in used.stderr


def test_a_missing_compiler_is_an_error_where_the_extension_is_required(
    tmp_path: Path, no_compiler: dict[str, str]
) -> None:
    (tmp_path / "tree").mkdir()
    tree = source_tree(tmp_path / "tree")
    done = build_wheel(tree, **no_compiler, MREM_REQUIRE_EXT="1")
    assert done.returncode != 0
    assert "MREM_REQUIRE_EXT is set, but no working C++ compiler" in done.stderr
    assert not list(tree.glob("wheels/*.whl"))


# -- what the sources may not do ---------------------------------------------------------------------------

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"torch.load", "torch.save", "pandas.read_pickle", "pd.read_pickle"}


def pickle_uses(source: str) -> list[str]:
    """Imports and calls in `source` through which a file could run code."""
    uses = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            uses += [a.name for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            uses += [n for n in names if n.split(".")[0] in FORBIDDEN_MODULES or n in FORBIDDEN_CALLS]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in FORBIDDEN_CALLS:
            uses.append(ast.unparse(node))
        elif (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and ast.unparse(node.value) != "False"
        ):
            uses.append("allow_pickle")
    return uses


def test_no_source_reads_or_writes_pickles() -> None:
    for bad in ("import pickle", "from torch import load", "torch.load(p)", "np.load(p, allow_pickle=True)"):
        assert pickle_uses(bad), f"the check itself misses {bad!r}"
    assert pickle_uses("np.load(p, allow_pickle=False); torch.nn.Linear(2, 2)") == []
    sources = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(sources) > 5
    found = {
        str(file.relative_to(ROOT)): uses
        for file in sources
        if (uses := pickle_uses(file.read_text("utf-8")))
    }
    assert found == {}


LARGEST_TRACKED = 512 * 1024  # bytes; the largest is a plot of the documentation


def test_the_repository_holds_no_models_or_data() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout: nothing is tracked")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert len(files) > 100
    present = [file for file in files if file.is_file()]
    assert [str(f.relative_to(ROOT)) for f in present if f.stat().st_size > LARGEST_TRACKED] == []
    assert [f.name for f in present if f.suffix in (".onnx", ".data", ".safetensors", ".bin", ".pt")] == []
