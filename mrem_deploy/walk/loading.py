"""The first stage: the task, the full-precision model and the calibration sentences, read and checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.progress import say
from mrem_deploy.data.encoded import Encoded
from mrem_deploy.data.task_data import Columns, TaskData, open_task
from mrem_deploy.data.tasks import NO_DATA, defaults_of
from mrem_deploy.data.texts import Texts, drawn_rows, encode, further_rows, sample, split_rows
from mrem_deploy.evaluate.drift import check_range
from mrem_deploy.evaluate.evaluation import Evaluation, weights_digest
from mrem_deploy.models.loading import load_model, longest_input
from mrem_deploy.models.sentence_files import EMBEDDER, RERANKER, SentenceFiles, sentence_files
from mrem_deploy.preflight import check_labels, check_model
from mrem_deploy.recipe import Recipe
from mrem_deploy.train import METHODS
from mrem_deploy.walk.state import Run

# Sentences on which --target-drop estimates what a model loses. With 2,000 the standard error of a drop is
# about half a point where one prediction in twenty changes.
MOST_JUDGED, LEAST_JUDGED = 2000, 200


@dataclass
class Loaded:
    """What a run reads. The evaluation texts are read when `evaluation` is first used: after training, except
    by qat, which chooses by it. (`load` has looked at their labels, to refuse one that the model lacks.)"""

    recipe: Recipe
    task_data: TaskData
    teacher: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    calibration: Encoded
    training: Encoded | None  # the training split, for methods that need it
    training_texts: int = 0  # in it; a long text may be several examples
    holdout: Encoded | None = None  # sentences of the training split that nothing is trained on
    judged: Texts | None = None  # others, with --target-drop: to estimate what a model loses
    sentences: SentenceFiles | None = None  # of an embedder or a reranker: what its folder says about it

    @property
    def head(self) -> str:
        return self.task_data.task.head

    @cached_property
    def weights(self) -> str:
        """Names the full-precision weights."""
        return weights_digest(self.teacher)

    @cached_property
    def evaluation(self) -> Evaluation:
        return Evaluation(
            self.recipe, self.task_data, self.tokenizer, self.teacher.config, sentences=self.sentences
        )

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the result: a resumed run must agree in all of it."""
        identity = {
            **self.recipe.identity(),
            "calibration data": self.calibration.digest(),
            "model weights": self.weights,
        }
        more = {"training data": self.training, "held-out data": self.holdout}
        return identity | {name: data.digest() for name, data in more.items() if data is not None}


def load(run: Run) -> Loaded:
    """Read the task's training split and the model; refuse what cannot work before anything is trained."""
    recipe = run.recipe
    say(f"loading {recipe.model}")
    task_data = open_task(
        str(recipe.task),
        str(recipe.data),
        Columns(recipe.text_column, recipe.text_pair_column, recipe.label_column),
        recipe.eval_data,
    )
    if recipe.data == NO_DATA:
        say(
            "note: calibrating with generated text. On SST-2 this cost nothing at 4-4-8 with ptq; at 2 bits "
            "text of another subject cost a point: give sentences of the task if you can (docs/tasks.md)"
            + ("" if recipe.eval_data else ". The score is measured on such text, too: give --eval-data")
        )
    elif task_data.task.lacks_labels:
        say(
            f"note: no labels in {task_data.description}: the score is how well the quantized model agrees "
            "with the original; --label-column names a column of labels"
        )
    check_range(recipe.threshold, task_data.task.kind)
    teacher, tokenizer = load_model(str(recipe.model), task_data.task.head)
    recipe = run.recipe = within_reach(recipe, teacher, tokenizer)
    check_model(recipe, teacher)
    every = task_data.train()
    sentences = _sentence_files(str(recipe.model), task_data.task.kind)
    if sentences is not None and task_data.task.kind == "embedding":
        every = every.prompted(sentences.prompt)
    rows, apart = split_rows(len(every), recipe.calib_size, recipe.holdout, recipe.seed)
    texts = every.take(rows)
    # Long contexts are several examples each; as many are drawn as there were to be.
    calibration = sample(encode(tokenizer, texts, recipe.max_length), recipe.calib_size, recipe.seed)
    check_labels(task_data, texts, teacher)
    teacher.to(run.device).requires_grad_(False)
    holdout = None
    if len(apart):
        encoded = encode(tokenizer, every.take(apart), recipe.max_length)
        holdout = sample(encoded, recipe.holdout, recipe.seed)
    training, kept = None, rows
    if METHODS[recipe.method].needs_training_set:
        others = np.setdiff1d(np.arange(len(every)), apart)
        kept = others[drawn_rows(len(others), recipe.train_size or len(others), recipe.seed)]
        training = encode(tokenizer, every.take(kept), recipe.max_length)
    judged = None
    if recipe.target_drop is not None:
        judged = to_judge_by(every, np.concatenate([rows, apart]), recipe)
    loaded = Loaded(
        recipe, task_data, teacher, tokenizer, calibration, training, len(kept), holdout, judged, sentences
    )
    if recipe.threshold is not None:  # one that nothing can cross is a mistake: found now, not after training
        loaded.evaluation.add_full_precision(teacher, loaded.weights)
        loaded.evaluation.check_threshold()
    return loaded


def within_reach(recipe: Recipe, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Recipe:
    """Cuts a default --max-length down to what the model reads. Another one stays, to be refused."""
    longest = min(tokenizer.model_max_length, longest_input(teacher) or tokenizer.model_max_length)
    if recipe.max_length <= longest or recipe.max_length != defaults_of(recipe.task).max_length:
        return recipe
    say(f"texts are cut after {longest} tokens: this model reads no more")
    return replace(recipe, max_length=longest)


def _sentence_files(model: str, kind: str) -> SentenceFiles | None:
    """Those of sentence-transformers, for the tasks that they are about."""
    wanted = {"embedding": EMBEDDER, "reranking": RERANKER}.get(kind)
    found = sentence_files(model) if wanted else None
    return found if found is not None and found.kind == wanted else None


def to_judge_by(every: Texts, taken: np.ndarray, recipe: Recipe) -> Texts:
    """Texts of the training split that are used for nothing else."""
    further = further_rows(len(every), taken, MOST_JUDGED, recipe.seed)
    if len(further) < LEAST_JUDGED:
        raise UserError(
            f"--target-drop: the training split of {len(every):,} leaves {len(further):,} sentences to "
            f"estimate the drop on; fewer than {LEAST_JUDGED} say too little",
            "lower --calib-size, or give --bits or --budget-mb instead",
        )
    return every.take(further)
