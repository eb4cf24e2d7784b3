"""SQuAD's files, the windows that contexts are cut into, and the answers read out of logits."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from tiny_bert import save_tiny_bert
from tiny_squad import CONTEXT, official, question, write_squad
from transformers import AutoTokenizer

from mrem_deploy.base.errors import UserError
from mrem_deploy.data.squad import Questions, Windows, best_span, read_answers, tokenize
from mrem_deploy.data.squad_files import Span
from mrem_deploy.data.task_data import encode, find_task, open_task, sample
from mrem_deploy.evaluate.fidelity import kl_divergence
from mrem_deploy.evaluate.scorers import QuestionScorer
from mrem_deploy.evaluate.squad import summary_v1

LENGTH = 16  # tokens of a window: 3 special ones, and a stride of 5


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(save_tiny_bert(tmp_path_factory.mktemp("bert")))


def one(context: str, answer: str = "", asked: str = "was the film good") -> Questions:
    spans = [Span(answer, context.index(answer))] if answer else []
    return Questions([asked], [context], None, (), ["q"], [spans])


# --- files -------------------------------------------------------------------------------------


def test_official_files_of_v1(tmp_path: Path) -> None:
    write_squad(tmp_path / "train-v1.1.json", [question("t", answer="good")])
    write_squad(
        tmp_path / "dev-v1.1.json", [question("d1", answer="film"), question("d2", answer="very good")]
    )
    data = open_task("SQuAD v1.1", str(tmp_path))
    found = data.evaluation()["dev"]
    assert isinstance(found, Questions)
    assert found.ids == ["d1", "d2"]
    assert found.contexts == [CONTEXT, CONTEXT]
    assert found.answers == [
        [Span("film", CONTEXT.index("film"))],
        [Span("very good", CONTEXT.index("very"))],
    ]
    assert data.train(needs_labels=True).first == ["was the film t"]
    assert found.take(np.array([1])).ids == ["d2"]
    assert sample(found, 1, seed=0).answers in ([found.answers[0]], [found.answers[1]])


def test_official_files_of_v2(tmp_path: Path) -> None:
    plausible = question("d2", answer="good") | {
        "is_impossible": True,
        "answers": [],
        "plausible_answers": [],
    }
    write_squad(tmp_path / "train-v2.0.json", [question("t", answer="good")])
    write_squad(tmp_path / "dev-v2.0.json", [question("d1", answer="good"), plausible])
    found = open_task("squad-v2", str(tmp_path)).evaluation()["dev"]
    assert isinstance(found, Questions)
    assert found.answers == [[Span("good", CONTEXT.index("good"))], []]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_rows_as_the_hub_has_them(tmp_path: Path, suffix: str) -> None:
    answers = {"text": ["good", "very good"], "answer_start": [CONTEXT.index("good"), CONTEXT.index("very")]}
    rows = [{"id": str(i), "question": "q", "context": CONTEXT, "answers": answers} for i in range(2)]
    if suffix == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    elif suffix == "json":
        (tmp_path / "a.json").write_text(json.dumps(rows))
    else:
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    place = str(tmp_path / f"a.{suffix}")
    found = open_task("squad", place, eval_data=place).evaluation()["dev"]
    assert isinstance(found, Questions)
    assert found.answers is not None
    assert [span.text for span in found.answers[1]] == ["good", "very good"]
    assert found.misplaced() == []


def test_training_questions_need_no_answers(tmp_path: Path) -> None:
    bare = {key: value for key, value in question("t", answer="good").items() if key != "answers"}
    write_squad(tmp_path / "train-v1.1.json", [bare])
    write_squad(tmp_path / "dev-v1.1.json", [question("d", answer="good")])
    data = open_task("squad", str(tmp_path))
    assert not data.train().labelled
    with pytest.raises(UserError, match="Expected a label in every training row"):
        data.train(needs_labels=True)


@pytest.mark.parametrize("name", ["SQuAD", "squad1.1", "squad_v1.1", "Squad V1"])
def test_spellings_of_v1(name: str) -> None:
    assert find_task(name).name == "squad"


@pytest.mark.parametrize("name", ["squad_v2", "SQuAD-v2", "squad2.0", "SQuAD v2.0"])
def test_spellings_of_v2(name: str) -> None:
    assert find_task(name).name == "squad_v2"


def test_questions_with_misplaced_answers() -> None:
    found = Questions(
        ["q"] * 4,
        ["a good film"] * 4,
        None,
        (),
        ["right", "shifted", "beyond", "not told"],
        [[Span("good", 2)], [Span("good", 3)], [Span("good", 90)], [Span("good", -1)]],
    )
    assert found.misplaced() == ["shifted", "beyond", "not told"]


# --- windows -----------------------------------------------------------------------------------


def words_of(windows: Windows, i: int, context: str) -> list[str]:
    return [context[a:b] for a, b in windows.offsets[i] if b > a]


def test_a_context_that_fits_is_one_window(tokenizer: Any) -> None:
    questions = one("the plot was very good", "very good")
    windows = tokenize(questions, tokenizer, 32)
    assert len(windows) == 1
    tokens = tokenizer.convert_ids_to_tokens(windows.columns["input_ids"][0])
    assert " ".join(tokens) == "[CLS] was the film good [SEP] the plot was very good [SEP]"
    assert windows.columns["token_type_ids"][0].tolist() == [0] * 6 + [1] * 6
    assert (windows.offsets[0][:6] == -1).all()
    assert words_of(windows, 0, questions.contexts[0]) == ["the", "plot", "was", "very", "good"]
    assert windows.targets(questions).tolist() == [[9, 10]]  # very good
    assert windows.null.tolist() == [0]


def test_windows_cover_every_word_and_overlap_by_the_stride(tokenizer: Any) -> None:
    context = " ".join(f"w{i}" for i in range(30))  # unknown words have their characters all the same
    questions = one(context)
    windows = tokenize(questions, tokenizer, LENGTH)
    assert windows.lengths.max() == LENGTH
    parts = [words_of(windows, i, context) for i in range(len(windows))]
    assert parts[0] == context.split()[: len(parts[0])]
    for before, after in pairwise(parts):
        assert before[-5:] == after[:5]  # the stride, a third of 16
    assert parts[0] + [word for part in parts[1:] for word in part[5:]] == context.split()
    assert windows.question.tolist() == [0] * len(parts)


@pytest.mark.parametrize("at", range(30))
def test_an_answer_anywhere_is_whole_in_some_window(tokenizer: Any, at: int) -> None:
    """Two words, shorter than the stride: at the border of one window it is inside the next."""
    words = [f"w{i:02}" for i in range(31)]
    questions = one(" ".join(words), f"{words[at]} {words[at + 1]}")
    windows = tokenize(questions, tokenizer, LENGTH)
    targets = windows.targets(questions)
    holds = [
        {words[at], words[at + 1]} <= set(words_of(windows, i, questions.contexts[0]))
        for i in range(len(windows))
    ]
    assert any(holds)
    for i, (start, end) in enumerate(targets):
        if not holds[i]:
            assert (start, end) == (0, 0)  # CLS: not here, not even half of it
        else:
            begin, stop = windows.offsets[i][start][0], windows.offsets[i][end][1]
            assert questions.contexts[0][begin:stop] == f"{words[at]} {words[at + 1]}"


def test_an_answer_within_a_token_gets_that_token(tokenizer: Any) -> None:
    """Years out of dates, and the like: the label is the token around the answer."""
    questions = one("the film zzz1999zzz was good", "1999")
    windows = tokenize(questions, tokenizer, 32)
    (start, end), offsets = windows.targets(questions)[0], windows.offsets[0]
    assert start == end
    assert questions.contexts[0][offsets[start][0] : offsets[end][1]] == "zzz1999zzz"


def test_no_answer_points_at_cls(tokenizer: Any) -> None:
    questions = one("the plot was good")
    assert tokenize(questions, tokenizer, 32).targets(questions).tolist() == [[0, 0]]


def test_long_questions_are_cut_and_only_they(tokenizer: Any) -> None:
    context = " ".join(["film"] * 30)
    asked = ["was the film good", " ".join(["plot"] * 40)]
    windows = encode(tokenizer, Questions(asked, [context, context], None, (), ["1", "2"], None), LENGTH)
    assert isinstance(windows, Windows)
    ids = [tokenizer.decode(row) for row in windows.columns["input_ids"]]
    assert ids[0].startswith("[CLS] was the film good [SEP]")
    room = LENGTH - 3 - 5 - 1
    assert ids[-1].startswith("[CLS]" + " plot" * room + " [SEP]")
    assert set(windows.question) == {0, 1}


def test_a_length_without_room_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="--max-length 6 leaves no room"):
        encode(tokenizer, one("the plot was good"), 6)


def test_a_tokenizer_without_characters_is_refused(tokenizer: Any) -> None:
    class Slow:
        is_fast = False

    with pytest.raises(UserError, match=r"\(Slow\) does not give these"):
        tokenize(one("the plot was good"), Slow(), 32)


def test_windows_are_drawn_like_sentences(tokenizer: Any) -> None:
    windows = tokenize(one(" ".join(["film"] * 60)), tokenizer, LENGTH)
    assert len(windows) > 4
    few = sample(windows, 4, seed=0)
    assert len(few) == 4
    assert few.batch(np.arange(4))["input_ids"].shape[0] == 4


# --- answers -----------------------------------------------------------------------------------

OFFSETS = np.array([[-1, -1], [-1, -1], [0, 3], [4, 8], [9, 12], [13, 17], [-1, -1]])


def logits(start: dict[int, float], end: dict[int, float], length: int = 7) -> np.ndarray:
    rows = np.zeros((length, 2), dtype=np.float32)
    for column, values in enumerate((start, end)):
        for token, value in values.items():
            rows[token, column] = value
    return rows


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        ({3: 5.0}, {4: 4.0}, (9.0, 4, 12)),
        ({3: 5.0}, {3: 4.0}, (9.0, 4, 8)),  # a single token
        ({4: 5.0, 2: 3.0}, {3: 4.0}, (7.0, 0, 8)),  # an end before the start is none
        ({0: 9.0, 3: 1.0}, {6: 9.0, 5: 1.0}, (2.0, 4, 17)),  # CLS and SEP are not in the context
        ({}, {}, (0.0, 0, 3)),  # ties: the first
    ],
)
def test_the_best_span(
    start: dict[int, float], end: dict[int, float], expected: tuple[float, int, int]
) -> None:
    assert best_span(logits(start, end), OFFSETS) == pytest.approx(expected)


def test_spans_longer_than_thirty_tokens_are_none() -> None:
    offsets = np.array([[5 * i, 5 * i + 4] for i in range(60)])
    far = logits({10: 9.0}, {40: 9.0, 39: 2.0}, length=60)
    assert best_span(far, offsets) == pytest.approx((11.0, 50, 199))  # 10…39 are thirty


def test_only_the_twenty_likeliest_starts_and_ends_are_tried() -> None:
    offsets = np.array([[5 * i, 5 * i + 4] for i in range(60)])
    # The likeliest twenty ends lie before the likeliest twenty starts: no pair among them is in order.
    rows = logits(dict.fromkeys(range(30, 50), 5.0), dict.fromkeys(range(10, 30), 5.0), length=60)
    assert best_span(rows, offsets) is None
    rows[30, 1] = 6.0  # now one is
    assert best_span(rows, offsets) == pytest.approx((11.0, 150, 154))


def test_a_window_without_context_has_no_span() -> None:
    assert best_span(logits({}, {}), np.full((7, 2), -1)) is None


def test_answers_over_several_windows() -> None:
    """The best span of all windows; for "no answer" the window that is surest of an answer decides."""
    context = "the film was good"
    windows = Windows(
        {"input_ids": [np.arange(7)] * 3}, np.full(3, 7), {"input_ids": 0}, None,
        question=np.array([0, 0, 1]), offsets=[OFFSETS] * 3, null=np.zeros(3, dtype=int),
    )  # fmt: skip
    questions = Questions(["a", "b"], [context] * 2, None, (), ["1", "2"], [[Span("film", 4)], []])
    rows = [
        logits({0: 1.0, 3: 5.0}, {0: 1.0, 3: 5.0}),  # "film", 10, and 2 for nothing
        logits({0: 4.0, 5: 4.0}, {0: 4.0, 5: 4.0}),  # "good", 8, and 8 for nothing
        logits({0: 3.0, 2: 2.0}, {0: 3.0, 4: 2.0}),  # "the film was", 4, and 6 for nothing
    ]
    found = read_answers(windows, questions, rows)
    assert [answer.text for answer in found] == ["film", "the film was"]
    assert [answer.null_margin for answer in found] == pytest.approx([2 - 10, 6 - 4])


def test_windows_of_some_questions_and_their_divergence() -> None:
    """Questions are counted anew. A question's divergence is the mean over its windows."""
    windows = Windows(
        {"input_ids": [np.full(7, i) for i in range(5)]}, np.full(5, 7), {"input_ids": 0}, None,
        question=np.array([0, 0, 1, 2, 2]), offsets=[OFFSETS + i for i in range(5)], null=np.arange(5),
    )  # fmt: skip
    places = windows.places(np.array([0, 2]))
    assert places.tolist() == [0, 1, 3, 4]
    some = windows.take(places)
    assert some.question.tolist() == [0, 0, 1, 1]
    assert some.null.tolist() == [0, 1, 3, 4]
    assert [rows[0] for rows in some.columns["input_ids"]] == [0, 1, 3, 4]
    assert [int(pairs[0, 0] - OFFSETS[0, 0]) for pairs in some.offsets] == [0, 1, 3, 4]

    context = "the film was good"
    questions = Questions(["a", "b"], [context] * 2, None, (), ["1", "2"], [[Span("film", 4)]] * 2)
    windows = Windows(
        {"input_ids": [np.arange(7)] * 3}, np.full(3, 7), {"input_ids": 0}, None,
        question=np.array([0, 0, 1]), offsets=[OFFSETS] * 3, null=np.zeros(3, dtype=int),
    )  # fmt: skip
    one = [logits({3: 5.0}, {3: 5.0}), logits({5: 4.0}, {5: 4.0}), logits({2: 2.0}, {4: 2.0})]
    two = [one[0], logits({5: 9.0}, {5: 9.0}), one[2]]  # another text for the first question
    judge = QuestionScorer(find_task("squad"), questions, windows)
    found = judge.fidelity(one, two)
    changed = float(kl_divergence(one[1], two[1], axis=0).mean())
    assert found.kl == pytest.approx(changed / 2 / 2)
    assert found.kl_error == pytest.approx(changed / 4)
    assert found.flips == pytest.approx(100 - judge.agreement(one, two)["agreement"]) == 50.0


def test_logits_at_the_targets_give_the_answers_back(tokenizer: Any) -> None:
    """Windows, labels and extraction against each other, over long contexts."""
    words = [f"w{i:02}" for i in range(70)]
    context = " ".join(words)
    answers = [" ".join(words[i : i + 1 + i % 4]) for i in range(0, 66, 3)]
    spans = [[Span(answer, context.index(answer))] for answer in answers]
    questions = Questions(
        ["was it good"] * len(spans), [context] * len(spans), None, (), [*map(str, range(len(spans)))], spans
    )
    windows = tokenize(questions, tokenizer, LENGTH)
    perfect = []
    for length, (start, end) in zip(windows.lengths, windows.targets(questions), strict=True):
        perfect.append(logits({start: 9.0}, {end: 9.0}, length=length))
    assert summary_v1(read_answers(windows, questions, perfect), [[a] for a in answers]) == {
        "f1": 100.0,
        "exact": 100.0,
    }


def test_the_layout_is_the_official_one() -> None:
    """The helper of these tests writes what the others read."""
    article = official([question("1", answer="good")])["data"][0]
    assert article["paragraphs"][0]["qas"][0]["answers"] == [
        {"text": "good", "answer_start": CONTEXT.index("good")}
    ]
