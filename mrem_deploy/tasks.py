"""The tasks, a table row each: their columns, labels, metrics and file names."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from mrem_deploy.errors import UserError
from mrem_deploy.sources import GLUE_LAYOUTS, Layout, Naming, squeeze


@dataclass(frozen=True)
class Task:
    """One row of the table. Column names are in order of preference, the official one first."""

    name: str
    naming: Naming
    text_columns: tuple[str, ...]
    pair_columns: tuple[str, ...] = ()  # empty: single sentences
    label_columns: tuple[str, ...] = ("label",)  # empty: no labels
    labels: tuple[str, ...] = ()  # in the official order; empty: taken from the data
    kind: str = "classification"  # or regression, embedding, token-classification, question-answering
    metric: str = "accuracy"  # the paper's
    also: tuple[str, ...] = ()  # what GLUE reports besides
    skip_label: str | None = None  # rows with this label have no agreed answer and are left out

    @property
    def eval_splits(self) -> tuple[str, ...]:
        return self.naming.eval_splits


_MNLI_LAYOUTS = (
    Layout(
        "train",
        {
            "matched": ("dev_matched", "validation_matched"),
            "mismatched": ("dev_mismatched", "validation_mismatched"),
        },
    ),
    Layout(
        "multinli_1.0_train",
        {"matched": ("multinli_1.0_dev_matched",), "mismatched": ("multinli_1.0_dev_mismatched",)},
    ),
)
# Microsoft's own training file contains GLUE's dev rows: the two releases are never mixed.
_MRPC_LAYOUTS = (*GLUE_LAYOUTS, Layout("msr_paraphrase_train", {"dev": ("msr_paraphrase_test",)}))
_OWN = Naming((Layout("train", {"dev": ("dev", "validation", "eval", "test")}),))

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "mnli",
            Naming(_MNLI_LAYOUTS, folder="MNLI"),
            text_columns=("sentence1", "premise"),
            pair_columns=("sentence2", "hypothesis"),
            label_columns=("gold_label", "label"),
            labels=("entailment", "neutral", "contradiction"),
            skip_label="-",
        ),
        Task(
            "qqp",
            Naming(folder="QQP"),
            text_columns=("question1",),
            pair_columns=("question2",),
            label_columns=("is_duplicate", "label"),
            labels=("not_duplicate", "duplicate"),
            also=("f1",),
        ),
        Task(
            "qnli",
            Naming(folder="QNLI"),
            text_columns=("question",),
            pair_columns=("sentence",),
            labels=("entailment", "not_entailment"),
        ),
        Task(
            "sst2",
            Naming(folder="SST-2"),
            text_columns=("sentence", "text"),
            labels=("negative", "positive"),
        ),
        Task(
            "cola",
            Naming(folder="CoLA", header=("source", "label", "star", "sentence")),
            text_columns=("sentence",),
            labels=("unacceptable", "acceptable"),
            metric="matthews",
            also=("accuracy",),
        ),
        Task(
            "stsb",
            Naming(folder="STS-B"),
            text_columns=("sentence1",),
            pair_columns=("sentence2",),
            label_columns=("score", "label"),
            kind="regression",
            metric="spearman",
            also=("pearson",),
        ),
        Task(
            "mrpc",
            Naming(_MRPC_LAYOUTS, folder="MRPC"),
            text_columns=("#1 String", "sentence1"),
            pair_columns=("#2 String", "sentence2"),
            label_columns=("Quality", "label"),
            labels=("not_equivalent", "equivalent"),
            also=("f1",),
        ),
        Task(
            "rte",
            Naming(folder="RTE"),
            text_columns=("sentence1", "premise"),
            pair_columns=("sentence2", "hypothesis"),
            labels=("entailment", "not_entailment"),
        ),
        Task(
            "text-classification", _OWN, text_columns=("text", "sentence"), label_columns=("label", "labels")
        ),
        Task(
            "feature-extraction",
            _OWN,
            text_columns=("text", "sentence"),
            label_columns=(),
            kind="embedding",
            metric="cosine",
        ),
        Task(
            "token-classification",
            _OWN,
            text_columns=("text", "sentence"),
            label_columns=(),
            kind="token-classification",
            metric="agreement",
        ),
        Task(
            "question-answering",
            _OWN,
            text_columns=("question",),
            pair_columns=("context",),
            label_columns=(),
            kind="question-answering",
            metric="agreement",
        ),
    )
}


def find_task(name: str) -> Task:
    """The task of that name, in whichever spelling: SST-2, sst2, sst_2."""
    by_spelling = {squeeze(known): task for known, task in TASKS.items()}
    if squeeze(name) in by_spelling:
        return by_spelling[squeeze(name)]
    near = difflib.get_close_matches(squeeze(name), by_spelling, n=1)
    hint = f"Did you mean {by_spelling[near[0]].name}?" if near else "Choose one of these with --task."
    raise UserError(f"Expected a task of {', '.join(TASKS)}; got {name!r}.", hint)
