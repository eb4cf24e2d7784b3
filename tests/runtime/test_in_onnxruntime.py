"""The runtime's operators in onnxruntime itself, next to the functions of the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
runtime = pytest.importorskip("mrem_runtime", reason="mrem_runtime is not installed: make setup")

from exported import CLASSIFIER, run, skeleton  # noqa: E402
from fused import HIDDEN, MODELS, RUNTIME, answers, fused, session_with_library, with_hidden  # noqa: E402
from tiny_models import ARCHITECTURES, FIRST_WORD, VOCABULARY, tiny_batch  # noqa: E402

from mrem_deploy.export import write  # noqa: E402

# LayerNorm, GELU and softmax round in another order than onnxruntime's: some units in the last place of
# hidden states, which are around 1. A code on the other side of a boundary would change them by over 1e-3.
CLOSE = {"rtol": 0, "atol": 5e-6}


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    return as_arrays(tiny_batch("bert"))


def as_arrays(batch: Any) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in batch.items()}


def compare(model: Any, kind: str, optimize: bool = True) -> None:
    """Hidden states of real tokens and outputs, with the library and without."""
    given = tiny_batch(kind)
    real = given["attention_mask"].bool().numpy()
    shown = with_hidden(model)
    expected, came = run(shown, given), answers(session_with_library(shown, optimize=optimize), given)
    for name, value in expected.items():
        seen = real if name in HIDDEN else slice(None)
        np.testing.assert_allclose(came[name][seen], value[seen], **CLOSE, err_msg=name)
    output = next(name for name in expected if name not in HIDDEN)
    assert np.array_equal(came[output].argmax(-1), expected[output].argmax(-1))


@pytest.mark.parametrize("bits", [name for name in MODELS if name not in ("mixed", "hot rows")])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_operators_give_what_functions_give(kind: str, bits: str) -> None:
    compare(fused(MODELS[bits](kind)), kind)


@pytest.mark.parametrize("bits", ["mixed", "hot rows", "2-2-4"])
def test_also_without_optimizations(bits: str) -> None:
    """The custom operator wins over the function of the same name, overloads included, at either level."""
    compare(fused(MODELS[bits]("bert")), "bert", optimize=False)
    compare(fused(MODELS[bits]("bert")), "bert")


@pytest.mark.parametrize("head", ["token-classification", "question-answering", "feature-extraction"])
def test_heads_of_every_task(head: str) -> None:
    model, given = fused(MODELS["4-4-8"]("bert", head)), tiny_batch("bert")
    real = given["attention_mask"].bool().numpy()
    expected, came = run(model, given), answers(session_with_library(model), given)
    for name, value in expected.items():
        np.testing.assert_allclose(came[name][real], value[real], **CLOSE, err_msg=name)


def test_attention_in_float() -> None:
    frozen = MODELS["2-2-8"]("bert")
    lowered = write.lowered(frozen, "mrem-cpu", skeleton=skeleton("bert", CLASSIFIER), attention="float")
    compare(write.compact_proto(lowered), "bert")


def test_the_library_runs_what_the_file_has_as_functions(tmp_path: Path) -> None:
    """A future onnxruntime that put in the functions first would silently be slow."""
    model = fused(MODELS["mixed"]("bert"))
    kinds = []
    for name in ("with", "without"):
        options = runtime.options() if name == "with" else ort.SessionOptions()
        options.optimized_model_filepath, options.log_severity_level = str(tmp_path / name), 3
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        kinds.append(
            {node.op_type for node in onnx.load(tmp_path / name).graph.node if node.domain == RUNTIME}
        )
    assert kinds == [{node.op_type for node in model.graph.node if node.domain == RUNTIME}, set()]


# -- an answer is that of the sentence ----------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "bits"), [("bert", "2-2-8"), ("bert", "2-2-4"), ("roberta", "4-4-8")])
def test_alone_in_a_batch_and_behind_padding_are_equal(kind: str, bits: str) -> None:
    model = with_hidden(fused(MODELS[bits](kind)))
    given, pad = as_arrays(tiny_batch(kind)), MODELS[bits](kind).config.pad_token_id or 0
    opened = {threads: session_with_library(model, threads) for threads in (1, 2)}
    together = answers(opened[1], given)
    padded = {name: np.pad(value, ((0, 0), (0, 7))) for name, value in given.items()}
    padded["input_ids"][:, -7:] = pad
    lengths = given["attention_mask"].sum(axis=1)
    assert len(set(lengths)) > 1
    for threads in (1, 2):
        wider = answers(opened[threads], padded)
        for row, length in enumerate(lengths):
            alone = answers(
                opened[threads], {name: value[row : row + 1, :length] for name, value in given.items()}
            )
            for name, value in together.items():
                tokens = slice(0, length) if name in HIDDEN else slice(None)
                assert np.array_equal(alone[name][0], value[row][tokens]), name
                assert np.array_equal(wider[name][row][tokens], value[row][tokens]), name


def test_padding_is_zero_and_never_read() -> None:
    model = with_hidden(fused(MODELS["2-2-8"]("bert")))
    opened, given = session_with_library(model), as_arrays(tiny_batch("bert"))
    padding = given["attention_mask"] == 0
    assert padding.any()
    expected = answers(opened, given)
    given["input_ids"][padding], given["token_type_ids"][padding] = -7, 2**40
    came = answers(opened, given)
    for name in expected:
        assert np.array_equal(came[name], expected[name])
        assert name not in HIDDEN or not came[name][padding].any()


@pytest.mark.parametrize("shape", [(0, 5), (0, 0)])
def test_an_empty_batch_has_empty_answers(shape: tuple[int, int], batch: dict[str, np.ndarray]) -> None:
    opened = session_with_library(fused(MODELS["2-2-8"]("bert", "token-classification")))
    empty = {name: np.zeros(shape, np.int64) for name in batch}
    assert answers(opened, empty)["logits"].shape == (*shape, 3)


# -- mistakes are errors that name the operator --------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, -(2**63), VOCABULARY, 2**63 - 1])
@pytest.mark.parametrize("name", ["input_ids", "token_type_ids"])
@pytest.mark.parametrize("bits", ["2-2-8", "hot rows"])
def test_ids_beyond_the_tables(name: str, wrong: int, bits: str, batch: dict[str, np.ndarray]) -> None:
    opened = session_with_library(fused(MODELS[bits]("bert")))
    given = {key: value.copy() for key, value in batch.items()}
    given[name][0, 1] = wrong
    with pytest.raises(Exception, match=rf"(?s)PackedEmbedding.*{wrong}"):
        answers(opened, given)
    answers(opened, batch)  # the session is as before


def test_more_tokens_than_positions(batch: dict[str, np.ndarray]) -> None:
    opened = session_with_library(fused(MODELS["2-2-8"]("bert")))
    long = {name: np.full((1, 41), FIRST_WORD if name == "input_ids" else 1) for name in batch}
    with pytest.raises(Exception, match="PackedEmbedding"):
        answers(opened, long)


def broken(operator: str, change: Any) -> Any:
    """A model in which one node of this operator is changed, by `change(node, initializers by name)`."""
    model = onnx.ModelProto.FromString(fused(MODELS["2-2-8"]("bert")).SerializeToString())
    del model.functions[:]  # else they must fit, too
    node = next(node for node in model.graph.node if node.op_type == operator)
    change(node, {i.name: i for i in model.graph.initializer})
    return model


OPERATORS = ("PackedEmbedding", "AttentionBlock", "FeedForwardBlock", "LowBitLinear")
CODES = dict(zip(OPERATORS, (4, 2, 5, 1), strict=True))  # the place of an operator's codes among its inputs


def shorter(operator: str, node: Any, stored: Any) -> None:
    codes = stored[node.input[CODES[operator]]]
    array = onnx.numpy_helper.to_array(codes)[:-1].copy()
    codes.CopyFrom(onnx.numpy_helper.from_array(array, codes.name))


def of_another_type(operator: str, node: Any, stored: Any) -> None:
    codes = stored[node.input[CODES[operator]]]
    array = onnx.numpy_helper.to_array(codes).astype(np.int8)
    codes.CopyFrom(onnx.numpy_helper.from_array(array, codes.name))


def without_an_attribute(operator: str, node: Any, stored: Any) -> None:
    wanted = next(a for a in node.attribute if a.name.endswith("low"))
    node.attribute.remove(wanted)


def of_another_format(operator: str, node: Any, stored: Any) -> None:
    next(a for a in node.attribute if a.name == "format").i = 2


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("change", [shorter, of_another_type, without_an_attribute, of_another_format])
def test_files_that_are_wrong_do_not_load(operator: str, change: Any) -> None:
    model = broken(operator, lambda node, stored: change(operator, node, stored))
    reason = r"(?i)newer.*update mrem.runtime" if change is of_another_format else operator
    with pytest.raises(Exception, match=reason) as caught:
        session_with_library(model)
    assert operator in str(caught.value)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_tensor_whose_bytes_are_cut_off_does_not_load(operator: str) -> None:
    def cut(node: Any, stored: Any) -> None:
        codes = stored[node.input[CODES[operator]]]
        codes.raw_data = codes.raw_data[:-10]

    with pytest.raises(Exception, match=r"(?i)raw.?data|size|length|initializer"):
        session_with_library(broken(operator, cut))
