"""Opening ONNX models, asking them, and counting what really runs."""

from __future__ import annotations

from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tiny_onnx import WORDS, expected, save_tiny_onnx

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.options import MOST_THREADS
from mrem_deploy.deploy import census, optimizers, runtime
from mrem_deploy.deploy.providers import ON_CPU

BATCH = {
    "input_ids": torch.tensor([[3, 7, 9], [1, 4, 0]]),
    "token_type_ids": torch.tensor([[0, 1, 1], [0, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
}
TRUTH = expected(BATCH["input_ids"].numpy(), BATCH["token_type_ids"].numpy())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_onnx(tmp_path / "model.onnx")


def test_a_predictor_feeds_only_what_the_model_reads(model: Path) -> None:
    """The attention mask is no input of this model. 1e-5: sums in another order than numpy's."""
    predict = runtime.onnx_predictor(runtime.open_session(model))
    (logits,) = predict(BATCH)
    np.testing.assert_allclose(logits, TRUTH["logits"], rtol=0, atol=1e-5)
    narrow = {name: value.to(torch.int32) for name, value in BATCH.items()}
    np.testing.assert_array_equal(predict(narrow)[0], logits)


def test_token_types_that_a_tokenizer_does_not_give_are_all_zero(model: Path) -> None:
    predict = runtime.onnx_predictor(runtime.open_session(model))
    (logits,) = predict({"input_ids": BATCH["input_ids"]})
    ids = BATCH["input_ids"].numpy()
    np.testing.assert_allclose(logits, expected(ids, np.zeros_like(ids))["logits"], rtol=0, atol=1e-5)


def test_ids_outside_of_the_vocabulary_are_refused(model: Path) -> None:
    """onnxruntime refuses ids that are too large; negative ones it reads from the end of the table."""
    session = runtime.open_session(model)
    predict = runtime.onnx_predictor(session)
    plain = {name: value.numpy() for name, value in BATCH.items() if name != "attention_mask"}
    last = plain | {"input_ids": np.full_like(plain["input_ids"], WORDS - 1)}
    wrapped = plain | {"input_ids": np.full_like(plain["input_ids"], -1)}
    np.testing.assert_array_equal(session.run(None, wrapped)[0], session.run(None, last)[0])

    for name in ("input_ids", "token_type_ids"):
        with pytest.raises(UserError, match=f"{name} must be 0 or more; got -1"):
            predict(BATCH | {name: BATCH[name] - (BATCH[name] == 0).long()})
    with pytest.raises(
        UserError, match=r"cannot run the model on this batch: .*out of data bounds"
    ) as caught:
        predict(BATCH | {"input_ids": BATCH["input_ids"] + WORDS})
    assert "tokenizer" in caught.value.remedy


def test_the_census_tells_integer_products_from_float_ones(tmp_path: Path) -> None:
    found = census.census(save_tiny_onnx(tmp_path / "quantized.onnx"), BATCH)
    assert found.integer == {"MatMulIntegerToFloat": 1}
    assert found.floating_nodes == ["head"]
    assert (found.integer_count, found.floating_count) == (1, 1)
    assert found.providers.keys() == {"CPUExecutionProvider"}

    plain = census.census(save_tiny_onnx(tmp_path / "plain.onnx", integers=False), BATCH)
    assert plain.integer == {}
    assert plain.floating_count == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.onnx", "quantized.onnx"]


def test_every_node_that_ran_is_counted_once(model: Path) -> None:
    """Two gathers, their sum, QuantizeLinear, the product, the pooling and the head."""
    assert census.census(model, BATCH).providers == {"CPUExecutionProvider": 7}


def test_inner_values_become_outputs_of_a_copy(model: Path) -> None:
    before = model.read_bytes()
    copy, options = runtime.with_outputs(model, ["hidden.0", "hidden.1", "hidden.2", "logits"])
    session = runtime.open_session(copy, options=options)
    names = [entry.name for entry in session.get_outputs()]
    assert names == ["logits", "hidden.0", "hidden.1"]  # hidden.2 is not there, logits are already
    for name, value in zip(names, session.run(None, runtime.feed(session, BATCH)), strict=True):
        np.testing.assert_allclose(value, TRUTH[name], rtol=0, atol=1e-5)
    assert model.read_bytes() == before


def test_weights_in_a_file_of_their_own_are_found(model: Path, tmp_path: Path) -> None:
    large = tmp_path / "elsewhere" / "large.onnx"
    large.parent.mkdir()
    options = {"save_as_external_data": True, "location": "large.onnx.data", "size_threshold": 0}
    onnx.save(onnx.load(model), large, **options)
    copy, settings = runtime.with_outputs(large, ["hidden.0"])
    session = runtime.open_session(copy, options=settings)
    logits, hidden = session.run(None, runtime.feed(session, BATCH))
    np.testing.assert_allclose(logits, TRUTH["logits"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(hidden, TRUTH["hidden.0"], rtol=0, atol=1e-5)
    assert census.census(large, BATCH).integer_count == 1


def test_threads_are_the_only_option_that_is_changed(model: Path) -> None:
    options = runtime.open_session(model, threads=1).get_session_options()
    assert options.intra_op_num_threads == 1
    untouched = runtime.open_session(model).get_session_options()
    assert untouched.intra_op_num_threads == 0
    assert untouched.graph_optimization_level == options.graph_optimization_level


# --- what a user can get wrong -----------------------------------------------------------------


def refused(*args: Any, **options: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        runtime.open_session(*args, **options)
    return caught.value


@pytest.mark.parametrize("threads", [-1, 100_000, 1.5, "4", True])
def test_threads_that_nobody_can_have(model: Path, threads: Any) -> None:
    """onnxruntime would try to start any number of them, for minutes."""
    assert f"from 0 to {MOST_THREADS}; got {threads!r}" in refused(model, threads=threads).problem


def test_a_missing_file_is_told_with_the_command_that_writes_it(tmp_path: Path) -> None:
    error = refused(tmp_path / "model.onnx")
    assert "no ONNX model" in error.problem
    assert f"mrem_deploy.export {tmp_path}" in error.remedy


@pytest.mark.parametrize("kept", [0, 7, 0.5, 0.99])
def test_a_file_that_is_cut_short(kept: float, model: Path) -> None:
    content = model.read_bytes()
    model.write_bytes(content[: int(kept * len(content)) if kept < 1 else int(kept)])
    error = refused(model)
    assert "cannot be loaded" in error.problem
    assert "copy it again" in error.remedy


@pytest.mark.parametrize("newer", [{"opset": 99}, {"ir_version": 99}])
def test_a_runtime_too_old_for_the_file_is_told_so(newer: dict[str, int], tmp_path: Path) -> None:
    error = refused(save_tiny_onnx(tmp_path / "model.onnx", **newer))
    assert "opset" in error.problem
    assert "99" in error.problem
    assert "--profile int8" in error.remedy


def test_a_runtime_that_is_not_installed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = util.find_spec
    monkeypatch.setattr(runtime, "find_spec", lambda name: None if name == "onnxruntime" else whole(name))
    error = refused(model)
    assert error.problem == "onnxruntime is not installed"
    assert 'pip install "mrem-deploy[cpu]"' in error.remedy
    assert runtime.missing_packages("onnx", "onnxruntime") == ["onnxruntime"]


def test_a_provider_that_is_not_there(model: Path) -> None:
    assert runtime.placement("cpu", model, 1, 1) == ON_CPU
    with pytest.raises(UserError, match="CPUExecutionProvider"):
        runtime.placement("quantum", model, 1, 1)


# --- names of optimizers -----------------------------------------------------------------------


def test_optimizers_of_this_onnxruntime_are_known() -> None:
    known = optimizers.known_optimizers()
    assert {"SkipLayerNormFusion", "ConstantFolding", "EliminateIdentity"} <= known
    optimizers.check_optimizers(["SkipLayerNormFusion", "EliminateIdentity"])
    optimizers.check_optimizers([])


def test_a_misspelt_optimizer_is_refused_with_the_right_name(model: Path) -> None:
    """onnxruntime itself accepts any name without a word."""
    with pytest.raises(UserError, match=r"'SkipLayernormFusion'(.|\n)*did you mean SkipLayerNormFusion"):
        optimizers.check_optimizers(["ConstantFolding", "SkipLayernormFusion"])
    with pytest.raises(UserError, match=r"'xyz'(.|\n)*choose among(.|\n)*ConstantFolding"):
        optimizers.check_optimizers(["xyz"])
    with pytest.raises(UserError, match="did you mean ConstantFolding"):
        runtime.open_session(model, disabled_optimizers=["ConstantFoldin"])
    runtime.open_session(model, disabled_optimizers=["ConstantFolding"])


def test_without_a_log_no_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another onnxruntime may word its log differently; a right name must not be refused then."""
    monkeypatch.setattr(optimizers, "VERBOSE", 3)
    optimizers.known_optimizers.cache_clear()
    assert optimizers.known_optimizers() == frozenset()
    optimizers.check_optimizers(["xyz"])
    optimizers.known_optimizers.cache_clear()
