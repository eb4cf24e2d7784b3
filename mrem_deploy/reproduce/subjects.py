"""Which models on which tasks: those of the command line, and models fine-tuned for tasks without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import path_of
from mrem_deploy.base.processes import in_fresh_process
from mrem_deploy.base.progress import say
from mrem_deploy.data.tasks import find_task
from mrem_deploy.finetuning import RECORD, FinetuneSettings, finetune
from mrem_deploy.models.loading import load_config
from mrem_deploy.reproduce.cells import fingerprint
from mrem_deploy.reproduce.plan import Subject


@dataclass(frozen=True)
class Finetuning:
    """How a missing model is made."""

    encoder: str | None  # None: not at all
    epochs: float = 3.0
    batch_size: int = 32
    max_length: int = 128


def find_subjects(
    triples: Sequence[dict[str, str]], out: Path, finetuning: Finetuning, dry_run: bool
) -> list[Subject]:
    """Check every triple, fine-tune where the model is missing, and read every model's shape."""
    found: list[Subject] = []
    for given in triples or [{}]:
        missing = [f"--{name}" for name in ("task", "data") if name not in given]
        if missing:
            raise UserError(
                f"{' and '.join(missing)} must be given", "for example: --task mnli --data glue/MNLI"
            )
        task = find_task(given["task"]).name
        if any(subject.task == task for subject in found):
            raise UserError(
                f"--task {task} is given twice", "to compare two models, give each a separate --out"
            )
        data = _absolute(given["data"])
        if "model" in given:
            model = shaped_like = _absolute(given["model"])
        else:
            model = _finetuned(task, data, out, finetuning, dry_run)
            shaped_like = model if Path(model).exists() else str(finetuning.encoder)
        layers, hidden = _shape(shaped_like)
        found.append(Subject(model, task, data, layers, hidden, fingerprint(model)))
    return found


def _absolute(place: str) -> str:
    path = path_of("the path", place)
    return str(path.absolute()) if path.exists() else place  # what does not exist may be a hub id


def _finetuned(task: str, data: str, out: Path, how: Finetuning, dry_run: bool) -> str:
    """The folder of the model for this task; made now unless an earlier run did."""
    if how.encoder is None:
        raise UserError(
            f"--model is missing for --task {task}",
            "give a fine-tuned model, or --encoder: every task without a model is then fine-tuned from it",
        )
    folder = out / "models" / task
    if (folder / RECORD).exists():
        return str(folder)
    if dry_run:
        say(f"{task}: would first fine-tune a model from {how.encoder} for {how.epochs:g} epochs")
        return str(folder)
    say(f"{task}: no model given; fine-tuning one from {how.encoder}")
    settings = FinetuneSettings(
        model=_absolute(how.encoder),
        task=task,
        data=data,
        out=str(folder),
        epochs=how.epochs,
        batch_size=how.batch_size,
        max_length=how.max_length,
    )
    in_fresh_process(_finetune, settings)
    return str(folder)


def _finetune(settings: FinetuneSettings) -> None:
    finetune(settings)


def _shape(model: str) -> tuple[int, int]:
    """Layers and width."""
    config = load_config(model)
    return int(config.num_hidden_layers), int(config.hidden_size)
