"""First step sizes: what the quantizers will see, without padding, and the best step for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import ARCHITECTURES, POSITION_POINTS, tiny_batch, tiny_encoded, tiny_model
from torch import nn

from mrem_deploy.models.architectures import model_outputs
from mrem_deploy.numerics import activation_grid, asymmetric_grid
from mrem_deploy.quant import calibrate
from mrem_deploy.quant.calibrate import initial_scales, observe, search_activation_scale
from mrem_deploy.quant.insert import activation_points, insert_quantizers, prepare
from mrem_deploy.quant.spec import QuantSpec


def alone(batch: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    length = int(batch["attention_mask"][row].sum())
    return {name: value[row : row + 1, :length] for name, value in batch.items()}


def hooks_of(model: nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) for part in model.modules())


def seen(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    found = prepare(model)
    return {
        name: torch.cat(watcher.values).sort().values
        for name, watcher in observe(model, found, QuantSpec(), batches).items()
    }


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_padding_is_not_seen(kind: str) -> None:
    """A padded batch shows what its sentences show one by one; only the probabilities of padding keys
    come in addition, and they are exactly 0."""
    model = tiny_model(kind, dtype=torch.float64)
    batch = tiny_batch(kind)
    together = seen(model, [batch])
    singly = seen(model, [alone(batch, row) for row in range(3)])
    assert together.keys() == singly.keys()
    for name in together:
        a, b = together[name], singly[name]
        if name.endswith("context.left"):
            a, b = a[a != 0], b[b != 0]
        if name.endswith(POSITION_POINTS):  # once per batch, and for as many distances as it has
            a, b = a.unique(), b.unique()
        assert a.shape == b.shape, name
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_point_gets_a_quantizer_of_its_kind(kind: str) -> None:
    model = tiny_model(kind)
    found = prepare(model)
    batch = tiny_batch(kind)
    before, hooks = model_outputs(model(**batch))[0], hooks_of(model)
    for spec in (QuantSpec(activation_bits=4), QuantSpec(symmetric=True)):
        steps = initial_scales(model, found, spec, [batch])
        points = activation_points(found, spec)
        assert steps.keys() == points.keys()
        for name, step in steps.items():
            assert step.grid.signed != points[name], name
            assert step.grid.bits == spec.activation_bits
            assert step.scale > 0
            if name.endswith("context.left") and points[name]:
                assert step.grid == asymmetric_grid(spec.activation_bits, 0)  # probabilities begin at 0
    # Watching leaves nothing behind.
    assert hooks_of(model) == hooks
    assert torch.equal(model_outputs(model(**batch))[0], before)


def test_full_precision_activations_need_no_steps() -> None:
    model = tiny_model()

    def forbidden() -> list[dict[str, torch.Tensor]]:
        raise AssertionError("no batch may be asked for")
        yield  # a generator, so that it raises when the first batch is taken

    assert initial_scales(model, prepare(model), QuantSpec(activation_bits=32), forbidden()) == {}


def test_hooks_are_gone_after_an_exception() -> None:
    model = tiny_model()
    found = prepare(model)
    bad = {"input_ids": torch.tensor([[10**6]]), "attention_mask": torch.ones(1, 1)}
    with pytest.raises(IndexError):
        observe(model, found, QuantSpec(), [bad])
    assert all(not m._forward_pre_hooks for m in model.modules())


def test_kept_layers_are_not_watched() -> None:
    model = tiny_model()
    found = prepare(model)
    steps = initial_scales(model, found, QuantSpec(keep_fp=("*layer.1.*",)), [tiny_batch()])
    assert steps
    assert not any("layer.1." in name for name in steps)


def test_a_symmetric_step_by_hand() -> None:
    """Values on a grid of step 0.5 that reaches ±3.5: the best step is near 0.5 and the error near 0."""
    values = torch.arange(-7, 8).double() * 0.5
    step = search_activation_scale(values, 4, asymmetric=False)
    assert step.grid == activation_grid(4)
    assert step.scale.item() == pytest.approx(0.5, rel=0.05)  # the search is a geometric grid of 8%


def test_the_zero_point_of_softmax_is_zero_and_of_gelu_is_not() -> None:
    generator = torch.Generator().manual_seed(0)
    softmax = torch.rand(2000, generator=generator)
    gelu = nn.functional.gelu(2 * torch.randn(2000, generator=generator))
    for bits in (4, 8):
        assert search_activation_scale(softmax, bits, asymmetric=True).grid == asymmetric_grid(bits, 0)
        step = search_activation_scale(gelu, bits, asymmetric=True)
        assert not step.grid.signed
        least = -step.grid.zero_point * step.scale.item()
        assert -0.6 < least <= 0  # GELU's minimum is −0.17; a coarse step may reach a little further
    assert search_activation_scale(gelu, 8, asymmetric=True).grid.zero_point > 0


def test_an_outlier_does_not_ruin_the_step() -> None:
    """One value in 10,000 at 60 standard deviations: hidden states of BERT have such channels."""
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    values[5] = 60.0
    assert search_activation_scale(values, 4, asymmetric=False).scale.item() < 60 / 7 / 4


def test_a_large_tensor_is_sampled_the_same_way_each_time_and_keeps_its_extremes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibrate, "VALUES_PER_BATCH", 50)
    x = torch.randn(20, 100, generator=torch.Generator().manual_seed(2))
    x[3, 7], x[11, 2] = 99.0, -98.0
    samples = []
    for name in ("one point", "one point", "another"):
        watcher = calibrate._Watcher(name)
        watcher.see(x)
        watcher.see(x)
        samples.append(watcher.sample())
        assert len(samples[-1]) == 2 * 50 + 2
        assert samples[-1].max() == 99.0
        assert samples[-1].min() == -98.0
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])


def test_the_steps_follow_the_calibration_batches() -> None:
    """The same data gives the same steps, other data gives others."""
    model = tiny_model()
    found = prepare(model)
    encoded = tiny_encoded(count=8)
    a, b = (encoded.batch(np.arange(start, start + 4)) for start in (0, 4))
    spec = QuantSpec()
    once, again, other = (initial_scales(model, found, spec, batches) for batches in ([a], [a], [b]))
    assert all(torch.equal(once[name].log_scale, again[name].log_scale) for name in once)
    assert any(not torch.equal(once[name].log_scale, other[name].log_scale) for name in once)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_eight_bits_are_close_to_full_precision(kind: str) -> None:
    """8-8-8 without any training: within 10% of the norm, where 4-bit activations are not."""
    model = tiny_model(kind)
    found = prepare(model)
    batch = tiny_batch(kind)
    expected = model_outputs(model(**batch))[0].detach()
    steps = initial_scales(model, found, QuantSpec(8, 8, 8), [batch])
    insert_quantizers(model, QuantSpec(8, 8, 8), steps)
    with torch.no_grad():
        came = model_outputs(model(**batch))[0]
    assert not torch.equal(came, expected)
    # The means of logits of this tiny EuroBERT happen to be small; with other weights it is at 0.04.
    assert (came - expected).norm() < (0.2 if kind == "eurobert" else 0.1) * expected.norm()
