"""The runtime's operators in onnxruntime itself, next to the functions of the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
runtime = pytest.importorskip("mrem_runtime", reason="mrem_runtime is not installed: make setup")

from exported import CLASSIFIER, run, skeleton  # noqa: E402
from fused import HIDDEN, MODELS, RUNTIME, answers, fused, session_with_library, with_hidden  # noqa: E402
from tiny_models import FIRST_WORD, TRACED, VOCABULARY, tiny_batch  # noqa: E402

from mrem_deploy.export import write  # noqa: E402

# LayerNorm, GELU and softmax round in another order than onnxruntime's: some units in the last place of
# hidden states, which are around 1. A code on the other side of a boundary would change them by over 1e-3.
CLOSE = {"rtol": 0, "atol": 5e-6}


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    return as_arrays(tiny_batch("bert"))


def as_arrays(batch: Any) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in batch.items()}


def as_tensors(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in batch.items()}


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
@pytest.mark.parametrize("kind", TRACED)
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


WIDTH = 9
MASKS = {
    "full": [1] * WIDTH,
    "padding on the right": [1] * 5 + [0] * 4,
    "padding on the left": [0] * 4 + [1] * 5,
    "gaps": [1, 0, 0, 1, 1, 0, 1, 1, 0],
    "one token": [0, 0, 0, 0, 0, 0, 1, 0, 0],
    "none": [0] * WIDTH,
}


def masked(kind: str) -> dict[str, np.ndarray]:
    """A row for every mask; ids differ, and those of padding are the pad token."""
    mask = np.array(list(MASKS.values()))
    ids = np.random.default_rng(7).integers(FIRST_WORD, VOCABULARY, size=mask.shape)
    ids[mask == 0] = MODELS["2-2-8"](kind).config.pad_token_id or 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


@pytest.mark.parametrize(("kind", "bits"), [("bert", "2-2-8"), ("bert", "mixed"), ("roberta", "2-2-4")])
def test_any_mask_gives_in_a_batch_what_it_gives_alone(kind: str, bits: str) -> None:
    """Padding on the left, gaps and rows of nothing: every real token has the same bits in its row alone, in
    the batch, behind more padding, and with one thread or two. The functions give nearly the same."""
    model, given = with_hidden(fused(MODELS[bits](kind))), masked(kind)
    real = given["attention_mask"] != 0
    opened = {threads: session_with_library(model, threads) for threads in (1, 2)}
    together, plain = answers(opened[1], given), run(model, as_tensors(given))
    assert np.isfinite(together["logits"]).all()
    for name in HIDDEN:
        assert not together[name][~real].any(), "padding is 0"
        np.testing.assert_allclose(together[name][real], plain[name][real], **CLOSE, err_msg=name)
    wider = {name: np.pad(value, ((0, 0), (0, 4))) for name, value in given.items()}
    for threads, session in opened.items():
        again = answers(session, wider)
        for row, title in enumerate(MASKS):
            alone = answers(session, {name: value[row : row + 1] for name, value in given.items()})
            for name, value in together.items():
                assert np.array_equal(alone[name][0], value[row]), (title, name, threads)
                if name in HIDDEN:
                    assert np.array_equal(again[name][row, :WIDTH], value[row]), (title, name, threads)


@pytest.mark.parametrize("bits", ["2-2-8", "4-4-8"])
def test_where_positions_follow_the_tokens_padding_can_be_anywhere(bits: str) -> None:
    """RoBERTa counts real tokens, so a sentence by itself has the same bits as behind padding on the left and
    torn apart by gaps."""
    model, given = with_hidden(fused(MODELS[bits]("roberta"))), masked("roberta")
    opened = session_with_library(model)
    together = answers(opened, given)
    for row, (title, mask) in enumerate(MASKS.items()):
        places = np.flatnonzero(mask)
        if not places.size:
            continue
        dense = answers(opened, {name: value[row : row + 1, places] for name, value in given.items()})
        for name in HIDDEN:
            assert np.array_equal(dense[name][0], together[name][row, places]), (title, name)


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


def quiet() -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors come as exceptions
    return options


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


def test_an_operator_that_the_library_lacks_says_what_to_update(tmp_path: Path) -> None:
    def renamed(node: Any, stored: Any) -> None:
        node.op_type = "GatedBlock"

    onnx.save(broken("FeedForwardBlock", renamed), tmp_path / "newer.onnx")
    with pytest.raises(Exception, match=r"has no operator GatedBlock: .*; update mrem-runtime"):
        runtime.session(tmp_path / "newer.onnx", options=quiet())


def test_an_operator_that_the_library_lacks_runs_as_its_function() -> None:
    """A newer file in an older library: what is new runs as in plain onnxruntime, the rest as operators."""
    model = onnx.ModelProto.FromString(fused(MODELS["2-2-8"]("bert")).SerializeToString())
    for node in (*model.graph.node, *model.functions):
        kind, field = (node.op_type, "op_type") if hasattr(node, "op_type") else (node.name, "name")
        if kind == "FeedForwardBlock":
            setattr(node, field, "GatedBlock")
    compare(model, "bert")


@pytest.mark.parametrize("threads", [-1, 100_000, 1.5, "4"])
def test_threads_that_nobody_can_have(threads: Any) -> None:
    with pytest.raises(ValueError, match="from 0 to 4096"):
        runtime.session(b"never read", threads=threads)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_tensor_whose_bytes_are_cut_off_does_not_load(operator: str) -> None:
    def cut(node: Any, stored: Any) -> None:
        codes = stored[node.input[CODES[operator]]]
        codes.raw_data = codes.raw_data[:-10]

    with pytest.raises(Exception, match=r"(?i)raw.?data|size|length|initializer"):
        session_with_library(broken(operator, cut))
