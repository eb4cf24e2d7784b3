"""What the Triton kernels compile to, without a GPU: matrix instructions, registers, shared memory.

Every op in every tile that is shipped, for A100, H100 and MI300; and kernels made to fail each check.
It takes minutes, so `make gpu-compile` runs this file and `make test` does not; CI runs both.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton exists for Linux only")
import triton.language as tl  # noqa: E402

if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("TRITON_INTERPRET is set: nothing is compiled", allow_module_level=True)

from mrem_deploy.base.errors import UserError  # noqa: E402
from mrem_deploy.kernels.gpu import inspection, tuning  # noqa: E402
from mrem_deploy.kernels.gpu.launching import launch  # noqa: E402

TARGETS = ("sm_80", "sm_90", "gfx942")
pytestmark = pytest.mark.gpu_compile


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[inspection.Report]]:
    """All targets at once, each in its own process."""
    running = {}
    for target in TARGETS:
        folder = tmp_path_factory.mktemp(target)
        command = [sys.executable, "-m", "mrem_deploy.kernels.gpu.inspection", target, "--json"]
        environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache")}
        with open(folder / "report.json", "w") as out:
            running[target] = (subprocess.Popen(command, stdout=out, env=environment), folder)
    found = {}
    for target, (process, folder) in running.items():
        assert process.wait() == 0
        rows = json.loads((folder / "report.json").read_text())
        found[target] = [inspection.Report(**row) for row in rows]
    return found


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("target", TARGETS)
def test_every_shipped_tile_is_compiled(target: str, reports: dict[str, list[inspection.Report]]) -> None:
    vendor = inspection.DEVICES[target].target.backend
    tiles = {
        "codes": set[tuple[Any, ...]](),
        "product": set[tuple[Any, ...]](),
        "gradient": set[tuple[Any, ...]](),
    }
    for report in reports[target]:
        if report.kernel in ("product_kernel", "gradient_kernel"):
            kind = "gradient" if report.kernel == "gradient_kernel" else "product"
            sizes = tuple(report.constants[f"BLOCK_{letter}"] for letter in "MNK")
            tiles["codes" if report.constants.get("CODES") else kind].add(
                (*sizes, report.warps, report.stages)
            )
    for kind, shipped in tuning.TILES[vendor].items():
        assert tiles[kind] == {(tile.m, tile.n, tile.k, tile.warps, tile.stages) for tile in shipped}
    assert {report.call for report in reports[target]} == set(inspection.calls())


@pytest.mark.parametrize("target", TARGETS)
def test_no_kernel_spills_or_exceeds_the_device(
    target: str, reports: dict[str, list[inspection.Report]]
) -> None:
    problems = {
        f"{report.call}: {report.kernel} {report.constants}": report.problems(inspection.DEVICES[target])
        for report in reports[target]
    }
    assert {name: found for name, found in problems.items() if found} == {}


# sm_90 has wgmma from 64 rows on; smaller tiles use the older instruction.
INT8 = {"sm_80": r"mma\.sync.*s8\.s8", "sm_90": r"(wgmma|mma\.sync).*s8\.s8", "gfx942": r"v_mfma_i32_\w+_i8"}
FLOATS = {
    "sm_80": r"mma\.sync.*f32\.(tf32|bf16|f16)\.",
    "sm_90": r"(wgmma|mma\.sync).*f32\.(tf32|bf16|f16)\.",
    "gfx942": r"v_mfma_f32_\w+_(f32|bf16|f16)",
}


@pytest.mark.parametrize("target", TARGETS)
def test_products_run_on_matrix_units(target: str, reports: dict[str, list[inspection.Report]]) -> None:
    for report in reports[target]:
        expected = {"product_kernel": INT8, "gradient_kernel": FLOATS}.get(report.kernel)
        if expected is None:
            assert not report.matrix, report
        else:
            assert report.matrix, report
            assert all(re.search(expected[target], name) for name in report.matrix), report
            if target == "sm_90" and report.constants["BLOCK_M"] >= 64:
                assert all(name.startswith("wgmma") for name in report.matrix), report


@pytest.mark.parametrize("target", TARGETS)
def test_division_is_true_division(target: str, reports: dict[str, list[inspection.Report]]) -> None:
    divides = {"fake_quant_kernel", "fake_quant_backward_kernel", "codes_kernel", "gradient_kernel"}
    divides |= {"laq_rows_kernel", "laq_spans_kernel"}
    exact = {"v_div_fixup_f32", "v_div_fixup_f64"} if target == "gfx942" else {"div.rn.f32", "div.rn.f64"}
    for report in reports[target]:
        assert set(report.divisions) <= exact, report  # no .approx, no .full, no .ftz
        if report.call == "codes by threshold":
            assert not report.divisions, report  # a comparison
        elif report.kernel in divides or report.constants.get("CODES") is False:
            assert exact & set(report.divisions), report


# -- kernels that must not pass -----------------------------------------------------------------------------


@triton.jit
def approximate_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at) / tl.load(y_ptr + at))


def test_an_ordinary_division_is_found(own_cache: None) -> None:
    x = torch.zeros(64)
    (report,) = inspection.inspect(
        inspection.DEVICES["sm_80"], "x / y", lambda: launch(approximate_kernel, 1, x, x, BLOCK=64)
    )
    assert set(report.divisions) & {"div.full.f32", "div.approx.f32"}
    assert report.problems(inspection.DEVICES["sm_80"]) == ["an approximate division"]


def test_a_tile_that_is_too_large_is_found(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # 256 × 128 sums take all registers of 128 threads, and five stages more than the shared memory.
    monkeypatch.setitem(tuning.TILES["cuda"], "gradient", (tuning.Tile(256, 128, 32, 4, 5),))
    device = inspection.DEVICES["sm_80"]
    call = "linear_backward of x"
    report = inspection.inspect(device, call, inspection.calls()[call])[0]
    assert report.kernel == "gradient_kernel"
    assert report.spills > 0
    assert report.shared > device.shared
    assert len(report.problems(device)) >= 2


def test_an_unknown_target_is_a_users_mistake() -> None:
    with pytest.raises(UserError, match="sm_80, sm_90, gfx942"):
        inspection.inspect_all("sm_12")
