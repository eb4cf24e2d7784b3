"""Interruptions at every moment of a run: what is kept, and that the end is the same to the bit."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_job import job_in as job
from tiny_job import workshop_in

from mrem_deploy import __main__, pipeline, quantize
from mrem_deploy.base import cli
from mrem_deploy.quant import artifact
from mrem_deploy.train import checkpoint, rem, streams
from mrem_deploy.train.module import ModuleTrainer
from mrem_deploy.walk import publishing

ROOT = Path(__file__).resolve().parents[2]
STEPS = 10  # per module, with checkpoints after 4 and 8
LONG = {"steps": STEPS, "checkpoint_steps": 4}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop_in(tmp_path_factory.mktemp("workshop")) as root:
        yield root


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than training here; these tests look at the tensors."""
    monkeypatch.setattr(publishing, "write_report", lambda *args: None)


@pytest.fixture(scope="module")
def uninterrupted(workshop: Path) -> dict[str, bytes]:
    """The tensors of runs that nothing stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "write_report", lambda *args: None)
        for method in ("mrem-s", "rem"):
            steps = LONG if method == "mrem-s" else {"steps": 3}
            assert job(workshop, f"whole-{method}", method=method, **steps).run() == 0
    return {m: (workshop / f"whole-{m}" / artifact.TENSORS).read_bytes() for m in ("mrem-s", "rem")}


def at_call(number: int, whole: Callable[..., Any], spoil: Callable[..., None] = lambda *a: None) -> Any:
    """The function, until its call `number` (from 1), which is interrupted."""
    calls = iter(range(1, 10_000))

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) == number:
            spoil(*args)
            raise KeyboardInterrupt
        return whole(*args, **options)

    return call


def half_a_file(tensors: Any, path: Any, *rest: Any) -> None:
    Path(path).write_bytes(b"half a file")


# moment -> where, name, call, and how many steps are trained after resuming, of 20
MOMENTS: dict[str, tuple[Any, str, int, int]] = {
    "first step": (ModuleTrainer, "step", 1, 20),
    "before any checkpoint": (ModuleTrainer, "step", 4, 20),
    "between checkpoints": (ModuleTrainer, "step", 7, 16),
    "half of a checkpoint": (checkpoint, "save_file", 2, 16),
    "between modules": (streams.Streams, "advance", 1, 10),
    "second module": (ModuleTrainer, "step", 19, 2),
    "before the evaluation": (pipeline, "freeze", 1, 0),
    "half of the result": (artifact, "save_file", 1, 0),
    "before the report": (publishing, "write_report", 1, 0),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupted_run_ends_with_the_same_bits(
    moment: str, workshop: Path, uninterrupted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, number, left = MOMENTS[moment]
    out = workshop / "stopped"
    with pytest.MonkeyPatch.context() as patch:
        spoil = half_a_file if name == "save_file" else lambda *args: None
        patch.setattr(owner, name, at_call(number, getattr(owner, name), spoil))
        assert job(workshop, "stopped", **LONG).run() == cli.EXIT_INTERRUPTED
    assert not out.exists()
    steps: list[int] = []
    step = ModuleTrainer.step
    monkeypatch.setattr(ModuleTrainer, "step", lambda *a, **k: steps.append(a[1]) or step(*a, **k))
    assert job(workshop, "stopped", **LONG).run("--resume") == 0
    assert len(steps) == left
    assert (out / artifact.TENSORS).read_bytes() == uninterrupted["mrem-s"]
    stages = json.loads((out / "metrics.json").read_text())["cost"]["stages"]
    assert {"train module 1/2", "train module 2/2"} <= stages.keys()
    assert ("cache module 1/2" in stages) == (left > 0)  # what no module is left to read is not cached again
    assert [path.name for path in workshop.iterdir() if "stopped" in path.name] == ["stopped"]
    shutil.rmtree(out)


def test_rem_resumes_at_a_block(
    workshop: Path, uninterrupted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    units: list[str] = []
    whole = rem._train_unit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rem, "_train_unit", at_call(10, whole))  # in the second block: the first has 7 units
        assert job(workshop, "stopped-rem", method="rem", steps=3).run() == cli.EXIT_INTERRUPTED
    monkeypatch.setattr(rem, "_train_unit", lambda unit, *a: units.append(unit.name) or whole(unit, *a))
    assert job(workshop, "stopped-rem", method="rem", steps=3).run("--resume") == 0
    assert units
    assert not any("embeddings" in name for name in units)  # of the first block, which was kept
    assert (workshop / "stopped-rem" / artifact.TENSORS).read_bytes() == uninterrupted["rem"]


KILLED = """
import os, signal, sys
from mrem_deploy import quantize
from mrem_deploy.base import cli
from mrem_deploy.train.module import ModuleTrainer
step, calls = ModuleTrainer.step, iter(range(1, 100))
def deadly(*args, **options):
    if next(calls) == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*args, **options)
ModuleTrainer.step = deadly
cli.run(quantize.main, sys.argv[1:])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_killed_process_is_continued_by_another(workshop: Path, uninterrupted: dict[str, bytes]) -> None:
    """A kill leaves no chance to clean up; the old result stays until the new one is whole."""
    out = workshop / "killed"
    assert job(workshop, "killed", method="ptq").run() == 0
    old = (out / artifact.TENSORS).read_bytes()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-c", KILLED, *job(workshop, "killed", **LONG).argv()]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert (out / artifact.TENSORS).read_bytes() == old
    assert sorted(path.name for path in (workshop / ".killed.work").iterdir()) == [
        "command.txt",
        "module-0.safetensors",
        "module-1.safetensors",
        "recipe.yaml",
        "run.json",
    ]
    recipe = workshop / ".killed.work" / "recipe.yaml"
    assert cli.run(quantize.main, ["--config", str(recipe), "--resume"]) == 0
    assert (out / artifact.TENSORS).read_bytes() == uninterrupted["mrem-s"]
    assert [path.name for path in workshop.iterdir() if "killed" in path.name] == ["killed"]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that are trained from now on."""
    taken: list[int] = []
    step = ModuleTrainer.step
    monkeypatch.setattr(ModuleTrainer, "step", lambda *a, **k: taken.append(a[1]) or step(*a, **k))
    return taken


def interrupted(workshop: Path, out: str, call: int = 15) -> None:
    """An interrupted run; 15: after four steps of the second module, of which the first four are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleTrainer, "step", at_call(call, ModuleTrainer.step))
        assert job(workshop, out, **LONG).run() == cli.EXIT_INTERRUPTED


def test_the_same_command_continues_and_says_so(
    workshop: Path, uninterrupted: dict[str, bytes], steps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(workshop, "same")
    steps.clear()
    assert job(workshop, "same", **LONG).run() == 0
    said = capsys.readouterr().err
    assert f"continuing the interrupted run from its checkpoints in {workshop / '.same.work'}" in said
    assert steps == [*range(4, STEPS)]
    assert (workshop / "same" / artifact.TENSORS).read_bytes() == uninterrupted["mrem-s"]


def test_fresh_starts_over_and_says_so(
    workshop: Path, uninterrupted: dict[str, bytes], steps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(workshop, "afresh")
    steps.clear()
    assert job(workshop, "afresh", **LONG).run("--fresh") == 0
    assert f"removed the checkpoints of an interrupted run in {workshop}" in capsys.readouterr().err
    assert steps == [*range(STEPS), *range(STEPS)]
    assert (workshop / "afresh" / artifact.TENSORS).read_bytes() == uninterrupted["mrem-s"]


def test_the_printed_command_continues_from_any_folder(
    workshop: Path,
    tmp_path: Path,
    uninterrupted: dict[str, bytes],
    steps: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Relative paths, as people type them; the command works elsewhere too, and its recipe is complete."""
    monkeypatch.chdir(workshop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleTrainer, "step", at_call(15, ModuleTrainer.step))
        given = job(Path(), "told me", **LONG).argv()
        assert __main__.main(["quantize", *given]) == cli.EXIT_INTERRUPTED
    said = capsys.readouterr().err
    command = shlex.split(said[said.index("mrem quantize --config") :].splitlines()[0])
    assert command == ["mrem", "quantize", "--config", str(workshop / ".told me.work" / "recipe.yaml")]
    monkeypatch.chdir(tmp_path)
    steps.clear()
    assert __main__.main(command[1:]) == 0
    assert steps == [*range(4, STEPS)]
    assert (workshop / "told me" / artifact.TENSORS).read_bytes() == uninterrupted["mrem-s"]


def test_without_a_checkpoint_no_command_is_printed(
    workshop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleTrainer, "step", at_call(2, ModuleTrainer.step))
        argv = job(workshop, "early", **LONG).argv()
        assert __main__.main(["quantize", *argv]) == cli.EXIT_INTERRUPTED
    said = capsys.readouterr().err
    assert "interrupted before the first checkpoint" in said
    assert "--config" not in said
    assert [path.name for path in workshop.iterdir() if "early" in path.name] == []


def test_two_runs_do_not_mix(
    workshop: Path, uninterrupted: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one, of another recipe, starts while the first one trains: it is refused at once."""
    step, codes = ModuleTrainer.step, []

    def meanwhile(*args: Any, **options: Any) -> Any:
        if not codes:
            codes.append(None)
            codes.append(job(workshop, "shared", **LONG, seed=1).run("--fresh"))
        return step(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleTrainer, "step", meanwhile)
        assert job(workshop, "shared", **LONG).run() == 0
    assert codes[1] == cli.EXIT_USER_ERROR
    assert f"another run is writing to --out {workshop / 'shared'}: process {os.getpid()}" in (
        capsys.readouterr().err
    )
    assert (workshop / "shared" / artifact.TENSORS).read_bytes() == uninterrupted["mrem-s"]


def test_a_cache_on_disk_gives_the_same_bits_and_is_removed(
    workshop: Path, uninterrupted: dict[str, bytes]
) -> None:
    cache = {"max_memory": "0MB", "cache_dir": workshop / "scratch"}
    assert job(workshop, "on-disk", **LONG, **cache).run() == 0
    assert (workshop / "on-disk" / artifact.TENSORS).read_bytes() == uninterrupted["mrem-s"]
    assert list((workshop / "scratch").iterdir()) == []
