"""PPO's advantages stage: from the scores of a step and its values to advantages and returns of each token."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.algorithms.scoring import Scores
from megatron_grpo.algorithms.step_advantages import (
    Arrays,
    clipped,
    finite_sequences,
    kl_penalty_of_sampled,
    needed_entries,
    spread,
)
from megatron_grpo.algorithms.token_stage import on_tokens
from megatron_grpo.config.schema import Config
from megatron_grpo.data.batch import StepBatch
from megatron_grpo.losses.gae import estimate_advantages, token_rewards, whiten
from megatron_grpo.rollouts.pool import RolloutPool


def add_advantages(config: Config, scores: Scores, batch: StepBatch, rollouts: RolloutPool) -> NDArray[np.bool_]:
    """Add advantages and returns of every token to a batch that has values.

    With calculate_advantages_on_gpu the driver estimates them, on its GPU; else a rollout worker.

    Returns:
        [sequences], bool: whether the advantages of all sampled tokens are finite.
    """
    arguments = (config, scores.rewards, batch.response_tokens, batch.in_loss)
    entries = (*needed_entries(config), "values")
    here = config.ppo.calculate_advantages_on_gpu
    finite: NDArray[np.bool_] = on_tokens(rollouts, batch, entries, token_advantages, *arguments, in_driver=here)
    return finite


def token_advantages(
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
