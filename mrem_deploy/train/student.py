"""From a full-precision teacher to the fake-quant student that a method trains."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from mrem_deploy.base.progress import say
from mrem_deploy.data.encoded import BatchSchedule, Encoded
from mrem_deploy.models.architectures import Anatomy, anatomy
from mrem_deploy.quant.calibrate import initial_scales
from mrem_deploy.quant.centring import centre, channel_means, shifts_of
from mrem_deploy.quant.hot_rows import token_counts
from mrem_deploy.quant.insert import activation_points, insert_quantizers, prepare
from mrem_deploy.quant.mixed import Choices, MixedBits, choose_bits
from mrem_deploy.quant.spec import QuantSpec
from mrem_deploy.recipe import Recipe
from mrem_deploy.train.checkpoint import CheckpointStore
from mrem_deploy.train.mrem_p.crew import Crew
from mrem_deploy.train.mrem_p.shards import share_scales

BITS_CHECKPOINT = "bits"
ERRORS_CHECKPOINT = "sensitivities"
SENSITIVITY_BATCHES = 4  # batches on which the sensitivity of every layer is measured


def make_student(
    teacher: PreTrainedModel,
    recipe: Recipe,
    calibration: Encoded,
    crew: Crew | None = None,
    spec: QuantSpec | None = None,
) -> PreTrainedModel:
    """The fake-quant model with initial scales; prepares the teacher as well.

    The workers of a crew search a share of the scales each; all get all of them. `spec` is the
    recipe's, unless bits per layer were chosen.
    """
    crew, spec = crew or Crew(), spec or recipe.spec
    device = next(teacher.parameters()).device
    found = prepare(teacher)
    batches = list(first_batches(recipe, calibration, device, recipe.init_batches))
    say(f"initialising scales on {recipe.init_batches} batches")
    student = copy.deepcopy(teacher)
    if recipe.centres:
        centre(student, found, _shared_means(teacher, found, batches, crew))
    share = list(activation_points(found, spec))[crew.rank :: crew.world]
    own = initial_scales(student, found, spec, batches, share)
    scales = share_scales(crew, own)
    insert_quantizers(student, spec, scales, calibration_counts(teacher, calibration))
    return student.requires_grad_(True).to(device)


def _shared_means(
    teacher: PreTrainedModel, found: Anatomy, batches: list[dict[str, torch.Tensor]], crew: Crew
) -> dict[str, torch.Tensor]:
    """What to centre by; all workers take the leader's means, because neighbours must agree to the bit."""
    own = channel_means(teacher, shifts_of(teacher, found), batches) if crew.leads else {}
    plain = {name: mean.tolist() for name, mean in own.items()}
    shared = crew.exchange("the means of channels", plain, patient=True)[0]
    return {name: torch.tensor(values) for name, values in shared.items()}


def calibration_counts(teacher: PreTrainedModel, calibration: Encoded) -> torch.Tensor:
    """How often every row of the word embedding occurs in the calibration sentences."""
    rows = teacher.get_submodule(anatomy(teacher).word_embedding).weight.shape[0]
    return token_counts(calibration.columns["input_ids"], rows)


def first_batches(
    recipe: Recipe, calibration: Encoded, device: torch.device, count: int
) -> Iterator[dict[str, torch.Tensor]]:
    """The first `count` batches of the calibration set, on the device."""
    schedule = BatchSchedule(calibration.lengths, recipe.batch_size, recipe.seed)
    for i in range(count):
        yield {name: value.to(device) for name, value in calibration.batch(schedule.at(i)).items()}


def chosen_bits(
    teacher: PreTrainedModel, recipe: Recipe, calibration: Encoded, store: CheckpointStore | None, crew: Crew
) -> MixedBits:
    """The bits of every layer under the recipe's budget; the leader of a crew measures for all.

    They are kept as a checkpoint: a second measurement could swap near equals, and then the checkpoints
    of the weights would not fit.
    """
    kept = store.notes(BITS_CHECKPOINT) if store is not None and crew.leads else None
    chosen = None
    if kept and store is not None:
        with store.fitting(BITS_CHECKPOINT):
            chosen = MixedBits.from_dict(kept["chosen"]).to_dict()
    if crew.leads and chosen is None:
        say(f"choosing bits per layer for {recipe.budget_mb:g} MiB")
        device = next(teacher.parameters()).device
        batches = list(first_batches(recipe, calibration, device, SENSITIVITY_BATCHES))
        counts = calibration_counts(teacher, calibration)
        found = choose_bits(
            teacher, recipe.spec, batches, recipe.budget_mb, recipe.sensitivity, recipe.seed, counts
        )
        chosen = found.to_dict()
        if store is not None:
            store.save(BITS_CHECKPOINT, {}, {"chosen": chosen})
    return MixedBits.from_dict(crew.exchange("the bits of every layer", chosen, patient=True)[0])


def bit_choices(
    teacher: PreTrainedModel, recipe: Recipe, calibration: Encoded, store: CheckpointStore
) -> Choices:
    """Sizes and sensitivities of every layer, measured once in a run, whatever its interruptions."""
    choices = Choices.sizes(teacher, recipe.spec)
    kept = store.notes(ERRORS_CHECKPOINT)
    if kept:
        errors = [{int(bits): error for bits, error in each.items()} for each in kept["errors"]]
        return replace(choices, measure=recipe.sensitivity, errors=errors)
    device = next(teacher.parameters()).device
    batches = list(first_batches(recipe, calibration, device, SENSITIVITY_BATCHES))
    counts = calibration_counts(teacher, calibration)
    choices = choices.measured(teacher, recipe.spec, batches, recipe.sensitivity, recipe.seed, counts)
    store.save(ERRORS_CHECKPOINT, {}, {"errors": choices.errors})
    return choices
