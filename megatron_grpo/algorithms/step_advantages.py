"""From the rewards of environments to scores, and from the scores of a step to advantages of responses or tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.token_batch import scatter_sampled
from megatron_grpo.batch.trajectory import Outcome
from megatron_grpo.config.loop_schema import LoopConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.losses.advantages import (
    gdpo_advantages,
    gdpo_scores,
    group_advantages,
    has_signal,
    reinforce_plus_plus_advantages,
    scale_rewards,
    shape_rewards,
)
from megatron_grpo.losses.divergence import kl_estimate
from megatron_grpo.losses.value import estimate_advantages, token_rewards, whiten
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.rollouts.shards import compute


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of some groups of samples; the scores of a group do not depend on the other groups."""

    rewards: Tensor
    """[groups, samples], float32: rewards after scaling and then shaping; NaN for a sample without a reward."""
    parts: Tensor | None
    """[functions, groups, samples], float32: rewards of each reward function, NaN where it gave none. None for
    estimators other than GDPO."""
    weights: Tensor | None
    """[functions], float32: weight of each reward function in the sum; None if `parts` is None."""
    differs: Tensor
    """[groups], bool: whether the samples of the group got different rewards (with GDPO, different advantages)."""
    kept: Tensor
    """[groups], bool: whether dynamic sampling keeps the group."""

    @staticmethod
    def joined(scores: Sequence[Scores]) -> Scores:
        """The scores of several sets of groups, one after the other."""
        parts = [one.parts for one in scores if one.parts is not None]
        return Scores(
            rewards=torch.cat([one.rewards for one in scores]),
            parts=torch.cat(parts, dim=1) if parts else None,
            weights=scores[0].weights,
            differs=torch.cat([one.differs for one in scores]),
            kept=torch.cat([one.kept for one in scores]),
        )


def score(config: Config, outcomes: Sequence[Outcome]) -> Scores:
    """Scale and shape rewards, and find the groups that have a learning signal.

    A group is kept when its rewards differ both before and after shaping. Length penalties alone are no signal:
    responses that are all right or all wrong nearly always differ in length, and DAPO drops them (Yu et al. 2025, eq.
    11). With GDPO a group is kept when the weighted sums of its normalised rewards differ, even if its rewards do not.

    Args:
        config: scaling and shaping of rewards, and the advantage estimator.
        outcomes: outcomes of whole groups; the samples of a prompt are neighbours.
    """
    samples = config.training_loop.num_generations_per_prompt
    given = [math.nan if outcome.reward is None else outcome.reward for outcome in outcomes]
    scaled = scale_rewards(
        torch.tensor(given, dtype=torch.float32).view(-1, samples), config.training_loop.reward_scaling
    )
    rewards = shape_rewards(
        scaled,
        torch.tensor([outcome.response_tokens for outcome in outcomes]).view(-1, samples),
        torch.tensor([outcome.truncated for outcome in outcomes]).view(-1, samples),
        config.training_loop.reward_shaping,
        config.generation.max_new_tokens,
    )
    if config.grpo.adv_estimator.name == "gdpo":
        parts, weights = _parts(config, outcomes)
        differs = has_signal(gdpo_scores(parts, weights))
        return Scores(rewards, parts, weights, differs, differs)
    differs = has_signal(rewards)
    return Scores(rewards, None, None, differs, has_signal(scaled) & differs)


def _parts(config: Config, outcomes: Sequence[Outcome]) -> tuple[Tensor, Tensor]:
    """Rewards by function, [functions, groups, samples], and the functions' weights, [functions], both float32."""
    weights = {name: weight for one in config.env.values() for name, weight in one.function_weights.items()}
    rows = [[outcome.reward_parts.get(name, math.nan) for outcome in outcomes] for name in weights]
    parts = torch.tensor(rows, dtype=torch.float32).view(
        len(weights), -1, config.training_loop.num_generations_per_prompt
    )
    return parts, torch.tensor(list(weights.values()))


Arrays = dict[str, NDArray[Any]]
"""Flat per-token entries by name, sequences end to end in the order of the step."""


def add_advantages(config: Config, scores: Scores, batch: StepBatch, rollouts: RolloutPool) -> NDArray[np.bool_]:
    """Add advantages to the batch: one for each response if its tokens share it, else one for every token.

    For PPO the batch has values, and returns are added too. With calculate_advantages_on_gpu the driver estimates
    both on its GPU, otherwise a rollout worker does.

    Returns:
        [sequences], bool: whether the advantages of all sampled tokens are finite.
    """
    arguments: tuple[Any, ...] = (config, scores.rewards, batch.response_tokens)
    compared = (_policy_entry(config), "reference_logprobs") if config.loss_fn.use_kl_in_reward else ()
    entries = ("sampled", *compared)
    finite: NDArray[np.bool_]
    if config.value_model is not None:
        arguments, entries = (*arguments, batch.in_loss), (*entries, "values")
        if config.ppo.calculate_advantages_on_gpu:
            added, finite = compute(compute_ppo_token_advantages, batch, entries, arguments)
            batch.fields |= added
        else:
            finite = rollouts.compute(compute_ppo_token_advantages, batch, entries, *arguments)
    elif config.grpo.adv_estimator.name == "reinforce_plus_plus" or config.loss_fn.use_kl_in_reward:
        finite = rollouts.compute(compute_token_advantages, batch, entries, *arguments)
    else:
        if scores.parts is not None and scores.weights is not None:
            relative = gdpo_advantages(scores.parts, scores.weights)
        else:
            relative = _relative_to_group(config, scores.rewards)
        batch.advantages = clipped(relative.flatten(), config.training_loop).float().numpy()
        finite = np.isfinite(batch.advantages)
    return finite


def compute_token_advantages(
    lengths: NDArray[np.int64], arrays: Arrays, config: Config, rewards: Tensor, response_tokens: NDArray[np.int64]
) -> tuple[Arrays, NDArray[np.bool_]]:
    """The advantage of every sampled token, 0 for the others; runs in a rollout worker.

    Args:
        lengths: [sequences], int64: tokens of each.
        arrays: sampled (bool), [sum(lengths)]; with use_kl_in_reward reference_logprobs and the policy's
            (`_policy_entry`), float32.
        config: estimator, penalty and clipping.
        rewards: [groups, samples], float32: `Scores.rewards`, scaled and shaped; NaN where there is none.
        response_tokens: [sequences], int64: sampled tokens of each.

    Returns:
        advantages, [sum(lengths)], float32; and [sequences], bool: whether all of a sequence's advantages are finite.
    """
    estimator, of_responses = config.grpo.adv_estimator, response_tokens.tolist()
    penalty = kl_penalty_of_sampled(config, arrays)
    if estimator.name == "reinforce_plus_plus":
        by_token = reinforce_plus_plus_advantages(
            rewards, of_responses, token_penalty=penalty, minus_baseline=estimator.minus_baseline
        )
    else:
        assert penalty is not None
        # A KL penalty lowers the response's reward by its sum (as in RLOO, Ahmadian et al. 2024).
        sums = torch.stack([piece.sum() for piece in penalty.split(of_responses)]).view_as(rewards)
        by_response = _relative_to_group(config, rewards - sums).flatten()
        by_token = by_response.repeat_interleave(torch.tensor(of_responses))
    entry = scatter_sampled(clipped(by_token, config.training_loop), arrays["sampled"])
    return {"advantages": entry}, find_finite_sequences(entry, lengths)


def _policy_entry(config: Config) -> str:
    """The policy's log-probabilities that are compared with the reference's: those over the whole vocabulary."""
    return "whole_logprobs" if config.generation.has_training_filter else "prev_logprobs"


def kl_penalty_of_sampled(config: Config, arrays: Arrays) -> Tensor | None:
    """KL penalty of each sampled token under the policy that the step begins with: [sampled tokens], float32.

    None when use_kl_in_reward is off.
    """
    loss = config.loss_fn
    if not loss.use_kl_in_reward:
        return None
    penalty = loss.kl_in_reward * kl_estimate(
        torch.from_numpy(arrays[_policy_entry(config)]),
        torch.from_numpy(arrays["reference_logprobs"]),
        loss.reference_policy_kl_type,
        input_clamp=loss.kl_input_clamp_value,
        output_clamp=loss.kl_output_clamp_value,
    )
    return penalty[torch.from_numpy(arrays["sampled"])]


def clipped(advantages: Tensor, loop: LoopConfig) -> Tensor:
    """Clip advantages ([...], floating point) to advantage_clip_low and advantage_clip_high where these are set."""
    if loop.advantage_clip_low is None and loop.advantage_clip_high is None:
        return advantages
    return advantages.clamp(loop.advantage_clip_low, loop.advantage_clip_high)


def find_finite_sequences(entry: NDArray[np.float32], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether all values of a sequence are finite: [sequences], bool, from [tokens], float32, sequences end to end."""
    # Only non-finite values are looked up: nearly always there are none.
    wrong = np.flatnonzero(~np.isfinite(entry))
    finite = np.ones(len(lengths), dtype=np.bool_)
    finite[np.searchsorted(np.cumsum(lengths), wrong, side="right")] = False
    return finite


def _relative_to_group(config: Config, rewards: Tensor) -> Tensor:
    """Advantages from rewards, [groups, samples], float32: reward minus baseline, normalised if configured."""
    grpo = config.grpo
    return group_advantages(
        rewards,
        leave_one_out=grpo.use_leave_one_out_baseline,
        normalize=grpo.normalize_rewards,
        over_batch=grpo.normalize_rewards_over == "batch",
    )


def compute_ppo_token_advantages(
    lengths: NDArray[np.int64],
    arrays: Arrays,
    config: Config,
    rewards: Tensor,
    response_tokens: NDArray[np.int64],
    in_loss: NDArray[np.bool_],
) -> tuple[Arrays, NDArray[np.bool_]]:
    """Advantages and returns of every sampled token, 0 for the others; the arithmetic is float64.

    Advantages are normalised over the tokens in the loss, then clipped as configured.

    Args:
        lengths: [sequences], int64: tokens of each.
        arrays: sampled (bool) and values (float32), [sum(lengths)]; with use_kl_in_reward reference_logprobs and the
            policy's (`_policy_entry`), float32.
        config: estimator, penalty and clipping.
        rewards: [groups, samples], float32: `Scores.rewards`, scaled and shaped; NaN where there is none.
        response_tokens: [sequences], int64: sampled tokens of each.
        in_loss: [sequences], bool: whether the loss is taken over the response.

    Returns:
        advantages and returns, each [sum(lengths)], float32; and [sequences], bool: whether all of a
            sequence's advantages are finite.
    """
    ppo = config.ppo
    device = torch.device("cuda" if ppo.calculate_advantages_on_gpu else "cpu")
    sampled, of_responses = arrays["sampled"], response_tokens.tolist()
    known = rewards.flatten().double().nan_to_num(nan=0.0)  # a response without a reward is not in the loss
    by_token = token_rewards(known, of_responses, kl_penalty_of_sampled(config, arrays)).to(device)
    values = torch.from_numpy(arrays["values"][sampled]).double().to(device)
    estimate = estimate_advantages(by_token, values, of_responses, ppo.adv_estimator)
    advantages = estimate.advantages
    if ppo.adv_estimator.normalize_advantages:
        advantages = whiten(advantages, torch.from_numpy(np.repeat(in_loss, response_tokens)).to(device))
    entry = scatter_sampled(clipped(advantages.cpu(), ppo), sampled)
    returns = scatter_sampled(estimate.returns, sampled)
    return {"advantages": entry, "returns": returns}, find_finite_sequences(entry, lengths)
