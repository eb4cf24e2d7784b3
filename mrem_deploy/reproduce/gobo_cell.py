"""GOBO as a cell of the comparison on GLUE: no training, evaluated in torch, size by a formula."""

from __future__ import annotations

import time
from pathlib import Path

from mrem_deploy.base import machine
from mrem_deploy.base.files import atomic_folder
from mrem_deploy.base.units import MIB
from mrem_deploy.data.task_data import Columns, open_task
from mrem_deploy.evaluate.evaluation import evaluate
from mrem_deploy.evaluate.examples import write_examples
from mrem_deploy.models.loading import load_model
from mrem_deploy.recipe import Recipe
from mrem_deploy.result import Cost, History, Metrics, Sizes, WorkerCost

FLOAT_BYTES = 4


def run_gobo(recipe: Recipe) -> None:
    """Write the cell's folder: metrics, history and predictions."""
    import torch

    from mrem_deploy.reproduce.gobo import gobo_model

    started = time.perf_counter()
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    columns = Columns(recipe.text_column, recipe.text_pair_column, recipe.label_column)
    task_data = open_task(str(recipe.task), str(recipe.data), columns, recipe.eval_data)
    teacher, tokenizer = load_model(str(recipe.model), task_data.task.head)
    with machine.PeakMemory("cpu") as memory:
        began = time.perf_counter()
        quantized, size = gobo_model(teacher, recipe.spec)
        seconds = time.perf_counter() - began
    evaluation = evaluate(recipe, task_data, tokenizer, teacher, quantized)
    whole = sum(value.numel() for value in teacher.state_dict().values())
    with atomic_folder(Path(str(recipe.out))) as folder:
        History().write(folder)
        write_examples(folder, evaluation, teacher.config)
        Metrics(
            task=task_data.task.name,
            data=task_data.description,
            model=str(recipe.model),
            method="gobo",
            bits=recipe.bits,
            seed=recipe.seed,
            accuracy=evaluation.accuracy(),
            cost=Cost(
                train_seconds=seconds,
                total_seconds=time.perf_counter() - started,
                peak_memory_mb=memory.mb,
                memory_kind=memory.kind,
                workers=(WorkerCost("main", memory.mb),),
                calibration_samples=0,
            ),
            environment=machine.describe_machine(),
            size=Sizes(FLOAT_BYTES * whole / MIB, size.mb),
        ).write(folder)
