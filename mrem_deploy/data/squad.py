"""Reading comprehension: contexts cut into windows of tokens, and answers read from the logits.

A context that does not fit is cut into windows that overlap, each with the entire question before it
(question first, as in training; padding is on the right). Every window is a separate example for training,
calibration and predictions; `read_answers` combines the windows of a question.

Note: the stride is the *overlap* of two neighbouring windows, as in transformers' own example. So an answer
shorter than that is complete in at least one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mrem_deploy.base.errors import UserError
from mrem_deploy.data.encoded import Encoded, chunks, lengths_of, padding_of
from mrem_deploy.data.squad_files import Span, check_questions
from mrem_deploy.data.table_files import Table
from mrem_deploy.data.texts import Texts

STRIDE = 128  # tokens that two neighbouring windows share; a third of windows shorter than 384
N_BEST = 20  # starts, and ends, that are tried
MAX_ANSWER = 30  # tokens


@dataclass
class Windows(Encoded):
    """Windows of all questions, in their order."""

    question: np.ndarray  # (W,) which question each belongs to
    offsets: list[np.ndarray]  # (T, 2) characters of the context under each token; (−1, −1) elsewhere
    null: np.ndarray  # (W,) the token that stands for "no answer here": CLS

    def places(self, texts: np.ndarray) -> np.ndarray:
        """Where the windows of these questions are."""
        return np.flatnonzero(np.isin(self.question, texts))

    def take(self, indices: np.ndarray) -> Windows:
        """Only these windows, in this order; their questions keep their order and are counted anew."""
        some = super().take(indices)
        question = np.unique(self.question[indices], return_inverse=True)[1]
        offsets = [self.offsets[i] for i in indices]
        return Windows(
            some.columns, some.lengths, some.pad, some.labels, question, offsets, self.null[indices]
        )

    def targets(self, questions: Questions) -> np.ndarray:
        """Tokens where the first answer starts and ends, (W, 2); CLS twice if the window lacks part of it."""
        assert questions.answers is not None, "read with needs_labels"
        targets = np.stack([self.null, self.null], axis=1)
        for i, offsets in enumerate(self.offsets):
            spans = questions.answers[self.question[i]]
            context = np.flatnonzero(offsets[:, 1] > offsets[:, 0])
            if not spans or len(context) == 0:
                continue
            begin, end = spans[0].start, spans[0].start + len(spans[0].text)
            if offsets[context[0], 0] <= begin and end <= offsets[context[-1], 1]:
                # The last token that starts at or before `begin`, and the first that ends at or after `end`.
                first = np.searchsorted(offsets[context, 0], begin, side="right") - 1
                last = np.searchsorted(offsets[context, 1], end, side="left")
                targets[i] = context[first], context[last]
        return targets


def tokenize(questions: Questions, tokenizer: Any, max_length: int) -> Windows:
    """All windows of all questions."""
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            "Answers are read from the context by the characters under each token; this tokenizer "
            f"({type(tokenizer).__name__}) does not give these.",
            "Give a model folder with a fast tokenizer (tokenizer.json).",
        )
    stride = min(STRIDE, max_length // 3)
    room = max_length - tokenizer.num_special_tokens_to_add(pair=True) - stride - 1
    if room < 1:
        raise UserError(
            f"--max-length {max_length} leaves no room for a question and a part of its context.",
            "Give more; 384 is usual.",
        )
    short = shortened(tokenizer, questions.first, room)
    columns: dict[str, list[np.ndarray]] = {}
    owners: list[int] = []
    offsets: list[np.ndarray] = []
    for part in chunks(len(questions)):
        tokens = tokenizer(
            short[part],
            questions.contexts[part],
            truncation="only_second",
            max_length=max_length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_attention_mask=False,
        )
        owners += [part.start + owner for owner in tokens.pop("overflow_to_sample_mapping")]
        for i, pairs in enumerate(tokens.pop("offset_mapping")):
            of_context = np.array([side == 1 for side in tokens.sequence_ids(i)])
            offsets.append(np.where(of_context[:, None], np.asarray(pairs, dtype=np.int32), np.int32(-1)))
        for name, rows in tokens.items():
            columns.setdefault(name, []).extend(np.asarray(row, dtype=np.int32) for row in rows)
    # argmax gives the first CLS; where a tokenizer has none, the first token.
    null = np.array([int((row == tokenizer.cls_token_id).argmax()) for row in columns["input_ids"]])
    pad = padding_of(tokenizer, columns)
    return Windows(columns, lengths_of(columns), pad, None, np.array(owners), offsets, null)


def shortened(tokenizer: Any, questions: list[str], room: int) -> list[str]:
    """The questions, cut after `room` tokens; tokenizers refuse questions that leave no room for context."""
    short = list(questions)
    for part in chunks(len(short)):
        tokens = tokenizer(short[part], add_special_tokens=False, return_attention_mask=False)["input_ids"]
        for i in (part.start + j for j, ids in enumerate(tokens) if len(ids) > room):
            kept = room
            while len(tokenizer(short[i], add_special_tokens=False)["input_ids"]) > room:
                # Half a word can be more tokens than it was within the question: then keep one less.
                cut = tokenizer(questions[i], add_special_tokens=False, return_offsets_mapping=True)
                short[i] = questions[i][: cut["offset_mapping"][kept - 1][1]]
                kept -= 1
    return short


@dataclass(frozen=True)
class Answer:
    """The answer of a model: the best text, and by how much "no answer" scores above it."""

    text: str
    null_margin: float


def read_answers(windows: Windows, questions: Questions, logits: Sequence[np.ndarray]) -> list[Answer]:
    """The best answer to every question over all its windows; logits (T, 2) of start and end per window."""
    best: list[tuple[float, int, int] | None] = [None] * len(questions)
    null = np.full(len(questions), np.inf)
    for i, rows in enumerate(logits):
        question = int(windows.question[i])
        null[question] = min(null[question], float(rows[windows.null[i]].sum()))
        found, known = best_span(rows, windows.offsets[i]), best[question]
        if found is not None and (known is None or found[0] > known[0]):
            best[question] = found
    return [
        Answer("", np.inf) if span is None else Answer(context[span[1] : span[2]], null[i] - span[0])
        for i, (span, context) in enumerate(zip(best, questions.contexts, strict=True))
    ]


def best_span(logits: np.ndarray, offsets: np.ndarray) -> tuple[float, int, int] | None:
    """(start logit + end logit, first character, end) of the best span in one window's context.

    Among the N_BEST likeliest starts and ends, the pair with the highest sum that is in order and not longer
    than MAX_ANSWER tokens; None if there is no such pair.
    """
    context = np.flatnonzero(offsets[:, 1] > offsets[:, 0])
    starts = context[np.argsort(-logits[context, 0], kind="stable")[:N_BEST]]
    ends = context[np.argsort(-logits[context, 1], kind="stable")[:N_BEST]]
    length = ends - starts[:, None] + 1  # (starts, ends)
    fits = (length >= 1) & (length <= MAX_ANSWER)
    if not fits.any():
        return None
    sums = np.where(fits, logits[starts, 0][:, None].astype(np.float64) + logits[ends, 1], -np.inf)
    first, last = np.unravel_index(int(sums.argmax()), sums.shape)
    return float(sums[first, last]), int(offsets[starts[first], 0]), int(offsets[ends[last], 1])


@dataclass
class Questions(Texts):
    """Questions (`first`), their contexts (`second`), and the right answers to each."""

    ids: list[str]
    answers: list[list[Span]] | None  # an empty list: the context does not answer the question

    @property
    def labelled(self) -> bool:
        return self.answers is not None

    @property
    def contexts(self) -> list[str]:
        assert self.second is not None
        return self.second

    def take(self, rows: np.ndarray) -> Questions:
        answers = None if self.answers is None else [self.answers[i] for i in rows]
        texts = super().take(rows)
        return Questions(texts.first, texts.second, None, (), [self.ids[i] for i in rows], answers)

    def tokenize(self, tokenizer: Any, max_length: int) -> Encoded:
        return tokenize(self, tokenizer, max_length)

    def misplaced(self) -> list[str]:
        """Ids of questions with an answer that is not at its answer_start."""
        return [
            self.ids[i]
            for i, (context, spans) in enumerate(zip(self.contexts, self.answers or [], strict=False))
            if any(span.start < 0 or not context.startswith(span.text, span.start) for span in spans)
        ]


def read_questions(
    table: Table,
    questions: list[str],
    contexts: list[str],
    answer_column: str | None,
    unanswerable: bool,
    labelled: bool,
) -> Questions:
    """The rows of a table as questions; `check_questions` explains the arguments."""
    ids, answers = check_questions(table, contexts, answer_column, unanswerable, labelled)
    return Questions(questions, contexts, None, (), ids, answers)
