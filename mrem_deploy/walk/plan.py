"""What a run will do, how long it will take here, and what would make it shorter, before the work starts.

`make_plan` is plain arithmetic over a `Timing` (see timing.py), a `ModelShape` and a recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from mrem_deploy.base.format import count, duration
from mrem_deploy.base.units import MIB
from mrem_deploy.data.tasks import NO_DATA
from mrem_deploy.models.architectures import anatomy
from mrem_deploy.models.partition import module_cuts
from mrem_deploy.recipe import Recipe, module_count, parse_epochs, parse_modules
from mrem_deploy.recipe_defaults import PRESETS
from mrem_deploy.train import METHODS
from mrem_deploy.train.activation_cache import CacheSettings
from mrem_deploy.train.heldout import looks
from mrem_deploy.train.mrem_p.launch import devices, threads_each
from mrem_deploy.walk.loading import MOST_JUDGED, Loaded
from mrem_deploy.walk.scoring import TORCH_EXAMPLES, by_onnxruntime
from mrem_deploy.walk.state import Run
from mrem_deploy.walk.target import MOST_SHORT, RUNGS, SHORT
from mrem_deploy.walk.timing import Timing, measure

REM_COST = 2.5  # a step of REM for all matmuls of a block, in steps of MREM: each runs the block again
QAT_COST = 1.2  # attention scores are compared as well
ONNX_COST = 0.5  # a forward pass in onnxruntime, in full-precision passes in torch
SMALL_BATCH, FEW_EXAMPLES = 16, 1000  # of suggested shorter runs
WORTH_SAYING = 0.9  # a suggestion must save a tenth of the time


def planner_of(run: Run, loaded: Loaded) -> Planner:
    """Time a few steps; the result plans any number of them."""
    recipe = run.recipe
    workers = run.crew.world if run.crew.world > 1 else planned_workers(recipe, run.device)
    if workers > run.crew.world:  # planned, not started: each will have a share of the threads
        torch.set_num_threads(threads_each(recipe.threads, workers))
    data = loaded.calibration if loaded.training is None else loaded.training
    shape, timing = shape_of(loaded.teacher, recipe), measure(loaded.teacher, recipe, data)
    threads = torch.get_num_threads()
    inputs = loaded.task_data.inputs

    def plan(changed: Recipe) -> Plan:
        return make_plan(
            changed,
            shape,
            timing,
            sentences=len(data),
            threads=threads,
            workers=workers,
            cache_budget_mib=CacheSettings.of(recipe).max_memory_mb,
            profiles=len(run.profiles),
            evaluation_examples=inputs(recipe.eval_size or None),
            compared=inputs(min(TORCH_EXAMPLES, recipe.eval_size or TORCH_EXAMPLES)),
            few=inputs(FEW_EXAMPLES) or FEW_EXAMPLES,
        )

    return plan


def planned_workers(recipe: Recipe, device: torch.device) -> int:
    """Processes that will train: for mrem-p one per module, as far as there are devices."""
    if recipe.method != "mrem-p":
        return 1
    return min(module_count(recipe.modules), recipe.workers or devices(device))


Planner = Callable[[Recipe], "Plan"]  # for recipes that differ in how much they train


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model that decide time and memory."""

    blocks: int
    width: int
    block_parameters: int  # of the largest block
    parameters: int  # of the whole model
    embedding_parameters: int  # of the word embedding
    cuts: tuple[int, ...]  # first block of every module, then the number of blocks

    @property
    def largest_module(self) -> int:
        """Blocks of the largest module."""
        return max(stop - start for start, stop in zip(self.cuts, self.cuts[1:], strict=False))


@dataclass(frozen=True)
class Stage:
    name: str
    what: str
    seconds: float


@dataclass(frozen=True)
class Plan:
    """The stages of a run with their estimated seconds, and its estimated peaks of memory and disk."""

    title: str
    stages: tuple[Stage, ...]
    evaluation_per_thousand: float  # seconds
    memory_mib: float
    disk_mib: float
    threads: int
    workers: int
    shorter: tuple[tuple[str, float], ...] = ()  # options and the seconds that the run would then take
    at_most: bool = False  # the times are those of the worst case

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    def lines(self) -> list[str]:
        """For the terminal."""
        stages = [f"  {s.name:<11}{s.what:<44}{duration(s.seconds):>9}" for s in self.stages]
        each = "threads" if self.threads > 1 else "thread"
        where = f"{self.workers} workers of {self.threads} {each}" if self.workers > 1 else ""
        total = (
            f"  {'at most' if self.at_most else 'about'} {duration(self.seconds)} on this machine "
            f"({where or f'{self.threads} {each}'}); "
            f"memory up to {_size(self.memory_mib)}, disk up to {_size(self.disk_mib)}"
        )
        if not any(stage.name == "evaluate" for stage in self.stages):
            total += f"; then about {duration(self.evaluation_per_thousand)} per 1,000 evaluation examples"
        shorter = "; ".join(f"{options} (about {duration(seconds)})" for options, seconds in self.shorter)
        return [f"plan: {self.title}", *stages, total, *([f"  shorter: {shorter}"] if shorter else [])]


def shape_of(model: PreTrainedModel, recipe: Recipe) -> ModelShape:
    found = anatomy(model)
    blocks = [sum(p.numel() for p in model.get_submodule(name).parameters()) for name in found.blocks]
    modules = parse_modules(recipe.modules) if recipe.method in ("mrem-s", "mrem-p") else 1
    return ModelShape(
        blocks=len(blocks),
        width=model.config.hidden_size,
        block_parameters=max(blocks),
        parameters=sum(p.numel() for p in model.parameters()),
        embedding_parameters=model.get_submodule(found.word_embedding).weight.numel(),
        cuts=tuple(module_cuts(model, modules)),
    )


# -- arithmetic --------------------------------------------------------------------------------------------


def make_plan(
    recipe: Recipe,
    shape: ModelShape,
    timing: Timing,
    sentences: int,
    threads: int = 1,
    workers: int = 1,
    cache_budget_mib: float = float("inf"),
    profiles: int = 1,
    evaluation_examples: int | None = None,
    compared: int | None = None,
    few: int = FEW_EXAMPLES,
) -> Plan:
    """`sentences` are the calibration sentences, or those of the training set for qat. `compared` are the
    examples that torch predicts as well, `few` those of --eval-size 1000: a corpus counts with its queries.
    """

    def planned(changed: Recipe, examples: int | None = evaluation_examples) -> Plan:
        return _plan(
            changed,
            shape,
            timing,
            sentences,
            threads,
            workers,
            cache_budget_mib,
            profiles,
            examples,
            compared,
        )

    plan = planned(recipe)
    return replace(plan, shorter=tuple(_shorter(recipe, plan, planned, evaluation_examples, few)))


def _plan(
    recipe: Recipe,
    shape: ModelShape,
    timing: Timing,
    sentences: int,
    threads: int,
    workers: int,
    cache_budget_mib: float,
    profiles: int,
    evaluation_examples: int | None,
    compared: int | None,
) -> Plan:
    modules = len(shape.cuts) - 1
    keeps_targets = recipe.method == "mrem-s" and recipe.teacher_cache != "never"
    hidden_mib = sentences * timing.mean_length * shape.width * 4 / MIB
    cached = _cached(recipe, shape, hidden_mib, cache_budget_mib)
    stages = [
        Stage(
            "calibrate",
            f"{recipe.init_batches} batches",
            recipe.init_batches * shape.blocks * timing.teacher + shape.blocks * timing.search / workers,
        )
    ]
    batches = -(-sentences // recipe.batch_size)
    both = timing.teacher + timing.student
    if recipe.method == "qat":
        epochs = sum(parse_epochs(recipe.qat_epochs))
        what = f"{epochs:g} epochs of {count(sentences)} sentences"
        stages.append(Stage("train", what, epochs * batches * shape.blocks * timing.train * QAT_COST))
    elif recipe.method == "rem":
        what = f"{count(recipe.steps)} steps of {recipe.batch_size} for each matmul"
        stages.append(Stage("train", what, recipe.steps * shape.blocks * timing.train * REM_COST))
    elif recipe.method == "mrem-p":
        share = -(-modules // workers) * shape.largest_module if workers < modules else shape.largest_module
        what = f"{count(recipe.steps)} steps of {recipe.batch_size} sentences, {modules} modules at once"
        stages.append(Stage("train", what, recipe.steps * min(share, shape.blocks) * timing.train))
        stages += _choosing(recipe, shape, timing)
    elif recipe.method == "mrem-s":
        what = f"{modules} × {count(recipe.steps)} steps of {recipe.batch_size} sentences"
        step = timing.train - (timing.teacher if keeps_targets else 0.0)
        stages.append(Stage("train", what, recipe.steps * shape.blocks * step))
    if keeps_targets or (recipe.method in ("mrem-s", "rem") and shape.cuts[-2] > 0):
        seconds = batches * shape.cuts[-2] * both
        if keeps_targets:  # the teacher's outputs are kept for the last module as well
            seconds += batches * (shape.blocks - shape.cuts[-2]) * timing.teacher
        stages.append(Stage("cache", f"outputs of {count(sentences)} sentences", seconds))
    if recipe.target_drop is not None:
        stages = _walked(recipe, shape, timing, stages)
    passes = timing.teacher
    if profiles and recipe.validate:
        passes += ONNX_COST * timing.teacher
    sampling = by_onnxruntime(recipe, profiles)
    passes += 0.0 if sampling else timing.student
    per_thousand = 1000 * shape.blocks * passes / recipe.batch_size
    if evaluation_examples is not None:
        what = f"{count(evaluation_examples)} examples"
        stages.append(Stage("evaluate", what, per_thousand * evaluation_examples / 1000))
    if sampling:
        sampled = compared or min(TORCH_EXAMPLES, evaluation_examples or TORCH_EXAMPLES)
        seconds = sampled * shape.blocks * timing.student / recipe.batch_size
        stages.append(Stage("compare", f"{count(sampled)} examples in torch", seconds))
    return Plan(
        title=_title(recipe, shape),
        stages=tuple(stages),
        evaluation_per_thousand=per_thousand,
        memory_mib=_memory(recipe, shape, timing, cached[0]),
        disk_mib=_disk(recipe, shape, cached[1], profiles),
        threads=threads,
        workers=workers,
        at_most=recipe.target_drop is not None,
    )


def _walked(recipe: Recipe, shape: ModelShape, timing: Timing, stages: list[Stage]) -> list[Stage]:
    """--target-drop: all sizes trained in full, in the worst case; see target.py."""
    full, short = len(RUNGS), MOST_SHORT if METHODS[recipe.method].trains else 0
    found = []
    for stage in stages:
        if stage.name == "train":
            steps = count(max(1, round(SHORT * recipe.steps)))
            brief = f"up to {short} trainings with {steps} of the steps"
            found.append(Stage("short", brief, short * SHORT * stage.seconds))
            found.append(Stage("train", f"1 to {full} trainings of {stage.what}", full * stage.seconds))
        else:  # the scales of the result are searched once more
            times = full + short + (stage.name == "calibrate")
            found.append(replace(stage, seconds=times * stage.seconds))
    passes = timing.teacher + (full + short) * timing.student
    seconds = MOST_JUDGED / recipe.batch_size * shape.blocks * passes
    return [*found, Stage("estimate", f"the drop on up to {count(MOST_JUDGED)} sentences", seconds)]


def _choosing(recipe: Recipe, shape: ModelShape, timing: Timing) -> list[Stage]:
    """MREM-P compares states on held-out sentences when all are trained, one worker after another."""
    if not recipe.holdout:
        return []
    passes = len(looks(recipe.steps, recipe.batch_size, recipe.holdout)) + 1  # the best one's is passed on
    seconds = recipe.holdout / recipe.batch_size * shape.blocks * (timing.teacher + passes * timing.student)
    return [Stage("choose", f"the best states on {count(recipe.holdout)} sentences", seconds)]


def _title(recipe: Recipe, shape: ModelShape) -> str:
    name = str(recipe.model or "the model").rstrip("/").rpartition("/")[2]
    size = f"{shape.blocks} blocks, {shape.parameters / 1e6:.0f} M parameters"
    texts = ", calibrated with generated text" if recipe.data == NO_DATA else ""
    return f"{name} ({size}) to {recipe.bits} with {recipe.method}{texts}"


def _cached(recipe: Recipe, shape: ModelShape, hidden_mib: float, budget_mib: float) -> tuple[float, float]:
    """Cached activations in memory and on disk: both streams, and the targets of the largest module.

    `hidden_mib` is one hidden state of all sentences.
    """
    streams = 2 * hidden_mib if recipe.method in ("mrem-s", "rem") and shape.cuts[-2] > 0 else 0.0
    targets = 0.0
    if recipe.method == "mrem-s" and recipe.teacher_cache != "never":
        first = shape.cuts[1] + 1  # the embedding's output, and that of every block
        largest = max(first, shape.largest_module) - (1 if streams else 0)  # the last one is in a stream
        targets = largest * hidden_mib
    in_memory = sum(part for part in (streams, targets) if part <= budget_mib)
    if in_memory > budget_mib:
        in_memory = streams
    return in_memory, streams + targets - in_memory


def _memory(recipe: Recipe, shape: ModelShape, timing: Timing, cached_mib: float) -> float:
    """The student next to what is held already, a training step of the largest module, and the cache."""
    student = shape.parameters * 4 / MIB
    if recipe.method == "ptq":
        return timing.held_mib + 2 * student  # the frozen model is evaluated next to both
    blocks = shape.blocks if recipe.method == "qat" else 1 if recipe.method == "rem" else shape.largest_module
    training = timing.step_mib * blocks + 2 * shape.embedding_parameters * 4 / MIB  # Adam's two moments
    return timing.held_mib + student + max(training + cached_mib, student)


def _disk(recipe: Recipe, shape: ModelShape, cached_mib: float, profiles: int) -> float:
    """Checkpoints next to the cache, where that goes to disk, or next to the finished result."""
    bits = 8 if recipe.chooses_bits else min(recipe.spec.weight_bits, 32)
    result = shape.parameters * bits / 8 / MIB * (1 + profiles)
    if recipe.method == "ptq":
        return result
    trained = shape.parameters * 4 / MIB
    if recipe.method == "mrem-p" and recipe.holdout:  # and the states that were set aside
        trained *= len(looks(recipe.steps, recipe.batch_size, recipe.holdout))
    moments = 2 * shape.largest_module * shape.block_parameters * 4 / MIB if recipe.checkpoint_steps else 0.0
    moments += 2 * shape.embedding_parameters * 4 / MIB if recipe.checkpoint_steps else 0.0
    return trained + moments + max(result, cached_mib)


def _shorter(
    recipe: Recipe, plan: Plan, planned: Callable[..., Plan], examples: int | None, few: int
) -> Iterator[tuple[str, float]]:
    """Options that would save a tenth of the time or more, with the time that is left."""
    training = sum(stage.seconds for stage in plan.stages if stage.name == "train")
    choices: list[tuple[str, float]] = []
    if recipe.method in ("mrem-s", "mrem-p", "rem"):
        for steps in (preset.steps for preset in PRESETS.values() if preset.steps < recipe.steps):
            choices.append((f"--steps {steps}", planned(replace(recipe, steps=steps)).seconds))
        if recipe.batch_size > SMALL_BATCH:
            saved = training * (1 - SMALL_BATCH / recipe.batch_size)  # a step costs what its sentences cost
            choices.append((f"--batch-size {SMALL_BATCH}", plan.seconds - saved))
    if recipe.method == "qat":
        other = replace(recipe, method="mrem-s", train_size=0, accumulate=1)  # two options of qat only
        choices.append(("--method mrem-s", planned(other).seconds))
    if examples is not None and examples > 2 * few:
        choices.append((f"--eval-size {FEW_EXAMPLES}", planned(recipe, few).seconds))
    for options, seconds in choices:
        if seconds < WORTH_SAYING * plan.seconds:
            yield options, seconds


def _size(mib: float) -> str:
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{max(mib, 1):,.0f} MiB"
