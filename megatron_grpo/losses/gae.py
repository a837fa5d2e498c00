"""From token rewards and values to advantages and returns: generalised advantage estimation and its variants."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_grpo.config.loop_schema import PPOAdvantageConfig

VARIANCE_EPSILON = 1e-8
"""Added to the variance before advantages are divided by its root."""


class Estimate(NamedTuple):
    """Training targets of the policy and of the value model, token by token."""

    advantages: Tensor
    """[sum(lengths)], floating point: how much better a token turned out than the value model expected."""
    returns: Tensor
    """[sum(lengths)], floating point: target of the value before the token."""


def token_rewards(rewards: Tensor, lengths: list[int], token_penalty: Tensor | None = None) -> Tensor:
    """The reward of a response at its last token, minus a penalty at every token.

    Args:
        rewards: [responses], floating point: reward of each response.
        lengths: tokens of each response; one without tokens gets no reward.
        token_penalty: [sum(lengths)], floating point: subtracted at each token, coefficient included; None is nothing.

    Returns:
        [sum(lengths)], the dtype of the rewards: the responses laid end to end.
    """
    counts = torch.tensor(lengths, device=rewards.device)
    by_token = rewards.new_zeros(int(counts.sum())) if token_penalty is None else -token_penalty.to(rewards.dtype)
    # A response without tokens has no last one: what stands there belongs to the response before it.
    last = (counts.cumsum(0) - 1)[counts > 0]
    by_token[last] += rewards[counts > 0]
    return by_token


def gae(token_rewards: Tensor, values: Tensor, lengths: list[int], gamma: float, lam: Tensor) -> Tensor:
    """Generalised advantage estimation (Schulman et al. 2016, eqs. 11 to 16) within each response::

        delta_t = r_t + gamma V_(t+1) - V_t,    A_t = delta_t + gamma lambda A_(t+1)

    V_t is the value before token t is chosen. A response is over after its last token, also a truncated one: nothing
    follows, so value and advantage there are 0.

    Args:
        token_rewards: [sum(lengths)], floating point, the responses laid end to end.
        values: [sum(lengths)], floating point: the value model's expectation before each token.
        lengths: tokens of each response.
        gamma: discount of the next token.
        lam: [responses], floating point: lambda of each response.

    Returns:
        [sum(lengths)], the dtype of the values.
    """
    if not len(values):
        return values
    counts = torch.tensor(lengths, device=values.device)
    inside = torch.arange(int(counts.max()), device=values.device) < counts[:, None]
    padded = values.new_zeros(2, *inside.shape)  # zeros past the end stand for the value there
    padded[:, inside] = torch.stack([token_rewards.to(values.dtype), values])
    reward, value = padded
    after = torch.zeros_like(value[:, 0])
    next_value, advantage = after.clone(), after.clone()
    out = torch.zeros_like(value)
    decay = gamma * lam.to(values)
    # Backwards in time, all responses at once: the recursion is over tokens, as many as the longest response has.
    for t in range(inside.shape[1] - 1, -1, -1):
        delta = reward[:, t] + gamma * next_value - value[:, t]
        advantage = torch.where(inside[:, t], delta + decay * advantage, after)
        next_value = value[:, t]
        out[:, t] = advantage
    return out[inside]


def length_adaptive_lambda(lengths: list[int], alpha: float) -> Tensor:
    """lambda = 1 - 1 / (alpha * length): the longer a response, the further its reward reaches (VAPO, Yue et al. 2025).

    Args:
        lengths: tokens of each response.
        alpha: the larger, the closer lambda is to 1.

    Returns:
        [responses], float64; 0 where the formula is negative, for responses of fewer than 1 / alpha tokens.
    """
    counts = torch.tensor(lengths, dtype=torch.float64)
    # A length of at least 1, because an empty response must not divide by 0; lambda of at least 0, because a negative
    # one would turn every second later token's error round.
    return (1 - 1 / (alpha * counts.clamp(min=1))).clamp(min=0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Values shifted and scaled to mean 0 and variance 1 over the mask (variance with divisor n - 1).

    Args:
        values: [tokens], floating point, of the whole step, so that mean and variance are those of all ranks.
        mask: [tokens], bool; what stands outside takes no part.

    Returns:
        [tokens], the dtype of the values; 0 outside the mask, and everywhere when all values inside are equal.
    """
    inside = values[mask]
    out = torch.zeros_like(values)
    # Equal values differ from their mean by rounding at most, which the division would turn into a signal.
    if len(inside) and (inside != inside[0]).any():
        out[mask] = (inside - inside.mean()) * (inside.var() + VARIANCE_EPSILON).rsqrt()
    return out


def estimate_advantages(
    token_rewards: Tensor, values: Tensor, lengths: list[int], config: PPOAdvantageConfig
) -> Estimate:
    """Advantages for the policy and returns for the value model, each with its lambda (decoupled GAE, VAPO).

    ::

        gae         advantages = GAE(lambda_policy),  returns = GAE(lambda_value) + values
        raw_reward  advantages = returns = the discounted sum of the rewards from the token on, whatever the values say

    Args:
        token_rewards: [sum(lengths)], floating point, the responses laid end to end.
        values: [sum(lengths)], floating point: values before each token, under the value model as the step finds it.
        lengths: tokens of each response.
        config: which estimator, gamma and the lambdas. Advantages are not normalised here: see `whiten`.
    """
    if config.name == "raw_reward":
        # With values of 0 and lambda 1 the recursion of GAE is that of the discounted sum of rewards.
        to_go = gae(token_rewards, torch.zeros_like(values), lengths, config.gae_gamma, torch.ones(len(lengths)))
        # A clone: advantages that are changed in place must leave the returns alone.
        return Estimate(to_go, to_go.clone())
    constant = torch.ones(len(lengths), dtype=torch.float64)
    if config.length_adaptive_alpha:
        lambda_policy = length_adaptive_lambda(lengths, config.length_adaptive_alpha)
    else:
        lambda_policy = config.lambda_policy * constant
    lambda_value = config.lambda_value * constant
    # Returns are advantages plus values under lambda_value, so they are made apart: the policy's lambda trades bias for
    # variance, while a value model that learns from its own bootstrapped values would keep their bias.
    return Estimate(
        advantages=gae(token_rewards, values, lengths, config.gae_gamma, lambda_policy),
        returns=gae(token_rewards, values, lengths, config.gae_gamma, lambda_value) + values,
    )
