"""The C++ extension called with arguments that nobody should give: a ValueError or TypeError, never a crash.

Loads neither torch nor the rest of the package, so that `make sanitize` can run it on an extension that was
built with the sanitizers: MREM_TEST_EXTENSION names its file.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mrem_deploy.kernels import backends


def load_extension() -> Any:
    if path := os.environ.get("MREM_TEST_EXTENSION"):
        spec = importlib.util.spec_from_file_location("_cpu", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    if backends.extension().module is None:
        pytest.skip(f"no C++ extension here: {backends.extension().problem}", allow_module_level=True)
    return backends.extension().module


cpp = load_extension()
ROWS, COLUMNS = 3, 5


def floats(*shape: int) -> np.ndarray:
    return np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


# Arguments that fit together, by name. A test spoils one of them.
FITTING: dict[str, Callable[[], dict[str, Any]]] = {
    "quantize": lambda: {
        "x": floats(ROWS, COLUMNS), "scale": ones(ROWS, 1), "low": -8, "high": 7, "dequantize": True,
        "out": ones(ROWS, COLUMNS), "threads": 1,
    },
    "quantize_backward": lambda: {
        "grad": floats(ROWS, COLUMNS), "x": floats(ROWS, COLUMNS), "scale": ones(ROWS, 1), "low": -8,
        "high": 7, "grad_x": ones(ROWS, COLUMNS), "grad_scale": ones(ROWS, 1), "threads": 1,
    },
    "quantize_by_threshold": lambda: {
        "weight": floats(ROWS, COLUMNS), "threshold": ones(ROWS, 1), "inner": 0, "outer": 1,
        "factor": ones(ROWS, 1), "out": ones(ROWS, COLUMNS), "threads": 1,
    },
    "scale_product": lambda: {
        "product": floats(ROWS, COLUMNS), "scale": ones(COLUMNS), "bias": ones(COLUMNS), "threads": 1,
    },
    "twn": lambda: {
        "weight": floats(ROWS, COLUMNS), "per_row": True, "threshold": ones(ROWS, 1), "scale": ones(ROWS, 1),
        "threads": 1,
    },
    "midrise": lambda: {
        "weight": floats(ROWS, COLUMNS), "per_row": True, "threshold": ones(ROWS, 1), "scale": ones(ROWS, 1),
        "threads": 1,
    },
    "laq": lambda: {
        "weight": floats(ROWS, COLUMNS), "start": ones(ROWS, 1), "diagonal": ones(ROWS, COLUMNS), "low": -8,
        "high": 7, "iterations": 3, "per_row": True, "scale": ones(ROWS, 1), "threads": 1,
    },
}  # fmt: skip
OUTPUTS = {
    "quantize": ["out"],
    "quantize_backward": ["grad_x", "grad_scale"],
    "quantize_by_threshold": ["out"],
    "scale_product": ["product"],
    "twn": ["threshold", "scale"],
    "midrise": ["threshold", "scale"],
    "laq": ["scale"],
}
# The argument whose strides may be anything.
STRIDED = {("quantize", "x"), ("quantize_backward", "x"), ("quantize_by_threshold", "weight")}
ARRAYS = [
    (name, argument)
    for name, make in FITTING.items()
    for argument, value in make().items()
    if isinstance(value, np.ndarray)
]


def call(name: str, **changes: Any) -> dict[str, Any]:
    arguments = FITTING[name]() | changes
    getattr(cpp, name)(**arguments)
    return arguments


def refused(name: str, kinds: Any = ValueError, **changes: Any) -> str:
    with pytest.raises(kinds) as caught:
        call(name, **changes)
    return str(caught.value)


@pytest.fixture(autouse=True, scope="module")
def current() -> None:
    """An extension that was built before these checks would crash Python instead of failing a test."""
    try:
        call("quantize", threads=0)
    except ValueError:
        return
    pytest.fail("the C++ extension is older than its source: pip install -e .", pytrace=False)


def test_every_function_of_the_extension_is_tried_here() -> None:
    functions = {name for name in dir(cpp) if callable(getattr(cpp, name)) and not name.startswith("_")}
    assert functions == {*FITTING, "pack", "unpack", "targets", "cpu_features", "active_target", "use_target"}


@pytest.mark.parametrize("name", FITTING)
def test_the_arguments_fit(name: str) -> None:
    assert all(np.isfinite(call(name)[output]).all() for output in OUTPUTS[name])


# -- shapes and sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 2, 3, 1000])
def test_an_array_without_dimensions_has_one_scale(count: int) -> None:
    """There is no last dimension to divide by: this read memory in front of the array."""
    nothing, many = np.array(0.5, np.float32), ones(count)
    assert f"there are {count}" in refused("quantize", x=nothing, scale=many, out=ones(1))
    given = {"x": nothing, "grad": ones(1), "grad_x": ones(1), "grad_scale": ones(count)}
    assert f"there are {count}" in refused("quantize_backward", scale=many, **given)
    given = {"weight": nothing, "factor": ones(count), "out": ones(1)}
    assert f"there are {count}" in refused("quantize_by_threshold", threshold=many, **given)


def test_an_array_without_dimensions_is_one_element() -> None:
    nothing, one = np.array(3.4, np.float32), ones(1)
    call("quantize", x=nothing, scale=np.array(1, np.float32), out=one)
    assert one.tolist() == [3.0]
    for name in ("twn", "midrise"):
        assert "a dimension" in refused(name, weight=nothing, threshold=ones(1), scale=ones(1))
    assert "a dimension" in refused("laq", weight=nothing, start=ones(1), diagonal=None, scale=ones(1))
    assert "a dimension" in refused("scale_product", product=nothing, scale=ones(1), bias=None)


@pytest.mark.parametrize(("name", "argument"), ARRAYS)
def test_an_array_of_another_size(name: str, argument: str) -> None:
    for shape in ((0,), (0, 3), (2,), (ROWS, COLUMNS, 2), (1, 0, 1), (4096,)):
        problem = refused(name, **{argument: ones(*shape)})
        assert problem  # one of: elements, rows, empty, dimension


@pytest.mark.parametrize(("name", "argument"), ARRAYS)
def test_an_array_of_another_type(name: str, argument: str) -> None:
    fitting = FITTING[name]()[argument]
    for wrong in (
        fitting.astype(np.float64),
        fitting.astype(np.int32),
        fitting.astype(">f4"),
        fitting.tolist(),
        fitting.tobytes(),
        "x",
        object(),
    ):
        refused(name, TypeError, **{argument: wrong})
    if argument not in ("factor", "bias", "diagonal"):
        refused(name, TypeError, **{argument: None})


# -- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "argument"), ARRAYS)
def test_arrays_that_are_not_contiguous(name: str, argument: str) -> None:
    fitting = FITTING[name]()[argument]
    spread = np.repeat(fitting[..., None], 2, axis=-1)[..., 0]
    reversed_rows = fitting[::-1]
    broadcast = np.broadcast_to(np.float32(1), fitting.shape)
    for strided in (spread, reversed_rows, broadcast):
        if strided.flags.c_contiguous:
            continue
        if (name, argument) in STRIDED:
            refused(name, **{argument: strided})  # several scales need a contiguous array
        else:
            refused(name, TypeError, **{argument: strided})


@pytest.mark.parametrize(("name", "argument"), sorted(STRIDED))
def test_any_strides_give_the_result_of_a_copy(name: str, argument: str) -> None:
    """Negative, zero and overlapping strides are read as NumPy reads them, or refused."""
    base = floats(7, 6, 5, 4)
    views = [
        base[::-1], base[:, ::-1], base[..., ::-1], base[::2, ::-2], base[:, :, :1], base[..., :1],
        base[:0], np.broadcast_to(base[:1], base.shape), base.T, base.transpose(2, 0, 1, 3),
        np.lib.stride_tricks.as_strided(base, (5, 3, 4), (8, 4, 4)), base.reshape(-1)[::-1], base[3, 2, 1],
    ]  # fmt: skip
    tried = 0
    for view in views:
        sizes = {"out": ones(view.size), "grad": ones(view.size), "grad_x": ones(view.size)}
        given = {key: value for key, value in sizes.items() if key in FITTING[name]()}
        one = {
            key: ones(1) for key in ("scale", "threshold", "factor", "grad_scale") if key in FITTING[name]()
        }
        try:
            found = call(name, **given, **one, **{argument: view})
        except ValueError:
            continue
        again = {key: np.zeros_like(value) if key in OUTPUTS[name] else value for key, value in given.items()}
        truth = call(name, **again, **one, **{argument: np.ascontiguousarray(view)})
        np.testing.assert_array_equal(found[OUTPUTS[name][0]], truth[OUTPUTS[name][0]])
        tried += 1
    assert tried >= 8


@pytest.mark.parametrize(("name", "argument"), ARRAYS)
def test_addresses_that_are_not_those_of_floats(name: str, argument: str) -> None:
    fitting = FITTING[name]()[argument]
    odd = np.frombuffer(bytearray(4 * fitting.size + 1), np.uint8)[1:].view(np.float32).reshape(fitting.shape)
    assert odd.ctypes.data % 4
    assert f"{argument} must be aligned to 4 bytes" in refused(name, **{argument: odd})


@pytest.mark.parametrize(("name", "output"), [(name, out) for name, outs in OUTPUTS.items() for out in outs])
def test_outputs_that_may_not_be_written(name: str, output: str) -> None:
    fixed = FITTING[name]()[output]
    fixed.setflags(write=False)
    before = fixed.copy()
    assert f"{output} must be writable" in refused(name, **{output: fixed})
    np.testing.assert_array_equal(fixed, before)


def overlapping() -> list[tuple[str, str, str]]:
    """Every output with every other array of its function."""
    found = []
    for name, outputs in OUTPUTS.items():
        arrays = [argument for own, argument in ARRAYS if own == name]
        pairs = (pair for pair in itertools.product(outputs, arrays) if pair[0] != pair[1])
        found += [(name, *pair) for pair in pairs]
    return found


@pytest.mark.parametrize(("name", "output", "other"), overlapping())
def test_outputs_that_share_memory(name: str, output: str, other: str) -> None:
    arguments = FITTING[name]()
    room = np.ones(arguments[output].size + arguments[other].size, np.float32)
    shapes = arguments[output].shape, arguments[other].shape
    for shift in (1, arguments[output].size - 1):
        one = room[: arguments[output].size].reshape(shapes[0])
        two = room[shift : shift + arguments[other].size].reshape(shapes[1])
        problem = refused(name, **{output: one, other: two})
        assert "must not overlap" in problem
        assert output in problem
        assert other in problem


def test_a_gradient_may_be_replaced_in_place() -> None:
    grad = floats(ROWS, COLUMNS)
    truth = call("quantize_backward", grad=grad.copy())["grad_x"]
    call("quantize_backward", grad=grad, grad_x=grad)
    np.testing.assert_array_equal(grad, truth)


# -- numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FITTING)
def test_threads_out_of_range(name: str) -> None:
    for threads in (0, -1, 1025, 100_000, -(2**31), 2**31 - 1):
        assert refused(name, threads=threads) == f"threads must be 1 to 1024, but is {threads}"
    for threads in (2**31, 2**63, 1.5, None, "1"):
        refused(name, TypeError, threads=threads)
    call(name, threads=1024)  # no more than there are blocks of work are started


def test_other_numbers_out_of_range() -> None:
    for name in ("quantize", "quantize_backward", "laq"):
        assert "low must not exceed high, but they are 8 and 7" in refused(name, low=8)
        refused(name, TypeError, high=2**40)
    for iterations in (-1, 1001, 2**31 - 1):
        assert f"iterations must be 0 to 1000, but is {iterations}" in refused("laq", iterations=iterations)


def test_values_that_are_no_numbers_do_no_harm() -> None:
    special = np.array([np.nan, np.inf, -np.inf, 3e38, 1e-45], np.float32)
    for name in FITTING:
        arguments = FITTING[name]()
        for argument in (key for own, key in ARRAYS if own == name):
            call(name, **{argument: np.resize(special, arguments[argument].shape)})


# -- packing and targets -----------------------------------------------------------------------------------


def test_packing_of_anything_else() -> None:
    for bits in (-1, 0, 1, 5, 7, 9, 2**31 - 1):
        with pytest.raises(ValueError, match=f"but is {bits}"):
            cpp.pack(np.zeros(8, np.int8), bits)
        with pytest.raises(ValueError, match=f"but is {bits}"):
            cpp.unpack(np.zeros(8, np.uint8), bits, 8)
    for codes in (np.zeros(8), np.zeros((4, 2), np.int8)[:, 0], np.zeros(8, np.int8)[::-1], [1], None, b"12"):
        with pytest.raises(TypeError):
            cpp.pack(codes, 4)
    for count in (-1, -(2**63), 2**62, 2**63 - 1, 7, 100):
        with pytest.raises(ValueError, match=r"count must not be negative|packed bytes"):
            cpp.unpack(np.zeros(2, np.uint8), 4, count)
    with pytest.raises(TypeError):
        cpp.unpack(np.zeros(2, np.uint8), 4, 2**64)
    assert cpp.pack(np.array(3, np.int8), 4).tolist() == [3]
    assert cpp.unpack(np.array(3, np.uint8), 4, 2).tolist() == [3, 0]
    assert cpp.unpack(np.zeros(0, np.uint8), 4, 0).size == 0


@pytest.mark.parametrize("name", ["", "sse9", "avx512\0", "x" * 10_000])
def test_targets_that_there_are_not(name: str) -> None:
    before = cpp.active_target()
    with pytest.raises(ValueError, match="no CPU target"):
        cpp.use_target(name)
    assert cpp.active_target() == before
