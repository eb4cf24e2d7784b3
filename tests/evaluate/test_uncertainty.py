"""Bootstrap intervals against known truth, the vectorised metrics against the task metrics."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import accuracy_score

from mrem_deploy.evaluate import uncertainty
from mrem_deploy.evaluate.metrics import MEAN, METRICS, Metric, metric_of
from mrem_deploy.evaluate.rowwise import one_by_one
from mrem_deploy.evaluate.uncertainty import (
    over_seeds,
    paired_accuracy_error,
    paired_bootstrap,
)

ACCURACY, MATTHEWS = METRICS["accuracy"], METRICS["matthews"]


def two_models(generator: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels and two models that are right for 80% and 85%, mostly on the same examples."""
    labels = generator.integers(0, 2, n)
    luck = generator.random(n)
    first = luck < 0.80
    second = np.where(generator.random(n) < 0.7, luck < 0.85, generator.random(n) < 0.85)
    return labels, np.where(first, labels, 1 - labels), np.where(second, labels, 1 - labels)


@pytest.mark.parametrize("name", ["accuracy", "f1", "matthews", "spearman", "pearson"])
@pytest.mark.parametrize("classes", [2, 3])
def test_many_resamples_at_once_give_what_each_alone_gives(name: str, classes: int) -> None:
    generator = np.random.default_rng(0)
    truth = generator.integers(0, classes, (20, 31))
    guess = np.where(generator.random((20, 31)) < 0.6, truth, generator.integers(0, classes, (20, 31)))
    guess[0] = 1  # a model that always says the same
    truth[1] = 0  # a resample without a positive one
    if name in ("spearman", "pearson"):
        truth, guess = truth.astype(float), guess + generator.normal(0, 0.5, guess.shape)
        guess[0] = 2.5
    if name == "f1":
        truth, guess = truth.clip(max=1), guess.clip(max=1)
    expected = [METRICS[name].score(t, g, 1) for t, g in zip(truth, guess, strict=True)]
    np.testing.assert_allclose(METRICS[name].resample(truth, guess, 1), expected, atol=1e-12)


def test_f1_of_another_class() -> None:
    truth, guess = np.array([[0, 0, 1, 1]]), np.array([[0, 1, 1, 1]])
    expected = METRICS["f1"].score(truth[0], guess[0], 0)
    assert METRICS["f1"].resample(truth, guess, 0)[0] == pytest.approx(expected)
    assert expected != METRICS["f1"].score(truth[0], guess[0], 1)


def test_the_standard_error_of_accuracy_is_the_closed_form() -> None:
    labels, a, b = two_models(np.random.default_rng(1), 800)
    was, now = a == labels, b == labels
    lost, gained = int((was & ~now).sum()), int((~was & now).sum())
    found = paired_bootstrap(ACCURACY, a, b, labels, resamples=8000)
    assert found.difference == pytest.approx((gained - lost) / 800)
    # 8,000 resamples know a standard deviation to 1/sqrt(16000), 0.8%; four times that is allowed.
    assert 100 * found.standard_error == pytest.approx(paired_accuracy_error(lost, gained, 800), rel=0.032)
    assert found.low < found.difference < found.high


def test_pairing_tells_more_than_two_separate_scores() -> None:
    labels, a, b = two_models(np.random.default_rng(2), 500)
    paired = paired_bootstrap(ACCURACY, a, b, labels).standard_error
    alone = np.hypot(*(np.std(x == labels) / np.sqrt(500) for x in (a, b)))
    assert paired < 0.8 * alone


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """True difference: 0.85 − 0.80. Of 300 samples of 400 examples 95% should cover it; the count has a
    standard deviation of 1.3 points, and the percentile bootstrap is known to fall short by about one."""
    generator = np.random.default_rng(3)
    covered = 0
    for seed in range(300):
        labels, a, b = two_models(generator, 400)
        found = paired_bootstrap(ACCURACY, a, b, labels, resamples=400, seed=seed)
        covered += found.low - 1e-12 <= 0.05 <= found.high + 1e-12
    assert 0.90 <= covered / 300 <= 0.99


def test_it_is_the_same_for_the_same_seed_and_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, a, b = two_models(np.random.default_rng(4), 100)
    one = paired_bootstrap(MATTHEWS, a, b, labels, resamples=300, seed=7)
    assert paired_bootstrap(MATTHEWS, a, b, labels, resamples=300, seed=7) == one
    assert paired_bootstrap(MATTHEWS, a, b, labels, resamples=300, seed=8) != one
    monkeypatch.setattr(uncertainty, "VALUES_AT_A_TIME", 100 * 7)  # blocks of 7, the last of 6
    assert paired_bootstrap(MATTHEWS, a, b, labels, resamples=300, seed=7) == one


def test_any_function_can_be_the_metric() -> None:
    labels, a, b = two_models(np.random.default_rng(5), 60)
    plain = Metric("plain", "Plain", resample=one_by_one(lambda t, g, _: accuracy_score(t, g)))
    named = paired_bootstrap(ACCURACY, a, b, labels, resamples=50)
    given = paired_bootstrap(plain, a, b, labels, resamples=50)
    assert given.in_points() == pytest.approx(named.in_points())


def test_scores_per_example_need_no_labels() -> None:
    a, b = np.array([0.2, 0.5, 0.9]), np.array([0.4, 0.5, 1.0])
    assert paired_bootstrap(MEAN, a, b).difference == pytest.approx(0.1)


def test_equal_models_differ_by_nothing() -> None:
    labels, a, _ = two_models(np.random.default_rng(6), 50)
    found = paired_bootstrap(ACCURACY, a, a, labels)
    assert (found.difference, found.standard_error, found.low, found.high) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("a", "b", "labels"),
    [
        ([1, 0], [1, 0, 1], [1, 0]),
        ([1], [1], [1]),
        ([1, 0], [1, 0], [1, 0, 0]),
        ([[1, 0]] * 2, [[1, 0]] * 2, [1, 0]),
    ],
)
def test_what_does_not_belong_together_is_refused(a: list, b: list, labels: list) -> None:
    with pytest.raises(ValueError, match="as many predictions as labels"):
        paired_bootstrap(ACCURACY, np.array(a), np.array(b), np.array(labels))


def test_a_metric_that_cannot_be_resampled_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a metric with `resample`, got 'bleu'"):
        paired_bootstrap(metric_of("bleu"), np.array([1, 0]), np.array([1, 0]), np.array([1, 0]))


def test_over_seeds() -> None:
    found = over_seeds([80.0, 82.0, 84.0])
    assert (found.mean, found.std, found.count) == (82.0, 2.0, 3)
    assert str(found) == "82.00 ± 2.00"
    assert (over_seeds([80.0]).std, str(over_seeds([80.0]))) == (None, "80.00")
    with pytest.raises(ValueError, match="at least one run"):
        over_seeds([])
