"""`make gpu-check` and the rule that GPUs are used only when asked for, tried without a GPU."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import gpu_check
import pytest
from gpu_check import CHECKS, Outcome

ROOT = Path(__file__).resolve().parent.parent
REPORT = """<testsuites><testsuite>
<testcase name="test_a"/>
<testcase name="test_b"><failure message="assert 1 == 2&#10;more">trace</failure></testcase>
<testcase name="test_c"><skipped message="torch sees no GPU"/></testcase>
<testcase name="test_d"><skipped message="torch sees no GPU"/></testcase>
<testcase name="test_e"><error message="the fixture failed"/></testcase>
</testsuite></testsuites>"""


def test_every_check_names_tests_that_exist_and_every_gpu_test_is_in_a_check() -> None:
    assert len(CHECKS) == 9
    named = [test for tests in CHECKS.values() for test in tests]
    there = []
    for file in (gpu_check.GPU, gpu_check.KERNELS):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        there += [f"{file}::{name}" for name in names if name.startswith("test_")]
    assert sorted(named) == sorted(there)


def test_outcomes_are_counted_with_their_reasons(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    found = gpu_check.outcome_of(tmp_path / "report.xml")
    failed = ("test_b: assert 1 == 2", "test_e: the fixture failed")
    assert found == Outcome(1, failed, ("torch sees no GPU",))
    assert str(found) == f"FAIL: {'; '.join(failed)}; not tried: torch sees no GPU"
    assert str(Outcome(2)) == "PASS"
    assert str(Outcome(1, skipped=("one GPU",))) == "PASS: not tried: one GPU"
    assert str(Outcome(skipped=("no GPU",))) == "FAIL: not tried: no GPU"  # nothing ran: nothing is known


def test_nine_lines_and_a_last_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = iter([Outcome(1)] * 8 + [Outcome(skipped=("no provider",))])
    monkeypatch.setattr(gpu_check, "run", lambda tests, seconds: next(outcomes))
    assert gpu_check.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("versions: Python 3.")
    assert "topology: " in "\n".join(lines)
    numbered = [line for line in lines if line[0].isdigit()]
    assert [line.split(".")[0] for line in numbered] == [str(n) for n in range(1, 10)]
    assert numbered[-1].endswith("FAIL: not tried: no provider")
    assert lines[-1].startswith("gpu-check: 8 of 9 checks passed in ")
    assert lines[-1].endswith("; failed: 9")


def test_all_nine_make_the_exit_code_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "run", lambda tests, seconds: Outcome(1))
    assert gpu_check.main() == 0


def test_a_check_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them for real, where no GPU is visible."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = gpu_check.run(["tests/test_gpu.py::test_torch_computes_on_every_gpu"], 300.0)
    assert found == Outcome(skipped=("torch sees no GPU",))


def test_the_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no time was left" in str(gpu_check.run(["tests"], 0.0))
    assert "did not end within" in str(gpu_check.run(["tests"], 0.01))


# -- GPUs are used only when asked for ----------------------------------------------------------------------


def conftest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tests_conftest", ROOT / "tests" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_only_the_marker_makes_gpus_visible(request: pytest.FixtureRequest) -> None:
    asks = conftest().asks_for_gpus
    for markers in ("gpu", "gpu and not slow", "slow or gpu"):
        assert asks(markers, {})
    for markers in ("", "not gpu_compile", "not gpu", "gpu_compile"):
        assert not asks(markers, {})
    assert asks("", {"MREM_TEST_DEVICE": "cuda"})
    if not asks(request.config.option.markexpr, os.environ):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_setup_gpu_installs_the_cuda_builds(tmp_path: Path) -> None:
    (tmp_path / ".created").touch()
    (tmp_path / ".extras").write_text("gpu\n")  # as the first lines of the recipe leave it
    command = ["make", "--dry-run", "--no-print-directory", "setup-gpu", f"VENV={tmp_path}"]
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "uninstall --yes --quiet torch onnxruntime" in said.stdout
    assert "pip install  torch==" in said.stdout
    assert 'install --editable ".[gpu,dev]"' in said.stdout
