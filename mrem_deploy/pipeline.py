"""The walk: load → partition → insert quantizers → train → freeze → save → evaluate → report."""

from __future__ import annotations

import copy
import hashlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from mrem_deploy import artifact, environment, metrics
from mrem_deploy.batching import BatchSchedule, Encoded, encode
from mrem_deploy.config import Recipe, parse_megabytes, parse_modules
from mrem_deploy.data import Columns, TaskData, Texts, label_order, open_task, sample
from mrem_deploy.errors import UserError
from mrem_deploy.evaluate import layer_errors, pooling_of, predict, torch_predictor
from mrem_deploy.files import atomic_folder, explained, write_json, write_text
from mrem_deploy.freeze import MEBIBYTE, FrozenModel, build, freeze
from mrem_deploy.initialise import initial_steps
from mrem_deploy.loading import load_model
from mrem_deploy.memory import keep_large_blocks
from mrem_deploy.partition import module_cuts
from mrem_deploy.progress import say
from mrem_deploy.qlayers import insert_quantizers, prepare
from mrem_deploy.report import write_report
from mrem_deploy.train.checkpoint import CheckpointStore
from mrem_deploy.train.mrem import TrainSettings
from mrem_deploy.train.rem import train_rem
from mrem_deploy.train.sequential import CacheSettings, TrainLog, train_sequential

HEAD_OF_KIND = {
    "classification": "sequence-classification",
    "regression": "sequence-classification",
    "embedding": "feature-extraction",
    "token-classification": "token-classification",
    "question-answering": "question-answering",
}
ERROR_BATCHES = 4  # batches over which the error per layer is measured, before and after training
METRICS_FORMAT = 1


def quantize(recipe: Recipe, resume: bool = False) -> Path:
    """Run a whole recipe; returns the result folder."""
    started = time.perf_counter()
    out = _check_places(recipe)
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    keep_large_blocks()
    device = _device(recipe.device)

    say(f"loading {recipe.model}")
    task_data = open_task(
        recipe.task,
        recipe.data,
        Columns(recipe.text_column, recipe.text_pair_column, recipe.label_column),
        recipe.eval_data,
    )
    head = HEAD_OF_KIND[task_data.task.kind]
    teacher, tokenizer = load_model(recipe.model, head)
    texts = sample(task_data.train(), recipe.calib_size, recipe.seed)
    calibration = encode(tokenizer, texts, recipe.max_length)
    _check_labels(task_data, texts, teacher)
    teacher.to(device).requires_grad_(False)
    store = CheckpointStore(
        _work_folder(out), _identity(recipe, calibration, teacher), resume
    )
    if resume:
        say("continuing the interrupted run" if store.resumed else "no interrupted run found; starting afresh")

    with environment.PeakMemory(device) as memory:
        train_started = time.perf_counter()
        student = make_student(teacher, recipe, calibration)
        probe = [BatchSchedule(calibration.lengths, recipe.batch_size, recipe.seed).at(i) for i in range(ERROR_BATCHES)]
        before = layer_errors(teacher, student, calibration, probe)
        log = train(teacher, student, recipe, calibration, store)
        train_seconds = time.perf_counter() - train_started
    after = layer_errors(teacher, student, calibration, probe)

    frozen = freeze(student, head)
    frozen.notes = {"recipe_digest": recipe.digest(), "bits": recipe.bits, "method": recipe.method, "task": recipe.task}
    accuracy = evaluate(recipe, task_data, tokenizer, teacher, build(frozen).to(device))
    result = {
        "format": METRICS_FORMAT,
        "task": task_data.task.name,
        "data": task_data.description,
        "model": recipe.model,
        "method": recipe.method,
        "bits": recipe.bits,
        "seed": recipe.seed,
        "accuracy": accuracy,
        "cost": {
            "train_seconds": train_seconds,
            "total_seconds": 0.0,
            "peak_memory_mb": memory.mb,
            "memory_kind": memory.kind,
            "workers": [{"name": "main", "peak_memory_mb": memory.mb}],
            "calibration_samples": len(calibration),
            "stages": log.seconds,
        },
        "environment": environment.describe(),
    }
    errors = {"layers": list(before), "before": list(before.values()), "after": list(after.values())}
    with atomic_folder(out) as folder:
        save(folder, frozen, tokenizer, recipe)
        result["size"] = sizes(frozen, folder)
        result["cost"]["total_seconds"] = time.perf_counter() - started
        write_json(folder / "metrics.json", result)
        curves = {name: [list(point) for point in curve] for name, curve in log.curves.items()}
        write_report(folder, result, curves, {**errors, "unit": "relative RMS error"}, recipe.as_dict())
    store.remove()
    return out


def make_student(teacher: nn.Module, recipe: Recipe, calibration: Encoded) -> nn.Module:
    """The fake-quant model with initialised step sizes; prepares the teacher as well."""
    device = next(teacher.parameters()).device
    found = prepare(teacher)
    schedule = BatchSchedule(calibration.lengths, recipe.batch_size, recipe.seed)
    batches = ({k: v.to(device) for k, v in calibration.batch(schedule.at(i)).items()} for i in range(recipe.init_batches))
    say(f"initialising step sizes on {recipe.init_batches} batches")
    steps = initial_steps(teacher, found, recipe.spec, batches)
    student = copy.deepcopy(teacher)
    insert_quantizers(student, recipe.spec, steps)
    return student.requires_grad_(True).to(device)


def train(
    teacher: nn.Module, student: nn.Module, recipe: Recipe, calibration: Encoded, store: CheckpointStore | None = None
) -> TrainLog:
    """Train the student in place by the recipe's method."""
    cuts = module_cuts(teacher, parse_modules(recipe.modules))
    settings = TrainSettings(recipe.steps, recipe.lr, recipe.step_lr, recipe.batch_size, recipe.seed)
    cache = CacheSettings(_memory_budget(recipe), Path(recipe.cache_dir) if recipe.cache_dir else None)
    if recipe.method == "mrem-s":
        return train_sequential(
            teacher, student, cuts, calibration, settings, cache, store, recipe.checkpoint_steps
        )
    if recipe.method == "rem":
        return train_rem(teacher, student, calibration, settings, cache, store)
    return TrainLog()  # ptq: the initialisation is the result


def evaluate(
    recipe: Recipe, task_data: TaskData, tokenizer: Any, teacher: nn.Module, quantized: nn.Module
) -> dict[str, Any]:
    """Score both models on the evaluation split, which is read here for the first and only time."""
    task = task_data.task
    pooling = pooling_of(recipe.model or "") if task.kind == "embedding" else None
    splits: dict[str, Any] = {}
    for split, texts in task_data.evaluation().items():
        encoded = encode(tokenizer, texts, recipe.max_length)
        outputs = {}
        for name, model in (("full_precision", teacher), ("quantized", quantized)):
            label = f"evaluate {split} {name.replace('_', ' ')}"
            outputs[name] = predict(torch_predictor(model), encoded, label, pooling=pooling)
        splits[split] = {"examples": len(encoded), **compare(task, texts, teacher, outputs)}
    first = next(iter(splits.values()))
    metric = task.metric
    return {
        "metric": metric,
        "full_precision": first["full_precision"][metric],
        "quantized": first["quantized"][metric],
        "splits": splits,
    }


def compare(task: Any, texts: Texts, teacher: nn.Module, outputs: dict[str, list[np.ndarray]]) -> dict[str, Any]:
    """Metrics of both models; for classes also how many answers were lost and gained."""
    reference, quantized = outputs["full_precision"], outputs["quantized"]
    if task.kind in ("embedding", "token-classification", "question-answering"):
        measure = metrics.agreement if task.kind == "embedding" else metrics.token_agreement
        pair = (np.stack(reference), np.stack(quantized)) if task.kind == "embedding" else (reference, quantized)
        agreed = measure(*pair)
        return {"full_precision": dict.fromkeys(agreed, 100.0), "quantized": agreed}
    order = label_order(texts.label_names, teacher.config, task) if task.kind == "classification" else None
    full, small = np.stack(reference), np.stack(quantized)
    result: dict[str, Any] = {
        "full_precision": metrics.score(task, full, texts.labels, order),
        "quantized": metrics.score(task, small, texts.labels, order),
    }
    if order is not None:
        was, now = (values.argmax(axis=1) == order[texts.labels] for values in (full, small))
        result["lost"], result["gained"] = int((was & ~now).sum()), int((~was & now).sum())
    return result


def save(folder: Path, frozen: FrozenModel, tokenizer: Any, recipe: Recipe) -> None:
    """The model itself: packed integers, config, tokenizer and the recipe that made it."""
    artifact.save(frozen, folder)
    tokenizer.save_pretrained(folder)
    write_text(folder / "recipe.yaml", recipe.to_yaml())


def sizes(frozen: FrozenModel, folder: Path) -> dict[str, float]:
    return {
        "full_precision_mb": frozen.full_precision_mb(),
        "quantized_mb": (folder / artifact.TENSORS).stat().st_size / MEBIBYTE,
        "formula_mb": frozen.formula_mb(),
    }


def _check_places(recipe: Recipe) -> Path:
    """Refuse before any work is done what could not be written after it."""
    missing = [f"--{name}" for name in ("model", "task", "data", "out") if getattr(recipe, name) is None]
    if missing:
        raise UserError(
            f"{', '.join(missing)} must be given",
            "give all of --model, --task, --data and --out, or none of the first three for the built-in example",
        )
    out = Path(recipe.out or "").absolute()
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file", "give a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / artifact.MANIFEST).exists():
        raise UserError(
            f"--out {out} holds files that are not a quantized model", "give an empty or new folder; nothing was touched"
        )
    with explained(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        work = _work_folder(out)
        work.mkdir(exist_ok=True)
        probe = work / ".writable"
        probe.write_bytes(b"")
        probe.unlink()
        if not any(work.iterdir()):
            work.rmdir()
    return out


def _work_folder(out: Path) -> Path:
    return out.with_name(f".{out.name}.work")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {name}: torch sees no GPU here", "use --device cpu, or install a CUDA build of torch")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UserError(f"--device {name!r} is unknown", "use auto, cpu, cuda or cuda:0") from error


def _memory_budget(recipe: Recipe) -> float:
    if recipe.max_memory is not None:
        return parse_megabytes(recipe.max_memory)
    return psutil.virtual_memory().available / MEBIBYTE / 2


def _check_labels(task_data: TaskData, texts: Texts, teacher: nn.Module) -> None:
    """A label set that does not fit is found now, not after training."""
    if task_data.task.kind == "classification" and texts.label_names:
        label_order(texts.label_names, teacher.config, task_data.task)
    if task_data.task.kind == "regression" and teacher.config.num_labels != 1:
        raise UserError(
            f"{task_data.task.name} needs a model with one output; this one has {teacher.config.num_labels}",
            "give a checkpoint fine-tuned for this task",
        )


def _identity(recipe: Recipe, calibration: Encoded, teacher: nn.Module) -> dict[str, Any]:
    hasher = hashlib.sha256()
    for name, value in teacher.state_dict().items():
        hasher.update(name.encode())
        hasher.update(value.detach().cpu().contiguous().numpy().tobytes())
    return {
        **recipe.identity(),
        "calibration data": calibration.digest(),
        "model weights": hasher.hexdigest()[:16],
    }
