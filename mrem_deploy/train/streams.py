"""Both streams of a set of sentences at the module being trained, and the targets of that module.

The *full-precision stream* is what the teacher computes, the *quantized stream* what the trained modules
compute. A module reads the quantized one and must give what the teacher gives: the hidden states of its
blocks, and with them the full-precision stream behind it. Two orders of work:

*advance* alone: the teacher runs in every step (`--teacher-cache never`); both streams move on afterwards.
*look_ahead*, then *advance*: the teacher runs once over all sentences before the module trains. Its hidden
states are kept as targets; only the quantized stream moves on afterwards. A teacher's output differs in
its last bits with the sentences that share a batch, so the two orders agree closely, but not to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from mrem_deploy.base import interrupt
from mrem_deploy.base.progress import say, track
from mrem_deploy.data.encoded import BatchSchedule, Encoded, sorted_batches
from mrem_deploy.models.parts import Part, PartOutput
from mrem_deploy.train.activation_cache import ActivationCache, CacheSettings

CLEAN, NOISY = 0, 1  # the arrays of the cache


def used_examples(schedule: BatchSchedule, steps: int, count: int) -> np.ndarray:
    """Which of `count` examples the first `steps` batches hold, as a mask."""
    used = np.zeros(count, dtype=bool)
    for step in range(min(steps, schedule.steps_per_epoch)):
        used[schedule.at(step)] = True
    return used


class Targets:
    """What the full-precision module gives for the sentences that it is trained on.

    `like` is its output for any one of them. The output of the last block is not kept here if a stream
    holds it (`last_in_stream`). An output is "stream" if it is that hidden state itself (bare encoders),
    "wide" if it is as large, and otherwise "narrow": logits, which take little memory.
    """

    def __init__(
        self, like: PartOutput, lengths: np.ndarray, last_in_stream: bool, settings: CacheSettings
    ) -> None:
        last = like.hidden[-1]
        self._lengths = lengths
        self._has_embedding = like.embedding is not None
        self._hidden = len(like.hidden) - last_in_stream
        self._kinds = [
            "stream" if value is last else "wide" if value.shape == last.shape else "narrow"
            for value in like.outputs
        ]
        self._per_token, self._bare = like.per_token, like.bare
        self._narrow: list[dict[int, torch.Tensor]] = [{} for kind in self._kinds if kind == "narrow"]
        count = self._has_embedding + self._hidden + self._kinds.count("wide")
        self._wide = ActivationCache.made(lengths, last.shape[-1], settings, count)

    @property
    def megabytes_on_disk(self) -> float:
        return self._wide.megabytes if self._wide.on_disk else 0.0

    def put(self, indices: np.ndarray, output: PartOutput, rows: np.ndarray) -> None:
        """Keep those rows of a batch for which the mask `rows` is true."""
        picked = slice(None) if rows.all() else torch.from_numpy(rows)
        indices = indices[rows]
        wide = [output.embedding] if output.embedding is not None else []
        wide += [*output.hidden[: self._hidden], *self._outputs(output, "wide")]
        self._wide.put(indices, *(value[picked] for value in wide))
        for kept, value in zip(self._narrow, self._outputs(output, "narrow"), strict=True):
            for row, i in zip(value[picked].cpu(), indices, strict=True):
                kept[int(i)] = (row[: self._lengths[i]] if self._per_token else row).clone()

    def _outputs(self, output: PartOutput, kind: str) -> list[torch.Tensor]:
        return [value for value, own in zip(output.outputs, self._kinds, strict=True) if own == kind]

    def get(
        self, indices: np.ndarray, padded: int, last: torch.Tensor | None, device: torch.device
    ) -> PartOutput:
        """A batch as the teacher gave it, with zeros as padding; `last` comes from the stream."""
        values = [value.to(device) for value in self._wide.get(indices, padded)]
        embedding = values.pop(0) if self._has_embedding else None
        hidden, wide = values[: self._hidden], iter(values[self._hidden :])
        if last is not None:
            hidden.append(last.to(device))
        narrow = iter(self._narrow)
        outputs = []
        for kind in self._kinds:
            if kind == "narrow":
                outputs.append(self._logits(next(narrow), indices, padded).to(device))
            else:
                outputs.append(hidden[-1] if kind == "stream" else next(wide))
        return PartOutput(embedding, hidden, outputs, self._per_token, self._bare)

    def _logits(self, kept: dict[int, torch.Tensor], indices: np.ndarray, padded: int) -> torch.Tensor:
        rows = [kept[int(i)] for i in indices]
        if not self._per_token:
            return torch.stack(rows)
        value = torch.zeros(len(rows), padded, *rows[0].shape[1:])
        for line, row in zip(value, rows, strict=True):
            line[: len(row)] = row
        return value

    def close(self) -> None:
        self._wide.close()


class Streams:
    """The full-precision and the quantized stream of a set of sentences at the current cut.

    `clean_at` and `noisy_at` count the modules that each stream has passed. The first one is ahead by one
    while a module trains on kept targets.
    """

    def __init__(
        self,
        examples: Encoded,
        width: int,
        settings: CacheSettings,
        batch_size: int,
        needed: np.ndarray | None = None,
    ) -> None:
        """`needed`: a mask of the sentences that are ever asked for; None: all."""
        self.examples, self.batch_size = examples, batch_size
        self.cache: ActivationCache | None = None
        self.clean_at = self.noisy_at = 0
        self._targets: Targets | None = None
        self._needed = np.ones(len(examples), dtype=bool) if needed is None else needed
        self._width, self._settings = width, settings

    @property
    def is_ahead(self) -> bool:
        """Whether the full-precision stream has passed the module that trains."""
        return self.clean_at > self.noisy_at

    def batch(
        self, indices: np.ndarray, device: torch.device
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None, torch.Tensor | None]:
        """The token batch with both inputs of the module.

        None for the first module's, and for the full-precision one where `target` replaces the teacher.
        """
        tokens = self.examples.batch(indices)
        tokens.pop("labels", None)
        padded = tokens["input_ids"].shape[1]
        clean = noisy = None
        if self.cache is not None and self.noisy_at:
            noisy = self.cache.get(indices, padded, NOISY)[0].to(device)
            if not self.is_ahead:
                clean = self.cache.get(indices, padded, CLEAN)[0].to(device)
        return {name: value.to(device) for name, value in tokens.items()}, clean, noisy

    def target(self, indices: np.ndarray, padded: int, device: torch.device) -> PartOutput | None:
        """What the teacher gives for the batch; None if it was not kept and must be computed."""
        if self._targets is None:
            return None
        last = None
        if self.cache is not None:
            last = self.cache.get(indices, padded, CLEAN)[0]
        return self._targets.get(indices, padded, last, device)

    @torch.no_grad()
    def look_ahead(
        self,
        teacher: Part,
        label: str | None = None,
        keep: np.ndarray | None = None,
        over: np.ndarray | None = None,
    ) -> None:
        """Move the full-precision stream to the module's output, and keep the module's targets.

        `over` masks the sentences that the teacher runs over, `keep` those of them whose targets are kept;
        None: all. Raises NoSpace where the targets do not fit; nothing has changed then.
        """
        keep = self._needed if keep is None else keep
        device = next(teacher.parameters()).device
        if self.cache is None and not teacher.last:
            self._make_cache()
        if keep.any():
            self._targets = self._make_targets(teacher, keep, device)
        for indices in self._batches(self._needed if over is None else over, label):
            tokens, clean = self._clean_input(indices, device)
            output = teacher(clean, tokens)
            if self._targets is not None and keep[indices].any():
                self._targets.put(indices, output, keep[indices])
            if self.cache is not None:
                self.cache.put(indices, output.hidden[-1], None)
        self.clean_at += 1

    def _make_targets(self, teacher: Part, keep: np.ndarray, device: torch.device) -> Targets:
        tokens, clean = self._clean_input(np.flatnonzero(keep)[:1], device)
        lengths = np.where(keep, self.examples.lengths, 0)
        space, output = self._settings.beside(self.cache), teacher(clean, tokens)
        targets = Targets(output, lengths, self.cache is not None, space)
        if targets.megabytes_on_disk:
            say(f"targets of the module: {targets.megabytes_on_disk:.0f} MiB, memory-mapped on disk")
        return targets

    @torch.no_grad()
    def advance(
        self, teacher: Part, student: Part, label: str | None = None, over: np.ndarray | None = None
    ) -> None:
        """Replace the inputs of a trained module by its outputs, for the sentences that `over` masks.

        After `look_ahead` the teacher has nothing left to do.
        """
        device = next(student.parameters()).device
        self._make_cache()
        assert self.cache is not None
        for indices in self._batches(self._needed if over is None else over, label):
            tokens, clean, noisy = self.batch(indices, device)
            full = None if self.is_ahead else teacher(clean, tokens).hidden[-1]
            self.cache.put(indices, full, student(noisy, tokens).hidden[-1])
        self.noisy_at += 1
        self.clean_at = self.noisy_at
        self._drop_targets()

    def arrays_at(self, modules: int) -> list[torch.Tensor]:
        """Both streams behind so many modules, to be passed on, or to be filled with what was received."""
        self._make_cache()
        assert self.cache is not None
        self.clean_at = self.noisy_at = modules
        return self.cache.arrays

    def _batches(self, chosen: np.ndarray, label: str | None) -> Iterable[np.ndarray]:
        """The chosen sentences, longest first; with a progress bar if that has a label."""
        rows = np.flatnonzero(chosen)
        batches = [rows[batch] for batch in sorted_batches(self.examples.lengths[rows], self.batch_size)]
        return track(batches, label) if label else interrupt.steps(batches)

    def _clean_input(
        self, indices: np.ndarray, device: torch.device
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """The token batch and the teacher's input."""
        assert not self.is_ahead  # otherwise the stream holds the output instead
        tokens = {name: value.to(device) for name, value in self.examples.batch(indices).items()}
        if not self.clean_at:
            return tokens, None
        assert self.cache is not None
        return tokens, self.cache.get(indices, tokens["input_ids"].shape[1], CLEAN)[0].to(device)

    def _make_cache(self) -> None:
        if self.cache is not None:
            return
        lengths = np.where(self._needed, self.examples.lengths, 0)
        self.cache = ActivationCache.made(lengths, self._width, self._settings)
        if self.cache.on_disk:
            say(f"activation cache: {self.cache.megabytes:.0f} MiB, memory-mapped on disk")

    def _drop_targets(self) -> None:
        if self._targets is not None:
            self._targets.close()
            self._targets = None

    def close(self) -> None:
        self._drop_targets()
        if self.cache is not None:
            self.cache.close()
