"""The layout of the package: which part may import which, how long a file may be, what `--help` may load."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("mrem_deploy", "kernels", "export")  # the last two are parts of mrem_deploy, see setup.py
MOST_LINES = 400
MOST_FLAT_FILES = 20  # in mrem_deploy/ itself; anything else belongs in a subpackage

# Bottom up: a part imports from its own level and from those before it, at the top of a file or inside a
# function. `benchmark` is the command in front of `benchmarks`.
LEVELS = (
    ("base",),
    ("numerics",),
    ("kernels",),
    ("data", "models"),
    ("quant",),
    (
        "recipe",
        "recipe_values",
        "recipe_checks",
        "recipe_groups",
        "recipe_defaults",
        "recipe_page",
        "presets",
    ),
    ("train",),
    ("evaluate",),
    ("export",),
    ("deploy",),
    ("report", "result"),
    ("preflight",),
    ("walk",),
    ("pipeline",),
    ("api", "finetuning"),
    ("quantize", "validate", "verify", "finetune", "doctor", "demo", "export.__main__", "web"),
    ("benchmark", "benchmarks"),
    ("reproduce",),
    ("__main__", "__init__"),
)
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}

HEAVY = ("torch", "transformers", "onnxruntime", "matplotlib", "datasets", "onnx", "scipy", "sklearn")


def module_name(path: Path) -> str:
    """kernels/cpu/ops.py → mrem_deploy.kernels.cpu.ops; a package keeps its `__init__`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "mrem_deploy" else ("mrem_deploy", *parts))


FILES = {module_name(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}


def part_of(module: str) -> str:
    """mrem_deploy.train.rem → train; the command inside a package is a part by itself."""
    inner = module.removeprefix("mrem_deploy.")
    return inner if inner in LEVEL else inner.split(".")[0]


def file_of(name: str) -> str | None:
    """The file that `import name` reads."""
    return next((found for found in (name, f"{name}.__init__") if found in FILES), None)


def imported_names(path: Path) -> Iterator[str]:
    """Every import, wherever it is written."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the module in full"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if file_of(full) else str(node.module)


def texts(path: Path) -> Iterator[str]:
    """Every text constant; one that is a module's full name will be imported by that name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def uses(read: Callable[[Path], Iterator[str]]) -> dict[str, set[str]]:
    """Module → modules of the package that it names. Anyone may read `mrem_deploy.__version__`."""
    found = {}
    for module, path in FILES.items():
        targets = {file_of(name) for name in read(path)}
        found[module] = {name for name in targets if name} - {"mrem_deploy.__init__", module}
    return found


def cycles(graph: dict[str, set[str]]) -> list[str]:
    """The modules that can be reached from themselves."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = list(graph[start])
        while ahead:
            module = ahead.pop()
            if module not in seen:
                seen.add(module)
                ahead += graph[module]
        return seen

    return [module for module in graph if module in reachable(module)]


def test_every_part_has_a_level() -> None:
    assert {part_of(module) for module in FILES} - LEVEL.keys() == set()


@pytest.mark.parametrize("read", [imported_names, texts])
def test_imports_point_down(read: Callable[[Path], Iterator[str]]) -> None:
    upward = [
        f"{module} → {target}"
        for module, targets in uses(read).items()
        for target in sorted(targets)
        if LEVEL[part_of(target)] > LEVEL[part_of(module)]
    ]
    assert not upward, "\n".join(upward)


def test_no_module_imports_itself_by_a_detour() -> None:
    assert cycles({"a": {"b"}, "b": {"a"}, "c": {"a"}}) == ["a", "b"], "the check itself"
    assert cycles(uses(imported_names)) == []


def test_no_file_is_long() -> None:
    lengths = {module: len(path.read_text("utf-8").splitlines()) for module, path in FILES.items()}
    assert {module: length for module, length in lengths.items() if length > MOST_LINES} == {}


def test_the_top_folder_is_small() -> None:
    assert len(list((ROOT / "mrem_deploy").glob("*.py"))) <= MOST_FLAT_FILES


def test_the_methods_are_the_choices_of_the_recipe() -> None:
    from mrem_deploy import recipe
    from mrem_deploy.train import METHODS

    assert tuple(METHODS) == recipe.METHODS


# -- what --help loads -------------------------------------------------------------------------------------

VERBS = (
    "",
    "quantize",
    "export",
    "web",
    "validate",
    "verify",
    "beir",
    "finetune",
    "benchmark",
    "reproduce",
    "doctor",
)
BENCHMARKS = ("batches", "compare", "footprint", "kernels", "latency", "memory", "parallel", "schedule")
BENCHMARKS += ("step",)
SHOW_HELP = f"""
import sys
from mrem_deploy.__main__ import main
try:
    main([*sys.argv[1:], "--help"])
except SystemExit as ended:
    assert not ended.code, ended.code
print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""


def test_the_verbs_below_are_all_verbs() -> None:
    from mrem_deploy import __main__ as command
    from mrem_deploy import benchmark

    assert set(VERBS) == {"", *command.VERBS}
    assert set(BENCHMARKS) == set(benchmark.VERBS)


@pytest.mark.parametrize("words", [*VERBS, *(f"benchmark {name}" for name in BENCHMARKS)])
def test_help_loads_nothing_heavy(words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHOW_HELP, *words.split()],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "100"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "usage: mrem" in done.stdout
    assert done.stderr.splitlines()[-1] == "[]"


def test_no_two_test_files_share_a_name() -> None:
    """pytest imports them by name alone, and would refuse the second one."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
