"""REM, the baseline: each matmul trained on its own output error, in order (paper, eq. 2).

min over w, s of ‖ŵᵀâ − wᵀa‖², greedily: a matmul is trained after all those before it. Each step runs
the block up to that matmul again, in the teacher on the clean stream and in the student on the
quantized one. That costs less than caching every intermediate tensor (q·kᵀ of 4,096 sentences alone
takes gigabytes), and the memory stays that of one block.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mrem_deploy.base import interrupt
from mrem_deploy.base.progress import bar
from mrem_deploy.data.encoded import BatchSchedule
from mrem_deploy.models.parts import Part, carve
from mrem_deploy.quant.layers import Matmul, QuantEmbedding, QuantLinear
from mrem_deploy.quant.quantizers import LearnedScale
from mrem_deploy.train.activation_cache import CacheSettings
from mrem_deploy.train.checkpoint import CheckpointStore
from mrem_deploy.train.job import Curve, TrainJob, TrainLog, TrainSettings
from mrem_deploy.train.loss import valid_mse
from mrem_deploy.train.optimizer import LocalOptimizer, finite
from mrem_deploy.train.streams import Streams


@dataclass
class Unit:
    """One matmul, or several linears that read the same quantized tensor (q, k, v; gate, up).

    `reader` is the module whose raw input the unit takes; its `input_quantizer`, where it has one
    and is not the linear itself, is applied first.
    """

    name: str
    reader: Any
    members: list[nn.Module]
    teachers: list[nn.Module]  # the same modules of the full-precision model

    @property
    def shared(self) -> bool:
        return self.reader is not self.members[0]

    def __call__(self, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        if self.shared:
            inputs = (self.reader.input_quantizer(*inputs),)
        return [member(*inputs) for member in self.members]

    def trainable(self) -> list[nn.Module]:
        return [*self.members, self.reader.input_quantizer] if self.shared else list(self.members)


class _Reached(Exception):
    """Raised by a hook to stop a forward pass at the matmul being trained."""


def find_units(
    teacher: Part, student: Part, batch: dict[str, torch.Tensor], noisy: torch.Tensor | None
) -> list[Unit]:
    """The part's matmuls in the order of execution, found by running it once."""
    order: list[str] = []
    names = {module: name for name, module in student.view.named_modules()}
    matmuls: list[nn.Module] = [m for m in names if isinstance(m, QuantLinear | QuantEmbedding | Matmul)]
    # What disentangled attention projects besides: its scale belongs to no matmul that is trained by itself.
    matmuls += [m for m in names if isinstance(m, LearnedScale) and names[m].endswith(".position_quantizer")]
    handles = [m.register_forward_pre_hook(lambda m, _: order.append(names[m])) for m in matmuls]
    try:
        with torch.no_grad():
            student(noisy, batch)
    finally:
        for handle in handles:
            handle.remove()
    units: dict[str, Unit] = {}
    for name in dict.fromkeys(order):  # DeBERTa's projections of q and k project positions, too
        member, twin = student.view.get_submodule(name), teacher.view.get_submodule(name)
        parent_name = name.rpartition(".")[0]
        parent = student.view.get_submodule(parent_name)
        shares = isinstance(member, QuantLinear) and isinstance(member.input_quantizer, nn.Identity)
        if shares and hasattr(parent, "input_quantizer"):
            what = "q·k·v" if hasattr(parent, "scores") else "gate·up"
            unit = units.setdefault(parent_name, Unit(f"{parent_name} {what}", parent, [], []))
            unit.members.append(member)
            unit.teachers.append(twin)
        else:
            units[name] = Unit(name, member, [member], [twin])
    return list(units.values())


@contextmanager
def _stop_at(watched: list[nn.Module], seen: list[Any], inputs: bool) -> Iterator[None]:
    """Record the inputs of the first (before any quantizer) or the outputs of all, then stop."""
    handles = []
    if inputs:

        def on_enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(
                tuple(args) if isinstance(module, Matmul) else (args[0] if args else kwargs["hidden_states"],)
            )
            raise _Reached

        handles.append(watched[0].register_forward_pre_hook(on_enter, with_kwargs=True, prepend=True))
    else:

        def on_leave(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            seen.append(output)
            if len(seen) == len(watched):
                raise _Reached

        handles += [module.register_forward_hook(on_leave) for module in watched]
    try:
        yield
    except _Reached:
        pass
    finally:
        for handle in handles:
            handle.remove()


def train_rem(job: TrainJob) -> TrainLog:
    """Train every matmul of the student in place, `--steps` steps each."""
    log, settings, store = TrainLog(), job.settings, job.store
    cuts = list(range(job.teacher.config.num_hidden_layers + 1))
    device = next(job.student.parameters()).device
    cache = CacheSettings.of(job.recipe, device)
    streams = Streams(job.data, job.teacher.config.hidden_size, cache, settings.batch_size)
    parts = list(zip(carve(job.teacher, cuts), carve(job.student, cuts), strict=True))
    try:
        for index, (full, quantized) in enumerate(parts):
            started = time.perf_counter()
            name = f"block {index + 1}/{len(parts)}"
            schedule = BatchSchedule(job.data.lengths, settings.batch_size, settings.seed + 1 + index)
            if not _restore(store, index, quantized, log):
                first, _, noisy = streams.batch(schedule.at(0), device)
                units = find_units(full, quantized, first, noisy)
                with bar(len(units) * settings.steps, f"rem {name}") as shown:
                    for number, unit in enumerate(units):
                        label = f"{name} {unit.name}"
                        seeded = replace(settings, seed=settings.seed + 1000 * index + number)
                        log.curves[label] = _train_unit(unit, full, quantized, streams, seeded, shown)
                _save(store, index, quantized, log, name)
            if not quantized.last:
                streams.advance(full, quantized, f"cache after {name}")
            log.seconds[name] = time.perf_counter() - started
    finally:
        streams.close()
    return log


def _train_unit(
    unit: Unit, teacher: Part, student: Part, streams: Streams, settings: TrainSettings, shown: Any
) -> Curve:
    device = next(student.parameters()).device
    schedule = BatchSchedule(streams.examples.lengths, settings.batch_size, settings.seed)
    optimizer = LocalOptimizer(unit.trainable(), frozenset(), settings)
    curve = []
    for step in interrupt.steps(range(settings.steps if optimizer.parameters else 0)):
        tokens, clean, noisy = streams.batch(schedule.at(step), device)
        targets: list[torch.Tensor] = []
        inputs: list[tuple[torch.Tensor, ...]] = []
        with torch.no_grad():
            with _stop_at(unit.teachers, targets, inputs=False):
                teacher(clean, tokens)
            with _stop_at([unit.reader], inputs, inputs=True):
                student(noisy, tokens)
        outputs = unit(inputs[0])
        mask = tokens["attention_mask"]
        keys = unit.name.endswith(".scores")
        terms = [valid_mse(o, t, mask, keys) for o, t in zip(outputs, targets, strict=True)]
        loss = torch.stack(terms).sum()
        optimizer.update(loss, step)
        curve.append((step, finite(loss, step)))
        shown.update()
    return curve


def _save(store: CheckpointStore | None, index: int, part: Part, log: TrainLog, name: str) -> None:
    if store is not None:
        curves = {key: value for key, value in log.curves.items() if key.startswith(f"{name} ")}
        store.save(f"block-{index}", part.view.state_dict(), {"curves": curves})


def _restore(store: CheckpointStore | None, index: int, part: Part, log: TrainLog) -> bool:
    found = store.load(f"block-{index}") if store is not None else None
    if store is None or found is None:
        return False
    weights, notes = found
    with store.fitting(f"block-{index}"):
        part.view.load_state_dict(weights)
        log.curves.update(
            {name: [(step, loss) for step, loss in curve] for name, curve in notes["curves"].items()}
        )
    return True
