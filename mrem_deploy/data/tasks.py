"""The tasks, a table row each: their columns, labels, metrics and file names."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from functools import partial

from mrem_deploy.base.errors import UserError
from mrem_deploy.data import conll, squad_files
from mrem_deploy.data.table_files import GLUE_LAYOUTS, Layout, Naming, squeeze

HEAD_OF_KIND = {
    "classification": "sequence-classification",
    "regression": "sequence-classification",
    "embedding": "feature-extraction",
    "reranking": "sequence-classification",
    "token-classification": "token-classification",
    "question-answering": "question-answering",
}


SEARCHES = ("retrieval", "reranking")
NO_DATA = "none"  # instead of data: generated.py makes the texts


@dataclass(frozen=True)
class Defaults:
    """Defaults of options that depend on the task. Fine-tuning uses only the length.

    SQuAD has the paper's 384 tokens.
    """

    max_length: int = 128


@dataclass(frozen=True)
class Task:
    """One row of the table. Column names are in order of preference, the official one first."""

    name: str
    naming: Naming
    text_columns: tuple[str, ...]
    pair_columns: tuple[str, ...] = ()  # empty: single sentences
    label_columns: tuple[str, ...] = ("label",)  # empty: no labels
    labels: tuple[str, ...] = ()  # in the official order; empty: taken from the data
    kind: str = "classification"  # or another one of HEAD_OF_KIND
    metric: str = "accuracy"  # the paper's
    also: tuple[str, ...] = ()  # other metrics that GLUE reports
    skip_label: str | None = None  # rows with this label are left out: the annotators did not agree
    more_columns: tuple[str, ...] = ()  # also read, if the data has them
    unanswerable: bool = False  # the task has questions without an answer in the context
    spellings: tuple[str, ...] = ()  # other names
    defaults: Defaults = Defaults()
    without_labels: Task | None = None  # the task instead, if the data has only sentences

    @property
    def searches(self) -> bool:
        """Measured by queries over a corpus, in BEIR's layout."""
        return self.name in SEARCHES

    @property
    def label_free(self) -> bool:
        """Measured by how well the quantized model agrees with the original."""
        return not self.label_columns

    @property
    def lacks_labels(self) -> bool:
        """One that has labels as a rule is here without: the data holds none."""
        return self.label_free and TASKS[self.name].without_labels is self

    @property
    def head(self) -> str:
        return HEAD_OF_KIND[self.kind]

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
_TAGGED = Naming(
    (
        Layout("train", {"dev": ("dev", "valid", "validation", "testa", "eval", "test")}),
        Layout("eng.train", {"dev": ("eng.testa",)}),  # CoNLL-2003's own names
    ),
    suffixes=conll.SUFFIXES,
    read=conll.read_conll,
)


def _squad_naming(version: str, folder: str, unanswerable: bool) -> Naming:
    return Naming(
        (Layout(f"train-v{version}", {"dev": (f"dev-v{version}",)}), *GLUE_LAYOUTS),
        folder,
        read=partial(squad_files.read_official, unanswerable=unanswerable),
    )


_SQUAD = Task(
    "squad",
    _squad_naming("1.1", "SQuAD", unanswerable=False),
    text_columns=("question",),
    pair_columns=("context",),
    label_columns=("answers",),
    kind="question-answering",
    metric="f1",
    also=("exact",),
    more_columns=("id",),
    spellings=("squad1", "squad1.1", "squad_v1", "squad_v1.1"),
    defaults=Defaults(max_length=384),
)
_SENTENCES = Task(
    "token-classification",
    _TAGGED,
    text_columns=("text", "sentence"),
    label_columns=(),
    kind="token-classification",
    metric="agreement",
)

_TEXTS = Task(
    "text-classification", _OWN, text_columns=("text", "sentence"), label_columns=(), metric="agreement"
)
_PAIRS = Task(
    "reranking",
    _OWN,
    text_columns=("query", "question", "sentence1"),
    pair_columns=("passage", "document", "context", "sentence2"),
    label_columns=(),
    kind="reranking",
    metric="agreement",
    defaults=Defaults(max_length=256),
)

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
        replace(_TEXTS, label_columns=("label", "labels"), metric="accuracy", without_labels=_TEXTS),
        Task(
            "feature-extraction",
            _OWN,
            text_columns=("text", "sentence"),
            label_columns=(),
            kind="embedding",
            metric="cosine",
            defaults=Defaults(max_length=256),  # sentence-transformers' usual one; shorter texts cost nothing
        ),
        Task(
            "retrieval",
            _OWN,
            text_columns=("text", "sentence"),
            pair_columns=("query", "passage"),
            label_columns=("score",),
            kind="embedding",
            metric="ndcg_at_10",
            also=("recall_at_100", "mrr_at_10"),
            defaults=Defaults(max_length=256),
        ),
        replace(
            _PAIRS,
            label_columns=("label", "score"),
            metric="average_precision",
            spellings=("cross-encoder",),
            without_labels=_PAIRS,
        ),
        replace(
            _SENTENCES,
            text_columns=("tokens", "words"),
            label_columns=("ner_tags", "tags", "labels"),
            metric="f1",
            also=("precision", "recall", "accuracy"),
            spellings=("ner",),
            without_labels=_SENTENCES,
        ),
        _SQUAD,
        replace(
            _SQUAD,
            name="squad_v2",
            naming=_squad_naming("2.0", "squad_v2", unanswerable=True),
            unanswerable=True,
            spellings=("squad2", "squad2.0", "squad_v2.0"),
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


def _by_spelling() -> dict[str, Task]:
    return {squeeze(word): task for task in TASKS.values() for word in (task.name, *task.spellings)}


def searching(task: Task, judged: bool) -> Task:
    """A task that is measured by queries over a corpus; without judgements by how it ranks."""
    if not judged:
        return replace(task, label_columns=(), metric="overlap_at_10", also=(), without_labels=None)
    if task.kind == "reranking":
        return replace(task, metric="ndcg_at_10", also=("mrr_at_10",))
    return task


def defaults_of(name: str | None) -> Defaults:
    """The defaults of a task; the usual ones for an unknown name, which `find_task` refuses later."""
    task = _by_spelling().get(squeeze(name or ""))
    return Defaults() if task is None else task.defaults


def find_task(name: str) -> Task:
    """The task of that name, in any spelling: SST-2, sst2, sst_2; SQuAD v1.1."""
    by_spelling = _by_spelling()
    if squeeze(name) in by_spelling:
        return by_spelling[squeeze(name)]
    near = difflib.get_close_matches(squeeze(name), by_spelling, n=1)
    hint = f"Did you mean {by_spelling[near[0]].name}?" if near else "Choose one of these with --task."
    raise UserError(f"Expected a task of {', '.join(TASKS)}; got {name!r}.", hint)
