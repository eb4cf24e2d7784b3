"""The reconstruction error, by hand."""

from __future__ import annotations

import pytest
import torch
from tiny_models import HEAD_NAMES, tiny_batch, tiny_pair

from mrem_deploy.models.parts import PartOutput, carve
from mrem_deploy.train.loss import cosine_terms, reconstruction_terms, term_weights, token_mse, valid_mse


def test_token_mse_by_hand() -> None:
    student = torch.tensor([[[1.0, 2.0], [5.0, 5.0]], [[0.0, 0.0], [9.0, 9.0]]])
    teacher = torch.tensor([[[0.0, 0.0], [5.0, 2.0]], [[0.0, 2.0], [0.0, 0.0]]])
    mask = torch.tensor([[1, 1], [1, 0]])  # the last token is padding: its 9s do not count
    # squares 1, 4, 0, 9, 0, 4 over the 6 elements of 3 tokens
    assert token_mse(student, teacher, mask).item() == 18 / 6
    assert token_mse(student, teacher, torch.ones(2, 2)).item() == (18 + 162) / 8


def test_token_mse_of_scores_per_token() -> None:
    # Start and end logits of question answering are (B, T), with no width.
    came = token_mse(torch.tensor([[1.0, 7.0]]), torch.tensor([[3.0, 0.0]]), torch.tensor([[1, 0]]))
    assert came.item() == 4.0


def test_the_gradient_of_padding_is_zero() -> None:
    student = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    token_mse(student, torch.zeros(2, 3, 4), mask).backward()
    assert student.grad is not None
    torch.testing.assert_close(student.grad, student.detach() * mask[:, :, None] * 2 / (4 * 4))


def output(
    embedding: float | None, hidden: list[float], outputs: list[torch.Tensor], per_token: bool
) -> PartOutput:
    def full(value: float) -> torch.Tensor:
        return torch.full((1, 2, 3), value)

    return PartOutput(
        None if embedding is None else full(embedding), [full(value) for value in hidden], outputs, per_token
    )


def test_the_terms_of_each_kind_of_module() -> None:
    mask = torch.tensor([[1, 0]])
    # A first module of two blocks: embedding and both blocks, no logits.
    terms = reconstruction_terms(output(1.0, [2.0, 3.0], [], False), output(0.0, [0.0, 0.0], [], False), mask)
    assert [term.item() for term in terms] == [1.0, 4.0, 9.0]
    # A middle one: its blocks alone.
    terms = reconstruction_terms(output(None, [2.0], [], False), output(None, [0.0], [], False), mask)
    assert [term.item() for term in terms] == [4.0]
    # A last one with logits per sentence: padding means nothing to them.
    logits = torch.tensor([[1.0, 3.0]])
    terms = reconstruction_terms(
        output(None, [2.0], [logits], False), output(None, [0.0], [torch.zeros(1, 2)], False), mask
    )
    assert [term.item() for term in terms] == [4.0, 5.0]
    # The same numbers as start logits of two tokens: the second is padding.
    terms = reconstruction_terms(
        output(None, [2.0], [logits, logits], True),
        output(None, [0.0], [torch.zeros(1, 2), torch.zeros(1, 2)], True),
        mask,
    )
    assert [term.item() for term in terms] == [4.0, 1.0, 1.0]


def terms_of(
    student: torch.Tensor,
    teacher: torch.Tensor,
    mask: torch.Tensor,
    per_token: bool = False,
    bare: bool = False,
) -> list[float]:
    """The terms of a model's outputs alone, by `--output-loss auto`."""
    pair = [PartOutput(None, [], [value], per_token, bare) for value in (student, teacher)]
    return [term.item() for term in reconstruction_terms(pair[0], pair[1], mask, "auto")]


def kl(teacher: list[float], student: list[float]) -> float:
    p, q = (torch.tensor(row, dtype=torch.float64).softmax(0) for row in (teacher, student))
    return float((p * (p / q).log()).sum())


def test_the_divergence_of_classes_is_a_mean_over_sentences() -> None:
    student, teacher = torch.tensor([[0.0, 2.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    (came,) = terms_of(student, teacher, torch.tensor([[1, 0], [1, 1]]))
    assert came == pytest.approx(kl([1.0, 0.0], [0.0, 2.0]) / 2)
    (shifted,) = terms_of(student + 5.0, teacher, torch.ones(2, 2))
    assert shifted == pytest.approx(came)  # a constant in all logits is no error


def test_the_divergence_of_tags_is_a_mean_over_real_tokens() -> None:
    student = torch.tensor([[[0.0, 2.0], [50.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])
    teacher = torch.tensor([[[1.0, 0.0], [0.0, 50.0]], [[1.0, 0.0], [0.0, 3.0]]])
    (came,) = terms_of(student, teacher, torch.tensor([[1, 0], [1, 1]]), per_token=True)
    assert came == pytest.approx((kl([1.0, 0.0], [0.0, 2.0]) + kl([0.0, 3.0], [0.0, 1.0])) / 3)


def test_the_divergence_of_answers_is_over_the_real_tokens_of_each_sentence() -> None:
    student = torch.tensor([[0.0, 2.0, 90.0], [1.0, 0.0, 2.0]], requires_grad=True)
    teacher = torch.tensor([[1.0, 0.0, -5.0], [1.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    (came,) = terms_of(student, teacher, mask, per_token=True)
    expected = (kl([1.0, 0.0], [0.0, 2.0]) + kl([1.0, 0.0, 0.0], [1.0, 0.0, 2.0])) / 2
    assert came == pytest.approx(expected)
    pair = [PartOutput(None, [], [value, value], True) for value in (student, teacher)]
    torch.stack(reconstruction_terms(pair[0], pair[1], mask, "kl")).sum().backward()
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()
    assert student.grad[0, 2] == 0  # padding learns nothing


def test_a_score_keeps_its_squared_error() -> None:
    assert terms_of(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [2.0]]), torch.ones(2, 1)) == [2.0]


def test_an_embedding_has_the_cosines_of_both_poolings_next_to_its_squared_error() -> None:
    student = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]]])
    teacher = torch.tensor([[[0.0, 1.0], [0.0, 3.0], [-9.0, 0.0]]])
    squared, mean, first = terms_of(student, teacher, torch.tensor([[1, 1, 0]]), per_token=True, bare=True)
    assert squared == pytest.approx((1 + 1 + 0 + 4) / 4)
    assert mean == pytest.approx(1 - 2**-0.5)  # (½, ½) against (0, 2)
    assert first == pytest.approx(1.0)


@pytest.mark.parametrize("head", HEAD_NAMES)
@pytest.mark.parametrize("output_loss", ["mse", "auto"])
def test_every_term_has_a_weight(head: str, output_loss: str) -> None:
    """Tokens for the blocks, and for outputs what their mean is over."""
    teacher, student = tiny_pair("bert", head)
    batch = tiny_batch()
    (full,), (quantized,) = carve(teacher, [0, 3]), carve(student, [0, 3])
    with torch.no_grad():
        target, came = full(None, batch), quantized(None, batch)
    mask = batch["attention_mask"]
    terms = reconstruction_terms(came, target, mask, output_loss)
    weights = term_weights(target, mask, output_loss)
    assert len(weights) == len(terms)
    assert all(bool(term > 0) for term in terms)
    tokens, sentences = float(mask.sum()), 3.0
    assert weights[:4] == [tokens] * 4
    expected = {
        "sequence-classification": [sentences],
        "token-classification": [tokens],
        "question-answering": [tokens if output_loss == "mse" else sentences] * 2,
        "feature-extraction": [tokens] + ([] if output_loss == "mse" else [sentences] * 2),
    }
    assert weights[4:] == expected[head]


@pytest.mark.parametrize("head", HEAD_NAMES)
def test_a_model_that_equals_its_teacher_has_no_error(head: str) -> None:
    teacher, student = tiny_pair("bert", head)
    batch = tiny_batch()
    full, quantized = carve(teacher, [0, 3])[0], carve(student, [0, 3])[0]
    with torch.no_grad():
        same = reconstruction_terms(full(None, batch), full(None, batch), batch["attention_mask"])
        terms = reconstruction_terms(quantized(None, batch), full(None, batch), batch["attention_mask"])
    expected = 1 + 3 + (2 if head == "question-answering" else 1)  # embedding, blocks, outputs
    assert len(terms) == len(same) == expected
    assert [term.item() for term in same] == [0.0] * expected
    assert all(term > 0 for term in terms)


def test_the_embedding_of_a_causal_model_is_its_last_token() -> None:
    """Vectors that differ in one token only: at right angles there, equal elsewhere."""
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])  # padding on either side
    teacher = torch.zeros(2, 4, 2)
    teacher[..., 0] = 1.0
    student = teacher.clone()
    student[0, 2] = student[1, 3] = torch.tensor([0.0, 1.0])
    assert cosine_terms(student, teacher, mask, causal=True)[1].item() == pytest.approx(1.0)
    assert cosine_terms(student, teacher, mask)[1].item() == pytest.approx(0.0, abs=1e-7)
    first = teacher.clone()
    first[:, 0] = torch.tensor([0.0, 1.0])
    assert cosine_terms(first, teacher, mask, causal=True)[1].item() == pytest.approx(0.0, abs=1e-7)


def mean_over(squares: torch.Tensor, chosen: torch.Tensor) -> float:
    return squares[chosen.expand_as(squares)].mean().item()


def test_the_error_of_every_kind_of_output_leaves_padding_out() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    real = mask.bool()

    def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        return a, b, (a - b).square()

    a, b, squares = pair(3, 4, 5)  # hidden states
    assert valid_mse(a, b, mask).item() == pytest.approx(mean_over(squares, real[:, :, None]))
    a, b, squares = pair(3, 2, 4, 5)  # P·V: (B, heads, T, d)
    assert valid_mse(a, b, mask).item() == pytest.approx(mean_over(squares, real[:, None, :, None]))
    a, b, squares = pair(3, 5)  # pooled
    assert valid_mse(a, b, mask).item() == pytest.approx(squares.mean().item())
    a, b, squares = pair(3, 2, 4, 4)  # Q·Kᵀ: real queries and real keys
    both = real[:, None, :, None] & real[:, None, None, :]
    assert valid_mse(a, b, mask, keys=True).item() == pytest.approx(mean_over(squares, both))
    # P·V of a batch that is exactly as long as a head is wide: channels are not keys.
    assert valid_mse(a, b, mask).item() == pytest.approx(mean_over(squares, real[:, None, :, None]))
