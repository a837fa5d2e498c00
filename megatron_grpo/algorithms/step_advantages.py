"""From rewards to scores, and from the scores of a step to advantages of responses or tokens, on the driver."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.algorithms.token_functions import (
    choose_policy_logprobs,
    compute_ppo_token_advantages,
    compute_token_advantages,
)
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import Outcome
from megatron_grpo.config.schema import Config
from megatron_grpo.losses import advantages as formulas
from megatron_grpo.rollouts.partitions import compute_over_tokens
from megatron_grpo.rollouts.pool import RolloutPool


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of some groups of samples, each independent of the others."""

    rewards: Tensor
    """[groups, samples], float32: rewards after scaling and then shaping; NaN for a sample without a reward."""
    reward_parts: Tensor | None
    """[functions, groups, samples], float32: rewards of each function, NaN where it gave none; None without GDPO."""
    function_weights: Tensor | None
    """[functions], float32: weight of each reward function in the sum; None without `reward_parts`."""
    differs: Tensor
    """[groups], bool: whether the samples of the group got different rewards (with GDPO, different advantages)."""
    has_signal: Tensor
    """[groups], bool: whether dynamic sampling keeps the group."""

    @staticmethod
    def join(scores: Sequence[Scores]) -> Scores:
        """Join the scores of several sets of groups."""
        reward_parts = [part.reward_parts for part in scores if part.reward_parts is not None]  # of all sets or of none
        return Scores(
            rewards=torch.cat([part.rewards for part in scores]),
            reward_parts=torch.cat(reward_parts, dim=1) if reward_parts else None,
            function_weights=scores[0].function_weights,
            differs=torch.cat([part.differs for part in scores]),
            has_signal=torch.cat([part.has_signal for part in scores]),
        )


def score(config: Config, outcomes: Sequence[Outcome]) -> Scores:
    """Scale and shape rewards of groups, and find learning signals."""
    samples = config.training_loop.num_generations_per_prompt
    rewards = torch.tensor(
        [math.nan if outcome.reward is None else outcome.reward for outcome in outcomes], dtype=torch.float32
    )
    scaled = formulas.scale_rewards(rewards.view(-1, samples), config.training_loop.reward_scaling)
    shaped = formulas.shape_rewards(
        scaled,
        torch.tensor([outcome.response_tokens for outcome in outcomes]).view(-1, samples),
        torch.tensor([outcome.truncated for outcome in outcomes]).view(-1, samples),
        config.training_loop.reward_shaping,
        config.generation.max_new_tokens,
    )
    if config.grpo.adv_estimator.name == "gdpo":
        factors = {name: weight for section in config.env.values() for name, weight in section.function_weights.items()}
        rows = [[outcome.reward_parts.get(name, math.nan) for outcome in outcomes] for name in factors]
        reward_parts = torch.tensor(rows, dtype=torch.float32).view(len(factors), -1, samples)
        weights = torch.tensor(list(factors.values()))
        # The weighted sums of the normalised rewards count, even if the sums of the rewards do not differ.
        differs = formulas.has_signal(formulas.gdpo_scores(reward_parts, weights))
        return Scores(shaped, reward_parts, weights, differs, differs)
    # Rewards must differ before shaping, too. Length penalties alone are no signal: responses that are all right or all
    # wrong nearly always differ in length, and DAPO drops them (Yu et al. 2025, eq. 11).
    differs = formulas.has_signal(shaped)
    return Scores(shaped, None, None, differs, formulas.has_signal(scaled) & differs)


def add_advantages(config: Config, scores: Scores, batch: StepBatch, rollouts: RolloutPool) -> NDArray[np.bool_]:
    """Add advantages, and for PPO returns, to the batch.

    There is one advantage per sequence if its tokens share it, else one per token. The result, [sequences], bool, is
    true where all advantages of a sequence are finite.
    """
    # A rollout has one score, and its sampled tokens lie end to end, whether in one sequence or in several segments.
    arguments: tuple[Any, ...] = (config, scores.rewards, batch.sum_by_rollout(batch.response_tokens))
    in_penalty = (choose_policy_logprobs(config), "reference_logprobs") if config.loss_fn.use_kl_in_reward else ()
    fields = ("sampled", *in_penalty)
    is_finite: NDArray[np.bool_]
    if config.value_model is not None:
        in_loss = np.repeat(batch.in_loss, batch.response_tokens)
        arguments, fields = (*arguments, in_loss), (*fields, "values")
        if config.ppo.calculate_advantages_on_gpu:  # the driver's GPU, so the tokens have to come to the driver
            new_fields, is_finite = compute_over_tokens(compute_ppo_token_advantages, batch, fields, arguments)
            batch.fields |= new_fields
        else:
            is_finite = rollouts.compute(compute_ppo_token_advantages, batch, fields, *arguments)
    elif config.grpo.adv_estimator.name == "reinforce_plus_plus" or config.loss_fn.use_kl_in_reward:
        is_finite = rollouts.compute(compute_token_advantages, batch, fields, *arguments)
    else:
        if scores.reward_parts is not None and scores.function_weights is not None:
            advantages = formulas.gdpo_advantages(scores.reward_parts, scores.function_weights)
        else:
            advantages = formulas.compute_group_advantages(config.grpo, scores.rewards)
        by_rollout = formulas.clip_advantages(advantages.flatten(), config.training_loop).float().numpy()
        batch.advantages = batch.repeat_by_sequence(by_rollout)
        is_finite = np.isfinite(batch.advantages)
    return is_finite
