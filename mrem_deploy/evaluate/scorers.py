"""Scorers, one per kind of task: the metrics of a model, which predictions are right, which models agree.

A scorer knows one evaluation split. It takes the outputs of one model in the order of the encoded examples
(for reading comprehension, one per window) and knows which of them belong together.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from transformers import PretrainedConfig

from mrem_deploy.data import tagging
from mrem_deploy.data.encoded import Encoded
from mrem_deploy.data.labels import label_order
from mrem_deploy.data.searching import Searches, SearchTokens
from mrem_deploy.data.squad import Answer, Questions, Windows, read_answers
from mrem_deploy.data.tagging import TaggedTexts, TaggedTokens
from mrem_deploy.data.tasks import Task
from mrem_deploy.data.texts import Texts
from mrem_deploy.evaluate import metrics, squad, tags
from mrem_deploy.evaluate.accuracy import MODELS
from mrem_deploy.evaluate.agreement import AGREEMENTS, Outputs, share
from mrem_deploy.evaluate.drift import SCORES, class_scores, span_scores, tag_scores
from mrem_deploy.evaluate.fidelity import FIDELITIES, Fidelity, fidelity_of, kl_divergence, span_divergence
from mrem_deploy.evaluate.metrics import MEAN, METRICS
from mrem_deploy.evaluate.search_scorer import SearchScorer
from mrem_deploy.evaluate.uncertainty import paired_bootstrap

Changes = dict[str, dict[str, float]]
Both = tuple[list[np.ndarray], list[np.ndarray]]


class Scorer(Protocol):
    """`paired` names the metric that is the mean of `right`, to count what quantization changed.

    `fidelity` compares the second model with the first, the reference.
    `thresholded` gives the scores of both models that a user compares with a threshold (`drift`).
    `change` gives, by metric, now − was with its standard error and interval, from resampled examples. It
    leaves out metrics that cannot be resampled.
    """

    paired: str

    def score(self, rows: Outputs) -> dict[str, float]: ...

    def right(self, rows: Outputs) -> np.ndarray | None: ...

    def agreement(self, one: Outputs, other: Outputs) -> dict[str, float]: ...

    def fidelity(self, reference: Outputs, model: Outputs) -> Fidelity: ...

    def thresholded(self, reference: Outputs, model: Outputs) -> Both: ...

    def change(self, was: Outputs, now: Outputs) -> Changes: ...


def scorer_for(
    task: Task, texts: Texts, encoded: Encoded, config: PretrainedConfig, similarity: str = "cosine"
) -> Scorer:
    """`similarity` is how an embedder compares its vectors."""
    if isinstance(texts, Searches) and isinstance(encoded, SearchTokens):
        return SearchScorer(task, texts, encoded, similarity)
    if task.label_free:
        return Comparison(task)
    if isinstance(texts, Questions) and isinstance(encoded, Windows):
        return QuestionScorer(task, texts, encoded)
    if isinstance(texts, TaggedTexts) and isinstance(encoded, TaggedTokens):
        return TagScorer(task, texts, encoded, config)
    return LabelScorer(task, texts, config)


class Comparison:
    """For tasks without labels: models can only be compared."""

    paired = ""

    def __init__(self, task: Task) -> None:
        self._kind = task.kind

    def score(self, rows: Outputs) -> dict[str, float]:
        raise AssertionError("a task without labels is measured by agreement")

    def right(self, rows: Outputs) -> np.ndarray | None:
        return None

    def agreement(self, one: Outputs, other: Outputs) -> dict[str, float]:
        return AGREEMENTS[self._kind](one, other)

    def fidelity(self, reference: Outputs, model: Outputs) -> Fidelity:
        return FIDELITIES[self._kind](reference, model)

    def thresholded(self, reference: Outputs, model: Outputs) -> Both:
        return SCORES[self._kind](reference), SCORES[self._kind](model)

    def change(self, was: Outputs, now: Outputs) -> Changes:
        return {}


class LabelScorer:
    """Classes and scores of whole texts."""

    paired = "accuracy"

    def __init__(self, task: Task, texts: Texts, config: PretrainedConfig) -> None:
        assert texts.labels is not None  # evaluation() refuses unlabelled rows of such tasks
        self._task, self._labels = task, texts.labels
        classes = task.kind == "classification"
        self._order = label_order(texts.label_names, config, task) if classes else None

    def score(self, rows: Outputs) -> dict[str, float]:
        return metrics.score(self._task, np.stack(rows), self._labels, self._order)

    def right(self, rows: Outputs) -> np.ndarray | None:
        return None if self._order is None else np.stack(rows).argmax(axis=1) == self._order[self._labels]

    def agreement(self, one: Outputs, other: Outputs) -> dict[str, float]:
        return AGREEMENTS[self._task.kind](one, other)

    def fidelity(self, reference: Outputs, model: Outputs) -> Fidelity:
        return FIDELITIES[self._task.kind](reference, model)

    def thresholded(self, reference: Outputs, model: Outputs) -> Both:
        if self._order is not None:
            positive = int(self._order[-1])
            return class_scores(reference, positive), class_scores(model, positive)
        return SCORES[self._task.kind](reference), SCORES[self._task.kind](model)

    def change(self, was: Outputs, now: Outputs) -> Changes:
        if len(self._labels) < 2:
            return {}
        (truth, before, positive), (_, after, _) = (
            metrics.truth_and_guess(self._task, np.stack(rows), self._labels, self._order)
            for rows in (was, now)
        )
        rows = [METRICS[name] for name in (self._task.metric, *self._task.also)]
        return {
            row.name: paired_bootstrap(row, before, after, truth, positive=positive).in_points()
            for row in rows
            if row.resample is not None
        }


class QuestionScorer:
    """SQuAD: one answer per question, read from all its windows."""

    paired = "exact"

    def __init__(self, task: Task, questions: Questions, windows: Windows) -> None:
        assert questions.answers is not None  # evaluation() refuses questions without
        self._questions, self._windows, self._v2 = questions, windows, task.unanswerable
        self._truths = [[span.text for span in spans] for spans in questions.answers]
        # By identity of the outputs, which are kept; only the newest, as QAT scores many models.
        self._read: dict[int, tuple[Outputs, list[Answer]]] = {}

    def answers(self, rows: Outputs) -> list[Answer]:
        if id(rows) not in self._read:
            if not all(np.isfinite(row).all() for row in rows):
                raise ValueError("some outputs are not finite numbers")
            if len(self._read) == len(MODELS):
                del self._read[next(iter(self._read))]
            self._read[id(rows)] = rows, read_answers(self._windows, self._questions, rows)
        return self._read[id(rows)][1]

    def score(self, rows: Outputs) -> dict[str, float]:
        summary = squad.summary_v2 if self._v2 else squad.summary_v1
        return summary(self.answers(rows), self._truths)

    def per_question(self, rows: Outputs) -> dict[str, np.ndarray]:
        """By metric, the score of every answer, 0 to 1."""
        scores = squad.score_v2 if self._v2 else squad.score_v1
        return scores(self.answers(rows), self._truths)

    def right(self, rows: Outputs) -> np.ndarray:
        return self.per_question(rows)["exact"] == 1.0

    def change(self, was: Outputs, now: Outputs) -> Changes:
        before, after = self.per_question(was), self.per_question(now)
        if len(self._truths) < 2:
            return {}
        return {name: paired_bootstrap(MEAN, before[name], after[name]).in_points() for name in before}

    def agreement(self, one: Outputs, other: Outputs) -> dict[str, float]:
        """The share of questions that both models answer with the same text, or both with none."""
        return share(self._same(one, other))

    def fidelity(self, reference: Outputs, model: Outputs) -> Fidelity:
        """The divergence of a question is the mean over its windows; a flip is an answer of another text."""
        question = self._windows.question
        sums = np.bincount(question, span_divergence(reference, model), len(self._truths))
        return fidelity_of(sums / np.bincount(question, minlength=len(sums)), self._same(reference, model))

    def thresholded(self, reference: Outputs, model: Outputs) -> Both:
        return self._sureness(reference), self._sureness(model)

    def _sureness(self, rows: Outputs) -> list[np.ndarray]:
        """Of every question, over all its windows."""
        found = np.zeros(len(self._truths))
        np.maximum.at(found, self._windows.question, np.concatenate(span_scores(rows)))
        return list(found)

    def _same(self, one: Outputs, other: Outputs) -> list[np.ndarray]:
        said = [self._said(rows) for rows in (one, other)]
        return [np.array(a == b) for a, b in zip(*said, strict=True)]

    def _said(self, rows: Outputs) -> list[str]:
        answers = self.answers(rows)
        silent = squad.abstains(answers) if self._v2 else np.zeros(len(answers), dtype=bool)
        return ["" if quiet else answer.text for answer, quiet in zip(answers, silent, strict=True)]


class TagScorer:
    """Entities: the tags of words, read from their first tokens."""

    paired = "sentences"

    def __init__(
        self, task: Task, texts: TaggedTexts, tokens: TaggedTokens, config: PretrainedConfig
    ) -> None:
        assert texts.tags is not None  # evaluation() refuses sentences without
        order = label_order(texts.label_names, config, task)
        self._names = [str(config.id2label[i]) for i in range(len(config.id2label))]
        for name, i in zip(texts.label_names, order, strict=True):
            if not name.isdecimal():  # LABEL_0, … take the data's names; numbers take the model's
                self._names[i] = name
        self._truth = [[self._names[order[tag]] for tag in own] for own in texts.tags]
        self._tokens = tokens

    def _tags(self, rows: Outputs) -> list[list[str]]:
        if not all(np.isfinite(row).all() for row in rows):
            raise ValueError("some outputs are not finite numbers")
        return tagging.read_tags(rows, self._tokens, self._names)

    def score(self, rows: Outputs) -> dict[str, float]:
        return tags.score(self._truth, self._tags(rows))

    def right(self, rows: Outputs) -> np.ndarray:
        return np.array([own == truth for own, truth in zip(self._tags(rows), self._truth, strict=True)])

    def agreement(self, one: Outputs, other: Outputs) -> dict[str, float]:
        """The share of words that both models give the same tag."""
        return share(self._same(one, other))

    def fidelity(self, reference: Outputs, model: Outputs) -> Fidelity:
        """The predictions are those on the first tokens of words; words that were cut off never change."""
        heads = [own[own >= 0] for own in self._tokens.heads]
        divergence = [
            kl_divergence(a[own], b[own]) for a, b, own in zip(reference, model, heads, strict=True)
        ]
        return fidelity_of(divergence, self._same(reference, model))

    def thresholded(self, reference: Outputs, model: Outputs) -> Both:
        heads = [own[own >= 0] for own in self._tokens.heads]
        one, other = (
            [row[own] for row, own in zip(tag_scores(rows), heads, strict=True)]
            for rows in (reference, model)
        )
        return one, other

    def _same(self, one: Outputs, other: Outputs) -> list[np.ndarray]:
        pairs = zip(self._tags(one), self._tags(other), strict=True)
        return [np.array([a == b for a, b in zip(*pair, strict=True)]) for pair in pairs]

    def change(self, was: Outputs, now: Outputs) -> Changes:
        return {}  # entities are counted over all sentences at once; there is no fast resampling of that
