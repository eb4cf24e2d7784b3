"""How long one block of the model takes here: a few training steps on a copy, with real batches."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace

import numpy as np
import psutil
import torch
from transformers import PreTrainedModel

from mrem_deploy.base import interrupt
from mrem_deploy.base.machine import PeakMemory
from mrem_deploy.base.units import MIB
from mrem_deploy.data.encoded import BatchSchedule, Encoded
from mrem_deploy.models.architectures import anatomy
from mrem_deploy.models.parts import carve
from mrem_deploy.numerics import UNQUANTIZED_BITS, activation_grid, asymmetric_grid
from mrem_deploy.quant.calibrate import VALUES_PER_BATCH, search_activation_scale
from mrem_deploy.quant.insert import activation_points, insert_quantizers, prepare
from mrem_deploy.quant.quantizers import LearnedScale
from mrem_deploy.quant.spec import QuantSpec
from mrem_deploy.recipe import Recipe
from mrem_deploy.train.job import TrainSettings
from mrem_deploy.train.loss import reconstruction_terms
from mrem_deploy.train.optimizer import LocalOptimizer

TIMED_STEPS = 3  # after one to warm up


LONG_STEP = 10.0  # seconds; a step that takes longer is timed once


@dataclass(frozen=True)
class Timing:
    """Seconds for a batch of mean size through one block, measured here; and what a step takes in memory."""

    train: float  # a training step: teacher forward, student forward and backward, update
    teacher: float  # a full-precision forward pass
    student: float  # a quantized forward pass
    search: float  # finding the scales of one block's activations
    step_mib: float  # peak of a training step
    held_mib: float  # what the process holds before training
    mean_length: float  # tokens of a calibration sentence


def measure(model: PreTrainedModel, recipe: Recipe, calibration: Encoded) -> Timing:
    """Train one block of a copy for a few steps; `model` and the run's random numbers stay as they are."""
    device = next(model.parameters()).device
    held = _held_mib(device)
    teacher = copy.deepcopy(model)
    prepare(teacher)
    student, middle = _one_block_quantized(teacher, recipe.spec)
    cuts = sorted({0, middle, middle + 1, len(anatomy(model).blocks)})
    full, quantized = (carve(m, cuts)[cuts.index(middle)] for m in (teacher, student))
    settings = TrainSettings(TIMED_STEPS + 2, recipe.lr, recipe.step_lr, recipe.batch_size, recipe.seed)
    optimizer = LocalOptimizer([quantized.view], quantized.shared_parameters, settings)
    schedule = BatchSchedule(calibration.lengths, recipe.batch_size, recipe.seed)
    before, steps, forwards = _held_mib(device), [], []
    with PeakMemory(device) as memory:
        batches = timed_batches(schedule, calibration.lengths)
        for i, (chosen, size) in enumerate(interrupt.steps(batches)):
            batch = {name: value.to(device) for name, value in calibration.batch(chosen).items()}
            hidden = _made_up(batch["input_ids"], model.config.hidden_size)
            with _Clock(device) as step:
                with torch.no_grad():
                    target = full(hidden, batch)
                terms = reconstruction_terms(quantized(hidden, batch), target, batch["attention_mask"])
                optimizer.update(torch.stack(terms).sum(), i)
            if i == 0:
                continue  # it also allocates, and is of another size
            with torch.no_grad(), _Clock(device) as teacher_clock:
                full(hidden, batch)
            with torch.no_grad(), _Clock(device) as student_clock:
                quantized(hidden, batch)
            steps.append(step.seconds / size)
            forwards.append((teacher_clock.seconds / size, student_clock.seconds / size))
            if step.seconds >= LONG_STEP:
                break
    teacher_forward, student_forward = np.median(np.array(forwards), axis=0)
    return Timing(
        train=float(np.median(steps)),
        teacher=float(teacher_forward),
        student=float(student_forward),
        search=_search_seconds(recipe),
        step_mib=max(0.0, memory.mb - before),
        held_mib=held,
        mean_length=float(np.mean(calibration.lengths)),
    )


def timed_batches(schedule: BatchSchedule, lengths: np.ndarray) -> list[tuple[np.ndarray, float]]:
    """The largest batch of an epoch, for the memory, then usual ones, for the time; and their sizes.

    A size is in tokens, padding included, where the mean of the epoch is 1: time is about proportional to it.
    The first few batches would not do. Where questions and paragraphs are mixed, most batches are short, and
    the few long ones take most of the time. Usual ones are the smallest of those above the mean.
    """
    epoch = [schedule.at(step) for step in range(schedule.steps_per_epoch)]
    tokens = np.array([float(len(batch) * lengths[batch].max()) for batch in epoch])
    size = tokens / tokens.mean()
    order = np.argsort(size, kind="stable")
    usual = order[np.searchsorted(size[order], 1.0 - 1e-9) :][:TIMED_STEPS]
    return [(epoch[i], float(size[i])) for i in (order[-1], *np.resize(usual, TIMED_STEPS))]


class _Clock:
    """Seconds that a block of code takes, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.seconds = device, 0.0

    def __enter__(self) -> _Clock:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds = time.perf_counter() - self._started


def _held_mib(device: torch.device) -> float:
    """Memory in use now: on the GPU, if that is where the model is."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / MIB
    return psutil.Process().memory_info().rss / MIB


def _made_up(ids: torch.Tensor, width: int) -> torch.Tensor:
    """Hidden states for a batch: the time of a step does not depend on their values."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn((*ids.shape, width), generator=draw).to(ids.device)


def _one_block_quantized(teacher: PreTrainedModel, spec: QuantSpec) -> tuple[PreTrainedModel, int]:
    """A copy of which only the middle block has quantizers, with made-up scales; and that block's number."""
    found = anatomy(teacher)
    middle = len(found.blocks) // 2
    inside = found.blocks[middle] + "."
    names = [*found.linears, *found.attentions, found.word_embedding]
    others = tuple(name for name in names if not name.startswith(inside))
    only = replace(spec, keep_fp=(*spec.keep_fp, *others), layer_bits=())
    scales = {}
    if only.activation_bits != UNQUANTIZED_BITS:
        for name, asymmetric in activation_points(found, only).items():
            bits = only.activation_bits
            grid = asymmetric_grid(bits, 0) if asymmetric else activation_grid(bits)
            scales[name] = LearnedScale(torch.tensor(2.0**-bits), grid)
    student = copy.deepcopy(teacher)
    insert_quantizers(student, only, scales)
    return student.requires_grad_(True).to(next(teacher.parameters()).device), middle


def _search_seconds(recipe: Recipe) -> float:
    """The search for the scales of one block: six symmetric operands and two that may be asymmetric."""
    bits = recipe.spec.activation_bits
    if bits == UNQUANTIZED_BITS:
        return 0.0
    values = torch.randn(VALUES_PER_BATCH, generator=torch.Generator().manual_seed(0))  # of one batch
    with _Clock(values.device) as plain:
        search_activation_scale(values, bits, False)
    if recipe.symmetric:
        return recipe.init_batches * 8 * plain.seconds
    with _Clock(values.device) as two:  # after softmax, and after GELU
        search_activation_scale(values.abs(), bits, True)
        search_activation_scale(values.clamp(min=-0.17), bits, True)
    return recipe.init_batches * (6 * plain.seconds + two.seconds)
