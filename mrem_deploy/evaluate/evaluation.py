"""Several models beside each other on the evaluation split of a task: their metrics and how they agree."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from mrem_deploy.data.encoded import Encoded
from mrem_deploy.data.task_data import TaskData, Texts, sample
from mrem_deploy.data.texts import encode
from mrem_deploy.evaluate.predict import Predictor, pooling_of, predict, remember, torch_predictor
from mrem_deploy.evaluate.scorers import Scorer, scorer_for
from mrem_deploy.recipe import Recipe

FULL_PRECISION, QUANTIZED, ONNX = "full_precision", "quantized", "onnx"
MODELS = (FULL_PRECISION, QUANTIZED, ONNX)  # in the order of every table
ONE_ROW_EACH = ("classification", "regression", "embedding")  # kinds whose predictions stack to (N, …)
BATCH_SIZE = 32


@dataclass
class Split:
    """One evaluation split, and what each model that was asked answers, by the names in MODELS."""

    texts: Texts
    encoded: Encoded
    judge: Scorer
    answers: dict[str, list[np.ndarray]] = field(default_factory=dict)
    change: dict[str, dict[str, float]] | None = None  # by metric: how sure that of quantization is


class Evaluation:
    """The evaluation split of a task, read once; models are asked one after another."""

    def __init__(
        self,
        recipe: Recipe,
        task_data: TaskData,
        tokenizer: PreTrainedTokenizerBase,
        config: PretrainedConfig,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        self.task = task_data.task
        self.pooling = pooling_of(recipe.model or "") if self.task.kind == "embedding" else None
        self._batch_size = batch_size
        self.splits: dict[str, Split] = {}
        for name, every in task_data.evaluation().items():
            texts = sample(every, recipe.eval_size, recipe.seed) if recipe.eval_size else every
            encoded = encode(tokenizer, texts, recipe.max_length)
            self.splits[name] = Split(texts, encoded, scorer_for(self.task, texts, encoded, config))

    def ask(self, model: str, predictor: Predictor) -> None:
        """Let a model answer every example of every split."""
        for name, split in self.splits.items():
            split.answers[model] = self._predict(model, name, predictor)
            if model == QUANTIZED:
                split.change = None

    def ask_full_precision(self, teacher: PreTrainedModel) -> None:
        """The same, with the answers kept for the next run."""
        for name, split in self.splits.items():

            def compute(name: str = name) -> list[np.ndarray]:
                return self._predict(FULL_PRECISION, name, torch_predictor(teacher))

            decides = (
                weights_digest(teacher),
                teacher.config.to_json_string(),  # an activation function is not among the weights
                split.encoded.digest(),
                self.pooling,
                torch.__version__,
                teacher.device,
            )
            one_row_each = self.task.kind in ONE_ROW_EACH
            join = np.stack if one_row_each else np.concatenate  # rows of tokens differ in length
            kept = remember(str(decides), lambda run=compute, join=join: join(run()))  # type: ignore[misc]
            ends = np.cumsum(split.encoded.lengths)[:-1]
            split.answers[FULL_PRECISION] = list(kept) if one_row_each else np.split(kept, ends)

    def _predict(self, model: str, name: str, predictor: Predictor) -> list[np.ndarray]:
        label = f"evaluate {name} {model.replace('_', ' ')}"
        return predict(predictor, self.splits[name].encoded, label, self._batch_size, self.pooling)

    def accuracy(self) -> dict[str, Any]:
        """The metrics of every model that was asked; the headline is that of the first split."""
        splits = {name: self._scores(split) for name, split in self.splits.items()}
        first = next(iter(splits.values()))
        headline = {model: first[model][self.task.metric] for model in MODELS if model in first}
        return {"metric": self.task.metric, **headline, "splits": splits}

    def agreement(self, one: str, other: str) -> dict[str, dict[str, float]]:
        """By split, how alike two models that were asked answer."""
        return {
            name: split.judge.agreement(split.answers[one], split.answers[other])
            for name, split in self.splits.items()
        }

    def _scores(self, split: Split) -> dict[str, Any]:
        """Metrics of one split, and how sure their `change` is; where answers are right or wrong, how many
        quantization lost and gained.

        `paired` says of which metric these are, where it is not the accuracy.
        """
        result: dict[str, Any] = {"examples": len(split.texts), "digest": split.encoded.digest()[:16]}
        if len(split.encoded) != len(split.texts):
            result["windows"] = len(split.encoded)
        answers = {model: split.answers[model] for model in MODELS if model in split.answers}
        judge = split.judge
        if self.task.label_free:
            for model, rows in answers.items():
                agreed = judge.agreement(answers[FULL_PRECISION], rows)
                result[model] = dict.fromkeys(agreed, 100.0) if model == FULL_PRECISION else agreed
            return result
        for model, rows in answers.items():
            result[model] = judge.score(rows)
        if {FULL_PRECISION, QUANTIZED} <= answers.keys():
            was, now = judge.right(answers[FULL_PRECISION]), judge.right(answers[QUANTIZED])
            if was is not None and now is not None:
                result["lost"], result["gained"] = int((was & ~now).sum()), int((~was & now).sum())
                result |= {"paired": judge.paired} if judge.paired != "accuracy" else {}
            if split.change is None:
                split.change = judge.change(answers[FULL_PRECISION], answers[QUANTIZED])
            result |= {"change": split.change} if split.change else {}
        return result


def evaluate(
    recipe: Recipe,
    task_data: TaskData,
    tokenizer: PreTrainedTokenizerBase,
    teacher: PreTrainedModel,
    quantized: PreTrainedModel,
) -> Evaluation:
    """Ask both models on the evaluation split, which is read here for the first and only time."""
    evaluation = Evaluation(recipe, task_data, tokenizer, teacher.config)
    evaluation.ask_full_precision(teacher)
    evaluation.ask(QUANTIZED, torch_predictor(quantized))
    return evaluation


def score_on_evaluation_split(
    recipe: Recipe,
    task_data: TaskData,
    tokenizer: PreTrainedTokenizerBase,
    teacher: PreTrainedModel,
) -> Callable[[nn.Module], float]:
    """A function that scores a model on the evaluation split, for methods that choose by it."""
    evaluation = Evaluation(recipe, task_data, tokenizer, teacher.config)
    if evaluation.task.label_free:
        evaluation.ask_full_precision(teacher)

    def judge(model: nn.Module) -> float:
        evaluation.ask(QUANTIZED, torch_predictor(model))
        return float(evaluation.accuracy()[QUANTIZED])

    return judge


def weights_digest(model: PreTrainedModel) -> str:
    """Names the weights of a model."""
    hasher = hashlib.sha256()
    for name, value in model.state_dict().items():
        hasher.update(name.encode())
        hasher.update(value.detach().cpu().contiguous().numpy().data)
    return hasher.hexdigest()[:16]
