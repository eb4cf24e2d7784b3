"""The last stage: the result folder, written as a whole or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import atomic_folder
from mrem_deploy.base.machine import describe_machine
from mrem_deploy.base.units import MIB
from mrem_deploy.evaluate.examples import write_examples
from mrem_deploy.export.profiles import find_profile
from mrem_deploy.quant import artifact
from mrem_deploy.quant.frozen import FrozenModel
from mrem_deploy.recipe import Recipe, parse_epochs
from mrem_deploy.report.page import write_report
from mrem_deploy.result import RECIPE, HeldOut, History, Metrics, Onnx, Parallel, Qat, Result, Sizes
from mrem_deploy.result.recipe_file import write_recipe
from mrem_deploy.walk.loading import Loaded
from mrem_deploy.walk.scoring import score, score_fused
from mrem_deploy.walk.state import Run
from mrem_deploy.walk.training import Trained


def notes_of(recipe: Recipe, trained: Trained) -> dict[str, Any]:
    """What the manifest says about where the model comes from."""
    notes = {
        "recipe_digest": recipe.digest(),
        "bits": recipe.bits,
        "method": recipe.method,
        "task": recipe.task,
    }
    return notes | ({"mixed_precision": trained.mixed.manifest_notes()} if trained.mixed else {})


def publish(
    run: Run, loaded: Loaded, trained: Trained, frozen: FrozenModel, quantized: PreTrainedModel
) -> Result:
    """Save, export, score and report, all into one new folder that replaces an older result."""
    recipe, evaluation = run.recipe, loaded.evaluation
    with atomic_folder(run.out) as folder:
        frozen.save(folder, loaded.tokenizer, loaded.sentences.files if loaded.sentences else None)
        write_recipe(folder / RECIPE, recipe)
        model, fused = export(folder, run.profiles, frozen) if run.profiles else (None, None)
        onnx = score(recipe, evaluation, quantized, model)
        besides = score_fused(recipe, evaluation, fused)
        metrics = measured(run, loaded, trained, sizes(frozen, folder, onnx), onnx, frozen.hot_rows)
        metrics = replace(metrics, runtime=besides)
        metrics.write(folder)
        history = History(trained.log.curves, trained.errors, trained.log.heldout)
        history.write(folder)
        write_examples(folder, evaluation, loaded.teacher.config)
        write_report(folder, metrics, history, recipe)
    run.finish()
    return Result(run.out, metrics)


def export(folder: Path, profiles: tuple[str, ...], frozen: FrozenModel) -> tuple[Path, Path | None]:
    """Export every profile; the file of the first one is the one that is validated. Also the file for the CPU
    runtime, if it is another."""
    from mrem_deploy.export import export_all  # needs onnx, which is optional

    try:
        paths = export_all(frozen, folder, profiles)
    except UserError as error:
        remedy = f"{error.remedy}; or run again with --export none: the training is kept"
        raise UserError(error.problem, remedy) from error
    fused = [path for path, name in zip(paths[1:], profiles[1:], strict=True) if find_profile(name).fused]
    return paths[0], fused[0] if fused else None


def sizes(frozen: FrozenModel, folder: Path, onnx: Onnx | None) -> Sizes:
    return Sizes(
        full_precision_mb=frozen.full_precision_mb(),
        quantized_mb=(folder / artifact.TENSORS).stat().st_size / MIB,
        formula_mb=frozen.formula_mb(),
        onnx_mb=onnx.size_mb if onnx else None,
    )


def measured(
    run: Run, loaded: Loaded, trained: Trained, size: Sizes, onnx: Onnx | None, hot_rows: int
) -> Metrics:
    """metrics.json."""
    recipe, task_data, log = run.recipe, loaded.task_data, trained.log
    parallel = None
    if recipe.method == "mrem-p":
        ages = {name: sorted(counted.items()) for name, counted in log.ages.items()}
        staleness = 1 if recipe.deterministic else recipe.staleness
        parallel = Parallel(staleness, log.forcing_steps, ages)
    qat = None
    if loaded.training is not None:
        split, samples = len(task_data.train()), loaded.training_texts
        qat = Qat(parse_epochs(recipe.qat_epochs), samples, split, len(loaded.training), log.choice)
    return Metrics(
        task=task_data.task.name,
        data=task_data.description,
        model=str(recipe.model),
        method=recipe.method,
        bits=recipe.bits,
        hot_rows=hot_rows,
        seed=recipe.seed,
        accuracy=loaded.evaluation.accuracy(),
        cost=replace(trained.cost, total_seconds=run.seconds()),
        environment=describe_machine(),
        size=size,
        onnx=onnx,
        parallel=parallel,
        mixed=trained.mixed,
        target=trained.target,
        qat=qat,
        heldout={name: HeldOut.of(curve) for name, curve in log.heldout.items()},
    )
