"""What the Triton kernels compile to, without a GPU: matrix instructions, registers, shared memory.

Every op in every tile that is shipped, for A100, H100 and MI300; a few of them for other capabilities and, if
MREM_OTHER_TRITON names a folder with another Triton (`pip install --target`), with that one; and kernels made
to fail each check. It takes minutes, so `make gpu-compile` runs this file and `make test` does not; CI runs
both.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton exists for Linux only")
import triton.language as tl  # noqa: E402

if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("TRITON_INTERPRET is set: nothing is compiled", allow_module_level=True)

from mrem_deploy.base.errors import UserError  # noqa: E402
from mrem_deploy.kernels.gpu import inspection, ops, tuning  # noqa: E402
from mrem_deploy.kernels.gpu import linear as linear_op  # noqa: E402
from mrem_deploy.kernels.gpu.launching import DoesNotCompile, launch  # noqa: E402
from mrem_deploy.kernels.quantized import Quantized  # noqa: E402
from mrem_deploy.numerics import activation_grid, symmetric_grid  # noqa: E402

TARGETS = ("sm_80", "sm_90", "gfx942")  # with every tile
OTHERS = ("sm_86", "sm_89", "sm_100", "sm_120")  # a few
OTHER_TRITON = os.environ.get("MREM_OTHER_TRITON", "")
Reports = list[inspection.Report]
pytestmark = pytest.mark.gpu_compile


def inspect(target: str, folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What the kernels compile to, in a separate process; none of it comes from a cache."""
    return subprocess.run(
        [sys.executable, "-m", "mrem_deploy.kernels.gpu.inspection", target, "--json", *options],
        env={**os.environ, "TRITON_CACHE_DIR": str(folder), **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def done(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, subprocess.CompletedProcess[str]]:
    """What the chosen tests look at, as many targets at a time as there are cores; the longest first."""
    folder = tmp_path_factory.mktemp("caches")
    other = {"PYTHONPATH": os.pathsep.join(filter(None, (OTHER_TRITON, os.environ.get("PYTHONPATH", ""))))}
    chosen = [item for item in request.session.items if "done" in getattr(item, "fixturenames", ())]
    needed = dict.fromkeys((item.callspec.params["target"], "another" in item.name) for item in chosen)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        jobs = {}
        for target, is_other in sorted(needed, key=lambda job: (job[1], job[0] not in TARGETS)):
            name = f"other {target}" if is_other else target
            few = ["--few"] if is_other or target in OTHERS else []
            environment = other if is_other else {}
            jobs[name] = pool.submit(inspect, target, folder / name.replace(" ", "-"), *few, **environment)
        return {name: job.result() for name, job in jobs.items()}


def parsed(finished: subprocess.CompletedProcess[str]) -> Reports:
    assert finished.returncode == 0, finished.stderr
    return [inspection.Report(**row) for row in json.loads(finished.stdout)]


@pytest.fixture(scope="module")
def reports(done: dict[str, subprocess.CompletedProcess[str]]) -> dict[str, Reports]:
    return {target: parsed(done[target]) for target in TARGETS if target in done}


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("target", TARGETS)
def test_every_shipped_tile_is_compiled(target: str, reports: dict[str, Reports]) -> None:
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
def test_no_kernel_spills_or_exceeds_the_device(target: str, reports: dict[str, Reports]) -> None:
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
def test_products_run_on_matrix_units(target: str, reports: dict[str, Reports]) -> None:
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
def test_division_is_true_division(target: str, reports: dict[str, Reports]) -> None:
    divides = {"fake_quant_kernel", "fake_quant_backward_kernel", "codes_kernel", "gradient_kernel"}
    divides |= {"laq_rows_kernel", "laq_spans_kernel"}
    exact = {"v_div_fixup_f32", "v_div_fixup_f64"} if target == "gfx942" else {"div.rn.f32", "div.rn.f64"}
    for report in reports[target]:
        assert set(report.divisions) <= exact, report  # no .approx, no .full, no .ftz
        if report.call == "codes by threshold":
            assert not report.divisions, report  # a comparison
        elif report.kernel in divides or report.constants.get("CODES") is False:
            assert exact & set(report.divisions), report


# -- other capabilities, another Triton ---------------------------------------------------------------------


@pytest.mark.parametrize("target", OTHERS)
def test_other_capabilities_compile_and_fit(
    target: str, done: dict[str, subprocess.CompletedProcess[str]]
) -> None:
    found = parsed(done[target])
    assert {report.call for report in found} == set(inspection.FEW)
    for report in found:
        # Two accesses to local memory were seen on sm_100 and sm_120, three on sm_89: a register or two.
        assert report.spills <= 4, report
        assert replace(report, spills=0).problems(inspection.DEVICES[target]) == [], report
        assert bool(report.matrix) == (report.kernel in ("product_kernel", "gradient_kernel")), report


def test_a_capability_below_8_is_refused(own_cache: None) -> None:
    """`backends.LEAST_CAPABILITY` says so before anything is compiled; here is why."""
    call = "linear codes"
    with pytest.raises(DoesNotCompile):
        inspection.inspect(inspection.DEVICES["sm_75"], call, inspection.calls()[call], most_tiles=1)


@pytest.mark.skipif(not OTHER_TRITON, reason="MREM_OTHER_TRITON names no folder with another Triton")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", *OTHERS])
def test_another_triton_compiles_or_says_that_it_cannot(
    target: str, done: dict[str, subprocess.CompletedProcess[str]]
) -> None:
    """Either is fine: what does not compile is computed in plain torch. A crash would not be."""
    finished = done[f"other {target}"]
    if finished.returncode == 0:
        assert {report.call for report in parsed(finished)} == set(inspection.FEW)
    else:
        assert finished.returncode == 2, finished.stderr
        assert f"cannot compile the kernels for {target}" in finished.stderr
        assert target in ("sm_100", "sm_120"), finished.stderr


def test_every_op_compiles_where_all_sizes_are_one(own_cache: None) -> None:
    """Triton makes integer arguments of 1 constants, which do not have all methods of a number."""
    one, scale = torch.zeros(1, 1), torch.ones(())
    signed, learned = Quantized(scale, activation_grid(8)), Quantized(scale, symmetric_grid(4), learned=True)
    batch, grid = one.view(1, 1, 1, 1), symmetric_grid(4)
    calls = {
        "fake_quant": lambda: ops.fake_quant(one, scale, grid),
        "fake_quant_backward": lambda: ops.fake_quant_backward(one, one, scale, grid),
        "linear": lambda: linear_op.linear(one, one, one[0], signed, learned, codes=False),
        "linear codes": lambda: linear_op.linear(one, one, one[0], signed, learned, codes=True),
        "linear_backward": lambda: ops.linear_backward(one, one, one, signed, learned, True, True),
        "matmul": lambda: ops.matmul(batch, batch, signed, signed),
        "twn": lambda: (ops.twn(one, False), ops.twn(one, True)),
        "midrise": lambda: (ops.midrise(one, False), ops.midrise(one, True)),
        "laq": lambda: (ops.laq(one, scale, None, grid, 1, False), ops.laq(one, scale, one, grid, 1, True)),
    }
    for call, run in calls.items():
        assert inspection.inspect(inspection.DEVICES["sm_80"], call, run, most_tiles=1), call


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
    with pytest.raises(UserError, match=r"sm_75, sm_80, .*, gfx942"):
        inspection.inspect_all("sm_12")
