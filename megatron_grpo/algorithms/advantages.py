"""GRPO's advantages stage: from the scores of a step to the advantage of each response, or of each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.algorithms.scoring import Scores
from megatron_grpo.cluster.futures import stored
from megatron_grpo.config.loop_schema import LoopConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.data.step_batch import StepBatch
from megatron_grpo.losses.advantages import gdpo_advantages, group_advantages, reinforce_plus_plus_advantages
from megatron_grpo.losses.divergence import kl_estimate
from megatron_grpo.losses.value import estimate_advantages, token_rewards, whiten
from megatron_grpo.sampler.pool import RolloutPool
from megatron_grpo.sampler.shards import compute


def on_tokens(
    rollouts: RolloutPool,
    batch: StepBatch,
    entries: Sequence[str],
    fn: Callable[..., Any],
    *arguments: Any,
    in_driver: bool = False,
) -> Any:
    """Call fn(lengths, arrays, *arguments) on entries of all sequences, and add the entries that it returns to a batch.

    Args:
        rollouts: one of whose workers makes the call.
        batch: the step's batch, whose shards hold the entries.
        entries: names of the entries that fn reads: its `arrays` are these, flat and in the order of the step.
        fn: returns new entries by name, each [sum(lengths)], and a summary.
        arguments: passed on to fn.
        in_driver: make the call in this process instead, which may have a GPU that the workers have not.

    Returns:
        The summary.
    """
    if not in_driver:
        return rollouts.tokens.compute(fn, batch, entries, *arguments)
    what = f"the step's {', '.join(entries)}"
    added, summary = compute(fn, batch, entries, arguments, lambda references: stored(references, what))
    batch.fields |= added
    return summary


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


def add_ppo_advantages(config: Config, scores: Scores, batch: StepBatch, rollouts: RolloutPool) -> NDArray[np.bool_]:
    """Add advantages and returns of every token to a batch that has values.

    With calculate_advantages_on_gpu the driver estimates them, on its GPU; else a rollout worker.

    Returns:
        [sequences], bool: whether the advantages of all sampled tokens are finite.
    """
    arguments = (config, scores.rewards, batch.response_tokens, batch.in_loss)
    entries = (*needed_entries(config), "values")
    here = config.ppo.calculate_advantages_on_gpu
    finite: NDArray[np.bool_] = on_tokens(rollouts, batch, entries, ppo_token_advantages, *arguments, in_driver=here)
    return finite


def ppo_token_advantages(
    lengths: NDArray[np.int64],
    arrays: Arrays,
    config: Config,
    rewards: Tensor,
    response_tokens: NDArray[np.int64],
    in_loss: NDArray[np.bool_],
) -> tuple[Arrays, NDArray[np.bool_]]:
    """Advantages and returns of every sampled token, 0 for the others.

    Advantages are normalised over the tokens in the loss, then clipped as configured. The arithmetic is float64.

    Args:
        lengths: [sequences], int64: tokens of each.
        arrays: sampled (bool) and values (float32), [sum(lengths)]; with use_kl_in_reward prev_logprobs and
            reference_logprobs (float32) too.
        config: estimator, penalty and clipping.
        rewards: [groups, samples], float32: rewards as they are learnt from (`Scores`); NaN where there is none.
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
    entry = spread(clipped(advantages.cpu(), ppo), sampled)
    return {"advantages": entry, "returns": spread(estimate.returns, sampled)}, finite_sequences(entry, lengths)
