"""Likelihoods of tokens that others wrote: which tokens they are, their loss and gradient token by token."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields, find_observed
from megatron_grpo.config.schema import LossConfig
from megatron_grpo.losses.likelihood import imitation_loss
from megatron_grpo.losses.loss import GlobalCounts
from megatron_grpo.losses.policy_loss import ClippedPGLossFn


def list_observed(sampled: list[list[int]]) -> list[bool]:
    """By the definition: tokens that were not sampled, after the first one of their sequence that was."""
    return [not flag and any(row[:number]) for row in sampled for number, flag in enumerate(row)]


@given(sampled=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=5))
def test_observed_tokens_follow_a_sampled_one_of_their_sequence(sampled: list[list[int]]) -> None:
    flat = np.array([bool(flag) for row in sampled for flag in row])
    assert find_observed(flat, np.array([len(row) for row in sampled])).tolist() == list_observed(sampled)


SAMPLED = [[0, 1, 1, 0, 0, 1, 0], [0, 0, 1, 1], [0, 1, 0], [0, 1, 0, 0, 1]]


def make_step(**fields: Any) -> StepBatch:
    values = {
        "lengths": np.array([len(row) for row in SAMPLED]),
        "response_tokens": np.array([sum(row) for row in SAMPLED]),
        "in_loss": np.array([True, True, False, True]),
    }
    return StepBatch(**(values | fields))


def make_tokens(step: StepBatch) -> TokenBatch:
    sampled = np.array([bool(flag) for row in SAMPLED for flag in row])
    zeros = np.zeros(len(sampled), dtype=np.float32)
    return TokenBatch.from_replica(step, {"sampled": [sampled], "generation_logprobs": [zeros]})


WEIGHTS = np.array([1.0, 1.0, 1.0, 0.5], dtype=np.float32)
OBSERVED = np.array([sum(list_observed([row])) for row in SAMPLED])


def test_a_step_counts_what_its_ranks_imitate() -> None:
    everything = np.arange(4)
    for weights in (None, WEIGHTS):
        step = make_step(imitated_tokens=OBSERVED, loss_weights=weights)
        fields = make_tokens(step).fields
        expected = 3 + 2 * (0.5 if weights is not None else 1)  # the third rollout is not in the loss
        assert GlobalCounts.count(step, everything).imitated_tokens == float(fields.imitated.sum()) == expected
    demonstrations = np.array([False, False, True, False])
    step = make_step(
        imitated_tokens=np.array([0, 0, 1, 0]), demonstrated=demonstrations, advantages=np.ones(4, dtype=np.float32)
    )
    counts, fields = GlobalCounts.count(step, everything), make_tokens(step).fields
    assert counts.imitated_tokens == float(fields.imitated.sum()) == 1
    assert (fields.imitated * fields.loss_mask).sum() == 0, "demonstrated tokens have no policy gradient"
    assert counts.all_sequences == 3
    assert GlobalCounts.count(make_step(), everything).imitated_tokens == 0
    assert make_tokens(make_step()).fields.imitated is None


def draw(seed: int) -> Tensor:
    count = sum(map(len, SAMPLED))
    return -torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 0.1


@pytest.mark.parametrize("has_filter", [False, True])
def test_the_loss_adds_the_mean_over_the_environments_tokens(has_filter: bool) -> None:
    step = make_step(imitated_tokens=OBSERVED, loss_weights=WEIGHTS)
    fields, counts = make_tokens(step).fields, GlobalCounts.count(step, np.arange(4))
    fields.advantages = draw(2) * fields.loss_mask
    logprobs = draw(1)
    if has_filter:  # it may remove what others wrote
        fields.unfiltered_logprobs = logprobs.clone().requires_grad_()
        logprobs = torch.where(fields.loss_mask > 0, logprobs, -math.inf)
    logprobs.requires_grad_()
    source = fields.unfiltered_logprobs if has_filter else logprobs
    plain = LossConfig(reference_policy_kl_penalty=0.0)
    without, _ = ClippedPGLossFn(plain)(logprobs[None], map_rows(fields), counts)
    config = LossConfig(reference_policy_kl_penalty=0.0, environment_nll_weight=0.3)
    total, metrics = ClippedPGLossFn(config)(logprobs[None], map_rows(fields), counts)
    observed = list_observed(SAMPLED)
    weights = np.repeat(WEIGHTS * step.in_loss, step.lengths).tolist()
    weighted = [weight if flag else 0.0 for weight, flag in zip(weights, observed, strict=True)]
    mean = -sum(w * value for w, value in zip(weighted, source.tolist(), strict=True)) / sum(weighted)
    assert metrics["environment_nll"].item() == pytest.approx(mean)
    assert (total - without).item() == pytest.approx(0.3 * mean)
    (gradient,) = torch.autograd.grad(total - without, source)
    assert gradient.tolist() == pytest.approx([-0.3 * w / sum(weighted) for w in weighted])


def map_rows(fields: TokenFields) -> TokenFields:
    return TokenFields(**{name: value[None] for name, value in fields.as_dict().items()})


@given(cuts=st.sets(st.integers(1, 3)), favours_uncertain=st.booleans())
def test_shares_of_microbatches_add_up(cuts: set[int], favours_uncertain: bool) -> None:
    step = make_step(imitated_tokens=OBSERVED)
    batch, counts, logprobs = make_tokens(step), GlobalCounts.count(step, np.arange(4)), draw(4)
    batch.fields.generation_logprobs = logprobs  # cut like a field
    whole = imitation_loss(logprobs, batch.fields, counts, favours_uncertain=favours_uncertain)
    bounds = [0, *sorted(cuts), 4]
    parts = [batch.select(range(first, last)).fields for first, last in itertools.pairwise(bounds)]
    shares = [
        imitation_loss(part.generation_logprobs, part, counts, favours_uncertain=favours_uncertain) for part in parts
    ]
    assert sum(share.item() for share in shares) == pytest.approx(whole.item())


def test_uncertain_tokens_count_most_and_their_factor_has_no_gradient() -> None:
    probabilities = torch.tensor([1.0, 0.5, 1e-30, 0.9], dtype=torch.float64)
    logprobs = probabilities.log().requires_grad_()
    counts = GlobalCounts(tokens=1, sequences=1, all_sequences=1, imitated_tokens=4)
    loss = imitation_loss(logprobs, TokenFields(imitated=torch.ones(4)), counts, favours_uncertain=True)
    factors = [0.0, 0.25, 1e-30, 0.09]
    terms = zip(factors, probabilities.tolist(), strict=True)
    assert loss.item() == pytest.approx(sum(-factor * math.log(p) for factor, p in terms) / 4)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.tolist() == pytest.approx([-factor / 4 for factor in factors])


def test_a_step_without_such_tokens_adds_nothing() -> None:
    counts = GlobalCounts(tokens=1, sequences=1, all_sequences=1)
    logprobs = torch.tensor([-1.0, -math.inf], requires_grad=True)
    loss = imitation_loss(logprobs, TokenFields(imitated=torch.zeros(2)), counts)
    assert loss.item() == 0
    assert torch.equal(torch.autograd.grad(loss, logprobs)[0], torch.zeros(2))
