"""The walk: load → partition → insert quantizers → train → freeze → save → evaluate → report."""

from __future__ import annotations

import copy
import fnmatch
import hashlib
import re
import tempfile
import time
from functools import partial
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
from mrem_deploy.evaluate import layer_errors, pooling_of, predict, remember, torch_predictor
from mrem_deploy.files import atomic_folder, explained, write_json, write_text
from mrem_deploy.freeze import MEBIBYTE, FrozenModel, build, freeze
from mrem_deploy.initialise import initial_steps
from mrem_deploy.loading import check_max_length, load_model
from mrem_deploy.memory import keep_large_blocks
from mrem_deploy.models import anatomy
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
AGREEMENTS = {  # the measure of tasks that have no labels
    "embedding": metrics.agreement,
    "token-classification": metrics.token_agreement,
    "question-answering": metrics.span_agreement,
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
    _check_model(recipe, teacher)
    texts = sample(task_data.train(), recipe.calib_size, recipe.seed)
    calibration = encode(tokenizer, texts, recipe.max_length)
    _check_labels(task_data, texts, teacher)
    teacher.to(device).requires_grad_(False)
    store = CheckpointStore(_work_folder(out), _identity(recipe, calibration, teacher), resume)
    if resume:
        say(
            "continuing the interrupted run" if store.resumed else "no interrupted run found; starting afresh"
        )

    with environment.PeakMemory(device) as memory:
        train_started = time.perf_counter()
        student = make_student(teacher, recipe, calibration)
        probe = [
            BatchSchedule(calibration.lengths, recipe.batch_size, recipe.seed).at(i)
            for i in range(ERROR_BATCHES)
        ]
        before = layer_errors(teacher, student, calibration, probe)
        log = train(teacher, student, recipe, calibration, store)
        train_seconds = time.perf_counter() - train_started + store.earlier_seconds
    after = layer_errors(teacher, student, calibration, probe)

    frozen = freeze(student, head)
    frozen.notes = {
        "recipe_digest": recipe.digest(),
        "bits": recipe.bits,
        "method": recipe.method,
        "task": recipe.task,
    }
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
        result["cost"]["total_seconds"] = time.perf_counter() - started + store.earlier_seconds
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
    batches = (
        {k: v.to(device) for k, v in calibration.batch(schedule.at(i)).items()}
        for i in range(recipe.init_batches)
    )
    say(f"initialising step sizes on {recipe.init_batches} batches")
    steps = initial_steps(teacher, found, recipe.spec, batches)
    student = copy.deepcopy(teacher)
    insert_quantizers(student, recipe.spec, steps)
    return student.requires_grad_(True).to(device)


def train(
    teacher: nn.Module,
    student: nn.Module,
    recipe: Recipe,
    calibration: Encoded,
    store: CheckpointStore | None = None,
) -> TrainLog:
    """Train the student in place by the recipe's method."""
    settings = TrainSettings(recipe.steps, recipe.lr, recipe.step_lr, recipe.batch_size, recipe.seed)
    cache = CacheSettings(_memory_budget(recipe), Path(recipe.cache_dir) if recipe.cache_dir else None)
    if recipe.method == "mrem-s":
        cuts = module_cuts(teacher, parse_modules(recipe.modules))
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
        if recipe.eval_size:
            texts = sample(texts, recipe.eval_size, recipe.seed)
        encoded = encode(tokenizer, texts, recipe.max_length)
        outputs = {}
        for name, model in (("full_precision", teacher), ("quantized", quantized)):
            label = f"evaluate {split} {name.replace('_', ' ')}"
            run = partial(predict, torch_predictor(model), encoded, label, pooling=pooling)
            if name == "full_precision" and task.kind in ("classification", "regression", "embedding"):
                key = (
                    f"{weights_digest(model)} {encoded.digest()} {pooling} {torch.__version__} {model.device}"
                )
                outputs[name] = list(remember(key, lambda run=run: np.stack(run())))
            else:
                outputs[name] = run()
        splits[split] = {"examples": len(encoded), **compare(task, texts, teacher, outputs)}
    first = next(iter(splits.values()))
    metric = task.metric
    return {
        "metric": metric,
        "full_precision": first["full_precision"][metric],
        "quantized": first["quantized"][metric],
        "splits": splits,
    }


def compare(
    task: Any, texts: Texts, teacher: nn.Module, outputs: dict[str, list[np.ndarray]]
) -> dict[str, Any]:
    """Metrics of both models; for classes also how many answers were lost and gained."""
    reference, quantized = outputs["full_precision"], outputs["quantized"]
    if task.kind in AGREEMENTS:
        agreed = AGREEMENTS[task.kind](reference, quantized)
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
    out = Path(recipe.out or "").resolve()  # where a link points to is what will be replaced
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file", "give a folder")
    for name in ("model", "data", "eval_data"):
        source = getattr(recipe, name)
        if source and Path(source).expanduser().resolve().is_relative_to(out):
            raise UserError(
                f"--out {out} holds the --{name.replace('_', '-')} that is read; it would be replaced",
                "give another folder for the result",
            )
    if out.is_dir() and any(out.iterdir()) and not (out / artifact.MANIFEST).exists():
        raise UserError(
            f"--out {out} holds files that are not a quantized model",
            "give an empty or new folder; nothing was touched",
        )
    if recipe.cache_dir and Path(recipe.cache_dir).is_file():
        raise UserError(f"--cache-dir {recipe.cache_dir} is a file", "give a folder")
    with explained(out):
        existing = next(folder for folder in out.parents if folder.exists())
        tempfile.TemporaryDirectory(prefix=".mrem-", dir=existing).cleanup()
    return out


def _work_folder(out: Path) -> Path:
    return out.with_name(f".{out.name}.work")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"--device {name}: torch sees no GPU here", "use --device cpu, or install a CUDA build of torch"
        )
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UserError(f"--device {name!r} is unknown", "use auto, cpu, cuda or cuda:0")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: this machine has {torch.cuda.device_count()} GPUs", "use cuda:0")
    return device


def _memory_budget(recipe: Recipe) -> float:
    if recipe.max_memory is not None:
        return parse_megabytes(recipe.max_memory)
    return psutil.virtual_memory().available / MEBIBYTE / 2


def _check_model(recipe: Recipe, teacher: nn.Module) -> None:
    """What the recipe asks of the model is found missing now, not after training."""
    found = anatomy(teacher)
    check_max_length(teacher, recipe.max_length)
    if recipe.method == "mrem-s":
        module_cuts(teacher, parse_modules(recipe.modules))
    names = [*found.linears, *found.attentions, found.word_embedding]
    for pattern in recipe.keep_fp:
        if not fnmatch.filter(names, pattern):
            raise UserError(
                f"--keep-fp {pattern!r} matches no layer of this model",
                f"write * for any characters; the layers are {', '.join(names[:8])}, …",
            )


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
    return {
        **recipe.identity(),
        "calibration data": calibration.digest(),
        "model weights": weights_digest(teacher),
    }


def weights_digest(model: nn.Module) -> str:
    """Names the weights of a model."""
    hasher = hashlib.sha256()
    for name, value in model.state_dict().items():
        hasher.update(name.encode())
        hasher.update(value.detach().cpu().contiguous().numpy().data)
    return hasher.hexdigest()[:16]
