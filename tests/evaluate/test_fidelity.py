"""KL and flips: values worked out by hand, what must not change them, and how sure they are."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mrem_deploy.evaluate.agreement import AGREEMENTS
from mrem_deploy.evaluate.fidelity import (
    FIDELITIES,
    Fidelity,
    class_fidelity,
    clustered_mean,
    fidelity_of,
    kl_divergence,
    log_softmax,
    score_fidelity,
    span_fidelity,
    tag_fidelity,
)

INF = math.inf


def logits(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities))


# -- one distribution --------------------------------------------------------------------------------------


def test_divergence_by_hand() -> None:
    half, skewed = logits(0.5, 0.5), logits(0.9, 0.1)
    assert kl_divergence(half, skewed) == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5))
    assert kl_divergence(skewed, half) == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))
    assert kl_divergence(logits(1 / 3, 1 / 3, 1 / 3), logits(0.5, 0.25, 0.25)) == pytest.approx(
        (math.log(2 / 3) + 2 * math.log(4 / 3)) / 3
    )


def test_divergence_depends_on_differences_of_logits_only() -> None:
    draw = np.random.default_rng(0)
    one, two = draw.normal(size=(7, 5)), draw.normal(size=(7, 5))
    plain = kl_divergence(one, two)
    assert plain.shape == (7,)
    assert (plain > 0).all()
    np.testing.assert_allclose(kl_divergence(one + 3, two - draw.normal(size=(7, 1))), plain, rtol=1e-9)
    order = draw.permutation(5)
    np.testing.assert_allclose(kl_divergence(one[:, order], two[:, order]), plain, rtol=1e-12)
    np.testing.assert_allclose(kl_divergence(one.T, two.T, axis=0), plain, rtol=1e-12)
    np.testing.assert_array_equal(kl_divergence(one, one), 0.0)
    np.testing.assert_array_equal(
        kl_divergence(one, one + 1e-9 * one) >= 0, True
    )  # never below 0 by rounding


def test_huge_logits_do_not_overflow() -> None:
    one, two = np.array([1e4, 0.0, -1e4]), np.array([1e4, 9e3, 0.0])
    assert kl_divergence(one, two) == pytest.approx(0.0)
    assert kl_divergence(two, np.array([9e3, 1e4, 0.0])) == pytest.approx(1e3)  # all of p where log q = −1000
    assert kl_divergence(one.astype(np.float32), two.astype(np.float32)) == pytest.approx(0.0)


def test_masked_positions_are_left_out() -> None:
    """−∞ marks what a model may not choose, such as the tokens of the question: never NaN."""
    draw = np.random.default_rng(1)
    one, two = draw.normal(size=(4, 6)), draw.normal(size=(4, 6))
    masked = np.array([False, True, False, False, True, False])
    both = kl_divergence(np.where(masked, -INF, one), np.where(masked, -INF, two))
    np.testing.assert_allclose(both, kl_divergence(one[:, ~masked], two[:, ~masked]), rtol=1e-12)
    # p is certain, q gives it a half: log 2. The other way round q gives 0 to what p may choose.
    certain, half = np.array([0.0, -INF]), np.array([0.0, 0.0])
    assert kl_divergence(certain, half) == pytest.approx(math.log(2))
    assert kl_divergence(half, certain) == INF
    assert kl_divergence(certain, certain) == 0.0


@pytest.mark.parametrize("broken", [[math.nan, 1.0], [INF, 1.0], [-INF, -INF]])
def test_what_is_no_distribution_is_refused(broken: list[float]) -> None:
    with pytest.raises(ValueError, match="finite largest value"):
        log_softmax(np.array(broken))


# -- many of them ------------------------------------------------------------------------------------------


def test_the_error_of_one_value_each_is_the_usual_one() -> None:
    values = np.random.default_rng(2).exponential(size=50)
    mean, error = clustered_mean(values)
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(values.std(ddof=1) / math.sqrt(50))
    share, binomial = clustered_mean(np.arange(50) < 10)
    assert (share, binomial) == (pytest.approx(0.2), pytest.approx(math.sqrt(0.2 * 0.8 / 49)))


def test_values_of_one_example_count_as_one() -> None:
    """By hand: m = 4/6; s − m·n = 1 − 4/3, 3 − 2, 0 − 2/3; Σ² = 14/9; error = √(3/2 · 14/9) / 6."""
    parts = [np.array([1, 0]), np.array([1, 1, 1]), np.array([0])]
    mean, error = clustered_mean(parts)
    assert mean == pytest.approx(4 / 6)
    assert error == pytest.approx(math.sqrt(1.5 * 14 / 9) / 6)
    twice = clustered_mean([np.repeat(own, 2) for own in parts])  # says nothing new
    assert twice == (pytest.approx(mean), pytest.approx(error))
    assert clustered_mean([*parts, np.array([])]) == (mean, error)  # a sentence without words
    assert clustered_mean([np.array([0.5])]) == (0.5, None)
    assert clustered_mean([]) == (None, None)


def test_classes_by_hand() -> None:
    reference = [logits(0.5, 0.5), logits(0.9, 0.1), logits(0.2, 0.8), logits(0.1, 0.9)]
    model = [logits(0.9, 0.1), logits(0.9, 0.1), logits(0.8, 0.2), logits(0.1, 0.9)]
    changed = 0.2 * math.log(0.25) + 0.8 * math.log(4)
    kept = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5)
    found = class_fidelity(reference, model)
    values = np.array([kept, 0, changed, 0])
    assert found.kl == pytest.approx(values.mean())
    assert found.kl_error == pytest.approx(values.std(ddof=1) / 2)
    assert found.flips == pytest.approx(25.0)  # only the third has another likeliest class
    assert found.flips_error == pytest.approx(100 * math.sqrt(0.25 * 0.75 / 3))


def test_spans_by_hand() -> None:
    """The divergences of start and end, each over the tokens of the text, and their mean."""
    start, end = (
        (logits(0.5, 0.3, 0.2), logits(0.4, 0.4, 0.2)),
        (logits(0.2, 0.2, 0.6), logits(0.2, 0.2, 0.6)),
    )
    one, two = np.stack([start[0], end[0]], axis=1), np.stack([start[1], end[1]], axis=1)  # (T, 2)
    expected = 0.5 * (0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4))
    found = span_fidelity([one, one], [two, one])
    assert found.kl == pytest.approx(expected / 2)
    assert found.flips == 0.0  # of equal values the first counts


def test_tags_are_clustered_by_sentence() -> None:
    draw = np.random.default_rng(3)
    one = [draw.normal(size=(n, 4)) for n in (3, 8, 5)]
    two = [rows + draw.normal(size=rows.shape) for rows in one]
    found = tag_fidelity(one, two)
    each = [kl_divergence(a, b) for a, b in zip(one, two, strict=True)]
    every = np.concatenate(each)
    assert found.kl == pytest.approx(every.mean())
    assert found.kl_error == pytest.approx(clustered_mean(each)[1])
    assert found.kl_error != pytest.approx(every.std(ddof=1) / 4, rel=1e-3)


def test_scores_of_a_regression_have_a_difference_only() -> None:
    found = score_fidelity([np.array([1.0]), np.array([3.0])], [np.array([1.5]), np.array([2.0])])
    assert found == Fidelity(difference=0.75, difference_error=pytest.approx(0.25))


SHAPES = {"classification": (3,), "token-classification": (6, 3), "question-answering": (6, 2)}


@pytest.mark.parametrize("kind", SHAPES)
def test_flips_are_what_agreement_leaves(kind: str) -> None:
    draw = np.random.default_rng(4)
    one = [draw.normal(size=SHAPES[kind]) for _ in range(40)]
    two = [rows + draw.normal(size=rows.shape) for rows in one]
    found = FIDELITIES[kind](one, two)
    assert found.flips == pytest.approx(100 - AGREEMENTS[kind](one, two)["agreement"])
    assert 0 < found.flips < 100
    order = draw.permutation(40)
    shuffled = FIDELITIES[kind]([one[i] for i in order], [two[i] for i in order])
    assert shuffled.to_dict() == pytest.approx(found.to_dict())
    same = FIDELITIES[kind](one, one)
    assert same.to_dict() == {"kl": 0, "kl_error": 0, "flips": 0, "flips_error": 0}


def test_outputs_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="same shapes"):
        class_fidelity([np.zeros(3)], [np.zeros(2)])
    with pytest.raises(ValueError, match="not finite"):
        class_fidelity([np.zeros(2)], [np.array([0.0, math.nan])])


# -- as people and files see it ----------------------------------------------------------------------------


def test_in_words_and_in_json() -> None:
    found = Fidelity(0.04123, 0.00312, 3.104, 0.587)
    assert str(found) == "3.10% ± 0.59 flips, KL 0.0412 ± 0.0031"
    assert str(Fidelity(difference=0.5)) == "mean difference 0.5000"
    assert list(found.to_dict()) == ["kl", "kl_error", "flips", "flips_error"]
    assert Fidelity.from_dict(json.loads(json.dumps(found.to_dict())) | {"younger": 1}) == found
    assert found
    assert not Fidelity()
    assert FIDELITIES["embedding"]([np.ones(4)] * 2, [np.ones(4)] * 2).cosine == pytest.approx(100.0)


def test_one_example_has_no_error() -> None:
    found = fidelity_of([np.array([0.5])], [np.array([True])])
    assert found == Fidelity(kl=0.5, flips=0.0)
