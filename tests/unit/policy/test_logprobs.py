"""Token log-probabilities and entropies on one rank against torch; the vocabulary-parallel case is in tests/parity."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_grpo.policy.modeling.logprobs import VocabShard, token_entropy, token_logprobs

VOCAB, PADDED = 11, 16


@pytest.mark.parametrize("chunk", [None, 1, 3, 100])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
def test_values_and_gradients_equal_log_softmax(chunk: int | None, temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 7, PADDED, requires_grad=True)
    token_ids = torch.randint(0, VOCAB, (2, 7))
    weights = torch.randn(2, 7)

    actual = token_logprobs(logits, token_ids, VocabShard(0, VOCAB, None), temperature=temperature, chunk_tokens=chunk)
    (actual * weights).sum().backward()
    actual_grad, logits.grad = logits.grad, None

    scaled = logits[:, :-1, :VOCAB] / (temperature or 1.0)
    expected = scaled.log_softmax(dim=-1).gather(2, token_ids[:, 1:, None])[..., 0]
    (expected * weights[:, 1:]).sum().backward()

    assert (actual[:, 0] == 0).all()
    torch.testing.assert_close(actual[:, 1:], expected)
    torch.testing.assert_close(actual_grad, logits.grad)
    assert (actual_grad[..., VOCAB:] == 0).all(), "padding columns got a gradient"


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0], [0.0, 0.0, 0.0]]])
    logprobs = token_logprobs(logits, torch.tensor([[0, 1]]), VocabShard(0, 3, None))
    torch.testing.assert_close(logprobs, torch.tensor([[0.0, -2e4]]))


def test_bfloat16_logits_are_reduced_in_float32() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 4, 500, dtype=torch.bfloat16)
    token_ids = torch.randint(0, 500, (1, 4))
    actual = token_logprobs(logits, token_ids, VocabShard(0, 500, None))
    expected = logits.double()[:, :-1].log_softmax(-1).gather(2, token_ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(actual[:, 1:].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk", [None, 1, 3, 100])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.7])
def test_entropy_and_its_gradient_equal_those_of_the_distribution(chunk: int | None, temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 7, PADDED, requires_grad=True)
    weights = torch.randn(2, 7)

    actual = token_entropy(logits, VocabShard(0, VOCAB, None), temperature=temperature, chunk_tokens=chunk)
    (actual * weights).sum().backward()
    actual_grad, logits.grad = logits.grad, None

    expected = torch.distributions.Categorical(logits=logits[:, :-1, :VOCAB] / (temperature or 1.0)).entropy()
    (expected * weights[:, 1:]).sum().backward()

    assert (actual[:, 0] == 0).all()
    torch.testing.assert_close(actual[:, 1:], expected)
    torch.testing.assert_close(actual_grad, logits.grad)
    assert (actual_grad[..., VOCAB:] == 0).all(), "padding columns got a gradient"


def test_entropy_of_extreme_logits_stays_finite() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0], [5.0, 5.0, 5.0], [0.0, 0.0, 0.0]]], requires_grad=True)
    entropy = token_entropy(logits, VocabShard(0, 3, None))
    torch.testing.assert_close(entropy, torch.tensor([[0.0, 0.0, math.log(3.0)]]))
    entropy.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
