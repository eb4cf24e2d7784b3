"""Checks before any work: places that cannot be written, missing devices, labels that do not fit.

A run takes minutes to hours; a mistake that is visible at its start must not appear at its end.
"""

from __future__ import annotations

import fnmatch
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import explained, is_in_lower_layer, is_mount_point
from mrem_deploy.base.options import flag
from mrem_deploy.base.outside import path_of, shown
from mrem_deploy.base.progress import say
from mrem_deploy.data.labels import SCORED, label_order
from mrem_deploy.data.squad import Questions
from mrem_deploy.data.task_data import TaskData, Texts
from mrem_deploy.data.tasks import NO_DATA
from mrem_deploy.deploy import own_runtime
from mrem_deploy.deploy.runtime import EXPORT_PACKAGES, INSTALL, missing_packages
from mrem_deploy.kernels.backends import measure_tiles, use_backend
from mrem_deploy.models.architectures import anatomy
from mrem_deploy.models.loading import check_max_length
from mrem_deploy.models.partition import module_cuts
from mrem_deploy.numerics import UNQUANTIZED_BITS
from mrem_deploy.quant.artifact import MANIFEST
from mrem_deploy.recipe import Recipe, module_count, parse_modules

LONGEST_NAME = 200  # bytes; most systems allow 255


def absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe with its local paths made absolute, so that it works from any folder."""
    names = ("model", "data", "eval_data", "out", "cache_dir")
    paths = check_paths({name: getattr(recipe, name) for name in names})
    changes: dict[str, Any] = {
        name: str(path.absolute())
        for name, path in paths.items()
        # What does not exist may be a hub id; `none` is no folder, even if there is one of that name.
        if name in ("out", "cache_dir") or (path.exists() and (name, str(path)) != ("data", NO_DATA))
    }
    return replace(recipe, **changes)


def check_paths(named: Mapping[str, str | None]) -> dict[str, Path]:
    """The paths of the options that name one; refuses those that the system cannot look up."""
    return {name: path_of(flag(name), value) for name, value in named.items() if value}


def check_places(recipe: Recipe) -> Path:
    """The result folder of a run, if the recipe says what to read and where to write."""
    missing = [f"--{name}" for name in ("model", "task", "data", "out") if getattr(recipe, name) is None]
    if missing:
        raise UserError(
            f"{', '.join(missing)} must be given",
            "give --model, --task, --data and --out; without the first three the built-in example runs",
        )
    if recipe.cache_dir and Path(recipe.cache_dir).is_file():
        raise UserError(f"--cache-dir {recipe.cache_dir} is a file", "give a folder")
    read = {"model": recipe.model, "data": recipe.data, "eval_data": recipe.eval_data}
    return check_out(str(recipe.out), read, marker=MANIFEST)


def check_out(out: str, sources: Mapping[str, str | None], marker: str, overwrite: bool = False) -> Path:
    """The result folder. It may replace only an earlier result, known by its `marker` file.

    `sources` are the options that name what the run reads, such as {"model": …}.
    """
    folder = Path(out).expanduser().resolve()  # where a link points to is what will be replaced
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file", "give a folder")
    if is_mount_point(folder):
        raise UserError(
            f"--out {folder} is a mount point, such as a Docker volume; the result replaces its folder as a "
            "whole, and a mount point cannot be replaced",
            f"give a folder inside it: --out {folder / 'result'}",
        )
    if len(os.fsencode(folder.name)) > LONGEST_NAME:
        raise UserError(
            f"--out must have a name of at most {LONGEST_NAME} bytes; got {shown(folder.name)}",
            "give a shorter one: temporary folders next to it have this name and a few letters more",
        )
    for name, source in sources.items():
        if source and Path(source).expanduser().resolve().is_relative_to(folder):
            raise UserError(
                f"--out {folder} contains the --{name.replace('_', '-')} of this run; it would be replaced",
                "give another folder for the result",
            )
    if folder.is_dir() and any(folder.iterdir()) and not (folder / marker).exists() and not overwrite:
        raise UserError(
            f"--out {folder} is not empty and its files were not written by this command",
            "give an empty or new folder; nothing was touched",
        )
    with explained(folder):
        existing = next(parent for parent in folder.parents if parent.exists())
        tempfile.TemporaryFile(dir=existing).close()  # has no name, so that a kill leaves nothing
        if is_in_lower_layer(folder):
            raise UserError(
                f"--out {folder} came with the image of this container; the result replaces its folder as a "
                "whole, and this one cannot be replaced",
                "remove it first, or give another folder",
            )
    return folder


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU, if torch sees one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UserError(f"--device {name!r} is unknown", "use auto, cpu, cuda or cuda:0")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"--device {name}: torch sees no GPU here", "use --device cpu, or install a CUDA build of torch"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: this machine has {torch.cuda.device_count()} GPUs", "use cuda:0")
    return device


def select_backend(name: str, device: torch.device, deterministic: bool = False) -> None:
    """Use `--kernels` in this process, if it works on the device."""
    use_backend(name)
    measure_tiles(not deterministic)
    if name == "cpp" and device.type != "cpu":
        raise UserError(
            f"--kernels cpp computes on the CPU, not on {device}", "use --device cpu, or --kernels auto"
        )
    if name == "triton" and device.type == "cpu":
        raise UserError("--kernels triton needs a GPU, but --device is cpu", "use --kernels auto")


def check_workers(recipe: Recipe, workers: int) -> None:
    """Refuse recipes that cannot run as this many processes."""
    if workers > 1 and recipe.method != "mrem-p":
        raise UserError(
            f"--method {recipe.method} runs in one process; it was started as {workers}",
            "start it without torchrun, or use --method mrem-p",
        )
    modules = module_count(recipe.modules)
    if workers > modules:
        raise UserError(
            f"{workers} workers were started for {modules} modules",
            f"start at most {modules}, or give more --modules",
        )


def check_model(recipe: Recipe, model: PreTrainedModel) -> None:
    """Refuse recipes that do not fit the model."""
    found = anatomy(model)
    check_max_length(model, recipe.max_length)
    if recipe.method in ("mrem-s", "mrem-p"):
        module_cuts(model, parse_modules(recipe.modules))
    if recipe.output_loss == "kl" and (found.base == "" or model.config.num_labels == 1):
        what = "gives embeddings" if found.base == "" else "has one output"
        raise UserError(
            f"--output-loss kl compares predicted probabilities, and this model {what}",
            "use --output-loss auto or mse",
        )
    names = [*found.linears, *found.attentions, found.word_embedding]
    for pattern in recipe.keep_fp:
        if not fnmatch.filter(names, pattern):
            raise UserError(
                f"--keep-fp {pattern!r} matches no layer of this model",
                f"write * for any characters; the layers are {', '.join(names[:8])}, …",
            )


def export_profiles(recipe: Recipe) -> tuple[str, ...]:
    """The profiles to export at the end. Missing packages are an error only if the recipe names a profile."""
    if recipe.export == "none":
        return ()
    needed = [*EXPORT_PACKAGES, *(["onnxruntime"] if recipe.validate else [])]
    missing = missing_packages(*needed)
    if recipe.export == "auto":
        if missing:
            say(f"no ONNX model will be written: {', '.join(missing)} not installed ({INSTALL})")
        return () if missing else ("ort-cpu", *_runtime_profile(recipe))
    if missing:
        raise UserError(
            f"--export {recipe.export} needs {', '.join(missing)}, not installed here",
            f"{INSTALL}, or leave it out: --export none",
        )
    from mrem_deploy.export.profiles import find_profile

    names = [name.strip() for name in recipe.export.split(",")]
    return tuple(dict.fromkeys(find_profile(name).name for name in names))


def _runtime_profile(recipe: Recipe) -> tuple[str, ...]:
    """The profile of the CPU runtime, where it is installed and the model will have something for it."""
    spec = recipe.spec
    weights = recipe.chooses_bits or spec.weight_bits != UNQUANTIZED_BITS
    return ("mrem-cpu",) if weights and spec.quantizes_activations and not own_runtime.problem() else ()


def check_labels(task_data: TaskData, texts: Texts, model: PreTrainedModel) -> None:
    """Refuse data with labels that the model's head does not have, in the training or evaluation split."""
    task = task_data.task
    if texts.label_names:
        label_order(texts.label_names, model.config, task)
    if isinstance(texts, Questions) and (misplaced := texts.misplaced()):
        say(
            f"note: of {len(misplaced)} questions, such as {misplaced[0]!r}, an answer is not at its "
            "answer_start; calibration does not use answers"
        )
    if task.kind in SCORED and model.config.num_labels != 1:
        raise UserError(
            f"{task.name} needs a model with one output; this one has {model.config.num_labels}",
            "give a checkpoint fine-tuned for this task",
        )
    if task.kind == "classification" and task.label_free and model.config.num_labels < 2:
        raise UserError(
            f"{task.name} compares the classes of two models; this one has a single output, a score",
            "give a classifier, or --task reranking with pairs of texts",
        )
    check_evaluation_labels(task_data, model)


def check_evaluation_labels(task_data: TaskData, model: PreTrainedModel) -> None:
    """Refuse labels or tags of the evaluation split that the model does not have, before the training.

    Only the column of the labels is read here; the texts stay unread until the training is over.
    """
    for names in task_data.evaluation_label_names().values():
        label_order(names, model.config, task_data.task)
