"""Divergences from hidden states against whole distributions in float64, closed forms, and TRL's formula."""

import math

import pytest
import torch
from torch import Tensor

from megatron_grpo_kernels.divergence import Divergence, TeacherStates, TeacherTokens, linear_divergence
from tests.support.fp8_oracle import expected_divergence, with_tail

TOKENS, HIDDEN, THEIRS, VOCAB, PADDING = 11, 6, 9, 23, 3
CASES = [
    ("reverse", 0.5),
    ("forward", 0.5),
    ("mixed", 0.3),
    *(("jensen_shannon", weight) for weight in (0.0, 0.1, 0.5, 0.9, 1.0)),
]


def make_case(scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Student's hidden states and head, the teacher's, and a factor of each token's divergence."""
    generator = torch.Generator().manual_seed(5)

    def draw(*size: int) -> Tensor:
        return scale * torch.randn(*size, generator=generator, dtype=torch.float64)

    return draw(TOKENS, HIDDEN), draw(VOCAB + PADDING, HIDDEN), draw(TOKENS, THEIRS), draw(VOCAB, THEIRS), draw(TOKENS)


def laws(factor: float, cap: float | None, their_cap: float | None, scale: float = 1.0) -> tuple[Tensor, ...]:
    """Leaves (hidden, weight), log-probabilities of both models, factors."""
    hidden, weight, theirs, their_weight, factors = make_case(scale)
    hidden.requires_grad_(), weight.requires_grad_()
    logits, their_logits = hidden @ weight[:VOCAB].t(), theirs @ their_weight.t()
    capped = [z if c is None else c * torch.tanh(z / c) for z, c in ((logits, cap), (their_logits, their_cap))]
    student, teacher = (torch.log_softmax(factor * z, dim=-1) for z in capped)
    return hidden, weight, student, teacher, factors


def compare_kernels(
    name: str, weight: float, k: int | None, *, cap: float | None = None, chunk: int = 4, scale: float = 1.0
):
    """Values and gradients from the function, and as the definition has them."""
    factor, their_cap = 1.3, None if cap is None else 2 * cap
    hidden, head, student, teacher, factors = laws(factor, cap, their_cap, scale)
    if k is not None and k < VOCAB:
        chosen = teacher.topk(k).indices
        student, teacher_law = with_tail(student, chosen), with_tail(teacher, chosen)
    else:
        teacher_law = teacher
    expected = expected_divergence(student, teacher_law.detach(), name, weight)
    expected_gradients = torch.autograd.grad((expected * factors).sum(), [hidden, head])
    _, _, theirs, their_weight, _ = make_case(scale)
    if k is None:
        source = TeacherStates(theirs, torch.cat([their_weight, their_weight.new_zeros(PADDING, THEIRS)]), their_cap)
    else:
        top = teacher.detach().topk(k)
        source = TeacherTokens(top.indices, top.values, teacher_law[:, -1].detach() if k < VOCAB else None)
    value = linear_divergence(
        hidden, head, source, Divergence(name, weight), columns=VOCAB, scale=factor, cap=cap, chunk_tokens=chunk
    )
    actual = torch.autograd.grad((value * factors).sum(), [hidden, head])
    return (value, *actual), (expected, *expected_gradients)


@pytest.mark.parametrize("k", [None, 1, 5, VOCAB])
@pytest.mark.parametrize(("name", "weight"), CASES)
def test_values_and_gradients_are_those_of_the_definition(name: str, weight: float, k: int | None) -> None:
    for cap in (None, 2.0):
        for actual, expected in zip(*compare_kernels(name, weight, k, cap=cap), strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize(("name", "weight"), CASES)
def test_certain_models_stay_finite(name: str, weight: float, k: int | None) -> None:
    # Logits of a spread of some hundreds: most probabilities are 0 in float64.
    for actual, expected in zip(*compare_kernels(name, weight, k, scale=12.0), strict=True):
        assert actual.isfinite().all()
        if name != "jensen_shannon" and k is None:
            torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-7)


def test_chunks_change_nothing() -> None:
    full, _ = compare_kernels("mixed", 0.3, None, chunk=TOKENS)
    for chunk in (1, 3):
        for actual, expected in zip(compare_kernels("mixed", 0.3, None, chunk=chunk)[0], full, strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-13, rtol=1e-12)


def test_two_tokens_have_the_closed_form() -> None:
    # Logits (log 3, 0) and (0, 0): p = (3/4, 1/4), q = (1/2, 1/2).
    hidden, head = torch.ones(1, 1), torch.tensor([[math.log(3.0)], [0.0]])
    teacher = TeacherStates(torch.ones(1, 1), torch.zeros(2, 1))
    reverse = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    forward = 0.5 * math.log(2 / 3) + 0.5 * math.log(2.0)
    # The mixture at 1/2 is (5/8, 3/8).
    middle = 0.5 * (0.5 * math.log(0.8) + 0.5 * math.log(4 / 3)) + 0.5 * (0.75 * math.log(1.2) + 0.25 * math.log(2 / 3))
    expected = {"reverse": reverse, "forward": forward, "mixed": (reverse + forward) / 2, "jensen_shannon": middle}
    for name, value in expected.items():
        actual = linear_divergence(hidden, head, teacher, Divergence(name))
        assert float(actual) == pytest.approx(value, rel=1e-6), name


def test_the_tail_is_one_entry() -> None:
    # p = (1/2, 1/4, 1/4), and the teacher's likeliest token has 0.8: over (token, tail), (1/2, 1/2) to (0.8, 0.2).
    hidden, head = torch.ones(1, 1), torch.tensor([[math.log(2.0)], [0.0], [0.0]])
    top = TeacherTokens(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[0.8]]).log(), torch.tensor([0.2]).log())
    expected = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    assert float(linear_divergence(hidden, head, top, Divergence("reverse"))) == pytest.approx(expected, rel=1e-6)


def test_equal_models_have_no_divergence_and_no_gradient() -> None:
    hidden, head = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4)
    for name, weight in CASES:
        teacher = TeacherStates(hidden.detach().clone(), head)
        value = linear_divergence(hidden, head, teacher, Divergence(name, weight))
        (gradient,) = torch.autograd.grad(value.sum(), hidden)
        torch.testing.assert_close(value, torch.zeros(3), atol=1e-6, rtol=0)
        torch.testing.assert_close(gradient, torch.zeros(3, 4), atol=1e-6, rtol=0)


def test_a_microbatch_may_have_no_token() -> None:
    hidden = torch.zeros(0, 4, requires_grad=True)
    value = linear_divergence(
        hidden, torch.randn(7, 4), TeacherStates(hidden, torch.randn(7, 4)), Divergence("reverse")
    )
    value.sum().backward()
    assert value.shape == (0,)
    assert hidden.grad.shape == (0, 4)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_jensen_shannon_is_trls(beta: float) -> None:
    """TRL's beta is the weight of the reverse end."""
    trl = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    hidden, head, theirs, their_head, _ = (tensor.float() for tensor in make_case())
    head = head[:VOCAB]
    logits, their_logits = (hidden @ head.t())[None], (theirs @ their_head.t())[None]
    expected = trl.GKDTrainer.generalized_jsd_loss(logits, their_logits, beta=beta, reduction="none").sum(dim=-1)[0]
    teacher = TeacherStates(theirs, their_head)
    actual = linear_divergence(hidden, head, teacher, Divergence("jensen_shannon", 1 - beta))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
