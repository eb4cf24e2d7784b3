"""Which backend runs: the automatic choice, a choice by name, clear words for what is missing; the doctor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from mrem_deploy import doctor
from mrem_deploy.base.errors import UserError
from mrem_deploy.kernels import backends, reference
from mrem_deploy.preflight import select_backend
from mrem_deploy.recipe import Recipe

COMPILED = backends.extension().module is not None
needs_extension = pytest.mark.skipif(not COMPILED, reason=f"no C++ extension: {backends.extension().problem}")


@pytest.fixture(autouse=True)
def nothing_asked_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MREM_BACKEND", raising=False)
    backends.use_backend("auto")
    yield
    backends.use_backend("auto")


def without_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "extension", lambda: backends.Extension(None, "it was not built"))


@needs_extension
def test_float32_on_the_cpu_is_the_extensions_and_the_rest_the_references() -> None:
    assert backends.ops_for(torch.zeros(1)).__name__ == backends.BACKENDS["cpp"]
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        assert backends.ops_for(torch.zeros(1, dtype=dtype)) is reference
    assert backends.ops_for(torch.zeros(1, device="meta")) is reference


def test_a_gpu_gets_triton_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "triton_problem", lambda: "")
    assert backends.backend_for("cuda") == "triton"
    monkeypatch.setattr(backends, "triton_problem", lambda: "triton is not installed")
    assert backends.backend_for("cuda") == "reference"
    with pytest.raises(UserError, match=r"--kernels asks for triton, but triton is not installed"):
        backends.use_backend("triton")


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with an A100 on which Triton works."""
    monkeypatch.setattr(backends, "triton_problem", lambda: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "Fake GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    probe = SimpleNamespace(problem=lambda device: "")
    monkeypatch.setitem(sys.modules, "mrem_deploy.kernels.gpu.probe", probe)
    backends._probed.cache_clear()
    backends._warn_of_gpu.cache_clear()
    yield monkeypatch
    backends._probed.cache_clear()
    backends._warn_of_gpu.cache_clear()


def test_an_old_gpu_gets_the_reference_with_one_warning(
    one_gpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert backends.backend_for("cuda", index=0) == "triton"
    backends._probed.cache_clear()
    one_gpu.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.warns(RuntimeWarning, match=r"Fake GPU has compute capability 7\.5.*need 8\.0") as warned:
        found = [backends.backend_for("cuda", index=0), backends.backend_for("cuda")]
    assert found == ["reference"] * 2
    assert len(warned) == 1
    assert doctor.main([]) == 0
    told = capsys.readouterr().out
    assert "Fake GPU (compute capability 7.5)" in told
    assert "triton (training ops on a GPU): no, Fake GPU has compute capability 7.5" in told
    assert "on a GPU: reference" in told
    with pytest.raises(UserError, match=r"asks for triton, but Fake GPU has compute capability 7\.5"):
        select_backend("triton", torch.device("cuda", 0))


def test_capability_is_a_matter_of_nvidia_alone(one_gpu: pytest.MonkeyPatch) -> None:
    one_gpu.setattr(torch.cuda, "get_device_capability", lambda index: (0, 0))
    one_gpu.setattr(torch.version, "hip", "6.4")
    assert backends.gpu_problem(0) == ""


def test_a_gpu_on_which_no_kernel_runs_gets_the_reference(
    one_gpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def problem(device: torch.device) -> str:
        asked.append(device)
        return "Triton needs a C compiler at run time, and there is none"

    one_gpu.setattr(sys.modules["mrem_deploy.kernels.gpu.probe"], "problem", problem)
    with pytest.warns(RuntimeWarning, match="on Fake GPU: Triton needs a C compiler.*plain torch"):
        assert [backends.backend_for("cuda", index=0) for _ in range(3)] == ["reference"] * 3
    assert asked == [torch.device("cuda", 0)]  # one launch, however many ops there are
    assert doctor.main([]) == 0
    assert "for triton: install a C compiler" in capsys.readouterr().out


def test_a_deterministic_run_does_not_measure_tiles() -> None:
    select_backend("auto", torch.device("cpu"), deterministic=True)
    assert not backends.measures_tiles()
    select_backend("auto", torch.device("cpu"))
    assert backends.measures_tiles()


def test_without_the_extension_the_reference_takes_over_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_extension(monkeypatch)
    backends._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"it was not built; training on the CPU is slower"):
        assert backends.ops_for(torch.zeros(1)) is reference
    assert backends.ops_for(torch.zeros(1)) is reference


def test_the_option_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MREM_BACKEND", "cpp" if COMPILED else "auto")
    backends.use_backend("reference")
    assert backends.ops_for(torch.zeros(1)) is reference
    assert backends.backend() == "reference"
    backends.use_backend("auto")
    monkeypatch.setenv("MREM_BACKEND", "reference")
    assert backends.ops_for(torch.zeros(1)) is reference


@pytest.mark.parametrize(
    ("name", "device", "problem"),
    [
        ("cuda", "cpu", "one of auto, reference, cpp, triton; got 'cuda'"),
        ("cpp", "cpu", "it was not built"),
        ("triton", "cpu", "needs a GPU|no mrem_deploy.kernels.gpu.ops|not installed"),
    ],
)
def test_what_cannot_run_is_refused_in_clear_words(
    name: str, device: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_extension(monkeypatch)
    with pytest.raises(UserError, match=problem):
        select_backend(name, torch.device(device))


@needs_extension
def test_cpp_is_refused_for_a_gpu() -> None:
    with pytest.raises(UserError, match="--kernels cpp computes on the CPU, not on cuda"):
        select_backend("cpp", torch.device("cuda", 0))


def test_the_recipe_knows_the_backends() -> None:
    assert Recipe().kernels == "auto"
    assert "kernels" in Recipe().identity()  # the last bit of a step's gradient may depend on it
    with pytest.raises(UserError, match="--kernels must be one of auto, reference, cpp, triton; got 'fast'"):
        Recipe(kernels="fast")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MREM_")}
    return subprocess.run(
        [sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True
    )


@needs_extension
def test_the_cpu_target_is_chosen_by_the_environment() -> None:
    code = "from mrem_deploy.kernels import backends; print(backends.active_target())"
    assert run(code, MREM_CPU_TARGET="scalar").stdout.strip() == "scalar"
    own = {"avxvnni": "avx2", "avx512vnni": "avx512", "amx": "avx512"}  # the CPU runtime's names, and ours
    runs = backends.extension().module.targets()  # type: ignore[union-attr]
    for name in (name for name, ours in own.items() if runs.get(ours)):
        assert run(code, MREM_CPU_TARGET=name).stdout.strip() == own[name]
    code = "from mrem_deploy.base import cli; from mrem_deploy.kernels.__main__ import main; "
    wrong = run(f"import sys; {code}sys.exit(cli.run(main, []))", MREM_CPU_TARGET="sse9")
    assert wrong.returncode == 2, wrong.stderr
    assert 'MREM_CPU_TARGET: there is no CPU target "sse9"; this build has' in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_a_target_that_this_machine_lacks_says_what_it_needs() -> None:
    module = backends.extension().module
    lacking = [] if module is None else [name for name, runs in module.targets().items() if not runs]
    if module is None or not lacking:
        pytest.skip("this machine runs every target of the build")
    with pytest.raises(ValueError, match="needs AVX"):
        module.use_target(lacking[0])


def test_choosing_loads_neither_triton_nor_cuda() -> None:
    code = (
        "import sys, torch; from mrem_deploy.kernels import backends\n"
        "backends.ops_for(torch.zeros(2)); backends.backend_for('cuda')\n"
        "print('triton' in sys.modules, torch.cuda.is_initialized())"
    )
    assert run(code).stdout.split() == ["False", "False"]


# -- the doctor ----------------------------------------------------------------------------------------------


def test_the_doctor_tells_what_runs_and_why_not_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    told = capsys.readouterr().out
    assert f"float32 on the CPU: {'cpp' if COMPILED else 'reference'}" in told
    assert f"torch {torch.__version__}" in told
    assert "GPU: " in told
    if COMPILED:
        assert f"CPU target {backends.active_target()} of " in told


def test_the_doctor_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_extension(monkeypatch)
    monkeypatch.setenv("MREM_BACKEND", "cpp")
    assert doctor.main([]) == 0
    told = capsys.readouterr().out
    assert "nothing: MREM_BACKEND asks for cpp, but it was not built" in told
    assert "for cpp: install a C++17 compiler" in told


def test_an_instruction_set_needs_processor_and_operating_system() -> None:
    features = {"cpuid_avx2": True, "cpuid_avx512f": True, "os_avx": True, "os_avx512": False}
    assert doctor.instruction_sets(features) == [
        "AVX2: yes",
        "AVX-512: no, the operating system does not save its registers",
    ]


def test_the_choices_are_known_without_torch() -> None:
    """The recipe's --help lists them, and must not take seconds."""
    code = (
        "import sys; from mrem_deploy.kernels.backends import CHOICES; "
        "print(*CHOICES, {'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "auto reference cpp triton set()"
