"""`mrem reproduce` from the command line, on a tiny model: cells are run once, kept, and gone on with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_job import POSITIONS, save_model, workshop_in

from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError, WorkerFailed
from mrem_deploy.base.processes import in_fresh_process
from mrem_deploy.evaluate.examples import read_examples
from mrem_deploy.reproduce import __main__ as command
from mrem_deploy.reproduce import cells, subjects
from mrem_deploy.train.checkpoint import CheckpointStore


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop_in(tmp_path_factory.mktemp("reproduce")) as folder:
        yield folder


def arguments(workshop: Path, out: str, *what: str, **options: Any) -> list[str]:
    values: dict[str, Any] = {
        "model": workshop / "model",
        "task": "text-classification",
        "data": workshop / "data",
        "out": workshop / out,
        "bits": "2-2-4",
        "methods": "rem,mrem-s",
        "steps": 4,
        "rem_steps": 2,
        "module_counts": "1,2",
        "calib_size": 24,
        "batch_size": 8,
        "max_length": POSITIONS,
        "threads": 1,
        **options,
    }
    given = {f"--{name.replace('_', '-')}": value for name, value in values.items() if value is not None}
    return [*what, *(str(part) for pair in given.items() for part in pair)]


def reproduce(argv: list[str], *more: str) -> int:
    try:
        return cli.run(command.main, [*argv, *more])
    except SystemExit as exit:  # argparse's own refusals
        return exit.code if isinstance(exit.code, int) else 1


def here(call: Callable[..., Any], *arguments: Any) -> Any:
    """In this process, where a test can reach in."""
    return call(*arguments)


def never(call: Callable[..., Any], *arguments: Any) -> Any:
    raise AssertionError(f"a cell was run again: {arguments}")


@pytest.fixture(scope="module")
def done(workshop: Path) -> Path:
    """Two experiments with two seeds, run for real: every cell in a process of its own."""
    assert reproduce(arguments(workshop, "done", "num-modules", "error-propagation", seeds=2)) == 0
    return workshop / "done"


def test_two_experiments_with_two_seeds(done: Path) -> None:
    # 1 and 2 modules, and REM; MREM-S of two modules is shared; each with two seeds
    folders = [folder for folder in (done / "cells").iterdir() if not folder.name.startswith(".")]
    assert len(folders) == 6
    for folder in folders:
        names = {path.name for path in folder.iterdir()}
        assert {"metrics.json", "history.json", "examples.safetensors", "report.html"} <= names
        assert "mrem.safetensors" not in names  # weights are not kept unless asked for
        dev = read_examples(folder)["dev"]
        scores = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["accuracy"]
        for model in ("full_precision", "quantized"):
            assert 100 * (dev.predictions[model] == dev.truth).mean() == pytest.approx(scores[model])
    rows = json.loads((done / "num-modules.json").read_text(encoding="utf-8"))["rows"]
    assert [(r["modules"], r["paper_gigabytes"]) for r in rows] == [(1, 11.9), (2, 6.7)]
    assert rows[0]["score_std"] is not None
    assert rows[1]["change_how"] == "spread over 2 seeds"
    errors = json.loads((done / "error-propagation.json").read_text(encoding="utf-8"))
    assert [r["layer"] for r in errors["rows"]] == ["embeddings", "block 1", "block 2", "output"]
    assert all(r["rem 2-2-4"] > 0 and r["mrem-s 2-2-4"] > 0 for r in errors["rows"])
    assert {"index.md", "index.html", "num-modules.csv"} <= {path.name for path in done.iterdir()}
    assert {path.name for path in (done / "plots").iterdir()} == {"num-modules.png", "error-propagation.png"}


def test_the_caption_labels_every_reduction(done: Path) -> None:
    told = json.loads((done / "error-propagation.json").read_text(encoding="utf-8"))["caption"]
    for words in (
        "2 seeds (paper: 10)",
        "bits 2-2-4 (paper: 2-2-8, 2-2-4)",
        "steps per module 4 (paper: 2,000)",
        "steps per matmul of REM 2 (paper: 250)",
        "modules 2 (paper: 4)",
        "calibration examples 24 (paper: 4,096)",
        "learning rate 0.001 (paper: 0.0001)",
        "batch size 8",
        "task text-classification (paper: mnli)",
        "a model of 2 layers",
    ):
        assert words in told
    assert "evaluation examples" not in told  # all of them, as in the paper


def test_a_second_run_runs_no_cell_again(
    done: Path, workshop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cells, "in_fresh_process", never)
    assert reproduce(arguments(workshop, "done", "num-modules", seeds=2)) == 0
    shown = capsys.readouterr()
    assert "4 of 4 cells are finished already" in shown.err
    row = next(line for line in shown.out.splitlines() if line.startswith("| 2 "))
    assert " 6.7 |" in row  # the paper's


def test_a_dry_run_runs_and_writes_nothing(
    done: Path, workshop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cells, "in_fresh_process", never)
    before = sorted(done.rglob("*"))
    assert reproduce(arguments(workshop, "done", "num-modules", seeds=3), "--dry-run") == 0
    shown = capsys.readouterr().out
    assert shown.count("  finished ") == 4
    assert "6 cells; 2 cells to run, about " in shown
    assert sorted(done.rglob("*")) == before
    assert reproduce(arguments(workshop, "never", "all"), "--dry-run") == 0
    assert "known once a cell has finished" in capsys.readouterr().out
    assert not (workshop / "never").exists()


def test_finished_cells_survive_an_interruption(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def interrupted(call: Callable[..., Any], recipe: Any) -> None:
        if len(ran) == 1:
            raise KeyboardInterrupt
        ran.append(recipe.modules)
        call(recipe)

    argv = arguments(workshop, "interrupted", "num-modules")
    monkeypatch.setattr(cells, "in_fresh_process", interrupted)
    assert reproduce(argv) == cli.EXIT_INTERRUPTED
    assert not (workshop / "interrupted" / "num-modules.csv").exists()
    monkeypatch.setattr(
        cells, "in_fresh_process", lambda call, recipe: (ran.append(recipe.modules), call(recipe))
    )
    assert reproduce(argv) == 0
    assert ran == ["1", "2"]


def test_a_cell_goes_on_from_its_own_checkpoint(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted after the first of two modules, it ends with the same answers as a run in one go."""
    monkeypatch.setattr(cells, "in_fresh_process", here)
    argv = arguments(workshop, "midway", "num-modules", module_counts="2")
    save = CheckpointStore.save

    def save_and_stop(self: CheckpointStore, *values: Any) -> None:
        save(self, *values)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "save", save_and_stop)
        assert reproduce(argv) == cli.EXIT_INTERRUPTED
    assert reproduce(argv) == 0
    assert "continuing the interrupted run" in capsys.readouterr().err
    assert reproduce(arguments(workshop, "at-once", "num-modules", module_counts="2")) == 0
    one, other = (next((workshop / out / "cells").iterdir()) for out in ("midway", "at-once"))
    assert one.name == other.name
    assert (
        read_examples(one)["dev"].predictions["quantized"]
        == read_examples(other)["dev"].predictions["quantized"]
    ).all()


def test_models_are_kept_when_asked_for(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "in_fresh_process", here)
    argv = arguments(workshop, "kept", "num-modules", module_counts="1", steps=1)
    assert reproduce(argv, "--keep-models") == 0
    (cell,) = (workshop / "kept" / "cells").iterdir()
    assert (cell / "mrem.safetensors").exists()


def test_a_model_may_be_moved_but_not_replaced(
    done: Path,
    workshop: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cells, "in_fresh_process", never)
    (tmp_path / "moved").symlink_to(workshop / "model")
    assert reproduce(arguments(workshop, "done", "num-modules", seeds=2, model=tmp_path / "moved")) == 0
    other = save_model(tmp_path / "other", initializer_range=0.3)
    assert reproduce(arguments(workshop, "done", "num-modules", seeds=2, model=other)) == cli.EXIT_USER_ERROR
    assert "holds cells of another model for text-classification" in capsys.readouterr().err


def test_a_missing_model_is_fine_tuned(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cells, subjects):
        monkeypatch.setattr(module, "in_fresh_process", here)
    argv = arguments(
        workshop,
        "tuned",
        "glue",
        model=None,
        encoder=workshop / "model",
        finetune_epochs=0.2,
        methods="mrem-s",
    )
    assert reproduce(argv) == 0
    assert (workshop / "tuned" / "models" / "text-classification" / "finetune.json").exists()
    rows = json.loads((workshop / "tuned" / "glue.json").read_text(encoding="utf-8"))["rows"]
    ours = next(row for row in rows if (row["method"], row["bits"]) == ("mrem-s", "2-2-4"))
    assert ours["text-classification"] == ours["average"]
    quoted = next(row for row in rows if row["method"] == "TernaryBERT")
    assert (quoted["paper_megabytes"], quoted["average"]) == (28, None)


def test_baselines_have_rows_of_their_own(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "in_fresh_process", here)
    argv = arguments(
        workshop, "baselines", "main", "glue", methods="qat,gobo,mrem-s",
        train_size=16, qat_epochs="1+1", qat_lr="5e-4",
    )  # fmt: skip
    assert reproduce(argv) == 0
    main, glue = (
        json.loads((workshop / "baselines" / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("main", "glue")
    )
    qat = next(row for row in main["rows"] if row["method"] == "qat")
    assert (qat["thousands"], qat["paper_minutes"]) == (0.016, 875)
    assert "training examples of QAT 16 (paper: all); epochs of QAT 1+1 (paper: 3+3)" in main["caption"]
    assert "learning rate of QAT 0.0005 (the paper does not say)" in main["caption"]
    recipes = [path.read_text(encoding="utf-8") for path in workshop.glob("baselines/cells/*/recipe.yaml")]
    assert sum("qat_lr: 0.0005" in recipe for recipe in recipes) == 1
    assert "2-2-4: QAT scores above MREM-S" in [finding["claim"] for finding in main["orderings"]]
    gobo = {row["bits"]: row for row in glue["rows"] if row["method"] == "gobo"}
    assert set(gobo) == {"3-4-32", "2-2-32"}
    assert all(row["text-classification"] is not None for row in gobo.values())
    assert gobo["3-4-32"]["megabytes"] > gobo["2-2-32"]["megabytes"]
    assert "per-channel" not in glue["caption"]  # GOBO has no such choice to differ in
    assert (workshop / "baselines" / "plots" / "glue.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"what": ("everything",)}, "there is no experiment 'everything'"),
        ({"model": None}, "--model is missing for --task text-classification"),
        ({"model": "no/such/model"}, "no/such/model"),
        ({"data": None}, "--data must be given"),
        ({"task": "sst3"}, "Did you mean sst2"),
        ({"methods": "magic"}, "--methods: 'magic' is unknown"),
        ({"bits": "5-5-5"}, "5 bits for weights are not supported"),
        ({"lr": "fast"}, "--lr must be a number between 0 and 1"),
        ({"qat_lr": "2"}, "--qat-lr must be a number between 0 and 1"),
        ({"seeds": 0}, "--seeds must be a whole number of at least 1"),
        ({"what": ("teacher-forcing",)}, "there is nothing to run"),
    ],
)
def test_mistakes_are_explained(
    workshop: Path, change: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {name: value for name, value in change.items() if name != "what"}
    argv = arguments(workshop, "mistake", *change.get("what", ("num-modules",)), **options)
    assert reproduce(argv) == cli.EXIT_USER_ERROR
    assert words in capsys.readouterr().err
    assert not (workshop / "mistake" / "cells").exists()


def test_a_repeated_option_begins_the_next_triple() -> None:
    parser = command.build_parser()
    argv = "glue --out o --model m1 --task t1 --data d1 --task t2 --data d2 --data d3 --model m3 --task t3"
    assert parser.parse_args(argv.split()).triples == [
        {"model": "m1", "task": "t1", "data": "d1"},
        {"task": "t2", "data": "d2"},
        {"data": "d3", "model": "m3", "task": "t3"},
    ]


def _refuse() -> None:
    raise UserError("a problem", "a remedy")


def test_a_fresh_process_answers_or_explains() -> None:
    assert in_fresh_process(os.path.join, "a", "b") == os.path.join("a", "b")
    assert in_fresh_process(os.getpid) != os.getpid()
    with pytest.raises(UserError, match="a problem") as refused:
        in_fresh_process(_refuse)
    assert refused.value.remedy == "a remedy"
    with pytest.raises(WorkerFailed, match="failed"):
        in_fresh_process(os._exit, 3)
