"""The walk: load → partition → insert quantizers → train → freeze → evaluate → save → export → validate →
report."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from mrem_deploy.base import machine
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import atomic_folder, write_json, write_text
from mrem_deploy.base.machine import keep_large_blocks
from mrem_deploy.base.progress import say
from mrem_deploy.data.encoded import BatchSchedule, Encoded
from mrem_deploy.data.task_data import Columns, TaskData, open_task, sample
from mrem_deploy.data.texts import encode
from mrem_deploy.deploy import validation
from mrem_deploy.evaluate.evaluation import Evaluation, evaluate, score_on_evaluation_split, weights_digest
from mrem_deploy.evaluate.examples import write_examples
from mrem_deploy.evaluate.layer_error import layer_errors
from mrem_deploy.models.loading import load_model
from mrem_deploy.preflight import (
    check_labels,
    check_model,
    check_out,
    check_workers,
    export_profiles,
    resolve_device,
    select_backend,
)
from mrem_deploy.quant import artifact
from mrem_deploy.quant.frozen import MEBIBYTE, FrozenModel, build, freeze
from mrem_deploy.recipe import Recipe, module_count, parse_epochs
from mrem_deploy.report.page import write_report
from mrem_deploy.result import History, LayerErrors
from mrem_deploy.train import METHODS
from mrem_deploy.train.checkpoint import CheckpointStore
from mrem_deploy.train.job import ProcessCost, TrainJob, worker_costs
from mrem_deploy.train.mrem_p import launch
from mrem_deploy.train.mrem_p.crew import Crew
from mrem_deploy.train.student import chosen_bits, make_student

ERROR_BATCHES = 4  # batches over which the error per layer is measured, before and after training
METRICS_FORMAT = 1


def quantize(recipe: Recipe, resume: bool = False) -> Path:
    """Run a whole recipe; returns the result folder."""
    out = _check_places(recipe)
    device = resolve_device(recipe.device)
    select_backend(recipe.kernels, device)
    if launch.is_worker():
        check_workers(recipe, int(os.environ["WORLD_SIZE"]))
    elif recipe.method == "mrem-p":
        workers = min(module_count(recipe.modules), recipe.workers or launch.devices(device))
        if workers > 1:
            return launch.launch(walk, (recipe, out, resume), workers, recipe.max_restarts)
    return walk(recipe, out, resume)


def walk(recipe: Recipe, out: Path, resume: bool) -> Path:
    """The whole walk in one process; of several that train together, rank 0 finishes it."""
    with launch.crew_of(recipe.worker_timeout) as crew:
        return _walk(recipe, out, resume or launch.is_restarted(), crew)


def _walk(recipe: Recipe, out: Path, resume: bool, crew: Crew) -> Path:
    started = time.perf_counter()
    if launch.is_restarted():
        say("a worker died; all start again from the last checkpoints")
    if crew.world > 1:
        torch.set_num_threads(launch.threads_each(recipe.threads, crew.local_world))
    elif recipe.threads:
        torch.set_num_threads(recipe.threads)
    keep_large_blocks()
    device = launch.device_of(resolve_device(recipe.device), crew)
    select_backend(recipe.kernels, device)  # again, because a worker is a process of its own
    profiles = export_profiles(recipe)

    say(f"loading {recipe.model}")
    task_data = open_task(
        str(recipe.task),
        str(recipe.data),
        Columns(recipe.text_column, recipe.text_pair_column, recipe.label_column),
        recipe.eval_data,
    )
    head = task_data.task.head
    teacher, tokenizer = load_model(str(recipe.model), head)
    check_model(recipe, teacher)
    texts = sample(task_data.train(), recipe.calib_size, recipe.seed)
    # Long contexts are several examples each, of which as many are drawn as there were to be.
    calibration = sample(encode(tokenizer, texts, recipe.max_length), recipe.calib_size, recipe.seed)
    check_labels(task_data, texts, teacher)
    teacher.to(device).requires_grad_(False)
    method = METHODS[recipe.method]
    training = _training_set(recipe, task_data, tokenizer) if method.needs_training_set else None
    weights = weights_digest(teacher)
    store = _open_store(crew, out, _identity(recipe, calibration, weights, training), resume)
    if resume:
        say(
            "continuing the interrupted run" if store.resumed else "no interrupted run found; starting afresh"
        )

    with machine.PeakMemory(device) as memory:
        train_started, cpu_started = time.perf_counter(), time.process_time()
        mixed = chosen_bits(teacher, recipe, calibration, store, crew) if recipe.chooses_bits else None
        spec = replace(recipe.spec, layer_bits=mixed.layer_bits if mixed else ())
        student = make_student(teacher, recipe, calibration, crew, spec)
        probe = [
            BatchSchedule(calibration.lengths, recipe.batch_size, recipe.seed).at(i)
            for i in range(ERROR_BATCHES)
        ]
        before = layer_errors(teacher, student, calibration, probe) if crew.leads else {}
        if training is not None:
            score = score_on_evaluation_split(recipe, task_data, tokenizer, teacher)
            job = TrainJob(teacher, student, training, recipe, store, crew, score)
        else:
            job = TrainJob(teacher, student, calibration, recipe, store, crew)
        log = method.train(job)
        train_seconds = time.perf_counter() - train_started + store.earlier_seconds
        cpu_seconds = time.process_time() - cpu_started
        own_cost = ProcessCost(memory.mb, cpu_seconds).to_dict()
        costs = [ProcessCost(**cost) for cost in crew.exchange("the sum of costs", own_cost)]
    if not crew.leads:
        del teacher, student  # the evaluation may need the memory
        crew.wait_for_leader("the result")
        if crew.local_rank == 0:  # the first on another machine, with checkpoints of its own
            store.remove()
        return out
    if crew.world > 1:  # the others are done: all their cores are free for the evaluation
        torch.set_num_threads(launch.threads_each(recipe.threads, 1))
    after = layer_errors(teacher, student, calibration, probe)

    frozen = freeze(student, head)
    frozen.notes = {
        "recipe_digest": recipe.digest(),
        "bits": recipe.bits,
        "method": recipe.method,
        "task": recipe.task,
        **({"mixed_precision": mixed.manifest_notes()} if mixed else {}),
    }
    quantized = build(frozen).to(device)
    evaluation = evaluate(recipe, task_data, tokenizer, teacher, quantized, weights)
    result: dict[str, Any] = {
        "format": METRICS_FORMAT,
        "task": task_data.task.name,
        "data": task_data.description,
        "model": recipe.model,
        "method": recipe.method,
        "bits": recipe.bits,
        "seed": recipe.seed,
        "accuracy": {},
        "cost": {
            "train_seconds": train_seconds,
            "total_seconds": 0.0,
            # On a shared machine fairer than the clock; a resumed run does not know its first part's.
            "train_cpu_seconds": None if store.resumed else sum(cost.cpu_seconds for cost in costs),
            "peak_memory_mb": max(cost.peak_memory_mb for cost in costs),
            "memory_kind": memory.kind + (", of the largest worker" if crew.world > 1 else ""),
            "workers": worker_costs(costs, log.workers),
            "calibration_samples": len(calibration),
            "stages": log.seconds,
        },
        "environment": machine.describe(),
    }
    if recipe.method == "mrem-p":
        result["parallel"] = {
            "staleness": 1 if recipe.deterministic else recipe.staleness,
            "teacher_forcing_steps": log.forcing_steps,
            "ages": {name: sorted(counted.items()) for name, counted in log.ages.items()},
        }
    if mixed:
        result["mixed_precision"] = mixed.to_dict()
    if training is not None:
        result["qat"] = {
            "epochs": list(parse_epochs(recipe.qat_epochs)),
            "training_samples": min(recipe.train_size or len(task_data.train()), len(task_data.train())),
            "training_split": len(task_data.train()),
            "training_windows": len(training),  # more than samples where texts are cut into several
            "chosen_on_the_evaluation_split": log.choice.to_dict() if log.choice else None,
        }
    errors = {"layers": list(before), "before": list(before.values()), "after": list(after.values())}
    with atomic_folder(out) as folder:
        save(folder, frozen, tokenizer, recipe)
        result["size"] = sizes(frozen, folder)
        if profiles:
            result["onnx"] = deploy(folder, profiles, recipe, frozen, quantized, evaluation)
            result["size"]["onnx_mb"] = result["onnx"]["size_mb"]
        result["accuracy"] = evaluation.accuracy().to_dict()
        result["cost"]["total_seconds"] = time.perf_counter() - started + store.earlier_seconds
        write_json(folder / "metrics.json", result)
        curves = {name: [list(point) for point in curve] for name, curve in log.curves.items()}
        write_report(folder, result, curves, {**errors, "unit": "relative RMS error"}, recipe.as_dict())
        History(log.curves, LayerErrors.between(before, after)).write(folder)
        write_examples(folder, evaluation, teacher.config)
    store.remove()
    crew.dismiss("the result")
    return out


def save(folder: Path, frozen: FrozenModel, tokenizer: Any, recipe: Recipe) -> None:
    """The model itself: packed integers, config, tokenizer and the recipe that made it."""
    artifact.save(frozen, folder)
    tokenizer.save_pretrained(folder)
    write_text(folder / "recipe.yaml", recipe.to_yaml())


def deploy(
    folder: Path,
    profiles: tuple[str, ...],
    recipe: Recipe,
    frozen: FrozenModel,
    quantized: PreTrainedModel,
    evaluation: Evaluation,
) -> dict[str, Any]:
    """Export every profile; the first one is validated, and what metrics.json says of it returned."""
    from mrem_deploy.export import PROFILES, export_onnx

    for name in profiles:
        say(f"exporting to ONNX, profile {name}")
        try:
            export_onnx(frozen, folder / PROFILES[name].file, name)
        except UserError as error:
            remedy = f"{error.remedy}; or keep the training and leave the export out: --resume --export none"
            raise UserError(error.problem, remedy) from error
    model = folder / PROFILES[profiles[0]].file
    if not recipe.validate:
        return validation.describe(model)
    found = validation.examine(model, evaluation, quantized, recipe.threads)
    accuracy = evaluation.accuracy()
    verdict = validation.judge(accuracy, validation.MAX_DROP)
    noted = validation.remarks(found, recipe.spec.activation_bits)
    for remark in noted:
        say(f"note: {remark}")
    record = validation.full_record(
        found, accuracy, verdict, noted, recipe, evaluation.task.name, full_precision_from="measured"
    )
    write_json(folder / validation.RESULT, record)
    return validation.headline(found, accuracy, verdict)


def sizes(frozen: FrozenModel, folder: Path) -> dict[str, float]:
    return {
        "full_precision_mb": frozen.full_precision_mb(),
        "quantized_mb": (folder / artifact.TENSORS).stat().st_size / MEBIBYTE,
        "formula_mb": frozen.formula_mb(),
    }


def _check_places(recipe: Recipe) -> Path:
    missing = [f"--{name}" for name in ("model", "task", "data", "out") if getattr(recipe, name) is None]
    if missing:
        raise UserError(
            f"{', '.join(missing)} must be given",
            "give --model, --task, --data and --out; without the first three the built-in example runs",
        )
    if recipe.cache_dir and Path(recipe.cache_dir).is_file():
        raise UserError(f"--cache-dir {recipe.cache_dir} is a file", "give a folder")
    read = {"model": recipe.model, "data": recipe.data, "eval_data": recipe.eval_data}
    return check_out(str(recipe.out), read, marker=artifact.MANIFEST)


def _work_folder(out: Path) -> Path:
    return out.with_name(f".{out.name}.work")


def _open_store(crew: Crew, out: Path, identity: dict[str, Any], resume: bool) -> CheckpointStore:
    """One after another: the first on each machine clears what an abandoned run left there."""
    place = 0 if crew.leads else 1 if crew.local_rank == 0 else 2
    for turn in range(3 if crew.world > 1 else 1):
        if turn == place:
            store = CheckpointStore(_work_folder(out), identity, resume or place == 2)
        crew.exchange("the checkpoints' folder")
    return store


def _training_set(recipe: Recipe, task_data: TaskData, tokenizer: Any) -> Encoded:
    """All of the training split for QAT, or what --train-size leaves of it. Its labels are not read."""
    texts = task_data.train()
    return encode(tokenizer, sample(texts, recipe.train_size or len(texts), recipe.seed), recipe.max_length)


def _identity(
    recipe: Recipe, calibration: Encoded, weights: str, training: Encoded | None = None
) -> dict[str, Any]:
    identity = {
        **recipe.identity(),
        "calibration data": calibration.digest(),
        "model weights": weights,
    }
    return identity if training is None else {**identity, "training data": training.digest()}
