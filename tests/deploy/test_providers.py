"""Where a session runs: what each provider gets, and that the CPU never takes over in silence."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_onnx import save_tiny_onnx

from mrem_deploy.base.errors import UserError
from mrem_deploy.deploy import census, providers, runtime
from mrem_deploy.deploy.findings import NO_INTEGERS
from mrem_deploy.deploy.providers import CPU, CUDA, TENSORRT, InputShapes, Placement

ALL = [TENSORRT, CUDA, CPU]
SHAPES = InputShapes(("input_ids", "attention_mask"), batch=64, tokens=144)
BATCH = {"input_ids": torch.tensor([[3, 7, 9]]), "token_type_ids": torch.zeros(1, 3, dtype=torch.int64)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_onnx(tmp_path / "model.onnx")


def test_a_provider_that_does_not_start_is_an_error(model: Path) -> None:
    """This onnxruntime has no CUDA; as with missing libraries, it opens the session on the CPU."""
    import onnxruntime

    if CUDA in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has the provider whose absence is tested")
    with (
        pytest.warns(UserWarning, match="not in available provider names"),
        pytest.raises(UserError, match=r"CUDAExecutionProvider did not start(.|\n)*onnxruntime-gpu"),
    ):
        runtime.open_session(model, where=Placement(((CUDA, {}), (CPU, {}))))


def test_cuda_folds_weights_and_multiplies_without_tf32() -> None:
    where = providers.place("cuda", ALL)
    assert where.for_session() == [(CUDA, {"use_tf32": "0"}), (CPU, {})]
    assert where.config == {"session.disable_quant_qdq": "1"}
    assert not where.compiles_graph


def test_the_entries_of_a_placement_reach_the_session(model: Path) -> None:
    """With that entry a dequantized weight is folded: no integer product is left."""
    assert census.census(model, BATCH).integer_count == 1
    folded = census.census(model, BATCH, where=Placement(config=providers.FOLD_WEIGHTS))
    assert folded.integer_count == 0
    assert folded.floating_count == 2


def test_tensorrt_gets_shapes_and_caches_and_cuda_behind_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MREM_CACHE", str(tmp_path))
    monkeypatch.setattr(providers, "tensorrt_problem", lambda: "")
    where = providers.place("tensorrt", ALL, SHAPES)
    (first, options), *others = where.for_session()
    assert first == TENSORRT
    assert others == [(CUDA, {"use_tf32": "0"}), (CPU, {})]
    assert options["trt_profile_min_shapes"] == "input_ids:1x1,attention_mask:1x1"
    assert options["trt_profile_opt_shapes"] == "input_ids:64x128,attention_mask:64x128"
    assert options["trt_profile_max_shapes"] == "input_ids:64x144,attention_mask:64x144"
    assert options["trt_int8_enable"] == "1"
    assert options["trt_fp16_enable"] == "0"  # a validation measures the codes, not fp16
    for what in ("engine", "timing"):
        assert options[f"trt_{what}_cache_enable"] == "1"
        assert Path(options[f"trt_{what}_cache_path"]).is_dir()
    assert where.compiles_graph


def test_tensorrt_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, mode: int) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(UserError, match=r"no libnvinfer\.so\.10(.|\n)*pip install(.|\n)*tensorrt"):
        providers.place("tensorrt", ALL, SHAPES)


def test_tensorrt_is_found_in_its_python_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded = []

    def load(name: str, mode: int) -> None:
        if name == providers.NVINFER:
            raise OSError
        loaded.append((name, mode))

    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(providers, "find_spec", lambda name: package)
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert providers.tensorrt_problem() == ""
    assert loaded == [(str(tmp_path / "libnvinfer.so.10"), ctypes.RTLD_GLOBAL)]


class FakeSession:
    """Stands for a session on a GPU: it notes how it was made and what its profile says."""

    def __init__(self, ran_on: str, folder: Path) -> None:
        self.ran_on, self.folder = ran_on, folder

    def run(self, outputs: None, feed: Any) -> None: ...

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name="input_ids")]

    def end_profiling(self) -> str:
        path = self.folder / "profile.json"
        path.write_text(f'[{{"cat": "Node", "args": {{"provider": "{self.ran_on}"}}}}]')
        return str(path)


def test_no_graph_is_dumped_where_tensorrt_compiles_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    def opened(path: Path, threads: int, where: Placement, options: Any) -> FakeSession:
        assert options.optimized_model_filepath == ""
        return FakeSession(TENSORRT, tmp_path)

    monkeypatch.setattr(census, "open_session", opened)
    found = census.census(model, BATCH, where=Placement(((TENSORRT, {}), (CUDA, {}), (CPU, {}))))
    assert found.providers == {TENSORRT: 1}
    assert found.integer_count == found.floating_count == 0


def test_a_provider_that_runs_nothing_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    monkeypatch.setattr(census, "open_session", lambda *arguments: FakeSession(CPU, tmp_path))
    with pytest.raises(UserError, match=r"no node of model\.onnx ran on Tensorrt(.|\n)*--profile int8"):
        census.census(model, BATCH, where=Placement(((TENSORRT, {}), (CPU, {}))))


def test_what_a_model_is_on_a_gpu_is_said() -> None:
    assert "multiplies floats" in str(providers.note_on({CUDA: 40, CPU: 2}))
    assert "compiled the graph" in str(providers.note_on({TENSORRT: 1, CUDA: 3}))
    assert providers.note_on({CPU: 7}) is None
    assert "not faster" in NO_INTEGERS


def test_the_cuda_libraries_are_loaded_before_a_session_on_a_gpu() -> None:
    calls = []
    runtime_with = SimpleNamespace(preload_dlls=lambda: calls.append("loaded"))
    for provider in (CPU, CUDA, TENSORRT):
        providers.preload(runtime_with, provider)
    assert calls == ["loaded"] * 2
    providers.preload(SimpleNamespace(), CUDA)  # an onnxruntime before 1.21


def test_the_module_is_light() -> None:
    code = (
        "import sys; from mrem_deploy.deploy import providers; "
        "print({'torch', 'onnxruntime', 'numpy', 'onnx'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
