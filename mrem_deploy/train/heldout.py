"""The held-out loss: how well a module does on sentences that nothing was trained on.

It is the loss that the module trains on (`train/loss.py`), over all held-out sentences, with the quantized
stream of the student's earlier modules as input. It ranks trained modules far better than a score on
a few thousand examples does, and needs no labels. MREM-S keeps the state in which it is least, and so does
MREM-P when all modules are trained (`mrem_p/best_states.py`). All methods report it for the finished model,
measured by the same code, so it compares them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from mrem_deploy.base import interrupt
from mrem_deploy.data.encoded import Encoded, sorted_batches
from mrem_deploy.models.architectures import anatomy
from mrem_deploy.models.partition import module_cuts
from mrem_deploy.models.parts import Part, carve
from mrem_deploy.recipe import Recipe, parse_modules
from mrem_deploy.train.activation_cache import CacheSettings
from mrem_deploy.train.job import Curve, TrainSettings
from mrem_deploy.train.loss import reconstruction_terms, term_weights
from mrem_deploy.train.streams import Streams

State = dict[str, torch.Tensor]

MOST_INNER = 4  # looks between the first and the last
SHARE = 0.05  # of the module's training time that all looks together may take
STEP_COST = 3.0  # a training step in forward passes of the student over the same sentences, at least


def looks(steps: int, batch_size: int, sentences: int) -> list[int]:
    """After how many steps the held-out loss is taken: before, at the end, and evenly in between as far as
    that costs little. It follows from the recipe, not from the clock: a resumed run looks at the same steps.
    """
    affordable = int(SHARE * STEP_COST * steps * batch_size / max(sentences, 1))
    inner = max(0, min(MOST_INNER, affordable - 2))
    return sorted({round(steps * i / (inner + 1)) for i in range(inner + 2)})


@torch.no_grad()
def heldout_loss(student: Part, held: Streams, output_loss: str) -> float:
    """The loss of a module over all held-out sentences; `held` has looked ahead over its teacher."""
    device = next(student.parameters()).device
    sums, weights = np.zeros(0), np.zeros(0)
    for indices in interrupt.steps(sorted_batches(held.examples.lengths, held.batch_size)):
        tokens, _, noisy = held.batch(indices, device)
        mask = tokens["attention_mask"]
        target = held.target(indices, mask.shape[1], device)
        assert target is not None  # `look_ahead` has kept them
        terms = reconstruction_terms(student(noisy, tokens), target, mask, output_loss)
        weight = np.array(term_weights(target, mask, output_loss))
        value = weight * np.array([float(term) for term in terms])
        sums, weights = (sums + value, weights + weight) if len(sums) else (value, weight)
    return float((sums / weights).sum())


class BestState:
    """The held-out losses of one module so far, and a copy of its state where the loss was least.

    The earliest of equals counts.
    """

    def __init__(self) -> None:
        self.curve: Curve = []
        self.state: State = {}

    @property
    def step(self) -> int:
        """After how many steps the loss was least."""
        return min(self.curve, key=lambda point: point[1])[0]

    @property
    def latest(self) -> float:
        return self.curve[-1][1]

    def add(self, step: int, loss: float, view: nn.Module) -> None:
        """A loss that was taken after `step` steps, with the module as it is now."""
        self.curve.append((step, loss))
        if self.step == step:
            self.state = {name: value.detach().clone() for name, value in view.state_dict().items()}

    def restore(self, view: nn.Module) -> None:
        """Bring the module into its best state."""
        view.load_state_dict(self.state)

    def resume(self, curve: Curve, state: State) -> None:
        """Continue with what a checkpoint has."""
        self.curve = [(step, loss) for step, loss in curve]
        self.state = state


def cuts_of(model: PreTrainedModel, recipe: Recipe) -> list[int]:
    """The modules that the held-out loss is taken of: the recipe's, whatever the method.

    Only mrem-s and mrem-p refuse cuts that do not fit the model: the other methods do not use them.
    """
    modules, blocks = parse_modules(recipe.modules), len(anatomy(model).blocks)
    if isinstance(modules, int):
        return module_cuts(model, min(modules, blocks))
    return [0, *sorted({cut for cut in modules if 0 < cut < blocks}), blocks]


def module_names(count: int) -> list[str]:
    return [f"module {index + 1}/{count}" for index in range(count)]


def budgets(
    recipe: Recipe, examples: Sequence[Encoded | None], device: torch.device | None = None
) -> list[CacheSettings]:
    """The recipe's memory for cached activations, shared out by the tokens of each set."""
    whole = CacheSettings.of(recipe, device)
    tokens = [0 if each is None else int(each.lengths.sum()) for each in examples]
    return [whole.share(own, sum(tokens)) for own in tokens]


def final_losses(
    teacher: PreTrainedModel, student: PreTrainedModel, holdout: Encoded, recipe: Recipe
) -> dict[str, float]:
    """The held-out loss of every module of a finished student, in order."""
    cuts, settings = cuts_of(teacher, recipe), TrainSettings.of(recipe)
    parts = zip(carve(teacher, cuts), carve(student, cuts), strict=True)
    space = CacheSettings.of(recipe, next(teacher.parameters()).device)
    held = Streams(holdout, teacher.config.hidden_size, space, settings.batch_size)
    losses = {}
    try:
        for name, (full, quantized) in zip(module_names(len(cuts) - 1), parts, strict=True):
            held.look_ahead(full)
            losses[name] = heldout_loss(quantized, held, settings.output_loss)
            if not quantized.last:
                held.advance(full, quantized)
    finally:
        held.close()
    return losses
