"""Cells: one quantization run each, in a separate process, kept in `OUT/cells/DIGEST/`.

A cell is a result folder of `mrem quantize`, without its weights unless --keep-models is given. The folder
appears when the run has succeeded, so a finished cell is never run again, and an interrupted one continues
from the pipeline's checkpoints. The digest names everything that decides the numbers: the recipe, the
version of this package, and the weights of the model instead of their path.

The process is separate because peak memory is measured: what an earlier cell left behind would count.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mrem_deploy import __version__
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import write_json
from mrem_deploy.base.format import duration
from mrem_deploy.base.processes import in_fresh_process
from mrem_deploy.base.progress import say
from mrem_deploy.evaluate.examples import Examples, read_examples
from mrem_deploy.quant import artifact
from mrem_deploy.recipe import Recipe, from_yaml, make_recipe
from mrem_deploy.reproduce.estimate import Estimate
from mrem_deploy.reproduce.plan import GoboRecipe, Subject, name_of, papers_settings
from mrem_deploy.result import METRICS, RECIPE, History, Metrics

SUBJECTS = "subjects.json"
Runner = Callable[[Recipe], object]


@dataclass(frozen=True)
class CellResult:
    """The numbers of a finished run."""

    metrics: Metrics
    history: History
    examples: dict[str, Examples]  # by split


def run_cell(recipe: Recipe) -> None:
    """Run a cell, or continue it, in a separate process."""
    in_fresh_process(_run, recipe)


def _run(recipe: Recipe) -> None:
    if isinstance(recipe, GoboRecipe):
        from mrem_deploy.reproduce.gobo_cell import run_gobo

        run_gobo(recipe)
    else:
        from mrem_deploy.pipeline import run

        run(recipe)


class Cells:
    """All cells of an output folder."""

    def __init__(
        self,
        out: Path,
        subjects: Sequence[Subject],
        keep_models: bool = False,
        runner: Runner = run_cell,
    ) -> None:
        self.out = out
        self.folder = out / "cells"
        self.keep_models = keep_models
        self._runner = runner
        self._fingerprints = {(s.model, s.task): s.fingerprint for s in subjects}
        _check_subjects(out, subjects)

    def digest(self, recipe: Recipe) -> str:
        identity = recipe.identity()
        identity["version"] = __version__
        identity["model"] = self._fingerprints[str(recipe.model), str(recipe.task)]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]

    def place(self, recipe: Recipe) -> Path:
        return self.folder / self.digest(recipe)

    def is_finished(self, recipe: Recipe) -> bool:
        return (self.place(recipe) / METRICS).exists()

    def load(self, recipe: Recipe) -> CellResult:
        folder = self.place(recipe)
        try:
            return CellResult(Metrics.read(folder), History.read(folder), read_examples(folder))
        except (UserError, OSError, ValueError, KeyError) as error:
            raise UserError(
                f"the finished cell {folder} cannot be read: {error}",
                "remove that folder, and the cell is run again",
            ) from error

    def estimate(self, recipes: Sequence[Recipe]) -> Estimate:
        """How long cells take, learned from the finished ones of the same tasks."""
        known = Estimate()
        tasks = {recipe.task for recipe in recipes}
        for path in sorted(self.folder.glob(f"[!.]*/{METRICS}")):
            with suppress(UserError):  # a cell of another version may have options unknown to this one
                recipe = make_recipe(from_yaml(path.parent / RECIPE))
                if recipe.task in tasks:
                    known.learn(recipe, Metrics.read(path.parent))
        return known

    def run(self, recipes: Sequence[Recipe]) -> None:
        """Run the cells that are not finished yet; say what each one is and how much time is left."""
        missing = [recipe for recipe in recipes if not self.is_finished(recipe)]
        if len(missing) < len(recipes):
            say(f"{len(recipes) - len(missing)} of {len(recipes)} cells are finished already")
        known = self.estimate(recipes)
        for number, recipe in enumerate(missing, start=1):
            left = known.total(missing[number - 1 :])
            rest = f"; about {duration(left)} left" if left is not None else ""
            say(f"cell {number} of {len(missing)}: {cell_label(recipe)}{rest}")
            started = time.perf_counter()
            folder = self.place(recipe)
            self._runner(replace(recipe, out=str(folder)))
            if not self.keep_models:
                (folder / artifact.TENSORS).unlink(missing_ok=True)
            metrics = self.load(recipe).metrics
            known.learn(recipe, metrics)
            score, seconds = metrics.accuracy, time.perf_counter() - started
            say(
                f"  {score.metric} {score.quantized:.2f} (full precision {score.full_precision:.2f}) "
                f"in {duration(seconds)}"
            )


def over_seeds(recipes: Sequence[Recipe], seeds: int) -> list[Recipe]:
    """Every variant with every seed, each once, seed by seed: then a first table is complete early."""
    cells = [replace(recipe, seed=recipe.seed + seed) for seed in range(seeds) for recipe in recipes]
    return list(dict.fromkeys(cells))


def cell_label(recipe: Recipe) -> str:
    """A cell in a few words."""
    words = [str(recipe.task), name_of(recipe), recipe.bits]
    if recipe.method in ("mrem-s", "mrem-p"):
        words.append(f"{recipe.modules} module{'' if recipe.modules == '1' else 's'}")
    if recipe.method == "ptq":
        return ", ".join(words)
    if recipe.method == "qat":
        words.append(f"{recipe.qat_epochs} epochs")
    else:
        words += [f"{recipe.steps} steps", f"{recipe.calib_size} examples"]
    if recipe.method == "mrem-p" and recipe.teacher_forcing == 0:
        words.append("no teacher forcing")
    if recipe.per_channel:
        words.append("per channel")
    if unlike := [n for n, value in papers_settings(recipe.bits).items() if getattr(recipe, n) != value]:
        words += [f"{name} {getattr(recipe, name)}" for name in (*unlike, "lr")]
    return ", ".join([*words, f"seed {recipe.seed}"])


def fingerprint(model: str) -> str:
    """Names the weights of a local model by their content, so that it may be moved; a hub id names itself."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    hasher = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
        if path.is_file():
            with path.open("rb") as file:
                while part := file.read(1 << 22):
                    hasher.update(part)
    return hasher.hexdigest()[:16]


def _check_subjects(out: Path, subjects: Sequence[Subject]) -> None:
    """One folder holds one model per task: a table with cells of two models would mean nothing."""
    path = out / SUBJECTS
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}", "give another folder for --out") from error
    for subject in subjects:
        before = known.get(subject.task)
        if before and before["fingerprint"] != subject.fingerprint:
            raise UserError(
                f"--out {out} holds cells of another model for {subject.task}: {before['model']}",
                "give another folder for --out, or the model of these cells",
            )


def note_subjects(out: Path, subjects: Sequence[Subject]) -> None:
    """Write down whose cells these are, per task; entries of other tasks stay."""
    path = out / SUBJECTS
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known |= {s.task: {"model": s.model, "data": s.data, "fingerprint": s.fingerprint} for s in subjects}
    write_json(path, known)
