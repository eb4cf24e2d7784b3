"""Several models on the evaluation split of a task: their metrics, and how far they agree."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from mrem_deploy.data.encoded import Encoded
from mrem_deploy.data.task_data import TaskData, Texts, sample
from mrem_deploy.data.texts import encode
from mrem_deploy.evaluate.accuracy import (
    BY_ONNXRUNTIME,
    BY_TORCH,
    FULL_PRECISION,
    MODELS,
    ONNX,
    QUANTIZED,
    TORCH,
    Accuracy,
    SplitScores,
)
from mrem_deploy.evaluate.agreement import Outputs
from mrem_deploy.evaluate.drift import check_scores, drift_of
from mrem_deploy.evaluate.fidelity import Fidelity
from mrem_deploy.evaluate.predict import Predictor, predict, remember, torch_predictor
from mrem_deploy.evaluate.scorers import Scorer, scorer_for
from mrem_deploy.models.sentence_files import SentenceFiles, sentence_files
from mrem_deploy.recipe import Recipe

ONE_ROW_EACH = (
    "classification",
    "regression",
    "embedding",
    "reranking",
)  # kinds whose predictions stack to (N, …)
BATCH_SIZE = 32
KEPT_FORMAT = "logits 2"  # of full precision's predictions on disk; another name, and they are computed again


@dataclass
class Split:
    """One evaluation split, and the predictions of full precision, of the quantized model in torch
    (QUANTIZED) and in onnxruntime (ONNX)."""

    texts: Texts
    encoded: Encoded
    scorer: Scorer
    predictions: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def models(self, scored_by: str) -> dict[str, list[np.ndarray]]:
        """The same by the names in MODELS: QUANTIZED is then the model in the runtime that decides."""
        named = dict(self.predictions)
        if scored_by == BY_ONNXRUNTIME:
            if QUANTIZED in named:
                named[TORCH] = named[QUANTIZED]
            named[QUANTIZED] = named[ONNX]
        return {model: named[model] for model in MODELS if model in named}


class Evaluation:
    """The evaluation split of a task, read once. Add the predictions of one model after another."""

    def __init__(
        self,
        recipe: Recipe,
        task_data: TaskData,
        tokenizer: PreTrainedTokenizerBase,
        config: PretrainedConfig,
        batch_size: int = BATCH_SIZE,
        sentences: SentenceFiles | None = None,
    ) -> None:
        """`sentences`: how an embedder makes its vectors; None: as the recipe's model does."""
        self.task = task_data.task
        self.scored_by = BY_TORCH  # where the quantized model's scores come from
        if self.task.kind == "embedding" and sentences is None:
            sentences = sentence_files(recipe.model or "")
        self.pooling = sentences.head if sentences and self.task.kind == "embedding" else None
        self.threshold = recipe.threshold
        self._similarity = sentences.similarity if sentences else "cosine"
        self._recipe, self._config = recipe, config
        self._batch_size = batch_size
        self._accuracy: Accuracy | None = None  # of the predictions so far
        self.splits: dict[str, Split] = {}
        for name, every in task_data.evaluation().items():
            texts = sample(every, recipe.eval_size, recipe.seed) if recipe.eval_size else every
            if self.pooling is not None and sentences is not None:
                texts = texts.prompted(sentences.prompt)
            encoded = encode(tokenizer, texts, recipe.max_length)
            self.splits[name] = Split(texts, encoded, self._scorer(texts, encoded))

    def add(self, model: str, predictor: Predictor) -> None:
        """Predict every example of every split; replaces earlier predictions of the same name."""
        self.forget(model)
        self.complete(model, predictor)

    def complete(self, model: str, predictor: Predictor) -> None:
        """Predict the splits for which the model has no predictions yet."""
        self._accuracy = None
        for name, split in self.splits.items():
            if model not in split.predictions:
                split.predictions[model] = self._predict(model, name, predictor)

    def forget(self, model: str) -> None:
        """Drop the predictions of a model: those of a state that QAT tried are not those of its result."""
        self._accuracy = None
        for split in self.splits.values():
            split.predictions.pop(model, None)

    def score_by_onnxruntime(self) -> None:
        """From now on the quantized model's scores are those of the ONNX model, which was added before."""
        self._accuracy = None
        self.scored_by = BY_ONNXRUNTIME

    def sampled(self, size: int) -> Evaluation:
        """The same with at most `size` texts of every split, drawn by the recipe's seed, and with the
        predictions that were made for them."""
        other = copy.copy(self)
        other._accuracy = None
        other.splits = {name: self._sampled(split, size) for name, split in self.splits.items()}
        return other

    def first_split(self) -> Evaluation:
        """The same with the split of the headline alone."""
        other = copy.copy(self)
        other._accuracy = None
        other.splits = dict(list(self.splits.items())[:1])
        return other

    def adopt(self, model: str, other: Evaluation) -> None:
        """Take over the predictions of a sample, for splits of which it has every text."""
        self._accuracy = None
        for name, split in self.splits.items():
            sampled = other.splits[name]
            if len(sampled.texts) == len(split.texts):
                split.predictions[model] = sampled.predictions[model]

    def _sampled(self, split: Split, size: int) -> Split:
        count = len(split.texts)
        if size >= count:
            return replace(split, predictions=dict(split.predictions))
        draw = np.random.default_rng(self._recipe.seed)
        chosen = np.sort(draw.choice(count, size=size, replace=False))
        places = split.encoded.places(chosen)
        texts, encoded = split.texts.take(chosen), split.encoded.take(places)
        predictions = {model: [rows[i] for i in places] for model, rows in split.predictions.items()}
        return Split(texts, encoded, self._scorer(texts, encoded), predictions)

    def _scorer(self, texts: Texts, encoded: Encoded) -> Scorer:
        return scorer_for(self.task, texts, encoded, self._config, self._similarity)

    def add_full_precision(self, teacher: PreTrainedModel, weights: str | None = None) -> None:
        """The same for the full-precision model. Its predictions are kept on disk for the next run.

        weights: the `weights_digest` of the teacher, if the caller has it already.
        """
        self._accuracy = None
        weights = weights or weights_digest(teacher)
        for name, split in self.splits.items():

            def compute(name: str = name) -> list[np.ndarray]:
                return self._predict(FULL_PRECISION, name, torch_predictor(teacher))

            decides = (
                KEPT_FORMAT,
                weights,
                teacher.config.to_json_string(),  # an activation function is not among the weights
                split.encoded.digest(),
                self.pooling and self.pooling.key(),
                torch.__version__,
                teacher.device,
            )
            one_row_each = self.task.kind in ONE_ROW_EACH
            join = np.stack if one_row_each else np.concatenate  # rows of tokens differ in length
            kept = remember(str(decides), lambda run=compute, join=join: join(run()))  # type: ignore[misc]
            ends = np.cumsum(split.encoded.lengths)[:-1]
            split.predictions[FULL_PRECISION] = list(kept) if one_row_each else np.split(kept, ends)

    def _predict(self, model: str, name: str, predictor: Predictor) -> list[np.ndarray]:
        label = f"evaluate {name} {model.replace('_', ' ')}"
        return predict(predictor, self.splits[name].encoded, label, self._batch_size, self.pooling)

    def accuracy(self) -> Accuracy:
        """The metrics of every model added so far; the headline is that of the first split."""
        if self._accuracy is None:
            splits = {name: self._scores(split) for name, split in self.splits.items()}
            first = next(iter(splits.values()))
            quoted = {model: scores[self.task.metric] for model, scores in first.scores.items()}
            self._accuracy = Accuracy(self.task.metric, splits, quoted, self.scored_by)
        return self._accuracy

    def agreement(self, one: str, other: str) -> dict[str, dict[str, float]]:
        """By split, how often two models predict the same."""
        return {
            name: split.scorer.agreement(split.predictions[one], split.predictions[other])
            for name, split in self.splits.items()
        }

    def fidelity(self, reference: str, model: str) -> dict[str, Fidelity]:
        """By split, how far the predictions of a model are from those of another."""
        return {
            name: self._fidelity(split.scorer, split.predictions[reference], split.predictions[model])
            for name, split in self.splits.items()
        }

    def _fidelity(self, scorer: Scorer, reference: Outputs, model: Outputs) -> Fidelity:
        drift = drift_of(*scorer.thresholded(reference, model), self.threshold)
        return replace(scorer.fidelity(reference, model), drift=drift)

    def check_threshold(self) -> None:
        """Refuse a threshold that full precision's scores do not reach; they must have been added."""
        if self.threshold is not None:
            rows = next(iter(self.splits.values())).predictions[FULL_PRECISION]
            scorer = next(iter(self.splits.values())).scorer
            check_scores(self.threshold, scorer.thresholded(rows, rows)[0])

    def _fidelities(self, scorer: Scorer, rows: dict[str, list[np.ndarray]]) -> dict[str, Fidelity]:
        """Of every other model against full precision."""
        if FULL_PRECISION not in rows:
            return {}
        others = [model for model in rows if model != FULL_PRECISION]
        return {model: self._fidelity(scorer, rows[FULL_PRECISION], rows[model]) for model in others}

    def _scores(self, split: Split) -> SplitScores:
        """The metrics of one split, and how sure the change by quantization is.

        Without labels the metrics are the agreement with full precision, which agrees with itself.
        """
        rows, scorer = split.models(self.scored_by), split.scorer
        result = SplitScores(
            examples=len(split.texts),
            digest=split.encoded.digest()[:16],
            windows=len(split.encoded) if len(split.encoded) != len(split.texts) else None,
            fidelity=self._fidelities(scorer, rows),
        )
        if self.task.label_free:
            agreed = {model: scorer.agreement(rows[FULL_PRECISION], own) for model, own in rows.items()}
            perfect = dict.fromkeys(agreed[FULL_PRECISION], 100.0)
            return replace(result, scores={**agreed, FULL_PRECISION: perfect})
        result = replace(result, scores={model: scorer.score(own) for model, own in rows.items()})
        if not {FULL_PRECISION, QUANTIZED} <= rows.keys():
            return result
        full, quantized = rows[FULL_PRECISION], rows[QUANTIZED]
        was, now = scorer.right(full), scorer.right(quantized)
        if was is not None and now is not None:
            lost, gained = int((was & ~now).sum()), int((~was & now).sum())
            result = replace(result, lost=lost, gained=gained, paired=scorer.paired)
        return replace(result, change=scorer.change(full, quantized))


def evaluate(
    recipe: Recipe,
    task_data: TaskData,
    tokenizer: PreTrainedTokenizerBase,
    teacher: PreTrainedModel,
    quantized: PreTrainedModel,
    weights: str | None = None,
) -> Evaluation:
    """Predict the evaluation split with the full-precision and the quantized model.

    `weights` is the `weights_digest` of the teacher, if the caller has it already.
    """
    evaluation = Evaluation(recipe, task_data, tokenizer, teacher.config)
    evaluation.add_full_precision(teacher, weights)
    evaluation.add(QUANTIZED, torch_predictor(quantized))
    return evaluation


def weights_digest(model: PreTrainedModel) -> str:
    """Identifies the weights of a model."""
    hasher = hashlib.sha256()
    for name, value in model.state_dict().items():
        hasher.update(name.encode())
        hasher.update(value.detach().cpu().contiguous().numpy().data)
    return hasher.hexdigest()[:16]
