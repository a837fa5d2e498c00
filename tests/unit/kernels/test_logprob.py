"""Log-probabilities and entropies from hidden states on one rank against torch; the split vocabulary is in parity."""

import math

import pytest
import torch
from torch import Tensor

from megatron_grpo_kernels import logprob as chunked_logprob
from megatron_grpo_kernels.head import Head
from megatron_grpo_kernels.logprob import linear_logprobs

TOKENS, HIDDEN, VOCAB, PADDED = 14, 6, 11, 16


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the head's weight, targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(PADDED, HIDDEN, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,), generator=generator)


@pytest.mark.parametrize("chunk", [None, 1, 3, 100])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (2.0, None), (0.6, None), (0.6, 1.5)])
def test_values_and_gradients_equal_those_of_the_whole_logits(
    chunk: int | None, scale: float, cap: float | None
) -> None:
    hidden, weight, targets = problem()
    of_logprobs, of_entropy = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(1))
    logprobs, entropy = linear_logprobs(
        hidden, weight, targets, columns=VOCAB, scale=scale, cap=cap, chunk_tokens=chunk
    )
    actual = torch.autograd.grad((logprobs * of_logprobs + entropy * of_entropy).sum(), (hidden, weight))

    logits = hidden @ weight[:VOCAB].t()
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    distribution = torch.distributions.Categorical(logits=logits * scale)
    expected = distribution.log_prob(targets), distribution.entropy()
    gradients = torch.autograd.grad((expected[0] * of_logprobs + expected[1] * of_entropy).sum(), (hidden, weight))
    torch.testing.assert_close((logprobs, entropy), expected)
    torch.testing.assert_close(actual, gradients)
    assert (actual[1][VOCAB:] == 0).all(), "padding rows got a gradient"


def test_chunks_are_no_larger_than_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_logprob, "CHUNK_NUMBERS", 3 * PADDED)
    sizes: list[int] = []
    original = chunked_logprob.compute_logits

    def watched(head: Head, rows: slice) -> Tensor:
        sizes.append(len(head.hidden[rows]))
        return original(head, rows)

    monkeypatch.setattr(chunked_logprob, "compute_logits", watched)
    hidden, weight, targets = problem()
    linear_logprobs(hidden, weight, targets)[0].sum().backward()
    assert sizes == [3, 3, 3, 3, 2] * 2


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4, -1e4, 0.0], [1e4, -1e4, 0.0], [5.0, 5.0, 5.0]], requires_grad=True)
    logprobs, entropy = linear_logprobs(hidden, torch.eye(3), torch.tensor([0, 1, 2]))
    torch.testing.assert_close(logprobs, torch.tensor([0.0, -2e4, -math.log(3.0)]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, 0.0, math.log(3.0)]))
    (logprobs + entropy).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_bfloat16_logits_are_reduced_in_float32() -> None:
    hidden, weight, targets = problem(torch.bfloat16)
    logprobs, _ = linear_logprobs(hidden, weight, targets)
    exact = (hidden @ weight.t()).double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), exact, atol=1e-5, rtol=0)
    logprobs.sum().backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)


def test_without_tokens_there_are_no_numbers() -> None:
    hidden, weight, _ = problem()
    logprobs, entropy = linear_logprobs(hidden[:0], weight, torch.empty(0, dtype=torch.int64))
    assert (logprobs.shape, entropy.shape) == ((0,), (0,))
    (logprobs.sum() + entropy.sum()).backward()
    assert (weight.grad == 0).all()
