"""--embedding-rate: which parameters it slows down, and what that spares the rows that never occur."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from tiny_models import (
    ARCHITECTURES,
    VOCABULARY,
    quantized_twin,
    settings,
    tiny_batch,
    tiny_model,
    tiny_pair,
)

from mrem_deploy.models.architectures import anatomy
from mrem_deploy.models.parts import carve
from mrem_deploy.quant.spec import QuantSpec
from mrem_deploy.recipe import Recipe
from mrem_deploy.train.job import TrainSettings
from mrem_deploy.train.module import ModuleTrainer

FREQUENT = [5, 6, 7]  # in every sentence, with an outlier each: what few bits do to them is seen everywhere
SEEN = 20  # ids below occur
STEPS = 60


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_it_slows_down_the_embeddings_and_nothing_else(kind: str) -> None:
    """Adam's first step is the rate in the direction of the sign: a tenth of it moves a tenth as far."""
    moved = {}
    for rate in (1.0, 0.1):
        teacher, student = tiny_pair(kind, spec=QuantSpec(2, 2, 8))
        before = {name: value.detach().clone() for name, value in student.named_parameters()}
        trainer = ModuleTrainer(
            carve(teacher, [0, 3])[0], carve(student, [0, 3])[0], settings(embedding_rate=rate)
        )
        trainer.step(0, tiny_batch(kind), None, None)
        now = dict(student.named_parameters())
        moved[rate] = {
            name: float((now[name].detach() - value).abs().max()) for name, value in before.items()
        }
    words = anatomy(tiny_model(kind)).word_embedding
    alone = words.endswith("embed_tokens")  # next to the blocks
    inside = words if alone else words.rpartition(".")[0] + "."
    slowed = {name for name, most in moved[1.0].items() if most and moved[0.1][name] < 0.5 * most}
    assert slowed == {name for name, most in moved[1.0].items() if most and name.startswith(inside)}
    assert len(slowed) >= (1 if alone else 2)  # the words, and a norm or positions
    for name, most in moved[1.0].items():
        assert moved[0.1][name] == pytest.approx(0.1 * most if name in slowed else most, rel=0.01)


def test_the_recipe_gives_it_to_the_optimizer() -> None:
    assert TrainSettings.of(Recipe(embedding_rate=0.25)).embedding_rate == 0.25
    assert dataclasses.replace(TrainSettings.of(Recipe(embedding_rate=0.25)), lr=1.0).embedding_rate == 0.25


def test_a_low_rate_spares_rows_that_never_occur() -> None:
    """Positions, types and the norm learn to make up for rows that occur; the others then have an error more.

    At the rate of the weights theirs grows by 20% here, at a tenth by 1%.
    """
    model = tiny_model()
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[FREQUENT, 3] += 2.0
    draw = np.random.default_rng(0)
    words = draw.integers(8, SEEN, size=(64, 8))
    first, middle, last = (np.full((64, 1), token) for token in FREQUENT)
    ids = torch.from_numpy(np.concatenate([first, words[:, :5], middle, words[:, 5:], last], axis=1))
    unseen = torch.arange(SEEN, VOCABULARY).repeat(ids.shape[1], 1).T  # each at every position
    pair = quantized_twin(model, QuantSpec(2, 2, 8))
    grown = {}
    for rate in (1.0, 0.1):
        teacher, student = copy.deepcopy(pair)
        before = _error(teacher, student, unseen), _error(teacher, student, ids)
        parts = (carve(either, [0, 1, 3])[0] for either in (teacher, student))
        trainer = ModuleTrainer(*parts, settings(steps=STEPS, embedding_rate=rate))
        for step in range(STEPS):
            batch = ids[(np.arange(8) + 8 * step) % len(ids)]
            tokens = {"input_ids": batch, "attention_mask": torch.ones_like(batch)}
            trainer.step(step, tokens | {"token_type_ids": torch.zeros_like(batch)}, None, None)
        assert _error(teacher, student, ids) < before[1]  # rows that occur do get better
        grown[rate] = _error(teacher, student, unseen) / before[0]
    assert grown[1.0] > 1.1
    assert grown[0.1] < 1.03


@torch.no_grad()
def _error(teacher: torch.nn.Module, student: torch.nn.Module, ids: torch.Tensor) -> float:
    clean, noisy = teacher.bert.embeddings(ids), student.bert.embeddings(ids)
    return float((noisy - clean).norm() / clean.norm())
