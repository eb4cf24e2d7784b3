"""The measurement of `benchmark step`: both students of a module, verified, then timed in turn."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from itertools import cycle

import numpy as np
import torch

from mrem_deploy.base.machine import keep_large_blocks
from mrem_deploy.base.progress import bar, say
from mrem_deploy.benchmarks.contenders import computing_with
from mrem_deploy.benchmarks.geometry import random_model, random_tokens
from mrem_deploy.benchmarks.quantized import check_quantized, expected_quantizers, names_outside
from mrem_deploy.benchmarks.step_rows import OtherKernels, StepRow, style_name
from mrem_deploy.benchmarks.timing import Comparison, interleave, timed
from mrem_deploy.models.architectures import anatomy
from mrem_deploy.models.partition import module_cuts
from mrem_deploy.models.parts import Part, carve
from mrem_deploy.quant.insert import prepare
from mrem_deploy.recipe import Recipe
from mrem_deploy.train.job import TrainSettings
from mrem_deploy.train.module import ModuleTrainer
from mrem_deploy.train.student import make_student

CPU = torch.device("cpu")
BATCHES = 2  # used in turn, so that no step finds its own input in the processor's cache
STRETCH = 1.02  # of the unquantized student's weights: equal to its teacher it would have no gradient
MANY_STEPS = 1_000_000  # the learning rate hardly decays while we measure

Batch = tuple[dict[str, torch.Tensor], torch.Tensor | None, torch.Tensor | None]


def measure(options: argparse.Namespace) -> tuple[list[StepRow], list[int]]:
    """A row for each bit setting and style of scales, and where the model is cut into modules."""
    keep_large_blocks()  # as a real run does
    teacher = random_model(options.geometry, options.seed).requires_grad_(False).to(options.device)
    prepare(teacher)
    cuts = module_cuts(teacher, options.modules)
    batches = _batches(teacher, cuts, options)
    styles = [False, True] if options.per_channel is None else [options.per_channel]
    variants = [(bits, per_channel) for bits in options.bits for per_channel in styles]
    rows = []
    calls = len(variants) * (1 + len(options.kernels)) * (options.warmup + options.rounds)
    with bar(calls, "training steps") as shown:
        for bits, per_channel in variants:
            say(f"{bits} {style_name(per_channel)}")
            rows.append(time_variant(teacher, cuts, bits, per_channel, batches, options, shown.update))
    return rows, cuts


def time_variant(
    teacher: torch.nn.Module,
    cuts: list[int],
    bits: str,
    per_channel: bool,
    batches: list[Batch],
    options: argparse.Namespace,
    after_step: Callable[[], object],
) -> StepRow:
    """Make both students of the module, verify the quantized one, then run their steps in turn.

    All kernels train the same student: the cost of a step does not depend on the values.
    """
    part = carve(teacher, cuts)[options.module - 1]
    recipe = Recipe(
        bits=bits,
        per_channel=per_channel,
        batch_size=options.batch_size,
        seed=options.seed,
        init_batches=1,
        keep_fp=names_outside(teacher, part),  # other modules are not timed: leave them as they are
    )
    calibration = random_tokens(options.geometry, options.batch_size, options.length, options.seed)
    quantized = carve(make_student(teacher, recipe, calibration), cuts)[options.module - 1]
    plain = carve(unquantized_student(teacher), cuts)[options.module - 1]
    tokens, _, noisy = batches[0]
    checked = check_quantized(part, quantized, expected_quantizers(teacher, recipe.spec), tokens, noisy)

    settings = TrainSettings(MANY_STEPS, recipe.lr, recipe.step_lr, options.batch_size, options.seed)
    plain_step, quantized_step = (
        stepper(ModuleTrainer(part, student, settings), batches, options.device)
        for student in (plain, quantized)
    )
    check_trains(plain_step, plain)
    steps = {"plain": timed(plain_step)}
    for name in options.kernels:
        quantized_by = by(name, quantized_step)
        check_trains(quantized_by, quantized)
        steps[name] = timed(quantized_by)
    times = interleave(steps, options.rounds, options.warmup, after_call=after_step)
    first, *others = options.kernels
    return StepRow(
        bits,
        per_channel,
        first,
        Comparison(times["plain"], times[first]),
        {
            name: OtherKernels(Comparison(times["plain"], times[name]), Comparison(times[first], times[name]))
            for name in others
        },
        checked,
    )


def by(name: str, step: Callable[[], float]) -> Callable[[], float]:
    """The step, computed by that contender."""

    def call() -> float:
        with computing_with(name):
            return step()

    return call


def unquantized_student(teacher: torch.nn.Module) -> torch.nn.Module:
    """A trainable copy, slightly different from its teacher.

    Its word embedding gets sparse gradients, as the quantized one does. Otherwise the first module would pay
    for 30,000 rows here and only for the batch's rows there.
    """
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(STRETCH)
    embedding = student.get_submodule(anatomy(student).word_embedding)
    assert isinstance(embedding, torch.nn.Embedding)
    embedding.sparse = True
    return student.requires_grad_(True)


def stepper(trainer: ModuleTrainer, batches: list[Batch], device: torch.device = CPU) -> Callable[[], float]:
    """A call that trains one step on the next batch and returns its loss, once the device is done with it."""
    numbered = enumerate(cycle(batches))

    def step() -> float:
        number, batch = next(numbered)
        loss = trainer.step(number, *batch).loss
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return loss

    return step


def check_trains(step: Callable[[], float], student: Part) -> None:
    """One step gives a finite loss and moves every weight matrix."""
    before = {name: value.detach().clone() for name, value in student.named_parameters() if value.dim() > 1}
    loss = step()
    after = dict(student.named_parameters())
    still = [name for name, value in before.items() if torch.equal(value, after[name])]
    if not 0 < loss < float("inf") or still:
        raise AssertionError(
            f"the step does not train: loss {loss}, unmoved: {', '.join(still) or 'nothing'}"
        )


def _batches(teacher: torch.nn.Module, cuts: list[int], options: argparse.Namespace) -> list[Batch]:
    """Inputs of the module: what the full-precision modules before it make of random tokens."""
    tokens = random_tokens(options.geometry, BATCHES * options.batch_size, options.length, options.seed)
    before = carve(teacher, cuts)[: options.module - 1]
    batches: list[Batch] = []
    for indices in np.arange(len(tokens)).reshape(BATCHES, options.batch_size):
        batch = {name: value.to(options.device) for name, value in tokens.batch(indices).items()}
        hidden = None
        with torch.no_grad():
            for part in before:
                hidden = part(hidden, batch).hidden[-1]
        batches.append((batch, hidden, None if hidden is None else hidden.clone()))
    return batches
