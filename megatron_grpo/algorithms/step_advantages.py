"""From rewards to scores, and from the scores of a step to advantages of responses or tokens, on the driver."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.algorithms.token_functions import (
    choose_policy_logprobs,
    compute_ppo_token_advantages,
    compute_token_advantages,
    repeat_turn_advantages,
    select_step_tokens,
)
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import Outcome
from megatron_grpo.config.schema import Config, GRPOConfig, PPOConfig
from megatron_grpo.config.started_values import list_code_folders
from megatron_grpo.losses import advantages as formulas
from megatron_grpo.losses.selections import list_figures
from megatron_grpo.rollouts.partitions import compute_over_tokens
from megatron_grpo.rollouts.pool import RolloutPool

if TYPE_CHECKING:
    from megatron_grpo.algorithms.context import GRPOSaveState


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns of the samples of some groups."""

    returns: Tensor  # [turns, groups, samples], float32: discounted return from the turn on; NaN without this turn
    tokens: Tensor  # [turns, groups, samples], int64: sampled tokens of the turn; 0 without it

    @staticmethod
    def join(parts: Sequence[Turns]) -> Turns:
        """Join the turns of several sets of groups."""
        turn_count = max(len(part.returns) for part in parts)
        return Turns(
            torch.cat([_pad_turns(part.returns, turn_count, math.nan) for part in parts], dim=1),
            torch.cat([_pad_turns(part.tokens, turn_count, 0) for part in parts], dim=1),
        )


def _pad_turns(values: Tensor, turns: int, filler: float) -> Tensor:
    return torch.cat([values, values.new_full((turns - len(values), *values.shape[1:]), filler)])


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
    turns: Turns | None = None
    """Returns by turn; None: all tokens of a response share an advantage."""
    tasks: list[str] = field(default_factory=list)
    """Task of each group."""

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
            tasks=[task for part in scores for task in part.tasks],
            turns=None if scores[0].turns is None else Turns.join([part.turns for part in scores if part.turns]),
        )


def score(config: Config, outcomes: Sequence[Outcome]) -> Scores:
    """Scale and shape rewards of groups, and find learning signals."""
    loop, samples = config.sampled_loop, config.sampled_loop.num_generations_per_prompt
    rewards = torch.tensor([_find_reward(config, outcome) for outcome in outcomes], dtype=torch.float32)
    scaled = formulas.scale_rewards(rewards.view(-1, samples), loop.reward_scaling)
    shaped = formulas.shape_rewards(
        scaled,
        torch.tensor([outcome.response_tokens for outcome in outcomes]).view(-1, samples),
        torch.tensor([outcome.truncated for outcome in outcomes]).view(-1, samples),
        loop.reward_shaping,
        config.most_sampled_tokens,
    )
    if isinstance(loop, GRPOConfig) and loop.adv_estimator.needs_parts:
        factors = {name: weight for section in config.env.values() for name, weight in section.function_weights.items()}
        rows = [[outcome.reward_parts.get(name, math.nan) for outcome in outcomes] for name in factors]
        reward_parts = torch.tensor(rows, dtype=torch.float32).view(len(factors), -1, samples)
        weights = torch.tensor(list(factors.values()))
        # The weighted sums of the normalised rewards count, even if the sums of the rewards do not differ.
        differs = formulas.has_signal(formulas.gdpo_scores(reward_parts, weights))
        return Scores(shaped, reward_parts, weights, differs, differs)
    if isinstance(loop, GRPOConfig) and loop.turn_credit == "turn":
        turns = _lay_out_turns(outcomes, shaped - scaled, loop.turn_discount)
        differs = torch.stack([formulas.has_signal(turn) for turn in turns.returns]).any(dim=0)
        unshaped = _lay_out_turns(outcomes, torch.zeros_like(scaled), loop.turn_discount).returns
        signal = torch.stack([formulas.has_signal(turn) for turn in unshaped]).any(dim=0)
        return Scores(shaped, None, None, differs, signal & differs, turns)
    # Rewards must differ before shaping, too. Length penalties alone are no signal: responses that are all right or all
    # wrong nearly always differ in length, and DAPO drops them (Yu et al. 2025, eq. 11).
    differs = formulas.has_signal(shaped)
    tasks = [outcome.task_name for outcome in outcomes[::samples]]
    return Scores(shaped, None, None, differs, formulas.has_signal(scaled) & differs, tasks=tasks)


def _find_reward(config: Config, outcome: Outcome) -> float:
    if outcome.reward is None:
        return math.nan
    loop = config.loop
    discount = loop.turn_discount if isinstance(loop, GRPOConfig) else 1.0
    if discount == 1.0 or not outcome.turn_rewards:
        return outcome.reward
    return math.fsum(reward * discount**turn for turn, reward in enumerate(outcome.turn_rewards))


def _lay_out_turns(outcomes: Sequence[Outcome], penalties: Tensor, discount: float) -> Turns:
    """Lay out the turns of groups as tensors.

    `penalties`, [groups, samples], are added to the last turns. A response without rewards by turn is one turn.
    """
    rewards = [outcome.turn_rewards or [outcome.reward or 0.0] for outcome in outcomes]
    tokens = [outcome.turn_tokens or [outcome.response_tokens] for outcome in outcomes]
    turn_count = max(map(len, rewards))
    laid_rewards = torch.full((len(outcomes), turn_count), math.nan)
    laid_tokens = torch.zeros((len(outcomes), turn_count), dtype=torch.int64)
    for row, (outcome, penalty) in enumerate(zip(outcomes, penalties.flatten().tolist(), strict=True)):
        count = len(rewards[row])
        laid_tokens[row, :count] = torch.tensor(tokens[row])
        if outcome.reward is not None:
            laid_rewards[row, :count] = torch.tensor(rewards[row])
            laid_rewards[row, count - 1] += penalty
    shape = (turn_count, *penalties.shape)
    returns = formulas.compute_turn_returns(laid_rewards.T.reshape(shape), discount)
    return Turns(returns, laid_tokens.T.reshape(shape))


def add_advantages(
    config: Config, scores: Scores, batch: StepBatch, rollouts: RolloutPool, state: GRPOSaveState | None = None
) -> NDArray[np.bool_]:
    """Add advantages, and the tokens that the loss chooses by them.

    `state`: of the run, for baselines over its steps. The result is that of `_add_advantages`.
    """
    is_finite = _add_advantages(config, scores, batch, rollouts, state)
    if config.loss_fn.selection is not None:
        by_sequence = batch.advantages
        fields = ("sampled", *list_figures(config.loss_fn.selection), *(("advantages",) if by_sequence is None else ()))
        rollouts.compute(select_step_tokens, batch, fields, config, batch.in_loss, by_sequence)
    return is_finite


def _add_advantages(
    config: Config, scores: Scores, batch: StepBatch, rollouts: RolloutPool, state: GRPOSaveState | None
) -> NDArray[np.bool_]:
    """Add advantages, and for PPO returns, to the batch.

    There is one advantage per sequence if its tokens share it, else one per token. The result, [sequences], bool, is
    true where all advantages of a sequence are finite.
    """
    # A rollout has one score, and its sampled tokens lie end to end, whether in one sequence or in several segments.
    response_tokens = batch.sum_by_rollout(batch.response_tokens)
    arguments: tuple[Any, ...] = (config, scores.rewards, response_tokens)
    in_penalty = (choose_policy_logprobs(config), "reference_logprobs") if config.loss_fn.use_kl_in_reward else ()
    fields = ("sampled", *in_penalty)
    is_finite: NDArray[np.bool_]
    loop = config.loop
    if isinstance(loop, PPOConfig):
        in_loss = np.repeat(batch.in_loss, batch.response_tokens)
        arguments, fields = (*arguments, in_loss), (*fields, "values")
        if loop.calculate_advantages_on_gpu:  # the driver's GPU, so the tokens have to come to the driver
            new_fields, is_finite = compute_over_tokens(compute_ppo_token_advantages, batch, fields, arguments)
            batch.fields |= new_fields
        else:
            is_finite = rollouts.compute(compute_ppo_token_advantages, batch, fields, *arguments)
        return is_finite
    assert isinstance(loop, GRPOConfig)
    estimator = formulas.make_estimator(loop, list_code_folders(config))
    settings = loop.adv_estimator
    fields = (*fields, "score_sizes") if settings.needs_score_sizes else fields
    means = None
    if settings.has_task_baselines:
        assert state is not None, "baselines are part of the run's state"
        baselines = state.setdefault("task_baselines", {})
        means = formulas.update_task_baselines(baselines, scores.tasks, scores.rewards, settings.baseline_decay)
    if loop.adv_estimator.by_token or config.loss_fn.use_kl_in_reward:
        is_finite = rollouts.compute(compute_token_advantages, batch, fields, *arguments, estimator)
    elif scores.turns is not None:
        advantages = formulas.compute_turn_advantages(estimator, scores.turns.returns)
        is_finite = rollouts.compute(repeat_turn_advantages, batch, fields, config, advantages, scores.turns.tokens)
    else:
        advantages = formulas.response_advantages(
            estimator,
            scores.rewards,
            torch.from_numpy(response_tokens).view_as(scores.rewards),
            reward_parts=scores.reward_parts,
            reward_weights=scores.function_weights,
            task_baselines=means,
        )
        by_rollout = formulas.clip_advantages(advantages.flatten(), loop).float().numpy()
        batch.advantages = batch.repeat_by_sequence(by_rollout)
        is_finite = np.isfinite(batch.advantages)
    return is_finite
