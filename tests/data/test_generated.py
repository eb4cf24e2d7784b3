"""Texts that the package makes itself: what they hold, and that every task can be calibrated with them."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from pathlib import Path

import pytest

from mrem_deploy.base.digests import of_content
from mrem_deploy.base.errors import UserError
from mrem_deploy.data import generated, phrases
from mrem_deploy.data.generated import DESCRIPTION, Writer
from mrem_deploy.data.splits import Columns
from mrem_deploy.data.tagging import TaggedTexts
from mrem_deploy.data.task_data import open_task
from mrem_deploy.data.tasks import NO_DATA, TASKS
from mrem_deploy.recipe import Recipe

PHRASES = [*(p for group in phrases.REGISTERS.values() for p in group), *sum(phrases.RELATED, ())]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "TRAINING", 300)
    monkeypatch.setattr(generated, "EVALUATION", 40)


def test_the_texts_never_change() -> None:
    """A recipe gives the same result on every machine, so the texts are a format. Change this digest only
    with a reason, and say so in the changelog."""
    writer = Writer(0)
    made = [[writer.text(), *writer.pair(), *writer.question()] for _ in range(50)]
    assert of_content(made) == "21cdf3bb0cad5c827ef00ff66ac75bbc1787ce231d80bb679e3a594c59fa7dc5"
    assert Writer(1).text() != Writer(0).text()


def test_every_slot_has_words_and_every_list_is_used() -> None:
    used = {name for phrase in [*PHRASES, *phrases.OPENERS] for _, name in generated.SLOT.findall(phrase)}
    assert used == set(phrases.WORDS)
    assert not [word for words in phrases.WORDS.values() for word in words if "{" in word or not word.strip()]
    assert not [phrase for phrase in PHRASES if re.search(r"[{}]", generated.SLOT.sub("", phrase))]


def test_natural_texts() -> None:
    writer = Writer(0)
    texts = [writer.text() for _ in range(4000)]
    assert len(set(texts)) > 3800
    lengths = [len(generated.WORD.findall(text)) for text in texts]
    assert 10 < statistics.median(lengths) < 25
    assert max(lengths) > 100
    assert min(lengths) < 4
    tokens = Counter(word for text in texts for word in generated.WORD.findall(text.lower()))
    assert len(tokens) > 600
    assert {".", ",", "the", "a", "of", "and"} <= {word for word, _ in tokens.most_common(12)}
    assert 0.1 < sum(text == text.lower() for text in texts) / len(texts) < 0.5
    assert not any("{" in text or "}" in text for text in texts)


def test_pairs_are_mostly_about_the_same() -> None:
    writer = Writer(0)
    made = [writer.pair() for _ in range(500)]
    shared = [
        bool({w for w in generated.WORD.findall(a.lower()) if len(w) > 4}
             & set(generated.WORD.findall(b.lower()))) for a, b in made
    ]  # fmt: skip
    assert 0.5 < sum(shared) / len(shared) < 0.95


def test_articles() -> None:
    writer = Writer(0)
    text = " ".join(writer.text() for _ in range(2000)).lower()
    assert re.search(r"\ban (apple|engine|old|important|early)", text)
    assert not re.search(r"\ba (apple|engine|old|important|early)\b", text)


@pytest.mark.parametrize("task", [task for task in TASKS if task != "retrieval"])
@pytest.mark.usefixtures("few")
def test_every_task_is_measured_by_agreement(task: str) -> None:
    data = open_task(task, NO_DATA)
    assert data.description == DESCRIPTION
    assert data.task.label_free
    assert data.task.head == TASKS[task].head
    train, (split, evaluation) = data.train(), *data.evaluation().items()
    assert split == "generated"
    assert (len(train), len(evaluation)) == (generated.TRAINING, generated.EVALUATION)
    assert train.labels is None
    assert evaluation.labels is None
    assert (train.second is None) == (not TASKS[task].pair_columns)
    assert data.evaluation_label_names() == {}
    assert train.first[:100] != evaluation.first[:100]
    if TASKS[task].kind == "question-answering":
        assert all("?" in q or q[-1].isalnum() for q in train.first)
        assert statistics.mean(map(len, train.second or [])) > 5 * statistics.mean(map(len, train.first))


@pytest.mark.usefixtures("few")
def test_measured_on_real_text(tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\ngood film\t1\nbad film\t0\n")
    data = open_task("sst2", NO_DATA, eval_data=str(tmp_path / "dev.tsv"))
    assert (data.task.metric, data.task.label_free) == ("accuracy", False)
    assert data.description.startswith(f"{DESCRIPTION}; evaluated on ")
    assert data.evaluation()["dev"].first == ["good film", "bad film"]
    assert not data.train().labelled
    own = open_task("text-classification", NO_DATA, Columns("q", "a", "verdict"), _csv(tmp_path))
    assert len(own.train().second or []) == generated.TRAINING
    assert own.evaluation()["dev"].label_names == ("no", "yes")


def _csv(folder: Path) -> str:
    (folder / "x.csv").write_text("q,a,verdict\nb,c,yes\nd,e,no\n")
    return str(folder / "x.csv")


@pytest.mark.usefixtures("few")
def test_tags_are_measured_on_files_with_words(tmp_path: Path) -> None:
    (tmp_path / "dev.txt").write_text("EU B-ORG\nrejects O\n\nPeter B-PER\n\n")
    data = open_task("ner", NO_DATA, eval_data=str(tmp_path / "dev.txt"))
    train = data.train()
    assert isinstance(train, TaggedTexts)
    assert not train.labelled
    assert train.words is not None
    assert all(" " not in word for words in train.words[:100] for word in words)


def test_retrieval_needs_a_collection() -> None:
    with pytest.raises(UserError, match=r"(?s)corpus\.jsonl.*feature-extraction"):
        open_task("retrieval", NO_DATA)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"eval_data": NO_DATA}, "--eval-data none"),
        ({"data": NO_DATA, "bits": "auto", "target_drop": 1.0}, "--target-drop"),
    ],
)
def test_what_is_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Recipe(task="sst2", **options)  # type: ignore[arg-type]
