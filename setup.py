"""Packages and the C++ extension; everything else about the project is in pyproject.toml.

Note:

1. `kernels/` and `export/` at the top are parts of `mrem_deploy` (import path = file path with `mrem_deploy.`
   in front). Only the folders inside `kernels/` are mapped, and it has no `__init__.py`: a package `kernels`
   on the path would hide the one of that name that transformers looks for.
2. The extension is optional. Without a working C++ toolchain the package installs anyway and prints what is
   slower. A source that does not compile is an error: that is a bug, not a missing tool.

Environment: MREM_REQUIRE_EXT=1 turns a missing extension and compiler warnings into errors (CI);
MREM_NO_EXT=1 leaves the extension out.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
EXTENSION = "mrem_deploy.kernels.cpu._cpu"
WHAT_IS_SLOWER = (
    "training on the CPU is slower (a quantized step takes about a quarter longer), and so is packing "
    "low-bit weights (saving or loading a BERT-base takes seconds, not a fraction of one)"
)


class ToolchainMissing(Exception):
    """Something needed to build C++ is not on this machine."""


def enabled(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


def build_tool(name: str, folder_attribute: str) -> str | None:
    """The executable from the PyPI package of that name (a build requirement), else from PATH."""
    try:
        folder = getattr(importlib.import_module(name), folder_attribute)
    except (ImportError, AttributeError):
        return shutil.which(name)
    return shutil.which(name, path=folder) or shutil.which(name)


def run(command: list[str]) -> tuple[bool, str]:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    return done.returncode == 0, done.stdout


class CMakeBuild(build_ext):
    """Builds the extension with CMake, to where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        in_source = ROOT / "kernels" / "cpu" / target.name
        for stale in {target, in_source} if self.editable_mode else {target}:
            stale.unlink(missing_ok=True)  # an old build must not be taken for this one
        if enabled("MREM_NO_EXT"):
            self.announce_without("MREM_NO_EXT is set")
            return
        try:
            self.build_with_cmake(target)
        except ToolchainMissing as missing:
            if enabled("MREM_REQUIRE_EXT"):
                raise SystemExit(f"error: MREM_REQUIRE_EXT is set, but {missing}") from missing
            self.announce_without(str(missing))

    def build_with_cmake(self, target: Path) -> None:
        cmake = build_tool("cmake", "CMAKE_BIN_DIR")
        if cmake is None:
            raise ToolchainMissing("cmake was not found; install it, or build with pip's build isolation")
        try:
            pybind11 = importlib.import_module("pybind11")
        except ImportError:
            raise ToolchainMissing(
                "pybind11 was not found; install it, or build with pip's isolation"
            ) from None

        # A new folder: the cache of the last isolated build names tools that no longer exist.
        folder = Path(self.build_temp).resolve() / "cmake"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        ninja = build_tool("ninja", "BIN_DIR")
        # A new warning of a newer compiler must not break a user's build: warnings are errors only in CI.
        warnings_are_errors = "ON" if enabled("MREM_REQUIRE_EXT") else "OFF"
        configured, log = run(
            [
                *(cmake, "-S", str(ROOT), "-B", str(folder)),
                *(["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []),
                "-DCMAKE_BUILD_TYPE=Release",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
                f"-DMREM_EXTENSION_FOLDER={target.parent}",
                f"-DMREM_EXTENSION_FILE={target.name}",
                f"-DMREM_WERROR={warnings_are_errors}",
            ]
        )
        if not configured:
            raise ToolchainMissing(
                f"no working C++ compiler with Python's headers was found. CMake says:\n{log}"
            )
        compiled, log = run([cmake, "--build", str(folder), "--config", "Release"])
        if not compiled or not target.exists():
            raise SystemExit(
                f"{log}\nerror: the C++ sources in kernels/cpu did not compile; see the messages above.\n"
                "To install without them, set MREM_NO_EXT=1."
            )

    def announce_without(self, reason: str) -> None:
        print(
            f"\nwarning: mrem_deploy is installed without its C++ extension: {reason}\n"
            f"Everything works, but {WHAT_IS_SLOWER}.\n"
            "To build it, install a C++17 compiler (Debian: apt install g++; macOS: xcode-select --install) "
            "and install mrem_deploy again.\n",
            file=sys.stderr,
        )


setup(
    packages=[
        "mrem_deploy",
        "mrem_deploy.base",
        "mrem_deploy.data",
        "mrem_deploy.models",
        "mrem_deploy.quant",
        "mrem_deploy.train",
        "mrem_deploy.train.mrem_p",
        "mrem_deploy.evaluate",
        "mrem_deploy.deploy",
        "mrem_deploy.report",
        "mrem_deploy.walk",
        "mrem_deploy.result",
        "mrem_deploy.benchmarks",
        "mrem_deploy.benchmarks.latency",
        "mrem_deploy.reproduce",
        "mrem_deploy.web",
        "mrem_deploy.kernels",
        "mrem_deploy.kernels.cpu",
        "mrem_deploy.kernels.gpu",
        "mrem_deploy.export",
    ],
    package_dir={
        "mrem_deploy": "mrem_deploy",
        "mrem_deploy.kernels.cpu": "kernels/cpu",
        "mrem_deploy.kernels.gpu": "kernels/gpu",
        "mrem_deploy.export": "export",
    },
    package_data={"mrem_deploy.kernels.cpu": ["*.pyi"], "mrem_deploy.web": ["page/*", "npm/*.json"]},
    include_package_data=False,  # C++ sources belong in the sdist, not in the wheel
    ext_modules=[Extension(EXTENSION, sources=[], optional=True)],
    cmdclass={"build_ext": CMakeBuild},
    zip_safe=False,
)
