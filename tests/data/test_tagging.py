"""Tagged words: CoNLL files and others, tags on first tokens, entities counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
from tiny_bert import save_tiny_bert
from transformers import AutoTokenizer

from mrem_deploy.base.errors import UserError
from mrem_deploy.data import sources
from mrem_deploy.data.tagging import TaggedTexts, TaggedTokens, first_tokens
from mrem_deploy.data.task_data import Columns, find_task, label_order, open_task, sample
from mrem_deploy.evaluate.scorers import TagScorer
from mrem_deploy.evaluate.tags import score

CONLL = """\
-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O
German JJ B-NP B-MISC

Peter NNP B-NP B-PER
Blackburn NNP I-NP I-PER
"""
NAMES = ("B-MISC", "B-ORG", "B-PER", "I-PER", "O")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(save_tiny_bert(tmp_path_factory.mktemp("bert")))


def tagged(folder: Path, columns: Columns | None = None) -> TaggedTexts:
    found = open_task("ner", str(folder), columns).evaluation()["dev"]
    assert isinstance(found, TaggedTexts)
    return found


def names_of(texts: TaggedTexts) -> list[list[str]]:
    assert texts.tags is not None
    return [[texts.label_names[tag] for tag in own] for own in texts.tags]


# --- reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "dev"),
    [
        ("train.txt", "dev.txt"),
        ("train.txt", "valid.txt"),
        ("train.txt", "testa.txt"),
        ("train.conll", "test.conll"),
        ("eng.train", "eng.testa"),
    ],
)
def test_conll_files(tmp_path: Path, train: str, dev: str) -> None:
    for name in (train, dev):
        (tmp_path / name).write_text(CONLL, encoding="utf-8")
    found = tagged(tmp_path)
    assert found.words == [["EU", "rejects", "German"], ["Peter", "Blackburn"]]
    assert found.first == ["EU rejects German", "Peter Blackburn"]
    assert names_of(found) == [["B-ORG", "O", "B-MISC"], ["B-PER", "I-PER"]]
    assert found.label_names == NAMES
    assert names_of(sample(found, 1, seed=0)) in ([["B-ORG", "O", "B-MISC"]], [["B-PER", "I-PER"]])


def test_windows_line_ends_and_tabs(tmp_path: Path) -> None:
    for name in ("train.txt", "dev.txt"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbfEU\tB-ORG\r\nrejects\tO\r\n \r\n\r\nPeter\tB-PER")
    assert tagged(tmp_path).words == [["EU", "rejects"], ["Peter"]]


def test_rows_of_words_and_tags(tmp_path: Path) -> None:
    row = {"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"], "pos": ["NNP", "VBZ"]}
    for name in ("train.jsonl", "dev.jsonl"):
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    assert names_of(tagged(tmp_path)) == [["B-ORG", "O"]]
    with pytest.raises(UserError, match=r"such as B-PER, I-PER and O in column 'pos' .* NNP, VBZ"):
        tagged(tmp_path, Columns(label="pos"))


def test_the_hubs_numbers_become_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["O", "B-PER", "I-PER"]
    features = datasets.Features(
        tokens=datasets.Sequence(datasets.Value("string")),
        ner_tags=datasets.Sequence(datasets.ClassLabel(names=names)),
    )
    split = datasets.Dataset.from_dict({"tokens": [["Peter", "B"]], "ner_tags": [[1, 2]]}, features=features)
    stored = datasets.DatasetDict(train=split, validation=split)
    monkeypatch.setattr(sources, "_load_from_hub", lambda name, config: stored)
    found = open_task("token-classification", "somebody/conll2003").evaluation()["dev"]
    assert isinstance(found, TaggedTexts)
    assert found.label_names == tuple(names)  # in the data's own order
    assert names_of(found) == [["B-PER", "I-PER"]]


def test_plain_sentences_stay_a_task_without_labels(tmp_path: Path) -> None:
    """A sentence may well end in O or B-12."""
    (tmp_path / "a.txt").write_text("he needs vitamin B-12\nthe film was good\nblood group O\n")
    data = open_task("token-classification", str(tmp_path / "a.txt"))
    assert (data.task.metric, data.task.label_free) == ("agreement", True)
    assert len(data.train()) + len(data.evaluation()["dev"]) == 3


def test_training_sentences_need_no_tags(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"tokens": ["EU"]}) + "\n")
    (tmp_path / "dev.jsonl").write_text(json.dumps({"tokens": ["EU"], "ner_tags": ["B-ORG"]}) + "\n")
    data = open_task("ner", str(tmp_path))
    assert not data.train().labelled
    assert data.evaluation()["dev"].labelled


# --- tokens ------------------------------------------------------------------------------------


def test_first_tokens_by_hand() -> None:
    """ab|c def, the second word with its space, as sentencepiece counts it; special tokens around."""
    offsets = np.array([[0, 0], [0, 2], [2, 3], [3, 5], [5, 7], [0, 0]])
    assert first_tokens(["abc", "def"], offsets).tolist() == [1, 3]
    assert first_tokens(["abc", "def"], offsets[[0, 1, 2, 5]]).tolist() == [1, -1]  # cut off
    lone_space = np.array([[0, 3], [3, 4], [4, 7]])  # a token that is the space alone begins no word
    assert first_tokens(["abc", "def"], lone_space).tolist() == [0, 2]


def test_tags_are_on_first_tokens_only(tokenizer: Any) -> None:
    texts = TaggedTexts(
        ["the good-good film"], None, None, ("O", "B-X"), [["the", "good-good", "film"]], None
    )
    tokens = texts.tokenize(tokenizer, 32)  # [CLS] the good [UNK] good film [SEP]
    assert tokens.heads[0].tolist() == [1, 2, 5]
    targets = tokens.targets([np.array([0, 1, 0])], order=np.array([7, 3]))
    assert targets.tolist() == [[-100, 7, 3, -100, -100, 7, -100]]


def test_words_cut_off_count_as_outside(tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["the", "film", "was", "good"]
    texts = TaggedTexts([" ".join(words)], None, None, ("B-X", "O"), [words], [np.array([1, 0, 1, 0])])
    tokens = texts.tokenize(tokenizer, 5)  # three words and two special tokens
    assert "1 of 4 words" in capsys.readouterr().err
    assert tokens.targets(texts.tags or [], np.array([0, 1])).tolist() == [[-100, 1, 0, 1, -100]]
    judge = TagScorer(find_task("ner"), texts, tokens, SimpleNamespace(id2label={0: "B-X", 1: "O"}))  # type: ignore[arg-type]
    perfect = np.array([[0, 0], [0, 1], [1, 0], [0, 1], [0, 0]], dtype=float)
    found = judge.score([perfect])
    assert found["precision"] == 100.0
    assert found["recall"] == 50.0  # the entity behind the cut is missed, not left out


# --- entities ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("truth", "guess", "precision", "recall"),
    [
        ("B-PER I-PER O", "B-PER I-PER O", 1, 1),
        ("B-PER I-PER O", "B-PER O O", 0, 0),  # half an entity is none
        ("B-PER I-PER O", "B-ORG I-ORG O", 0, 0),  # the kind counts
        ("B-PER B-PER", "B-PER I-PER", 0, 0),  # two are not one
        ("B-PER O B-LOC", "B-PER O O", 1, 1 / 2),
        ("B-PER O O", "B-PER O B-LOC", 1 / 2, 1),
        ("I-PER I-PER O", "B-PER I-PER O", 1, 1),  # IOB1's way to begin
        ("B-PER I-LOC O", "B-PER B-LOC O", 1, 1),  # another kind begins another entity
        ("O O", "O O", 0, 0),  # nothing to find
    ],
)
def test_entities_by_hand(truth: str, guess: str, precision: float, recall: float) -> None:
    found = score([truth.split()], [guess.split()])
    assert list(found) == ["f1", "precision", "recall", "accuracy", "sentences"]
    assert found["precision"] == pytest.approx(100 * precision)
    assert found["recall"] == pytest.approx(100 * recall)
    both = precision + recall
    assert found["f1"] == pytest.approx(100 * 2 * precision * recall / both if both else 0)
    same = [a == b for a, b in zip(truth.split(), guess.split(), strict=True)]
    assert found["accuracy"] == pytest.approx(100 * np.mean(same))
    assert found["sentences"] == 100.0 * all(same)


def test_entities_do_not_cross_sentences() -> None:
    found = score([["B-PER"], ["I-PER"]], [["B-PER"], ["O"]])
    assert (found["precision"], found["recall"]) == (100.0, 50.0)
    assert found["sentences"] == 50.0


def test_labels_of_the_model(tokenizer: Any) -> None:
    task = find_task("ner")
    config: Any = SimpleNamespace(id2label=dict(enumerate(["O", "B-PER", "I-PER", "B-LOC"])))
    assert label_order(("B-PER", "O"), config, task).tolist() == [1, 0]  # the data may lack some
    assert label_order(("0", "3"), config, task).tolist() == [0, 3]
    with pytest.raises(UserError, match=r"the data has 2 \(B-ORG, O\)"):
        label_order(("B-ORG", "O"), config, task)


def test_numbers_take_the_names_of_the_model(tokenizer: Any) -> None:
    words = [["the", "film"]]
    texts = TaggedTexts(["the film"], None, None, ("0", "1"), words, [np.array([1, 0])])
    tokens = texts.tokenize(tokenizer, 32)
    config: Any = SimpleNamespace(id2label={0: "O", 1: "B-PER"})
    judge = TagScorer(find_task("ner"), texts, tokens, config)
    right = np.array([[0, 0], [0, 1], [1, 0], [0, 0]], dtype=float)
    wrong = right[:, ::-1]
    assert judge.score([right])["f1"] == 100.0
    assert judge.score([wrong])["f1"] == 0.0
    assert judge.right([right]).tolist() == [True]
    assert judge.agreement([right], [wrong]) == {"agreement": 0.0}
    # by the first tokens of the two words: log-odds of ±1 against ∓1; special tokens do not count
    p = 1 / (1 + np.exp(-1))
    found = judge.fidelity([right], [wrong])
    assert (found.kl, found.flips) == (pytest.approx(p - (1 - p)), 100.0)
    elsewhere = np.array([[9.0, 0], [0, 0], [0, 0], [0, 9.0]])
    assert judge.fidelity([right], [right + elsewhere]).kl == 0.0
    double = TaggedTexts(["the film"] * 2, None, None, ("0", "1"), words * 2, texts.tags * 2)
    (heads,) = double.tokenize(tokenizer, 32).take(np.array([1])).heads
    assert heads.tolist() == tokens.heads[0].tolist()
    assert isinstance(tokens, TaggedTokens)
