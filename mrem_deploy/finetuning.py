"""Fine-tuning: an encoder and labelled data in, a full-precision model out.

Hugging Face's defaults (AdamW, 5e-5, linear decay, clipping at 1, 3 epochs) with length-bucketed
batches. Its time and memory are measured and written next to the model: what quantization-aware
training starts from and post-training quantization is compared with.
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
import time
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mrem_deploy.base import interrupt
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import atomic_folder, write_json
from mrem_deploy.base.machine import PeakMemory, describe_machine, keep_large_blocks
from mrem_deploy.base.options import MOST, MOST_SEED, flag
from mrem_deploy.base.outside import check_text, shown
from mrem_deploy.base.place import hold, new_token
from mrem_deploy.base.progress import say
from mrem_deploy.base.resuming import COMMAND, resumable
from mrem_deploy.data.encoded import Encoded
from mrem_deploy.data.labels import CLASSES, SCORED, label_order
from mrem_deploy.data.squad import Questions, Windows
from mrem_deploy.data.tagging import TaggedTexts, TaggedTokens
from mrem_deploy.data.task_data import Columns, Task, TaskData, Texts, open_task, sample
from mrem_deploy.data.tasks import TASKS, defaults_of
from mrem_deploy.data.texts import encode
from mrem_deploy.evaluate.predict import predict, torch_predictor
from mrem_deploy.evaluate.scorers import scorer_for
from mrem_deploy.models.loading import check_max_length, load_model, quiet_transformers
from mrem_deploy.preflight import check_out, check_paths, resolve_device
from mrem_deploy.train.checkpoint import CheckpointStore, open_store
from mrem_deploy.train.supervised import LoopSettings, batch_loss, relevance_loss, train_on_labels

RECORD = "finetune.json"  # its presence marks a folder as ours to replace
RECORD_FORMAT = 1


_BY_TASK: Any = None  # filled in on construction


@dataclass(frozen=True)
class FinetuneSettings:
    """Every option of a fine-tuning run."""

    model: str
    task: str
    data: str
    out: str
    eval_data: str | None = None
    text_column: str | None = None
    text_pair_column: str | None = None
    label_column: str | None = None
    epochs: float = 3.0
    batch_size: int = 32
    lr: float = 5e-5
    warmup: float = 0.0
    max_length: int = _BY_TASK
    seed: int = 0
    checkpoint_steps: int = 500
    eval_size: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.max_length is _BY_TASK:
            object.__setattr__(self, "max_length", defaults_of(self.task).max_length)
        if not 0 < self.epochs <= 1000:
            raise _bad("epochs", "above 0, such as 3 or 0.5", self.epochs)
        if not 0 < self.lr < 1:
            raise _bad("lr", "between 0 and 1", self.lr)
        if not 0 <= self.warmup < 1:
            raise _bad("warmup", "a share of the steps, from 0 to below 1", self.warmup)
        for name, least in (("batch_size", 1), ("max_length", 3), ("seed", 0), ("checkpoint_steps", 0)):
            most = MOST_SEED if name == "seed" else MOST
            if not least <= getattr(self, name) <= most:
                raise _bad(name, f"{least} or more, at most {most}", getattr(self, name))
        if self.eval_size is not None and not 1 <= self.eval_size <= MOST:
            raise _bad("eval_size", f"1 or more, at most {MOST}", self.eval_size)
        for name, value in asdict(self).items():
            if isinstance(value, str):
                check_text(flag(name), value)

    def identity(self) -> dict[str, Any]:
        """What decides the weights: a resumed run must agree in all of it."""
        elsewhere = {"out", "checkpoint_steps", "eval_size", "eval_data", "device"}
        return {name: value for name, value in asdict(self).items() if name not in elsewhere}

    def command(self, *flags: str) -> str:
        """The command with these settings, without those that are the defaults."""
        words = ["mrem", "finetune", *flags]
        for item in fields(self):
            value = getattr(self, item.name)
            if item.default is MISSING or value not in (item.default, None):
                words += [flag(item.name), str(value)]
        return shlex.join(words)


@dataclass(frozen=True)
class Record:
    """The content of finetune.json."""

    task: str
    data: str
    settings: FinetuneSettings
    metric: str
    score: float  # on the first split
    splits: dict[str, dict[str, float]]  # split -> metric -> percent, and the number of examples
    examples: int  # for training
    steps: int
    train_seconds: float
    total_seconds: float
    peak_memory_mb: float
    memory_kind: str
    loss: float
    curve: list[list[float]]  # [step, mean loss since the last point]

    def to_dict(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name not in ("task", "data", "settings")}
        return {
            "format": RECORD_FORMAT,
            "task": self.task,
            "data": self.data,
            "model": self.settings.model,
            "settings": asdict(self.settings),
            **own,
            "environment": describe_machine(),
        }


def _bad(name: str, expected: str, got: Any) -> UserError:
    return UserError(f"{flag(name)} must be {expected}; got {shown(got)}.", "See --help.")


@interrupt.watched()
def finetune(
    settings: FinetuneSettings, resume: bool = False, overwrite: bool = False, fresh: bool = False
) -> Path:
    """Train, evaluate and write the model folder; returns it.

    An interrupted run with the same settings is continued; `resume` says so if there is none. `overwrite`
    replaces a folder that this command has not written. `fresh` removes checkpoints and starts over.
    """
    read = {"model": settings.model, "data": settings.data, "eval_data": settings.eval_data}
    check_paths(read | {"out": settings.out})
    out = check_out(settings.out, read, marker=RECORD, overwrite=overwrite)
    device = resolve_device(settings.device)
    command = settings.command(*(["--overwrite"] if overwrite else []))

    def store_of(identity: dict[str, Any]) -> CheckpointStore:
        return open_store(out, identity, {COMMAND: command + "\n"}, resume=resume, fresh=fresh)

    with hold(out, new_token()), resumable(out):
        _finetune(settings, out, device, store_of)
    return out


def _finetune(
    settings: FinetuneSettings,
    out: Path,
    device: torch.device,
    store_of: Callable[[dict[str, Any]], CheckpointStore],
) -> None:
    started = time.perf_counter()
    keep_large_blocks()
    columns = Columns(settings.text_column, settings.text_pair_column, settings.label_column)
    task_data = open_task(settings.task, settings.data, columns, settings.eval_data)
    task, texts = task_data.task, _labelled(task_data)
    chosen = {
        split: sample(part, settings.eval_size or len(part), settings.seed)
        for split, part in task_data.evaluation().items()
    }
    torch.manual_seed(settings.seed)  # a new head is drawn from it
    model, tokenizer = _load(settings, task, texts.label_names)
    # What does not fit is found now, not after hours of training.
    evaluations = {
        split: _Evaluation(task, part, model, tokenizer, settings.max_length)
        for split, part in chosen.items()
    }
    encoded = encode(tokenizer, texts, settings.max_length)
    targets = _targets(texts, encoded, model, task)
    steps = math.ceil(settings.epochs * math.ceil(len(encoded) / settings.batch_size))
    loop = LoopSettings(
        steps, settings.batch_size, settings.lr, settings.warmup, settings.seed, settings.checkpoint_steps
    )
    store = store_of({**settings.identity(), "training data": _digest(encoded.digest(), targets)})
    with PeakMemory(device) as memory:
        loss = relevance_loss if task.kind == "reranking" else batch_loss
        log = train_on_labels(model.to(device), encoded, targets, loop, store, loss)
    splits = {split: evaluation.score(split, model) for split, evaluation in evaluations.items()}
    first = next(iter(splits.values()))
    record = Record(
        task=task.name,
        data=task_data.description,
        settings=settings,
        metric=task.metric,
        score=first[task.metric],
        splits=splits,
        examples=len(encoded),
        steps=steps,
        train_seconds=log.seconds,
        total_seconds=time.perf_counter() - started,
        peak_memory_mb=memory.mb,
        memory_kind=memory.kind,
        loss=log.final_loss,
        curve=log.curve,
    )
    with quiet_transformers(), atomic_folder(out) as folder:
        model.cpu().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_json(folder / RECORD, record.to_dict())
    with interrupt.held():
        store.remove()
    say(
        f"{record.metric} {record.score:.2f} on {first['examples']} examples; "
        f"{log.seconds / 60:.1f} min training, peak memory {memory.mb / 1024:.1f} GiB; wrote {out}"
    )


def _labelled(task_data: TaskData) -> Texts:
    task = task_data.task
    if task.lacks_labels and task.kind == "classification":
        raise UserError(
            f"Expected a column of labels in {task_data.description}; it has none of the names "
            f"{', '.join(TASKS[task.name].label_columns)}.",
            "Name the column with --label-column.",
        )
    if task.label_free or task.kind == "embedding":
        raise UserError(
            f"{task.name} has no labels to learn from; expected classes, scores, tags or answers.",
            "Choose a GLUE task, squad, squad_v2, text-classification, reranking with a label for every pair "
            "or, on files with tags, token-classification. An embedding model is quantized as it is.",
        )
    texts = task_data.train(needs_labels=True)
    if task.kind in CLASSES and len(texts.label_names) < 2:
        raise UserError(
            f"Expected at least 2 different labels in {task_data.description}; got only "
            f"{', '.join(map(repr, texts.label_names)) or 'none'}.",
            "Give data with examples of every class, or check --label-column.",
        )
    if isinstance(texts, Questions) and (misplaced := texts.misplaced()):
        raise UserError(
            f"Expected every answer at its answer_start in {task_data.description}; it is elsewhere for "
            f"{len(misplaced)} of {len(texts)} questions, the first is {misplaced[0]!r}.",
            "Correct these rows: answer_start counts characters (not bytes) of the context, from 0.",
        )
    return texts


def _load(
    settings: FinetuneSettings, task: Task, names: tuple[str, ...]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model with the task's labels, and its tokenizer.

    A trained head whose labels have the data's names is trained on; a head without names (LABEL_0, …)
    takes the data's; the same number of other names is refused by `label_order`: nobody can tell
    which is which.
    """
    count = {"regression": 1, "reranking": 1, "question-answering": 2}.get(task.kind, len(names))
    model, tokenizer = load_model(settings.model, task.head, count, allow_new_head=True)
    check_max_length(model, settings.max_length)
    config = model.config
    if task.head == "sequence-classification" and task.kind != "reranking":
        config.problem_type = "regression" if task.kind == "regression" else "single_label_classification"
    nameless = all(re.fullmatch(r"LABEL_\d+", str(name)) for name in config.id2label.values())
    if task.kind in CLASSES and nameless:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: i for i, name in config.id2label.items()}
    return model, tokenizer


def _targets(texts: Texts, encoded: Encoded, model: PreTrainedModel, task: Task) -> torch.Tensor:
    """A row for every example: scores as they are, classes by their place in the model's output, spans as
    positions of tokens."""
    if isinstance(texts, Questions) and isinstance(encoded, Windows):
        return torch.from_numpy(encoded.targets(texts))
    order = label_order(texts.label_names, model.config, task)
    if isinstance(texts, TaggedTexts) and isinstance(encoded, TaggedTokens):
        assert texts.tags is not None, "read with needs_labels"
        return torch.from_numpy(encoded.targets(texts.tags, order))
    assert texts.labels is not None, "read with needs_labels"
    return torch.from_numpy(texts.labels if task.kind in SCORED else order[texts.labels])


class _Evaluation:
    """An evaluation split: prepared before the training, scored after it."""

    def __init__(
        self, task: Task, texts: Texts, model: PreTrainedModel, tokenizer: Any, max_length: int
    ) -> None:
        self._encoded = encode(tokenizer, texts, max_length)
        self._scorer = scorer_for(task, texts, self._encoded, model.config)
        self._examples = len(texts)

    def score(self, split: str, model: PreTrainedModel) -> dict[str, float]:
        rows = predict(torch_predictor(model), self._encoded, f"evaluate {split}")
        return {**self._scorer.score(rows), "examples": self._examples}


def _digest(tokens: str, targets: torch.Tensor) -> str:
    return hashlib.sha256(tokens.encode() + targets.numpy().tobytes()).hexdigest()[:16]
