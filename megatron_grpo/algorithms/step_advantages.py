"""GRPO's advantages stage: from the scores of a step to the advantage of each response, or of each token."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.algorithms.scoring import Scores
from megatron_grpo.algorithms.token_stage import on_tokens
from megatron_grpo.config.loop_schema import LoopConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.data.batch import StepBatch
from megatron_grpo.losses.advantages import gdpo_advantages, group_advantages, reinforce_plus_plus_advantages
from megatron_grpo.losses.kl import kl_estimate
from megatron_grpo.rollouts.pool import RolloutPool

Arrays = dict[str, NDArray[Any]]
"""Flat per-token entries by name, sequences end to end in the order of the step."""


def add_advantages(config: Config, scores: Scores, batch: StepBatch, rollouts: RolloutPool) -> NDArray[np.bool_]:
    """Add advantages to the batch: one number a response where that says it all, else one for every token.

    Returns:
        [sequences], bool: whether the advantages of all sampled tokens are finite.
    """
    if config.grpo.adv_estimator.name == "reinforce_plus_plus" or config.loss_fn.use_kl_in_reward:
        arguments = (config, scores.rewards, batch.response_tokens)
        finite: NDArray[np.bool_] = on_tokens(rollouts, batch, needed_entries(config), token_advantages, *arguments)
        return finite
    by_response = clipped(_group_relative(config, scores).flatten(), config.loop)
    batch.advantages = by_response.float().numpy()
    return np.isfinite(batch.advantages)


def needed_entries(config: Config) -> tuple[str, ...]:
    """The stored entries that advantages of tokens are computed from."""
    return ("sampled", *(("prev_logprobs", "reference_logprobs") if config.loss_fn.use_kl_in_reward else ()))


def token_advantages(
    lengths: NDArray[np.int64], arrays: Arrays, config: Config, rewards: Tensor, response_tokens: NDArray[np.int64]
) -> tuple[Arrays, NDArray[np.bool_]]:
    """The advantage of every sampled token, 0 for the others; runs in a rollout worker.

    Args:
        lengths: [sequences], int64: tokens of each.
        arrays: sampled (bool), [sum(lengths)]; with use_kl_in_reward prev_logprobs and reference_logprobs (float32).
        config: estimator, penalty and clipping.
        rewards: [groups, samples], float32: rewards as they are learnt from (`Scores`); NaN where there is none.
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
    entry = spread(clipped(by_token, config.loop), arrays["sampled"])
    return {"advantages": entry}, finite_sequences(entry, lengths)


def kl_penalty_of_sampled(config: Config, arrays: Arrays) -> Tensor | None:
    """[sampled tokens], float32: what use_kl_in_reward subtracts for each, under the policy that the step begins with.

    None when use_kl_in_reward is off.
    """
    loss = config.loss_fn
    if not loss.use_kl_in_reward:
        return None
    penalty = loss.kl_in_reward * kl_estimate(
        torch.from_numpy(arrays["prev_logprobs"]),
        torch.from_numpy(arrays["reference_logprobs"]),
        loss.reference_policy_kl_type,
        input_clamp=loss.kl_input_clamp_value,
        output_clamp=loss.kl_output_clamp_value,
    )
    return penalty[torch.from_numpy(arrays["sampled"])]


def clipped(advantages: Tensor, loop: LoopConfig) -> Tensor:
    """Advantages [...], floating point, within advantage_clip_low and advantage_clip_high as far as these are set."""
    if loop.advantage_clip_low is None and loop.advantage_clip_high is None:
        return advantages
    return advantages.clamp(loop.advantage_clip_low, loop.advantage_clip_high)


def spread(by_token: Tensor, sampled: NDArray[np.bool_]) -> NDArray[np.float32]:
    """[sampled tokens], floating point, to an entry of all tokens, [tokens], float32: 0 where nothing was sampled."""
    entry = np.zeros(len(sampled), dtype=np.float32)
    entry[sampled] = by_token.float().cpu().numpy()
    return entry


def finite_sequences(entry: NDArray[np.float32], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[sequences], bool, from [tokens], float32: whether all numbers of a sequence are finite; they lie end to end."""
    # Only the numbers that are wrong are looked up: nearly always there are none.
    wrong = np.flatnonzero(~np.isfinite(entry))
    finite = np.ones(len(lengths), dtype=np.bool_)
    finite[np.searchsorted(np.cumsum(lengths), wrong, side="right")] = False
    return finite


def _group_relative(config: Config, scores: Scores) -> Tensor:
    """[groups, samples], float32: each reward compared with those of its group."""
    if scores.parts is not None and scores.weights is not None:
        return gdpo_advantages(scores.parts, scores.weights)
    return _relative_to_group(config, scores.rewards)


def _relative_to_group(config: Config, rewards: Tensor) -> Tensor:
    """[groups, samples], float32, to advantages: reward minus baseline, over a standard deviation if configured."""
    grpo = config.grpo
    return group_advantages(
        rewards,
        leave_one_out=grpo.use_leave_one_out_baseline,
        normalize=grpo.normalize_rewards,
        over_batch=grpo.normalize_rewards_over == "batch",
    )
