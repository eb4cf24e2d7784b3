"""F1 of entities, as CoNLL's script and seqeval count them."""

from __future__ import annotations

import warnings

import numpy as np


def score(truth: list[list[str]], guess: list[list[str]]) -> dict[str, float]:
    """In percent, the main number first. Accuracy counts words, `sentences` those with all tags right."""
    from seqeval import metrics

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names of a model's labels that mark no entity, such as LABEL_3
        scores = {
            "f1": metrics.f1_score(truth, guess, zero_division=0),
            "precision": metrics.precision_score(truth, guess, zero_division=0),
            "recall": metrics.recall_score(truth, guess, zero_division=0),
            "accuracy": metrics.accuracy_score(truth, guess),
            "sentences": np.mean([a == b for a, b in zip(truth, guess, strict=True)]),
        }
    return {name: 100.0 * float(value) for name, value in scores.items()}
