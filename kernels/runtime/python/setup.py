"""The wheel of mrem_runtime: one Python file and the shared library, for any Python 3 of one platform.

The library is built incrementally in build/runtime of the repository, so that an editable install takes
seconds after a change. Without a C++ toolchain the build ends with an error: there is nothing to install.
`python setup.py toolchain` only says whether there is one: exit code 3 if there is not. MREM_NO_EXT=1 leaves
the library out; MREM_REQUIRE_EXT=1 makes it an error that there is none, and so are compiler warnings.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent
BUILD = Path(os.environ.get("MREM_RUNTIME_BUILD") or SOURCES.parent.parent / "build" / "runtime")
LIBRARY = {"win32": "mrem_runtime.dll", "darwin": "libmrem_runtime.dylib"}.get(
    sys.platform, "libmrem_runtime.so"
)
NO_TOOLCHAIN = 3


def enabled(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


def tool(name: str) -> str | None:
    """The executable next to this Python (from PyPI), else from PATH."""
    return shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)


def run(command: list[str]) -> tuple[bool, str]:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    return done.returncode == 0, done.stdout


def configure() -> str:
    """Let CMake find a compiler; returns why there is no library to be had, "" if there is."""
    if enabled("MREM_NO_EXT"):
        return "MREM_NO_EXT is set"
    cmake, ninja = tool("cmake"), tool("ninja")
    if cmake is None:
        return "cmake was not found"
    command = [
        *(cmake, "-S", str(SOURCES), "-B", str(BUILD), "-DCMAKE_BUILD_TYPE=Release"),
        *(["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []),
        f"-DMREM_WERROR={'ON' if enabled('MREM_REQUIRE_EXT') else 'OFF'}",
    ]
    done, log = run(command)
    if not done:  # a cache from another place or generator
        done, log = run([*command, "--fresh"])
    return "" if done else f"no working C++ compiler was found. CMake says:\n{log}"


def build_library(target: Path) -> None:
    problem = configure()
    if problem:
        raise SystemExit(f"error: mrem-runtime cannot be built: {problem}")
    cmake = tool("cmake")
    assert cmake is not None
    done, log = run([cmake, "--build", str(BUILD), "--config", "Release", "--target", "mrem_runtime"])
    if not done:
        raise SystemExit(f"{log}\nerror: the C++ sources in kernels/runtime did not compile; see above")
    built = next(BUILD.rglob(LIBRARY))
    target.mkdir(parents=True, exist_ok=True)
    new = target / f".{LIBRARY}.new"  # a process that has loaded the old one keeps its file
    shutil.copy2(built, new)
    new.replace(target / LIBRARY)


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        build_library((HERE if self.editable_mode else Path(self.build_lib)) / "mrem_runtime")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        here = HERE if self.editable_mode else Path(self.build_lib)
        return [*super().get_outputs(include_bytecode), str(here / "mrem_runtime" / LIBRARY)]


class PlatformWheel(bdist_wheel):
    """py3-none-<platform>: the library knows nothing of Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class WithLibrary(Distribution):
    def has_ext_modules(self) -> bool:
        return True


if sys.argv[1:] == ["toolchain"]:
    problem = configure()
    if problem and enabled("MREM_REQUIRE_EXT"):
        raise SystemExit(f"error: MREM_REQUIRE_EXT is set, but {problem}")
    print(f"the CPU runtime is not built: {problem}" if problem else f"building the CPU runtime in {BUILD}")
    raise SystemExit(NO_TOOLCHAIN if problem else 0)

setup(
    packages=["mrem_runtime"],
    package_data={"mrem_runtime": ["py.typed"]},
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel},
    distclass=WithLibrary,
    zip_safe=False,
)
