"""Advantages and returns of a step: where they stand, what they are normalised over, what penalises them."""

from __future__ import annotations

import pytest
import torch

from tests.support.ppo_batch import VALUES, advantages_of, make_config

PLAIN = {"gae_lambda": 1.0, "normalize_advantages": False}


def test_monte_carlo_advantages_are_reward_minus_value_at_sampled_tokens_only() -> None:
    batch = advantages_of(make_config(PLAIN))
    returns = torch.tensor([0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0.5, 0.5])
    torch.testing.assert_close(batch.tokens["returns"], returns)
    torch.testing.assert_close(batch.tokens["advantages"], returns - VALUES)


def test_they_are_normalised_over_the_tokens_in_the_loss_alone() -> None:
    """A truncated response that is filtered out takes no part; its returns stay what they are."""
    raw = advantages_of(make_config(PLAIN)).tokens["advantages"]
    batch = advantages_of(make_config({**PLAIN, "normalize_advantages": True}, overlong_filtering=True))
    inside = batch.tokens["loss_mask"] > 0
    assert inside.sum() == 5
    expected = (raw[inside] - raw[inside].mean()) / raw[inside].std()
    torch.testing.assert_close(batch.tokens["advantages"][inside], expected, atol=1e-5, rtol=1e-5)
    assert (batch.tokens["advantages"][~inside] == 0).all()


def test_clipping_comes_last() -> None:
    batch = advantages_of(make_config(PLAIN, advantage_clip_low=-0.1, advantage_clip_high=0.5))
    raw = advantages_of(make_config(PLAIN)).tokens["advantages"]
    torch.testing.assert_close(batch.tokens["advantages"], raw.clamp(-0.1, 0.5))


def test_a_penalty_in_the_reward_counts_at_every_later_token() -> None:
    """k1 at log ratio 0.25 and weight 0.2 takes 0.05 a token from what follows."""
    loss = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.2, "reference_policy_kl_type": "k1"}
    batch = advantages_of(make_config(PLAIN, loss))
    expected = torch.tensor([0, 0, 0.85, 0.9, 0.95, 0, 0, -0.05, 0, 0, 0.4, 0.45])
    torch.testing.assert_close(batch.tokens["returns"], expected)


@pytest.mark.parametrize("name", ["gae", "raw_reward"])
def test_raw_reward_alone_does_not_look_at_the_values(name: str) -> None:
    advantages = advantages_of(make_config({**PLAIN, "name": name})).tokens["advantages"]
    to_go = torch.tensor([0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0.5, 0.5])
    assert torch.equal(advantages, to_go) == (name == "raw_reward")
