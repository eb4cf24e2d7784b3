"""Making the student and training it, with what that costs and how the error of every layer changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedModel

from mrem_deploy.base.machine import PeakMemory
from mrem_deploy.data.encoded import BatchSchedule
from mrem_deploy.evaluate.accuracy import QUANTIZED
from mrem_deploy.evaluate.layer_error import layer_errors
from mrem_deploy.evaluate.predict import torch_predictor
from mrem_deploy.quant.mixed import MixedBits
from mrem_deploy.result import Cost, LayerErrors, TargetDrop, WorkerCost
from mrem_deploy.train import METHODS
from mrem_deploy.train.heldout import final_losses
from mrem_deploy.train.job import Curve, ProcessCost, TrainJob, TrainLog
from mrem_deploy.train.student import chosen_bits, make_student
from mrem_deploy.walk.loading import Loaded
from mrem_deploy.walk.state import Run
from mrem_deploy.walk.target import walk_to_target

ERROR_BATCHES = 4  # batches on which the error of every layer is measured, before and after training


@dataclass(frozen=True)
class Trained:
    """The trained student, and what is known of its training."""

    student: PreTrainedModel
    log: TrainLog
    mixed: MixedBits | None  # with --bits auto
    errors: LayerErrors
    cost: Cost  # total_seconds is not known yet
    target: TargetDrop | None = None  # with --target-drop


def train(run: Run, loaded: Loaded) -> Trained:
    """Choose bits if asked to, make the student, train it by the recipe's method, and measure around it."""
    recipe, teacher, calibration = run.recipe, loaded.teacher, loaded.calibration
    with PeakMemory(run.device) as memory:
        started, cpu_started = time.perf_counter(), time.process_time()
        mixed = target = None
        if recipe.target_drop is not None:
            target = walk_to_target(run, loaded)
            recipe = run.recipe
        if recipe.chooses_bits:
            mixed = chosen_bits(teacher, recipe, calibration, run.store, run.crew)
        spec = replace(recipe.spec, layer_bits=mixed.layer_bits if mixed else ())
        student = make_student(teacher, recipe, calibration, run.crew, spec)
        schedule = BatchSchedule(calibration.lengths, recipe.batch_size, recipe.seed)
        probe = [schedule.at(i) for i in range(ERROR_BATCHES)]
        before = layer_errors(teacher, student, calibration, probe) if run.crew.leads else {}
        data = calibration if loaded.training is None else loaded.training
        score = None if loaded.training is None else scorer_of(loaded)
        job = TrainJob(teacher, student, data, recipe, run.store, run.crew, score, loaded.holdout)
        log = METHODS[recipe.method].train(job)
        seconds = time.perf_counter() - started + run.store.earlier_seconds
        own = ProcessCost(memory.mb, time.process_time() - cpu_started)
        costs = [ProcessCost(**cost) for cost in run.crew.exchange("the sum of costs", own.to_dict())]
    run.use_all_cores()
    after = layer_errors(teacher, student, calibration, probe) if run.crew.leads else {}
    if loaded.holdout is not None and run.crew.leads and not log.heldout:
        log.heldout = measured_at_the_end(log, final_losses(teacher, student, loaded.holdout, recipe))
    cost = Cost(
        train_seconds=seconds,
        # On a shared machine fairer than the clock. A resumed run does not know its first part's.
        train_cpu_seconds=None if run.store.resumed else sum(each.cpu_seconds for each in costs),
        peak_memory_mb=max(each.peak_memory_mb for each in costs),
        memory_kind=memory.kind + (", of the largest worker" if run.crew.world > 1 else ""),
        workers=WorkerCost.of_all(costs, log.workers),
        calibration_samples=len(calibration),
        heldout_samples=len(loaded.holdout) if loaded.holdout is not None else None,
        stages=log.seconds,
    )
    return Trained(student, log, mixed, LayerErrors.between(before, after), cost, target)


def measured_at_the_end(log: TrainLog, losses: dict[str, float]) -> dict[str, Curve]:
    """Held-out losses of a method that does not look at them while it trains: a point each."""
    last = max((curve[-1][0] + 1 for curve in log.curves.values() if curve), default=0)
    return {name: [(last, loss)] for name, loss in losses.items()}


def scorer_of(loaded: Loaded) -> Callable[[nn.Module], float]:
    """A function that scores a model on the evaluation split, for methods that choose by it."""
    evaluation = loaded.evaluation
    if evaluation.task.label_free:
        evaluation.add_full_precision(loaded.teacher, loaded.weights)

    def score(model: nn.Module) -> float:
        evaluation.add(QUANTIZED, torch_predictor(model))
        quantized = evaluation.accuracy().quantized
        assert quantized is not None
        return float(quantized)

    return score
