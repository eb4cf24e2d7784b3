"""The estimates for GPUs: counted by hand once, and the table in the documentation is the command's."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrem_deploy.kernels.gpu.roofline import A100, H100, Product, Work, table

DOCS = Path(__file__).resolve().parents[2] / "docs" / "kernels-gpu.md"


def test_a_product_counted_by_hand() -> None:
    fused, codes, by_left, by_right = Product("small", batch=1, rows=256, columns=384, summed=10).work()
    assert fused.operations == codes.operations == 2 * 256 * 384 * 10
    assert by_left.operations == by_right.operations == 2 * fused.operations  # two TF32 products
    left, right, result = 2560, 3840, 98304
    assert fused.bytes == 4 * (left + right + result)
    assert codes.bytes == 4 * (left + right + result) + 2 * (left + right)  # a byte written and read
    assert fused.quantized == 3 * left + 2 * right  # three tiles across, two down
    assert codes.quantized == left + right


def test_the_bound_is_the_largest_of_the_three_times() -> None:
    work = Work("work", operations=624e6, unit="int8", bytes=2039e3 * 3, quantized=9.75e6 / 20 * 2)
    assert work.times(A100) == pytest.approx({"matrix": 1.0, "memory": 3.0, "quantize": 2.0})
    assert work.bound(A100) == (pytest.approx(3.0), "memory")
    assert work.bound(H100)[0] < work.bound(A100)[0]


def test_the_documented_table_is_what_the_command_prints() -> None:
    assert table(32, 128) in DOCS.read_text(encoding="utf-8")
