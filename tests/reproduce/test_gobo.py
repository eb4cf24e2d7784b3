"""GOBO by hand and by its promises: outliers untouched, few values, no worse than a uniform grid."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import ARCHITECTURES, tiny_batch, tiny_model

from mrem_deploy.base.errors import UserError
from mrem_deploy.models.architectures import anatomy, model_outputs
from mrem_deploy.quant.spec import QuantSpec
from mrem_deploy.recipe import Recipe
from mrem_deploy.reproduce.gobo import find_dictionary, find_outliers, gobo_model, gobo_weight


def weights(seed: int, spread: float = 0.04, outliers: int = 12) -> torch.Tensor:
    """A layer as trained ones are: Gaussian, and a few weights many deviations out."""
    generator = torch.Generator().manual_seed(seed)
    w = spread * torch.randn(96, 64, generator=generator)
    places = torch.randperm(w.numel(), generator=generator)[:outliers]
    w.view(-1)[places] = spread * (8 + 10 * torch.rand(outliers, generator=generator))
    return w


def uniform(w: torch.Tensor, bits: int) -> torch.Tensor:
    """Evenly spaced values from the least to the greatest."""
    step = (w.max() - w.min()) / (2**bits - 1)
    return ((w - w.min()) / step).round() * step + w.min()


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_what_it_promises(bits: int, seed: int) -> None:
    w = weights(seed)
    kept = w.clone()
    found = gobo_weight(w, bits)
    assert torch.equal(w, kept), "the given weight is not changed"
    assert found.outliers.sum() >= 12
    assert found.outliers.float().mean() < 0.01
    assert torch.equal(found.values[found.outliers], w[found.outliers])  # bit for bit
    inside = found.values[~found.outliers]
    assert len(inside.unique()) <= 2**bits
    assert set(inside.unique().tolist()) <= set(found.dictionary.tolist())
    for norm in (1, 2):
        ours, theirs = ((found.values - w).norm(norm), (uniform(w, bits) - w).norm(norm))
        assert ours < theirs
    again = gobo_weight(w, bits)
    assert torch.equal(again.values, found.values)
    assert 1 <= again.iterations < 100


def test_every_weight_has_its_nearest_value() -> None:
    w = weights(9)
    found = gobo_weight(w, 3)
    inside = ~found.outliers
    nearest = (w[inside][:, None] - found.dictionary).abs().min(dim=1).values
    torch.testing.assert_close((w - found.values)[inside].abs(), nearest)


def test_outliers_by_the_density() -> None:
    """log N < −4 where |w − μ|/σ > sqrt(2·(4 − log(σ·sqrt(2π)))); the small σ of real layers makes it 3.5."""
    w = torch.cat([torch.tensor([-1.0, 1.0]).repeat(5000) * 0.04, torch.tensor([0.12, 0.16])])
    deviation = w.double().std(correction=0).item()
    limit = deviation * math.sqrt(2 * (4 - math.log(deviation * math.sqrt(2 * math.pi))))
    assert 0.12 < limit < 0.16
    assert find_outliers(w).nonzero().flatten().tolist() == [10001]
    assert not find_outliers(torch.full((5,), 3.0)).any()  # nothing varies


def test_the_iteration_by_hand() -> None:
    """Equal population pairs 0 with 1 and 9 with 10.5; moving 1.. needs no step: the error stays."""
    values, iterations = find_dictionary(torch.tensor([0.0, 1.0, 9.0, 10.5], dtype=torch.float64), 2)
    assert (values.tolist(), iterations) == ([0.5, 9.75], 1)
    # Here the halves are 0 0 0 | 8 9 10 … but 6 lies on the wrong side at first: the means pull it over.
    ordered = torch.tensor([0.0, 0.0, 6.0, 8.0, 8.0, 8.0], dtype=torch.float64)
    values, iterations = find_dictionary(ordered, 2)
    assert (values.tolist(), iterations) == ([0.0, 7.5], 2)


@pytest.mark.parametrize("w", [torch.zeros(4, 4), torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])])
def test_fewer_weights_than_values(w: torch.Tensor) -> None:
    assert torch.equal(gobo_weight(w, 4).values, w)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_whole_model(kind: str) -> None:
    teacher = tiny_model(kind)
    model, size = gobo_model(teacher, QuantSpec(3, 4, 32))
    found = anatomy(teacher)
    for name in (found.word_embedding, *found.linears):
        bits = 4 if name == found.word_embedding else 3
        before, after = (m.get_submodule(name).weight for m in (teacher, model))
        outliers = find_outliers(before)
        assert torch.equal(after[outliers], before[outliers])
        assert len(after[~outliers].unique()) <= 2**bits
        assert not torch.equal(after, before)
    with torch.no_grad():
        a, b = (model_outputs(m(**tiny_batch(kind)))[0] for m in (teacher, model))
    assert bool(torch.isfinite(b).all())
    assert not torch.equal(a, b)
    count = {True: 0, False: 0}
    for name in (found.word_embedding, *found.linears):
        count[name == found.word_embedding] += teacher.get_submodule(name).weight.numel()
    rest = sum(value.numel() for value in teacher.state_dict().values()) - sum(count.values())
    assert size.codes == count[False] * 3 / 8 + count[True] * 4 / 8
    assert size.full_precision == 4 * rest
    assert size.outliers == pytest.approx(8 * size.outlier_share * sum(count.values()))
    assert size.dictionaries == 4 * (16 + 8 * len(found.linears))
    assert size.mb == pytest.approx(
        (size.codes + size.dictionaries + size.outliers + size.full_precision) / 2**20
    )


def test_layers_that_are_kept() -> None:
    teacher = tiny_model("bert")
    model, _ = gobo_model(teacher, QuantSpec(2, 32, 32, keep_fp=("*pooler*",)))
    same = [
        n for n, p in model.named_parameters() if torch.equal(p, teacher.get_parameter(n)) and p.dim() > 1
    ]
    assert {"bert.pooler.dense.weight", "bert.embeddings.word_embeddings.weight"} <= set(same)
    assert "bert.encoder.layer.0.output.dense.weight" not in same


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="weights only; got 8-bit activations"):
        gobo_model(tiny_model("bert"), QuantSpec(3, 4, 8))
    with pytest.raises(UserError, match="neither packed nor exported"):
        Recipe(method="gobo")
