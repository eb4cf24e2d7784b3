"""Real signals at every stage of real runs: the run ends at the next step, and can be continued.

The handler alone would raise an exception after a second. Here it never does, so each test shows that the
loop itself looks at the flag.
"""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_job import job_in as job
from tiny_job import workshop_in

import mrem_deploy
from mrem_deploy import benchmark, finetune, pipeline
from mrem_deploy.base import cli, files, interrupt
from mrem_deploy.benchmarks import schedule
from mrem_deploy.benchmarks.timing import interleave
from mrem_deploy.evaluate import layer_error, predict
from mrem_deploy.quant import artifact, calibrate, sensitivity
from mrem_deploy.recipe import make_recipe
from mrem_deploy.train import heldout, qat, rem, streams, supervised
from mrem_deploy.train.activation_cache import ActivationCache
from mrem_deploy.train.module import ModuleTrainer
from mrem_deploy.walk import loading, publishing, timing
from mrem_deploy.walk.state import Run

pytestmark = pytest.mark.usefixtures("usual_signals")
STEPS = 10  # per module, with checkpoints after 4 and 8
LONG = {"steps": STEPS, "checkpoint_steps": 4, "holdout": 16}
TERMINATED = 143


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop_in(tmp_path_factory.mktemp("workshop")) as root:
        yield root


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No report, which takes longer than the training here; and only checks raise exceptions."""
    monkeypatch.setattr(publishing, "write_report", lambda *args: None)
    monkeypatch.setattr(interrupt, "GRACE_SECONDS", 3600.0)


@pytest.fixture(scope="module")
def uninterrupted(workshop: Path) -> bytes:
    """The tensors of a run that nothing stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "write_report", lambda *args: None)
        assert job(workshop, "whole", **LONG).run() == 0
    return (workshop / "whole" / artifact.TENSORS).read_bytes()


class Signal:
    """Replaces a function by itself, but its call `at` (from 1) comes with a signal."""

    def __init__(self, owner: Any, name: str, at: int, number: int = signal.SIGTERM) -> None:
        self.owner, self.name, self.at, self.number = owner, name, at, number
        self.calls = 0

    def into(self, patch: pytest.MonkeyPatch) -> Signal:
        whole: Callable[..., Any] = getattr(self.owner, self.name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                signal.raise_signal(self.number)
            return whole(*args, **options)

        patch.setattr(self.owner, self.name, call)
        return self

    @property
    def calls_after(self) -> int:
        assert self.calls >= self.at, "the signal was never sent"
        return self.calls - self.at


# stage -> where, name and call; and how often it may be called again in the same step
MOMENTS: dict[str, tuple[Any, str, int, int]] = {
    "loading": (loading, "load_model", 1, 0),
    "planning": (timing, "_made_up", 2, 0),
    "initial scales": (calibrate, "search_activation_scale", 5, 0),
    "error per layer": (layer_error, "layers_of", 1, 1),  # of teacher and student
    "targets of a module": (streams.Targets, "put", 2, 0),
    "held-out loss": (heldout, "reconstruction_terms", 1, 0),
    "a step before any checkpoint": (ModuleTrainer, "step", 2, 0),
    "a step between checkpoints": (ModuleTrainer, "step", 7, 0),
    "outputs of a module": (ActivationCache, "put", 12, 1),
    "a step of the second module": (ModuleTrainer, "step", 17, 0),
    "evaluating": (predict, "model_outputs", 1, 0),
    "publishing": (publishing, "write_report", 1, 0),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_ends_within_the_step_and_is_continued_to_the_same_bits(
    moment: str, workshop: Path, uninterrupted: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "kept"))  # so that full precision is predicted each time
    owner, name, at, again = MOMENTS[moment]
    number = (signal.SIGINT, signal.SIGTERM)[list(MOMENTS).index(moment) % 2]
    with pytest.MonkeyPatch.context() as patch:
        sent = Signal(owner, name, at, number).into(patch)
        assert job(workshop, "stopped", **LONG).run() == 128 + number
    assert sent.calls_after <= again
    left = {path.name for path in workshop.iterdir() if "stopped" in path.name}
    assert left <= {".stopped.work"}
    assert {path.name for path in tmp_path.iterdir()} <= {"kept"}
    if left:  # a checkpoint
        assert job(workshop, "stopped", **LONG).run("--resume") == 0
        assert (workshop / "stopped" / artifact.TENSORS).read_bytes() == uninterrupted
        shutil.rmtree(workshop / "stopped")


QAT = {"method": "qat", "lr": None, "holdout": 0, "qat_epochs": "1+1", "qat_evals": 2}
OTHERS: dict[str, tuple[Any, str, int, dict[str, Any]]] = {
    "rem": (rem, "valid_mse", 4, {"method": "rem", "steps": 3}),
    "qat": (qat._Run, "_step", 3, QAT),
    "mrem-p in one process": (ModuleTrainer, "step", 4, {"method": "mrem-p", "workers": 1}),
    "bits auto": (sensitivity, "output_error", 2, {"bits": "auto", "budget_mb": 1, "method": "ptq"}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_every_method_looks_in_every_step(what: str, workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, at, options = OTHERS[what]
    sent = Signal(owner, name, at).into(monkeypatch)
    out = "-".join(["other", *what.split()])
    assert job(workshop, out, **options).run() == TERMINATED
    assert sent.calls_after <= (2 if what == "rem" else 0)  # q, k and v are three losses of one step
    assert not (workshop / out).exists()


def test_finetuning_looks_in_every_step(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"model": "model", "data": "data", "out": "tuned"}
    argv = [part for name, place in options.items() for part in (f"--{name}", str(workshop / place))]
    argv += ["--task", "text-classification", "--max-length", "16", "--batch-size", "8"]
    sent = Signal(supervised, "_step_seed", 3).into(monkeypatch)
    assert cli.run(finetune.main, argv) == TERMINATED
    assert sent.calls_after == 0
    assert not (workshop / "tuned").exists()


def test_benchmarks_look_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def call() -> float:
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return 0.0

    def main(argv: list[str] | None) -> int:
        return len(interleave({"one": call, "two": call}, rounds=10, warmup=1))

    assert cli.run(main) == TERMINATED
    assert len(calls) == 3
    sent = Signal(schedule, "simulate", 2).into(monkeypatch)
    assert cli.run(benchmark.main, ["schedule", "--quick"]) == TERMINATED
    assert sent.calls_after == 0


@pytest.mark.parametrize("owner_and_name", [(files, "_put_in_place"), (Run, "finish")])
def test_a_signal_after_the_last_check_leaves_a_complete_result(
    owner_and_name: tuple[Any, str], workshop: Path, uninterrupted: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written whole, nothing else is left, and the command reports success: it was done."""
    sent = Signal(*owner_and_name, 1).into(monkeypatch)
    assert job(workshop, "late", **LONG).run() == 0
    assert sent.calls_after == 0
    assert sorted(path.name for path in workshop.iterdir() if "late" in path.name) == ["late"]
    assert (workshop / "late" / artifact.TENSORS).read_bytes() == uninterrupted
    assert json.loads((workshop / "late" / "metrics.json").read_text())
    shutil.rmtree(workshop / "late")


def test_a_second_run_of_the_same_command_does_not_start_after_a_late_signal(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the built-in example, which makes two results."""
    recipes = [make_recipe(job(workshop, out, method="ptq").options) for out in ("first", "second")]
    Signal(files, "_put_in_place", 1).into(monkeypatch)

    def main(argv: list[str] | None) -> int:
        for recipe in recipes:
            pipeline.run(recipe)
        return 0

    assert cli.run(main) == TERMINATED
    assert (workshop / "first").exists()
    assert not (workshop / "second").exists()


# -- from Python ---------------------------------------------------------------------------------------------


def test_the_api_gives_the_callers_handlers_back(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook interrupts its kernel by SIGINT and expects a KeyboardInterrupt."""
    before = [signal.getsignal(number) for number in interrupt.SIGNALS]
    sent = Signal(ModuleTrainer, "step", 2, signal.SIGINT).into(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        mrem_deploy.run(make_recipe(job(workshop, "notebook", **LONG).options))
    assert sent.calls_after == 0
    assert [signal.getsignal(number) for number in interrupt.SIGNALS] == before
    assert not (workshop / "notebook").exists()


def test_the_api_runs_in_any_thread(workshop: Path) -> None:
    """Python handles signals in the main thread only; a run elsewhere leaves them alone."""
    before = [signal.getsignal(number) for number in interrupt.SIGNALS]
    found: list[Any] = []
    recipe = make_recipe(job(workshop, "threaded", method="ptq").options)
    thread = threading.Thread(target=lambda: found.append(mrem_deploy.run(recipe)))
    thread.start()
    thread.join()
    assert found[0].folder == workshop / "threaded"
    assert [signal.getsignal(number) for number in interrupt.SIGNALS] == before
