"""Edges of every objective, correction, kind of advantages and algorithm's loss, from the tables that name them."""

from __future__ import annotations

import math
import typing
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenFields
from megatron_grpo.config.algorithms import ALGORITHMS
from megatron_grpo.config.formulas import ADVANTAGES, CORRECTIONS, OBJECTIVES
from megatron_grpo.config.loop_schema import DPOConfig, KTOConfig
from megatron_grpo.config.loss_schema import AdvantageEstimatorConfig
from megatron_grpo.config.schema import GRPOConfig, LossConfig
from megatron_grpo.losses.advantages import make_estimator, response_advantages
from megatron_grpo.losses.chord_loss import ChordLossFn
from megatron_grpo.losses.distillation_loss import DistillationLossFn
from megatron_grpo.losses.likelihood import NLLLossFn
from megatron_grpo.losses.loss import LossFunction
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.losses.preference import (
    PreferenceLoss,
    SequenceGradientLossFn,
    compute_label_loss,
    compute_preference_loss,
    compute_score_loss,
)
from tests.support.loss_oracle import counts_of

LIMITS = {"truncated_importance_sampling_ratio": 1.3, "truncated_importance_sampling_ratio_min": 0.8}
LARGEST = 1e29
"""Log-probabilities times advantages beyond it may have an infinite sum."""


def make_edge_batch(data: st.DataObject) -> tuple[Tensor, TokenFields]:
    """Few responses, perhaps of no token or of equal values, with ratios that may be infinite or 0."""
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    lengths[0] = max(lengths[0], 1)
    mask = (torch.arange(4) < torch.tensor(lengths)[:, None]).float()
    logprob = st.sampled_from([0.0, -1e-7, -1.0, -3.0, -200.0, -1e30])
    engine = logprob | st.just(-math.inf)

    def draw(values: st.SearchStrategy[float]) -> Tensor:
        rows = data.draw(st.lists(values, min_size=mask.numel(), max_size=mask.numel()))
        return torch.tensor(rows).view_as(mask)

    curr = draw(logprob)
    is_equal = data.draw(st.booleans())
    tokens = TokenFields(
        loss_mask=mask,
        advantages=draw(st.sampled_from([0.0, 1.0, -2.0, 1e6])),
        prev_logprobs=curr.clone() if is_equal else draw(logprob),
        generation_logprobs=curr.clone() if is_equal else draw(engine),
        selected=draw(st.sampled_from([0.0, 1.0])),
        positive=torch.zeros_like(mask),
    )
    return curr, tokens


def expect_finite(loss_fn: LossFunction, curr: Tensor, tokens: TokenFields, learnt: Tensor) -> None:
    """Finite numbers, and no gradient at tokens that are not `learnt`."""
    values = curr.clone().requires_grad_()
    loss, metrics = loss_fn(values, tokens, counts_of(tokens))
    loss.backward()
    assert values.grad is not None
    assert values.grad.isfinite().all()
    assert (values.grad[~learnt] == 0).all()
    if curr.min() > -LARGEST:
        assert loss.isfinite()
        extremes = {"token_mult_prob_error_max", "probs_ratio_min", "probs_ratio_max"}
        assert all(value.isfinite() for key, value in metrics.items() if key not in extremes)


@pytest.mark.parametrize("name", [*OBJECTIVES, *CORRECTIONS, "log_ratio_penalty"])
@settings(max_examples=60)
@given(data=st.data())
def test_edges_of_every_loss(name: str, data: st.DataObject) -> None:
    """One sample, all equal, infinite ratios, empty responses: finite numbers, and nothing outside."""
    curr, tokens = make_edge_batch(data)
    keys: dict[str, Any] = {"reference_policy_kl_penalty": 0.0}
    if name in OBJECTIVES:
        keys |= {"objective": name, "token_level_loss": not OBJECTIVES[name].averages_responses}
    elif name in CORRECTIONS:
        keys |= {"corrections": [name]} | {key: LIMITS[key] for key in CORRECTIONS[name].reads & LIMITS.keys()}
    else:
        keys |= {name: 0.5}
    expect_finite(ClippedPGLossFn(LossConfig(**keys)), curr, tokens, tokens.loss_mask > 0)


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=60)
@given(data=st.data())
def test_edges_of_all_advantages(name: str, data: st.DataObject) -> None:
    """Missing and equal rewards, empty responses: finite numbers, 0 without a reward and without a difference."""
    samples = data.draw(st.integers(2 if ADVANTAGES[name].compares_samples else 1, 5))
    reward = st.sampled_from([0.0, 1.0, -1.0, 0.1, 1e20, math.nan])
    rows = data.draw(st.lists(st.lists(reward, min_size=samples, max_size=samples), min_size=1, max_size=3))
    rewards = torch.tensor(rows)
    rows = data.draw(st.lists(st.integers(0, 9), min_size=rewards.numel(), max_size=rewards.numel()))
    lengths = torch.tensor(rows).view_as(rewards)
    estimator = make_estimator(GRPOConfig(adv_estimator=AdvantageEstimatorConfig(name=name, pass_k=2)))
    parts: dict[str, Any] = {"reward_parts": rewards[None], "reward_weights": torch.ones(1), "token_penalty": None}
    sizes = data.draw(st.lists(st.sampled_from([0.0, 0.3, 2.0]), min_size=int(lengths.sum())))
    parts |= {"score_sizes": torch.tensor(sizes)[: int(lengths.sum())], "task_baselines": torch.zeros_like(rewards)}
    if ADVANTAGES[name].by_token:
        advantages = estimator(rewards=rewards, lengths=lengths, **parts)
        assert advantages.shape == (int(lengths.sum()),)
        assert advantages.isfinite().all()
        return
    advantages = response_advantages(estimator, rewards, lengths, **parts)
    assert advantages.shape == rewards.shape
    assert advantages.isfinite().all()
    assert (advantages[rewards.isnan()] == 0).all()
    if name not in ("gdpo", "rae"):  # which compare responses of other groups
        for row, result in zip(rewards, advantages, strict=True):
            present = row[~row.isnan()]
            assert (present != present[:1]).any() or (result == 0).all()


def make_distillation_loss(weight: float, **keys: Any) -> DistillationLossFn:
    return DistillationLossFn(LossConfig(reference_policy_kl_penalty=0.0, policy_loss_weight=weight, **keys))


def make_chord_loss(favours_uncertain: bool) -> ChordLossFn:
    loss = ChordLossFn(LossConfig(reference_policy_kl_penalty=0.0))
    loss.demonstration_weight, loss.favours_uncertain = 0.5, favours_uncertain
    return loss


# By the loss of an algorithm, as the table names it.
LOSSES: dict[str, list[LossFunction]] = {
    "policy_loss:ClippedPGLossFn": [
        ClippedPGLossFn(LossConfig(reference_policy_kl_penalty=0.0, environment_nll_weight=0.1))
    ],
    "likelihood:NLLLossFn": [NLLLossFn()],
    "preference:SequenceGradientLossFn": [SequenceGradientLossFn()],
    "chord_loss:ChordLossFn": [make_chord_loss(False), make_chord_loss(True)],
    "distillation_loss:DistillationLossFn": [
        make_distillation_loss(0.0),
        make_distillation_loss(0.5),
        make_distillation_loss(0.0, corrections=["high-entropy"]),
    ],
}


@pytest.mark.parametrize("name", sorted({algorithm.loss for algorithm in ALGORITHMS.values()}))
@settings(max_examples=40)
@given(data=st.data())
def test_edges_of_the_loss_of_every_algorithm(name: str, data: st.DataObject) -> None:
    curr, tokens = make_edge_batch(data)
    flags = data.draw(st.lists(st.booleans(), min_size=curr.numel(), max_size=curr.numel()))
    imitated = (torch.tensor(flags).view_as(curr) & (tokens.loss_mask == 0)).float()
    for loss_fn in LOSSES[name.removeprefix("megatron_grpo.losses.")]:
        fields = replace(tokens, imitated=imitated, divergence=-curr.clamp(min=-200.0))
        if isinstance(loss_fn, DistillationLossFn):
            fields = replace(fields, imitated=None, selected=None)
        learnt = (tokens.loss_mask > 0) | (imitated > 0)
        if isinstance(loss_fn, DistillationLossFn) and not loss_fn.weight:
            loss, _ = loss_fn(curr, fields, counts_of(tokens))
            assert loss.isfinite()
        else:
            expect_finite(loss_fn, curr, fields, learnt)


@pytest.mark.parametrize("name", [*typing.get_args(typing.get_type_hints(DPOConfig)["loss_type"]), "kto", "score"])
@settings(max_examples=40)
@given(data=st.data())
def test_edges_of_losses_of_whole_responses(name: str, data: st.DataObject) -> None:
    """One row, equal responses, log-probabilities far from the reference's: finite loss and gradient."""
    count = data.draw(st.integers(1, 3))
    logprob = st.sampled_from([0.0, -1e-7, -3.0, -1e4, -1e12])

    def draw(values: st.SearchStrategy[Any]) -> Tensor:
        return torch.tensor(data.draw(st.lists(values, min_size=2 * count, max_size=2 * count))).view(count, 2)

    policy, reference = draw(logprob).double(), draw(logprob).double()
    if data.draw(st.booleans()):
        reference = policy.clone()
    weights = torch.tensor([1.0, *data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=2))])[:count]
    result: PreferenceLoss
    if name == "kto":
        point = data.draw(st.sampled_from([0.0, 1e12]))
        result = compute_label_loss(policy, reference, draw(st.booleans()), weights.double(), point, KTOConfig())
    elif name == "score":
        result = compute_score_loss(policy, torch.zeros(count).double(), weights.double(), center=0.01)
    else:
        tokens = draw(st.integers(1, 4))
        result = compute_preference_loss(policy, reference, tokens, weights.double(), DPOConfig(loss_type=name))
    assert math.isfinite(result.loss)
    assert result.gradient.isfinite().all()
    assert (result.gradient[weights == 0] == 0).all()
    assert all(math.isfinite(value) for value in result.metrics.values())
