"""The value model's advantages and returns (GAE), and its loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenFields, require_field
from megatron_grpo.config.loop_schema import MseValueLossConfig, PPOAdvantageConfig
from megatron_grpo.losses.loss import GlobalCounts, Segments, mask_values, token_mean, token_weights, weighted_mean

VARIANCE_EPSILON = 1e-8  # added to the variance before advantages are divided by its root


class AdvantageEstimate(NamedTuple):
    """Training targets of policy and value model at each token, [sum(lengths)]."""

    advantages: Tensor  # how much better a token turned out than the value model expected
    returns: Tensor  # target of the value before the token


def token_rewards(rewards: Tensor, lengths: list[int], token_penalty: Tensor | None = None) -> Tensor:
    """Rewards by token: a response's reward at its last token, minus penalties.

    `rewards`: [responses]. `token_penalty`, coefficient included, is subtracted at each token: [sum(lengths)], as is
    the result. A response without tokens gets no reward.
    """
    counts = torch.tensor(lengths, device=rewards.device)
    by_token = rewards.new_zeros(int(counts.sum())) if token_penalty is None else -token_penalty.to(rewards.dtype)
    # A response without tokens has no last token: the index would be that of the response before it.
    last = (counts.cumsum(0) - 1)[counts > 0]
    by_token[last] += rewards[counts > 0]
    return by_token


def gae(token_rewards: Tensor, values: Tensor, lengths: list[int], gamma: float, lam: Tensor) -> Tensor:
    """Generalised advantage estimation within responses (Schulman et al. 2016, eqs. 11-16).

    ::

        delta_t = r_t + gamma V_(t+1) - V_t,    A_t = delta_t + gamma lambda A_(t+1)

    V_t is the value before token t is chosen. After the last token, also of a truncated response, V and A are 0.

    Args:
        token_rewards: [sum(lengths)], the responses laid end to end; so is the result.
        values: [sum(lengths)]: the value model's expectation before each token.
        lam: [responses] or [1]: lambda of each response, or of all.
    """
    if not len(values):
        return values
    counts = torch.tensor(lengths, device=values.device)
    inside = torch.arange(int(counts.max()), device=values.device) < counts[:, None]
    padded = values.new_zeros(2, *inside.shape)  # the value after the last token is 0
    padded[:, inside] = torch.stack([token_rewards.to(values.dtype), values])
    reward, value = padded
    zeros = torch.zeros_like(value[:, 0])
    next_value = advantage = zeros
    advantages = torch.zeros_like(value)
    decay = gamma * lam.to(values)
    # Backwards in time, all responses at once: the recursion is over tokens, as many as the longest response has.
    for t in range(inside.shape[1] - 1, -1, -1):
        delta = reward[:, t] + gamma * next_value - value[:, t]
        advantage = torch.where(inside[:, t], delta + decay * advantage, zeros)
        next_value = value[:, t]
        advantages[:, t] = advantage
    return advantages[inside]


def length_adaptive_lambda(lengths: list[int], alpha: float) -> Tensor:
    """lambda = 1 - 1 / (alpha * length), at least 0.

    VAPO, Yue et al. 2025: the longer a response, the further its reward reaches. Shape [responses], float64.
    """
    counts = torch.tensor(lengths, dtype=torch.float64)
    # A negative lambda would flip the sign of every second later token's error.
    return (1 - 1 / (alpha * counts.clamp(min=1))).clamp(min=0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Values with mean 0 and variance 1 over the mask.

    The variance has divisor n - 1. Values [tokens] are those of the whole step, so that mean and variance are those of
    all ranks. The result is 0 outside the mask, and everywhere when all values inside are equal.
    """
    inside = values[mask]
    whitened = torch.zeros_like(values)
    # Equal values differ from their mean only by rounding errors, which the division would turn into a signal.
    if len(inside) and (inside != inside[0]).any():
        whitened[mask] = (inside - inside.mean()) * (inside.var() + VARIANCE_EPSILON).rsqrt()
    return whitened


def estimate_advantages(
    token_rewards: Tensor, values: Tensor, lengths: list[int], config: PPOAdvantageConfig
) -> AdvantageEstimate:
    """Advantages and returns, each with its lambda (decoupled GAE, VAPO).

    ::

        gae         advantages = GAE(lambda_policy),  returns = GAE(lambda_value) + values
        raw_reward  advantages = returns = the discounted sum of the rewards from the token on, without the values

    Advantages are not normalised here: see `whiten`. Rewards and values are [sum(lengths)], the responses laid end to
    end; values are those before each token, under the value model before the step.
    """
    if config.name == "raw_reward":
        # With values of 0 and lambda 1 the recursion of GAE is that of the discounted sum of rewards.
        to_go = gae(token_rewards, torch.zeros_like(values), lengths, config.gae_gamma, torch.ones(1))
        # A clone: advantages that are changed in place must leave the returns alone.
        return AdvantageEstimate(to_go, to_go.clone())
    separate = (config.gae_lambda_policy, config.gae_lambda_value)
    lambdas = [[config.gae_lambda if number is None else number] for number in separate]
    lambda_policy, lambda_value = torch.tensor(lambdas, dtype=torch.float64)
    if config.length_adaptive_alpha:
        lambda_policy = length_adaptive_lambda(lengths, config.length_adaptive_alpha)
    # Returns are advantages under lambda_value plus values, computed apart: the policy's lambda trades bias for
    # variance, while a value model that learns from its own bootstrapped values would keep their bias.
    return AdvantageEstimate(
        advantages=gae(token_rewards, values, lengths, config.gae_gamma, lambda_policy),
        returns=gae(token_rewards, values, lengths, config.gae_gamma, lambda_value) + values,
    )


# Returns whose variance is below this share of their mean square are all equal, up to rounding.
_RELATIVE_VARIANCE = 1e-6


class MseValueLossFn:
    """Squared error of values (a `losses.loss.LossFunction` whose first argument is values).

    ::

        loss = scale * token mean of 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

    R are the returns, V_old the values before the step, c is value_clip: a value that has improved and is further than
    c from V_old has no gradient (PPO's reference implementation; see Engstrom et al. 2020, section 3). Without
    value_clip the loss is the mean of 1/2 (V - R)^2. scale is the configuration's factor.
    """

    field_names = ("sampled", "values", "returns")

    def __init__(self, config: MseValueLossConfig) -> None:
        self.config = config

    def __call__(
        self, curr_values: Tensor, tokens: TokenFields, counts: GlobalCounts, segments: Segments | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this microbatch's share of the value model's loss and metrics.

        Fields are ignored outside the mask. The metrics take the values before the step, since later ones have been
        trained on these returns. value_clip_fraction counts the tokens where clipping made the loss larger;
        `add_explained_variance` turns the moments into explained_variance.
        """
        mask = require_field(tokens.loss_mask) > 0
        values, returns = mask_values(curr_values, mask), mask_values(require_field(tokens.returns), mask)
        old = mask_values(require_field(tokens.values), mask)
        error, old_error = values - returns, old - returns
        loss = clipped = error.square()
        if self.config.value_clip:
            clip = self.config.value_clip
            clipped = (torch.clamp(values, old - clip, old + clip) - returns).square()
            # The larger of both: clipping may remove a gradient, but never hides that a value has become worse.
            loss = torch.maximum(loss, clipped)
        total = 0.5 * weighted_mean(loss, mask, counts, token_weights(tokens, mask))
        metrics = {
            "loss": total,
            "value_clip_fraction": token_mean(clipped > error.square(), mask, counts),
            "value_mean": token_mean(old, mask, counts),
            "return_mean": token_mean(returns, mask, counts),
            "return_squared": token_mean(returns.square(), mask, counts),
            "value_error": token_mean(old_error, mask, counts),
            "value_error_squared": token_mean(old_error.square(), mask, counts),
        }
        return self.config.scale * total, metrics


def add_explained_variance(metrics: dict[str, float]) -> None:
    """Replace moments in a step's metrics by the explained variance.

    1 - Var(R - V) / Var(R) is 1 if the values equal the returns, and 0 if they predict no better than a constant or the
    returns are all equal.
    """
    # From moments, because moments add up over ranks and microbatches, and variances do not.
    moments = ("return_squared", "value_error", "value_error_squared")
    squared, error, error_squared = (metrics.pop(name) for name in moments)
    variance = squared - metrics["return_mean"] ** 2
    unexplained = error_squared - error**2
    has_variance = variance > _RELATIVE_VARIANCE * squared
    metrics["explained_variance"] = 1.0 - unexplained / variance if has_variance else 0.0
