"""Every instruction set that this machine can run, in onnxruntime: the same bits from all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
runtime = pytest.importorskip("mrem_runtime", reason="mrem_runtime is not installed: make setup")

from exported import CLASSIFIER, skeleton  # noqa: E402
from fused import MODELS, fused, with_hidden  # noqa: E402
from tiny_models import tiny_batch  # noqa: E402

from mrem_deploy.export import write  # noqa: E402

TARGETS = ("scalar", "avx2", "avxvnni", "avx512vnni", "amx")
BITS = ("2-2-8", "4-4-8", "2-2-4", "8-8-8 per channel", "mixed", "hot rows", "2-2-8 twn")
CANNOT_RUN = 3

# An operator reads MREM_CPU_TARGET once, so every target has a process of its own.
RUN = f"""
import sys
import numpy as np, mrem_runtime
try:
    target = mrem_runtime.target()
except ValueError as error:
    print(error)
    sys.exit({CANNOT_RUN})
given, answers = np.load("batch.npz"), {{}}
for place, path in enumerate(sys.argv[2:]):
    session = mrem_runtime.session(path, threads=1)
    names = [entry.name for entry in session.get_outputs()]
    feed = {{entry.name: given[entry.name] for entry in session.get_inputs()}}
    for name, value in zip(names, session.run(names, feed)):
        answers[f"{{place}}.{{name}}"] = value
np.savez(sys.argv[1], **answers)
print(target)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, np.ndarray]]:
    """By target: every output and hidden state of models of all widths, and one with attention in float."""
    folder = tmp_path_factory.mktemp("targets")
    models = [fused(MODELS[bits]("bert")) for bits in BITS]
    frozen = MODELS["2-2-8"]("bert")
    in_float = write.lowered(frozen, "mrem-cpu", skeleton=skeleton("bert", CLASSIFIER), attention="float")
    models.append(write.compact_proto(in_float))
    files = [f"{place}.onnx" for place in range(len(models))]
    for name, model in zip(files, models, strict=True):
        (folder / name).write_bytes(with_hidden(model).SerializeToString())
    np.savez(folder / "batch.npz", **{name: value.numpy() for name, value in tiny_batch("bert").items()})
    found = {}
    for target in TARGETS:
        done = subprocess.run(
            [sys.executable, "-c", RUN, f"{target}.npz", *files],
            cwd=folder, env=os.environ | {"MREM_CPU_TARGET": target}, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode == CANNOT_RUN:
            assert done.stdout.strip() == f"MREM_CPU_TARGET={target} cannot run on this machine"
            continue
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == target, "another one ran"
        found[target] = dict(np.load(folder / f"{target}.npz"))
    return found


def test_every_target_gives_the_same_bits(answers: dict[str, dict[str, np.ndarray]]) -> None:
    expected = answers.pop("scalar")  # can run anywhere
    assert len(expected) > 4 * len(BITS)
    for target, came in answers.items():
        for name, value in expected.items():
            assert np.array_equal(came[name], value), (target, name)
    answers["scalar"] = expected


def test_the_one_in_use_is_the_best_of_them(answers: dict[str, dict[str, np.ndarray]]) -> None:
    if os.environ.get("MREM_CPU_TARGET"):
        pytest.skip("MREM_CPU_TARGET chooses it")
    assert runtime.target() == max(answers, key=TARGETS.index)


def test_an_unknown_name_is_refused_with_those_there_are(tmp_path: Path) -> None:
    code = "import mrem_runtime; mrem_runtime.options()"
    environment = os.environ | {"MREM_CPU_TARGET": "sse9"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert 'MREM_CPU_TARGET: there is no CPU target "sse9"; this build has ' in done.stderr
