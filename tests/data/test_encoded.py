"""Batches against sets worked out by hand; the tokenizer is six words long."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from mrem_deploy.base.errors import UserError
from mrem_deploy.data.encoded import (
    WINDOW,
    BatchSchedule,
    Encoded,
    bucketed_batches,
    sorted_batches,
)
from mrem_deploy.data.task_data import Texts
from mrem_deploy.data.texts import encode

PAD, CLS, SEP, A, B = 9, 1, 2, 3, 4  # a pad that is not 0 shows whether 0 was assumed


def six_words(pad: str | None = "[PAD]", longest: int = 16, types: bool = True) -> PreTrainedTokenizerFast:
    vocabulary = {"[UNK]": 0, "[CLS]": CLS, "[SEP]": SEP, "a": A, "b": B, "[PAD]": PAD}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    inputs = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, model_max_length=longest, model_input_names=inputs
    )


def singles(*texts: str) -> Texts:
    return Texts(list(texts), None, None, ())


# --- tokens and padding ------------------------------------------------------------------------


def test_batch_is_padded_to_its_own_longest() -> None:
    encoded = encode(six_words(), singles("a", "a b a b a b", "b a"), max_length=16)
    assert encoded.lengths.tolist() == [3, 8, 4]
    batch = encoded.batch(np.array([2, 0]))
    assert batch["input_ids"].tolist() == [[CLS, B, A, SEP], [CLS, A, SEP, PAD]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0], [0, 0, 0, 0]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_pairs_carry_types_and_lose_the_longer_side_first() -> None:
    texts = Texts(["a a a a a a"], ["b b"], np.array([1]), ("no", "yes"))
    encoded = encode(six_words(), texts, max_length=8)  # 8 words and 3 special tokens do not fit
    batch = encoded.batch(np.array([0]))
    assert batch["input_ids"].tolist() == [[CLS, A, A, A, SEP, B, B, SEP]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    assert encoded.labels is not None
    assert encoded.labels.tolist() == [1]


def test_a_tokenizer_without_types_gives_none() -> None:
    encoded = encode(six_words(types=False), singles("a b"), max_length=16)
    assert list(encoded.batch(np.array([0]))) == ["input_ids", "attention_mask"]


def test_more_texts_than_a_chunk_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrem_deploy.data.encoded.CHUNK", 3)
    monkeypatch.setattr("mrem_deploy.data.encoded.SHOW_PROGRESS_FROM", 5)  # and with the bar
    texts = [" ".join("a" * n) for n in range(1, 9)]
    assert encode(six_words(), singles(*texts), max_length=16).lengths.tolist() == [3, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("pair", "max_length"),
    [
        (False, 2),  # room for [CLS] and [SEP] only
        (True, 4),  # one word of two texts has no place
        (False, 17),  # the tokenizer ends at 16
    ],
)
def test_impossible_lengths_are_refused(pair: bool, max_length: int) -> None:
    texts = Texts(["a"], ["b"] if pair else None, None, ())
    with pytest.raises(UserError, match=rf"between {5 if pair else 3} and 16 .*got {max_length}"):
        encode(six_words(), texts, max_length)


def test_shortest_possible_length_works() -> None:
    assert encode(six_words(), singles("a b"), max_length=3).lengths.tolist() == [3]
    assert encode(six_words(), Texts(["a a"], ["b b"], None, ()), max_length=5).lengths.tolist() == [5]


def test_a_tokenizer_without_padding_is_refused() -> None:
    with pytest.raises(UserError, match="pad_token"):
        encode(six_words(pad=None), singles("a"), max_length=8)


def test_digest_follows_tokens_and_order_only() -> None:
    def digest(*texts: str) -> str:
        return encode(six_words(), singles(*texts), max_length=16).digest()

    assert digest("a b", "a") == digest("a  b", "a")  # the same tokens
    assert len({digest("a b", "a"), digest("a", "a b"), digest("a b"), digest("a b a")}) == 4


def test_digest_of_pairs_follows_both_texts_and_no_labels() -> None:
    def digest(*pairs: tuple[str, str], label: int = 0) -> str:
        first, second = map(list, zip(*pairs, strict=True))
        labels = np.full(len(pairs), label)
        return encode(six_words(), Texts(first, second, labels, ("x", "y")), max_length=16).digest()

    same = digest(("a b", "b"), ("a", "b"))
    assert same == digest(("a b", "b"), ("a", "b"), label=1)
    different = [
        digest(("a", "b"), ("a b", "b")),  # order
        digest(("a", "b b"), ("a", "b")),  # the border between texts
        digest(("a b", "b")),
        digest(("a b", "b"), ("a", "a")),
    ]
    assert len({same, *different}) == 5


def test_digest_sees_where_one_text_ends() -> None:
    one = Encoded({"input_ids": [np.array([1, 2]), np.array([3])]}, np.array([2, 1]), {"input_ids": 0}, None)
    two = Encoded({"input_ids": [np.array([1]), np.array([2, 3])]}, np.array([1, 2]), {"input_ids": 0}, None)
    assert one.digest() != two.digest()


# --- which examples go together ----------------------------------------------------------------

LENGTHS = np.random.default_rng(5).integers(3, 128, size=1003)  # not a multiple of any batch size below


@pytest.mark.parametrize("batch_size", [1, 4, 16, 1002, 1003, 5000])
def test_an_epoch_has_every_example_once(batch_size: int) -> None:
    batches = bucketed_batches(LENGTHS, batch_size, seed=1, epoch=0)
    assert sorted(np.concatenate(batches).tolist()) == list(range(1003))
    sizes = sorted(len(batch) for batch in batches)
    assert len(sizes) == -(-1003 // batch_size)
    assert set(sizes[1:]) <= {batch_size}  # at most one is short, and it is kept


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def flat(seed: int, epoch: int) -> list[int]:
        return np.concatenate(bucketed_batches(LENGTHS, 16, seed, epoch)).tolist()

    assert flat(1, 0) == flat(1, 0)
    assert len({tuple(flat(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_batches_are_of_like_length() -> None:
    def padding(batches: list[np.ndarray]) -> float:
        spent = sum(LENGTHS[batch].max() * len(batch) for batch in batches)
        return float(spent / LENGTHS.sum() - 1)

    random = np.array_split(np.random.default_rng(0).permutation(1003), 63)
    assert padding(random) > 0.5  # what there is to save
    assert padding(bucketed_batches(LENGTHS, 16, seed=0, epoch=0)) < 0.1


def test_sorting_stays_inside_a_window() -> None:
    # With lengths 0..n-1 a batch from one sorted window of half of the data cannot be consecutive.
    lengths = np.arange(2 * WINDOW * 2)
    batches = bucketed_batches(lengths, 2, seed=0, epoch=0)
    gaps = [abs(int(batch[0]) - int(batch[1])) for batch in batches]
    assert max(gaps) > 1
    # …but is closer than a third of the range, of which a window of 100 has about 33.
    assert max(gaps) < len(lengths) / 3


def test_order_of_batches_is_shuffled() -> None:
    lengths = LENGTHS[: WINDOW * 16]  # a single window, which was sorted from short to long
    longest = [int(lengths[batch].max()) for batch in bucketed_batches(lengths, 16, seed=0, epoch=0)]
    assert longest != sorted(longest)


def test_schedule_needs_only_the_step() -> None:
    schedule = BatchSchedule(LENGTHS, 100, seed=3)
    assert schedule.steps_per_epoch == 11
    walked = [schedule.at(step) for step in range(25)]
    expected = [batch for epoch in range(3) for batch in bucketed_batches(LENGTHS, 100, 3, epoch)]
    for step in (24, 0, 10, 11, 21, 22):  # backwards and across the ends of epochs
        assert walked[step].tolist() == expected[step].tolist()
        assert schedule.at(step).tolist() == expected[step].tolist()
        assert BatchSchedule(LENGTHS, 100, 3).at(step).tolist() == expected[step].tolist()


def test_sorted_batches_begin_with_the_longest() -> None:
    batches = sorted_batches(np.array([3, 9, 5, 9, 1]), 2)
    assert [batch.tolist() for batch in batches] == [[1, 3], [2, 0], [4]]


def test_impossible_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        bucketed_batches(LENGTHS, 0, 0, 0)
    with pytest.raises(ValueError, match="no examples"):
        sorted_batches(np.array([], dtype=np.int64), 4)
    with pytest.raises(ValueError, match="no examples"):
        BatchSchedule(np.array([], dtype=np.int64), 4, 0)
    with pytest.raises(ValueError, match="from 0"):
        BatchSchedule(LENGTHS, 4, 0).at(-1)
