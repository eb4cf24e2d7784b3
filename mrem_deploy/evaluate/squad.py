"""Exact match and F1 by the rules of SQuAD's official scripts, v1.1 and v2.0.

Texts are compared in lower case, without punctuation, articles and extra spaces. If there are several right
answers, the best match counts. In v2.0 the answer to an unanswerable question is the empty text, and a model
abstains if "no answer" scores above its best text by more than a threshold.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

from mrem_deploy.data.squad import Answer

THRESHOLD = 0.0  # of the margin; the official script is given the same
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only, as in the official scripts


def normalize(text: str) -> str:
    """In this order: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, truths: Sequence[str]) -> float:
    return float(any(normalize(prediction) == normalize(truth) for truth in truths))


def f1(prediction: str, truths: Sequence[str]) -> float:
    """The best over the truths of 2·P·R / (P + R), where words are counted as often as they occur."""
    return max(_word_f1(normalize(prediction).split(), normalize(truth).split()) for truth in truths)


def _word_f1(guess: list[str], truth: list[str]) -> float:
    same = sum((Counter(guess) & Counter(truth)).values())
    return 2 * same / (len(guess) + len(truth)) if same else 0.0


def score_v1(answers: Sequence[Answer], truths: Sequence[Sequence[str]]) -> dict[str, np.ndarray]:
    """By question, 0 to 1."""
    return _raw([answer.text for answer in answers], truths)


def _raw(texts: Sequence[str], truths: Sequence[Sequence[str]]) -> dict[str, np.ndarray]:
    pairs = list(zip(texts, truths, strict=True))
    return {
        "f1": np.array([f1(*pair) for pair in pairs]),
        "exact": np.array([exact_match(*pair) for pair in pairs]),
    }


def abstains(answers: Sequence[Answer], threshold: float = THRESHOLD) -> np.ndarray:
    return np.array([answer.null_margin > threshold for answer in answers])


def real_truths(truths: Sequence[Sequence[str]]) -> list[list[str]]:
    """The right answers by v2.0, without those that normalize to nothing; none if unanswerable."""
    return [[truth for truth in several if normalize(truth)] for several in truths]


def _unabstaining(answers: Sequence[Answer], truths: list[list[str]]) -> dict[str, np.ndarray]:
    """As if the model never abstained; the empty text is right for unanswerable questions."""
    texts, either = [answer.text for answer in answers], [several or [""] for several in truths]
    raw = _raw(texts, either)
    unanswerable = np.array([not several for several in truths])
    raw["f1"] = np.where(unanswerable, raw["exact"], raw["f1"])  # the empty text shares no words with itself
    return raw


def score_v2(
    answers: Sequence[Answer], truths: Sequence[Sequence[str]], threshold: float = THRESHOLD
) -> dict[str, np.ndarray]:
    """By question, 0 to 1; the model abstains above the threshold."""
    kept = real_truths(truths)
    unanswerable = np.array([not several for several in kept])
    silent, raw = abstains(answers, threshold), _unabstaining(answers, kept)
    return {name: np.where(silent, unanswerable, values) for name, values in raw.items()}


def best_thresholds(answers: Sequence[Answer], truths: Sequence[Sequence[str]]) -> dict[str, float]:
    """The best scores (0 to 1) over all thresholds, and these thresholds.

    Start from "always abstain" and answer the questions in the order of their margins: each adds its score,
    and an unanswerable one loses the point that abstaining had.
    """
    kept = real_truths(truths)
    margins = np.array([answer.null_margin for answer in answers])
    unanswerable = np.array([not several for several in kept])
    order = np.argsort(margins, kind="stable")
    result = {}
    for name, scores in _unabstaining(answers, kept).items():
        gains = np.where(unanswerable, scores - 1.0, scores)[order]
        totals = unanswerable.sum() + np.concatenate([[0.0], np.cumsum(gains)])
        best = int(totals.argmax())
        result[f"best_{name}"] = float(totals[best]) / len(answers)
        # "Always abstain" has no margin; the official script reports 0.0 for it.
        result[f"best_{name}_thresh"] = float(margins[order[best - 1]]) if best else 0.0
    return result


def summary_v1(answers: Sequence[Answer], truths: Sequence[Sequence[str]]) -> dict[str, float]:
    """In percent, the main number first."""
    return {name: 100.0 * float(values.mean()) for name, values in score_v1(answers, truths).items()}


def summary_v2(answers: Sequence[Answer], truths: Sequence[Sequence[str]]) -> dict[str, float]:
    """The numbers of the official script, in percent except for the thresholds."""
    scores = score_v2(answers, truths)
    found = {name: 100.0 * float(values.mean()) for name, values in scores.items()}
    best = best_thresholds(answers, truths)
    found |= {name: value if name.endswith("_thresh") else 100.0 * value for name, value in best.items()}
    answerable = np.array([bool(several) for several in real_truths(truths)])
    for label, chosen in (("HasAns", answerable), ("NoAns", ~answerable)):
        if chosen.any():
            found |= {
                f"{label}_{name}": 100.0 * float(values[chosen].mean()) for name, values in scores.items()
            }
    return found
