"""What a run reads: the calibration sentences, and others that nothing is trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_job import POSITIONS, TRAIN, job_in, workshop_in
from tiny_models import tiny_model

from mrem_deploy.base.errors import UserError
from mrem_deploy.data.encoded import Encoded
from mrem_deploy.preflight import check_model
from mrem_deploy.recipe import Recipe
from mrem_deploy.walk import publishing
from mrem_deploy.walk.loading import Loaded, load
from mrem_deploy.walk.state import Begin, Run

METHODS = ("mrem-s", "mrem-p", "rem", "ptq", "qat")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop_in(tmp_path_factory.mktemp("workshop")) as root:
        yield root


def loaded(workshop: Path, **options: Any) -> Loaded:
    values: dict[str, Any] = {
        "task": "text-classification",
        "max_length": 32,
        "calib_size": 32,
        "modules": "2",
    } | options
    recipe = Recipe(model=str(workshop / "model"), data=str(workshop / "data"), **values)
    with Run.start(recipe, workshop / "out", Begin()) as run:
        return load(run)


def rows_of(encoded: Encoded | None) -> list[tuple[int, ...]]:
    assert encoded is not None
    return [tuple(row.tolist()) for row in encoded.columns["input_ids"]]


def test_the_calibration_set_does_not_depend_on_held_out_sentences(workshop: Path) -> None:
    with_them, without = loaded(workshop, holdout=6), loaded(workshop, holdout=0)
    assert with_them.calibration.digest() == without.calibration.digest()
    assert without.holdout is None
    assert len(rows_of(with_them.holdout)) == 6
    assert not set(rows_of(with_them.holdout)) & set(rows_of(with_them.calibration))
    assert "held-out data" in with_them.identity
    assert "held-out data" not in without.identity


def test_where_all_sentences_are_drawn_an_eighth_is_set_apart(workshop: Path) -> None:
    came = loaded(workshop, calib_size=4096)
    assert (len(came.calibration), len(rows_of(came.holdout))) == (TRAIN - TRAIN // 8, TRAIN // 8)


def test_qat_does_not_train_on_held_out_sentences(workshop: Path) -> None:
    came = loaded(workshop, method="qat", holdout=6)
    assert came.training is not None
    assert came.training_texts == len(came.training) == TRAIN - 6
    assert not set(rows_of(came.training)) & set(rows_of(came.holdout))
    some = loaded(workshop, method="qat", holdout=6, train_size=40)
    assert some.training_texts == 40  # as many as asked for, all of them from the others
    assert not set(rows_of(some.training)) & set(rows_of(some.holdout))


@pytest.mark.parametrize(
    ("head", "labels", "said"),
    [("feature-extraction", 3, "gives embeddings"), ("sequence-classification", 1, "has one output")],
)
def test_a_model_without_probabilities_has_no_divergence(head: str, labels: int, said: str) -> None:
    model = tiny_model("bert", head)
    model.config.num_labels = labels
    with pytest.raises(UserError, match=said):
        check_model(Recipe(output_loss="kl", modules="2", max_length=16), model)
    for recipe in (Recipe(output_loss=kind, modules="2", max_length=16) for kind in ("auto", "mse")):
        check_model(recipe, model)
    check_model(Recipe(output_loss="kl", modules="2", max_length=16), tiny_model())


@pytest.mark.parametrize("method", METHODS)
def test_every_method_reports_its_held_out_losses(
    workshop: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "write_report", lambda *args: None)
    options: dict[str, Any] = {"holdout": 6, "method": method, "steps": 6}
    if method == "qat":
        options |= {"qat_epochs": "1+1", "steps": None, "lr": None}
    if method == "mrem-p":
        options |= {"workers": 1}
    assert job_in(workshop, method, **options).run() == 0
    metrics = json.loads((workshop / method / "metrics.json").read_text())
    heldout = metrics["heldout"]
    assert list(heldout) == ["module 1/2", "module 2/2"]
    assert metrics["cost"]["heldout_samples"] == 6
    for module in heldout.values():
        assert np.isfinite(module["best"])
        assert module["best"] <= module["end"]
        assert (module["before"] is None) == (module["best_step"] is None) == (not method.startswith("mrem"))
    history = json.loads((workshop / method / "history.json").read_text())
    assert [len(curve) for curve in history["heldout"].values()] == [
        2 if method.startswith("mrem") else 1
    ] * 2


def test_without_held_out_sentences_nothing_is_said_of_them(workshop: Path) -> None:
    assert job_in(workshop, "none", holdout=0, method="ptq").run() == 0
    assert "heldout" not in json.loads((workshop / "none" / "metrics.json").read_text())
    assert "heldout" not in json.loads((workshop / "none" / "history.json").read_text())


def test_a_default_length_is_cut_to_what_the_model_reads(
    workshop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Many embedders read 128 tokens and less; a length that somebody gave is refused instead."""
    recipe = Recipe(model=str(workshop / "model"), data=str(workshop / "data"), task="text-classification",
                    modules="2", out=str(workshop / "out"))  # fmt: skip
    with Run.start(recipe, workshop / "out", Begin()) as run:
        came = load(run)
    assert (came.recipe.max_length, run.recipe.max_length) == (POSITIONS, POSITIONS)
    assert f"cut after {POSITIONS} tokens" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"--max-length 200"):
        loaded(workshop, max_length=200)
