"""Advantages of tokens that lie in shards are, to the last digit, those of responses that were never apart."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_grpo.algorithms.token_functions import find_finite_sequences
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.schema import AdvantageEstimatorConfig, Config, GRPOConfig, LossConfig
from megatron_grpo.losses.advantages import group_advantages, reinforce_plus_plus, reward_to_go
from megatron_grpo.losses.divergence import kl_estimate
from tests.support.step_advantages import advantages_of
from tests.support.trajectories import failed_trajectory, make_trajectory

ESTIMATORS = [
    AdvantageEstimatorConfig(),
    AdvantageEstimatorConfig(name="reinforce_plus_plus"),
    AdvantageEstimatorConfig(name="reinforce_plus_plus", minus_baseline=True),
]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    shards=st.integers(1, 4),
    samples=st.integers(2, 4),
    estimator=st.sampled_from(ESTIMATORS),
    penalty=st.booleans(),
    keys=st.sampled_from([{}, {"normalize_rewards": False}, {"normalize_rewards_over": "batch"}]),
)
def test_spread_over_shards_they_are_those_of_the_whole_step(
    seed: int, shards: int, samples: int, estimator: AdvantageEstimatorConfig, penalty: bool, keys: dict[str, Any]
) -> None:
    """To the last digit, against the formulas over plain lists of whole responses."""
    draw = np.random.default_rng(seed)
    loss = LossConfig(reference_policy_kl_penalty=0.5 * penalty, use_kl_in_reward=penalty)
    grpo = GRPOConfig(num_generations_per_prompt=samples, adv_estimator=estimator, advantage_clip_high=1.25, **keys)
    config = Config(grpo=grpo, loss_fn=loss)
    config.policy.parallel.data = shards
    trajectories = [random_response(draw) for _ in range(samples * shards * int(draw.integers(1, 3)))]
    total = sum(len(trajectory.token_ids) for trajectory in trajectories)
    prev, reference = (draw.normal(-1, 0.5, size=total).astype(np.float32) for _ in range(2))
    actual = advantages_of(config, trajectories, prev_logprobs=prev, reference_logprobs=reference)
    assert actual == by_formula(config, trajectories, prev, reference)


def random_response(draw: np.random.Generator) -> Trajectory:
    """Of 1 to 6 tokens; perhaps without a reward, perhaps not there at all."""
    if draw.random() < 0.1:
        return failed_trajectory(prompt_tokens=2)
    reward = None if draw.random() < 0.1 else float(draw.choice([0.0, 0.5, 1.0]))
    return make_trajectory(int(draw.integers(1, 7)), prompt_tokens=int(draw.integers(1, 4)), reward=reward)


def by_formula(
    config: Config, trajectories: list[Trajectory], prev: NDArray[np.float32], reference: NDArray[np.float32]
) -> list[list[float]]:
    """By trajectory, prompt tokens included, from sampled tokens that were never apart."""
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    counts = [trajectory.response_tokens for trajectory in trajectories]
    begins = [length - count for length, count in zip(lengths, counts, strict=True)]
    sampled = np.concatenate([np.arange(length) >= begin for length, begin in zip(lengths, begins, strict=True)])
    drawn = [torch.from_numpy(values[sampled]) for values in (prev, reference)]
    loss, grpo, samples = config.loss_fn, config.grpo, config.grpo.num_generations_per_prompt
    penalty = loss.kl_in_reward * kl_estimate(*drawn, loss.reference_policy_kl_type)
    scores = [math.nan if trajectory.reward is None else trajectory.reward for trajectory in trajectories]
    rewards = torch.tensor(scores).view(-1, samples)
    if grpo.adv_estimator.name == "reinforce_plus_plus":
        by_token = reinforce_plus_plus(
            rewards,
            torch.tensor(counts),
            token_penalty=penalty if loss.use_kl_in_reward else None,
            minus_baseline=grpo.adv_estimator.minus_baseline,
        )
    else:
        if loss.use_kl_in_reward:
            rewards = rewards - torch.stack([piece.sum() for piece in penalty.split(counts)]).view_as(rewards)
        by_response = group_advantages(
            rewards,
            leave_one_out=grpo.use_leave_one_out_baseline,
            normalize=grpo.normalize_rewards,
            over_batch=grpo.normalize_rewards_over == "batch",
        )
        by_token = by_response.flatten().repeat_interleave(torch.tensor(counts))
    pieces = by_token.clamp(max=grpo.advantage_clip_high).float().split(counts)
    return [[0.0] * begin + piece.tolist() for begin, piece in zip(begins, pieces, strict=True)]


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, math.nan, math.inf, -math.inf]), max_size=4), min_size=1, max_size=6)
)
def test_finite_sequences_against_a_loop(rows: list[list[float]]) -> None:
    """Sequences without a token are finite, and change nothing for their neighbours."""
    entry = np.array([value for row in rows for value in row], dtype=np.float32)
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    assert find_finite_sequences(entry, lengths).tolist() == [all(map(math.isfinite, row)) for row in rows]


def test_what_follows_a_token_is_charged_to_it() -> None:
    """The helper that REINFORCE++ charges by, with a response that has no token between two that have."""
    assert reward_to_go(torch.tensor([1.0, 2.0, 4.0]), [2, 0, 1]).tolist() == [3.0, 2.0, 4.0]
