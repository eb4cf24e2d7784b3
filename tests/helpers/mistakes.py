"""Mistakes that a user can make: a folder to spoil, and ways to spoil it (`tests/base/test_bad_input.py`)."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny_job import Job, sentences, write_jsonl

from mrem_deploy import preflight
from mrem_deploy.base import cli
from mrem_deploy.base.place import hold
from mrem_deploy.train import module
from mrem_deploy.train.module import ModuleTrainer

FULL_DISK = "Error while serializing: I/O error: No space left on device (os error 28)"  # safetensors' words


class Place:
    """The folder of one case, and the means to spoil it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.patch = root, monkeypatch
        self.model, self.data, self.out = root / "model", root / "data", root / "out"
        self.job = Job(model=self.model, data=self.data, out=self.out)
        self.flags: list[str] = []
        self.until_the_end = ExitStack()

    def set(self, **options: Any) -> None:
        self.job.set(**options)

    def file(self, name: str, content: str | bytes) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def data_file(self, name: str, content: str) -> None:
        self.set(data=self.file(name, content))

    def config(self, text: str) -> None:
        """Give the YAML file instead of the option it names, if it names one."""
        name = text.partition(":")[0].replace("-", "_")
        self.set(**{name: None} if name in self.job.options else {})
        self.flags += ["--config", str(self.file("my.yaml", text))]

    def edit_weights(self, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        path = self.model / "model.safetensors"
        weights = load_file(path)
        change(weights)
        save_file(weights, path, metadata={"format": "pt"})

    def interrupt(self) -> None:
        """Leave an interrupted run behind, with the checkpoint of step 4."""
        calls = iter(range(100))
        whole = ModuleTrainer.step

        def step(*args: Any, **options: Any) -> Any:
            if next(calls) == 5:
                raise KeyboardInterrupt
            return whole(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModuleTrainer, "step", step)
            assert self.job.run() == cli.EXIT_INTERRUPTED

    def fail(self, owner: Any, name: str, error: Exception, nth: int = 1, writes: bool = True) -> None:
        """Let the nth call of a function that saves write half a file and fail."""
        whole, calls = getattr(owner, name), iter(range(1, 1000))

        def broken(tensors: Any, path: Any, *args: Any, **options: Any) -> Any:
            if next(calls) < nth:
                return whole(tensors, path, *args, **options)
            if writes:
                Path(path).write_bytes(b"half a file")
            raise error

        self.patch.setattr(owner, name, broken)

    def tree(self) -> dict[str, bytes]:
        found = sorted(self.root.rglob("*"))
        return {
            str(path.relative_to(self.root)): path.read_bytes() if path.is_file() else b"" for path in found
        }


@dataclass(frozen=True)
class Case:
    """One mistake: how it comes about, and what the message must contain, in this order."""

    name: str
    arrange: Callable[[Place], Any]
    said: tuple[str, ...]
    entry: Callable[[Place], int] = lambda place: place.job.run(*place.flags)
    by_argparse: bool = False  # its messages have their own form
    keeps_checkpoints: bool = False  # training is not lost; all else is as it was


def gpt2(place: Place) -> None:
    shape = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    config = transformers.GPT2Config(**shape, pad_token_id=0)
    transformers.GPT2ForSequenceClassification(config).save_pretrained(place.model)


def already_quantized(place: Place) -> None:
    place.set(model=shutil.copytree(place.out, place.root / "small"))


def full_at_the_tokenizer(place: Place) -> None:
    """tokenizers is written in Rust and raises a bare Exception."""

    def save(*args: Any, **options: Any) -> None:
        raise Exception("No space left on device (os error 28)")

    place.patch.setattr(transformers.PreTrainedTokenizerBase, "save_pretrained", save)


def unknown_module(place: Place) -> None:
    """An embedder with a module of another kind."""
    types = ("Transformer", "Pooling", "LSTM")
    entries = ", ".join(f'{{"type": "sentence_transformers.models.{kind}", "path": ""}}' for kind in types)
    place.file("model/modules.json", f"[{entries}]")
    place.file("model/1_Pooling/config.json", "{}")
    place.set(task="feature-extraction")


def collection(corpus: str = "a film", qrels: str = "q0\td0\t1\n") -> Callable[[Place], None]:
    """A retrieval set of one query and one document, whose text and judgement are given."""

    def arrange(place: Place) -> None:
        place.file("set/corpus.jsonl", f'{{"_id": "d0", "text": "{corpus}"}}\n')
        place.file("set/queries.jsonl", '{"_id": "q0", "text": "the film"}\n')
        place.file("set/qrels/test.tsv", qrels)
        place.set(task="retrieval", data=place.root / "set")

    return arrange


def three_labels(place: Place) -> None:
    rows = [{**row, "label": i % 3} for i, row in enumerate(sentences(30, seed=3))]
    place.set(data=write_jsonl(place.root / "three.jsonl", rows))


def untrained(place: Place) -> None:
    place.patch.setattr(ModuleTrainer, "step", lambda *_, **__: pytest.fail("trained before the check"))


def new_label_in_dev(place: Place) -> None:
    untrained(place)
    rows = sentences(12, seed=3)
    write_jsonl(place.data / "dev.jsonl", [*rows, {"text": "good film", "label": 7}])


def unlabelled_row_in_dev(place: Place) -> None:
    untrained(place)
    write_jsonl(place.data / "dev.jsonl", [*sentences(12, seed=3), {"text": "good film", "label": None}])


def pickle_only(place: Place) -> None:
    (place.model / "model.safetensors").unlink()
    (place.model / "pytorch_model.bin").write_bytes(b"\x80\x02 would run anything")


def cut_short(place: Place) -> None:
    path = place.model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def diverging(place: Place) -> None:
    real = module.reconstruction_terms
    nan = float("nan")
    place.patch.setattr(module, "reconstruction_terms", lambda *args: [term * nan for term in real(*args)])


def started_as(workers: int, **options: Any) -> Callable[[Place], None]:
    """As torchrun would start it."""

    def arrange(place: Place) -> None:
        place.set(**options)
        place.patch.setenv("RANK", "0")
        place.patch.setenv("WORLD_SIZE", str(workers))

    return arrange


def no_permission(place: Place) -> None:
    """Root may write anywhere, so the system's refusal is played."""
    real = os.open

    def refusing(path: Any, *args: Any, **options: Any) -> int:
        if "locked" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **options)

    (place.root / "locked").mkdir()
    place.set(out=place.root / "locked" / "result")
    place.patch.setattr(os, "open", refusing)


def mounted(place: Place) -> None:
    """Only root may mount, so the system's answer is played; tests/base/test_files.py asks it."""
    place.patch.setattr(preflight, "is_mount_point", lambda folder: folder == place.out)


def of_an_image(place: Place) -> None:
    """The same for layers of file systems."""
    place.patch.setattr(preflight, "is_in_lower_layer", lambda folder: folder == place.out)


def taken(place: Place) -> None:
    """Another run writes to the same folder."""
    place.until_the_end.enter_context(hold(place.out, "another run"))


def mixed_checkpoints(place: Place) -> None:
    """A checkpoint of another recipe, copied among those of this one."""
    place.set(seed=1)
    place.interrupt()
    foreign = (place.root / ".out.work" / "module-0.safetensors").read_bytes()
    shutil.rmtree(place.root / ".out.work")
    place.set(seed=0)
    place.interrupt()
    place.file(".out.work/module-0.safetensors", foreign)


def unreadable(place: Place) -> None:
    """Root may read anything, so the system's refusal is played."""
    real = Path.open

    def refuse(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if path.name == "train.jsonl" and "b" not in mode:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, mode, *args, **options)

    place.patch.setattr(Path, "open", refuse)


def unreadable_folder(place: Place) -> None:
    real = Path.iterdir

    def refuse(path: Path) -> Any:
        if path == place.data:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    place.patch.setattr(Path, "iterdir", refuse)


def a_loop(name: str) -> Callable[[Place], None]:
    """A link that leads to itself, given as an option."""

    def arrange(place: Place) -> None:
        (place.root / "loop").symlink_to("loop")
        place.set(**{name: place.root / "loop"})

    return arrange


def folder_for_a_file(place: Place) -> None:
    (place.root / "single.csv").mkdir()
    place.set(data=place.root / "single.csv")


def deep(depth: int) -> str:
    return "[" * depth + "]" * depth


BOMB = "x0: &x0 [a]\n" + "".join(f"x{i}: &x{i} [*x{i - 1}, *x{i - 1}]\n" for i in range(1, 40))


def foreign_files(place: Place) -> None:
    place.set(out=place.root / "thesis")
    place.file("thesis/chapter-1.tex", "years of work")


def other_recipe(place: Place) -> None:
    place.interrupt()
    place.set(seed=1, bits="4-4-8")


def other_recipe_resumed(place: Place) -> None:
    other_recipe(place)
    place.flags.append("--resume")


def other_data(place: Place) -> None:
    place.interrupt()
    write_jsonl(place.data / "train.jsonl", sentences(60, seed=9))


def other_weights(place: Place) -> None:
    place.interrupt()
    place.edit_weights(lambda weights: weights["classifier.bias"].add_(1.0))


def broken_checkpoint(place: Place) -> None:
    place.interrupt()
    place.file(".out.work/module-0.safetensors", b"not what was written")


def without(*names: str) -> Callable[[Place], None]:
    return lambda place: place.set(**dict.fromkeys(names))


def setting(**options: Any) -> Callable[[Place], None]:
    return lambda place: place.set(**options)


def full_disk(owner: Any, nth: int = 1) -> Callable[[Place], None]:
    return lambda place: place.fail(owner, "save_file", SafetensorError(FULL_DISK), nth)
