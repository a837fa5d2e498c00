"""Generalised advantage estimation against its defining sums in float64, its limits, and whitening by hand."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_grpo.config.loop_schema import PPOAdvantageConfig
from megatron_grpo.losses.value import estimate_advantages, gae, length_adaptive_lambda, token_rewards, whiten

LENGTHS = [4, 1, 7, 0, 3]


def make_case(lengths: list[int] = LENGTHS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random token rewards and values, [sum(lengths)], float64."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(lengths), generator=generator, dtype=torch.float64)
    return rewards, values


def brute_force(rewards: Tensor, values: Tensor, lengths: list[int], gamma: float, lam: list[float]) -> Tensor:
    """Schulman et al. 2016, eq. 16: A_t = sum_l (gamma lambda)^l delta_(t+l), each sum written out."""
    out: list[float] = []
    start = 0
    for length, one in zip(lengths, lam, strict=True):
        r = rewards[start : start + length].tolist()
        v = [*values[start : start + length].tolist(), 0.0]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(length)]
        out += [sum((gamma * one) ** (k - t) * delta[k] for k in range(t, length)) for t in range(length)]
        start += length
    return torch.tensor(out, dtype=torch.float64)


def reward_to_go(rewards: Tensor, lengths: list[int], gamma: float) -> Tensor:
    out = []
    for piece in rewards.split(lengths):
        out += [sum(gamma ** (k - t) * float(piece[k]) for k in range(t, len(piece))) for t in range(len(piece))]
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_gae_equals_its_sum(gamma: float, lam: float) -> None:
    rewards, values = make_case()
    expected = brute_force(rewards, values, LENGTHS, gamma, [lam] * len(LENGTHS))
    actual = gae(rewards, values, LENGTHS, gamma, torch.full((len(LENGTHS),), lam))
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.floats(0.5, 1), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_gae_with_a_lambda_for_each_response(lengths: list[int], gamma: float, seed: int) -> None:
    rewards, values = make_case(lengths, seed)
    lam = [random.Random(seed + i).random() for i in range(len(lengths))]
    actual = gae(rewards, values, lengths, gamma, torch.tensor(lam, dtype=torch.float64))
    torch.testing.assert_close(actual, brute_force(rewards, values, lengths, gamma, lam), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_lambda_one_is_reward_to_go_minus_value_and_lambda_zero_the_td_error(gamma: float) -> None:
    rewards, values = make_case()
    ones = torch.ones(len(LENGTHS))
    to_go = reward_to_go(rewards, LENGTHS, gamma)
    torch.testing.assert_close(gae(rewards, values, LENGTHS, gamma, ones), to_go - values, atol=1e-12, rtol=0)
    following = torch.cat([torch.cat([v[1:], v.new_zeros(min(len(v), 1))]) for v in values.split(LENGTHS)])
    td = rewards + gamma * following - values
    torch.testing.assert_close(gae(rewards, values, LENGTHS, gamma, 0 * ones), td, atol=1e-12, rtol=0)


def test_with_exact_values_nothing_is_an_advantage() -> None:
    rewards, _ = make_case()
    values = reward_to_go(rewards, LENGTHS, 0.9)
    for lam in (0.0, 0.4, 1.0):
        advantages = gae(rewards, values, LENGTHS, 0.9, torch.full((len(LENGTHS),), lam))
        assert advantages.abs().max() < 1e-12


def test_a_response_does_not_see_its_neighbours() -> None:
    rewards, values = make_case()
    lam = torch.full((len(LENGTHS),), 0.7)
    whole = gae(rewards, values, LENGTHS, 0.9, lam).split(LENGTHS)
    for i, (r, v) in enumerate(zip(rewards.split(LENGTHS), values.split(LENGTHS), strict=True)):
        torch.testing.assert_close(whole[i], gae(r, v, [len(r)], 0.9, lam[:1]), atol=1e-14, rtol=0)


def test_rewards_come_at_the_last_token_and_penalties_at_each() -> None:
    rewards = torch.tensor([1.0, 2.0, 3.0, 9.0, 5.0])
    expected = torch.zeros(15)
    expected[[3, 4, 11, 14]] = torch.tensor([1.0, 2.0, 3.0, 5.0])
    assert torch.equal(token_rewards(rewards, LENGTHS), expected)
    penalty = torch.arange(15.0)
    torch.testing.assert_close(token_rewards(rewards, LENGTHS, penalty), expected - penalty)


def test_length_adaptive_lambda_by_hand() -> None:
    actual = length_adaptive_lambda([10, 20, 100, 1000, 0], alpha=0.05)
    torch.testing.assert_close(actual, torch.tensor([0.0, 0.0, 0.8, 0.98, 0.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("keys", "lambda_policy", "lambda_value"),
    [
        ({}, [0.95] * 5, [0.95] * 5),
        ({"gae_lambda": 0.3}, [0.3] * 5, [0.3] * 5),
        ({"gae_lambda": 0.3, "gae_lambda_value": 1.0}, [0.3] * 5, [1.0] * 5),
        ({"gae_lambda_policy": 0.0, "gae_gamma": 0.5}, [0.0] * 5, [0.95] * 5),
        ({"length_adaptive_alpha": 0.0, "gae_lambda": 0.3}, [0.3] * 5, [0.3] * 5),
        (
            {"length_adaptive_alpha": 0.5, "gae_lambda_value": 1.0},
            [0.5, 0.0, 1 - 1 / 3.5, 0.0, 1 / 3],
            [1.0] * 5,
        ),
    ],
    ids=["one lambda", "another", "value", "policy", "alpha 0 is off", "length"],
)
def test_policy_and_value_have_their_own_lambda(
    keys: dict[str, Any], lambda_policy: list[float], lambda_value: list[float]
) -> None:
    rewards, values = make_case()
    config = PPOAdvantageConfig(**keys)
    actual = estimate_advantages(rewards, values, LENGTHS, config)
    gamma = keys.get("gae_gamma", 1.0)
    expected = brute_force(rewards, values, LENGTHS, gamma, lambda_policy)
    torch.testing.assert_close(actual.advantages, expected, atol=1e-12, rtol=1e-12)
    returns = brute_force(rewards, values, LENGTHS, gamma, lambda_value) + values
    torch.testing.assert_close(actual.returns, returns, atol=1e-12, rtol=1e-12)


def test_monte_carlo_returns_do_not_depend_on_the_values() -> None:
    rewards, values = make_case()
    config = PPOAdvantageConfig(gae_lambda_value=1.0)
    expected = reward_to_go(rewards, LENGTHS, 1.0)
    for guess in (values, 3 * values):
        returns = estimate_advantages(rewards, guess, LENGTHS, config).returns
        torch.testing.assert_close(returns, expected, atol=1e-12, rtol=0)


def test_raw_reward_is_the_reward_at_every_token() -> None:
    rewards = torch.tensor([1.0, -2.0, 0.5, 0.0, 4.0])
    by_token = token_rewards(rewards, LENGTHS)
    _, values = make_case()
    estimate = estimate_advantages(by_token, values, LENGTHS, PPOAdvantageConfig(name="raw_reward"))
    expected = torch.tensor([r for r, n in zip(rewards.tolist(), LENGTHS, strict=True) for _ in range(n)])
    torch.testing.assert_close(estimate.advantages, expected.double())
    torch.testing.assert_close(estimate.returns, expected.double())


def test_raw_reward_is_discounted_token_by_token() -> None:
    rewards, values = make_case()
    estimate = estimate_advantages(rewards, values, LENGTHS, PPOAdvantageConfig(name="raw_reward", gae_gamma=0.9))
    expected = reward_to_go(rewards, LENGTHS, 0.9)
    torch.testing.assert_close(estimate.advantages, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(estimate.returns, expected, atol=1e-12, rtol=1e-12)


def test_whitening_by_hand_leaves_the_rest_out() -> None:
    values = torch.tensor([1.0, math.nan, 2.0, 6.0, 100.0], dtype=torch.float64)
    mask = torch.tensor([True, False, True, True, False])
    std = math.sqrt(((1 - 3) ** 2 + (2 - 3) ** 2 + (6 - 3) ** 2) / 2)
    expected = torch.tensor([-2 / std, 0.0, -1 / std, 3 / std, 0.0], dtype=torch.float64)
    torch.testing.assert_close(whiten(values, mask), expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("inside", [0, 1, 3])
def test_nothing_to_compare_gives_zeros(inside: int) -> None:
    mask = torch.arange(4) < inside
    assert torch.equal(whiten(torch.full((4,), 0.1), mask), torch.zeros(4))
