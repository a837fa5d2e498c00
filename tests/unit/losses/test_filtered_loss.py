"""The policy's loss when sampling filters tokens: tokens that the filter removes in training, and the KL."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenFields
from megatron_grpo.config.schema import LossConfig
from megatron_grpo.losses.divergence import find_inconsistent_sequences
from megatron_grpo.losses.loss import Segments
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from tests.support.loss_oracle import CONFIGS, counts_of, random_batch

TOKEN_BY_TOKEN = ("plain", "asymmetric", "dual", "kl", "k2", "correction", "tis", "icepop", "dr_grpo", "cispo", "sapo")
REMOVED = ((0, 2), (3, 4), (5, 2))
"""Tokens of `random_batch` that are in the loss, and that the filter removes."""


def filtered_batch(seed: int, *, by: str) -> tuple[Tensor, TokenFields, Tensor]:
    """A batch whose tokens have other log-probabilities over the whole vocabulary; and the removed ones, bool.

    `by`: curr or prev, under which the tokens are removed.
    """
    curr, tokens = random_batch(seed)
    removed = torch.zeros_like(curr, dtype=torch.bool)
    for place in REMOVED:
        assert tokens.loss_mask[place] > 0
        removed[place] = True
    tokens.unfiltered_logprobs = (
        curr - 0.1 - torch.rand(curr.shape, generator=torch.Generator().manual_seed(seed)).double()
    )
    if by == "curr":
        curr = curr.masked_fill(removed, -math.inf)
    else:
        tokens.prev_logprobs = tokens.prev_logprobs.masked_fill(removed, -math.inf)
    return curr, tokens, removed


@pytest.mark.parametrize("by", ["curr", "prev"])
@pytest.mark.parametrize("name", TOKEN_BY_TOKEN)
def test_removed_tokens_leave_the_loss_and_stay_in_its_denominator(name: str, by: str) -> None:
    curr, tokens, removed = filtered_batch(3, by=by)
    curr.requires_grad_()
    tokens.unfiltered_logprobs.requires_grad_()
    loss_fn, counts = ClippedPGLossFn(CONFIGS[name]), counts_of(tokens)
    loss, metrics = loss_fn(curr, tokens, counts)
    rest = replace(tokens, loss_mask=tokens.loss_mask.masked_fill(removed, 0.0))
    expected, _ = loss_fn(curr, rest, counts)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert metrics["outside_filter_fraction"].item() == pytest.approx(len(REMOVED) / counts.tokens)
    assert all(value.isfinite() for value in metrics.values())
    inputs = (curr, tokens.unfiltered_logprobs)
    found, wanted = (torch.autograd.grad(one, inputs, allow_unused=True) for one in (loss, expected))
    assert (found[0][removed] == 0).all()
    assert found[0].isfinite().all()
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["gspo", "gspo_corrected", "seq_mask_tis", "everything", "sequences"])
def test_responses_with_removed_tokens_are_the_same_in_both_forms(name: str) -> None:
    """In sums and means of a response a removed token is a log ratio of 0; the response does not get shorter."""
    curr, tokens, removed = filtered_batch(4, by="prev")
    loss_fn, counts = ClippedPGLossFn(CONFIGS[name]), counts_of(tokens)
    loss, metrics = loss_fn(curr, tokens, counts)
    rows = torch.arange(len(curr))[:, None].expand_as(curr).flatten()
    segments = Segments(rows, tokens.loss_mask.sum(dim=1).float())
    flat = TokenFields(**{entry: values.flatten() for entry, values in tokens.as_dict().items()})
    again, flat_metrics = loss_fn(curr.flatten(), flat, counts, segments)
    assert again.item() == pytest.approx(loss.item(), rel=1e-6)
    assert {one: float(value) for one, value in flat_metrics.items()} == pytest.approx(
        {one: float(value) for one, value in metrics.items()}, rel=1e-6
    )
    # The same as a token about which all log-probabilities agree, and whose advantage is 0.
    agreed = {entry: getattr(tokens, entry).masked_fill(removed, 0.0) for entry in ("prev_logprobs", "advantages")}
    agreed |= {
        entry: getattr(tokens, entry).masked_fill(removed, 0.0)
        for entry in ("generation_logprobs", "unfiltered_logprobs", "reference_logprobs")
    }
    expected, _ = loss_fn(curr.masked_fill(removed, 0.0), replace(tokens, **agreed), counts)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_kl_compares_whole_distributions(weighted: bool) -> None:
    """Only its weight, the ratio of sampling distributions, is over kept tokens."""
    curr, tokens, removed = filtered_batch(5, by="curr")
    config = LossConfig(reference_policy_kl_penalty=1.0, use_on_policy_kl_approximation=weighted)
    _, metrics = ClippedPGLossFn(config)(curr, tokens, counts_of(tokens))
    inside = (tokens.loss_mask > 0) & ~removed
    total = 0.0
    columns = (curr, tokens.unfiltered_logprobs, tokens.prev_logprobs, tokens.reference_logprobs)
    for now, whole, old, reference in zip(*(one[inside].tolist() for one in columns), strict=True):
        kl = math.exp(reference - whole) - (reference - whole) - 1
        total += kl * (math.exp(now - old) if weighted else 1.0)
    assert metrics["kl_penalty"].item() == pytest.approx(total / float(tokens.loss_mask.sum()), rel=1e-9)


def test_without_a_filter_an_infinite_log_probability_is_no_removed_token() -> None:
    curr, tokens, _ = filtered_batch(6, by="prev")
    tokens.unfiltered_logprobs = None
    loss, metrics = ClippedPGLossFn(CONFIGS["plain"])(curr, tokens, counts_of(tokens))
    assert "outside_filter_fraction" not in metrics
    assert metrics["token_mult_prob_error_max"] > 1e10
    assert loss.isfinite()


def test_removed_tokens_do_not_make_a_response_inconsistent() -> None:
    mask = torch.ones(5)
    generation = torch.full((5,), -1.0)
    prev = torch.tensor([-1.0, -math.inf, -1.0 + math.log(1.5), -math.inf, -math.inf])
    beyond, metrics = find_inconsistent_sequences(mask, prev, generation, [3, 2], threshold=1.3)
    assert beyond.tolist() == [False, False]
    assert metrics["max_seq_mult_prob_error"] == pytest.approx(1.25)
