"""From trajectories to the advantage of each token: what the configuration chooses, and where it lands."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from megatron_grpo.rollouts.batch import to_sequence_batch

from megatron_grpo.algorithms.step_advantages import (
    groups_with_signal,
    learning_rewards,
    signal_metrics,
    token_advantages,
)
from megatron_grpo.config.schema import (
    AdvantageEstimatorConfig,
    Config,
    EnvironmentConfig,
    GRPOConfig,
    LossConfig,
    RewardScalingConfig,
    RewardShapingConfig,
)
from megatron_grpo.data.trajectory import Span, Trajectory
from megatron_grpo.losses.advantages import (
    group_advantages,
    reinforce_plus_plus_advantages,
)
from tests.support.trajectories import make_trajectory

PROMPT = 2
LENGTHS = [3, 1, 2, 2]
REWARDS = [1.0, 0.0, 0.25, 0.75]


def trajectory(number: int, reward: float | None, length: int, **changes: Any) -> Trajectory:
    place = {"prompt_idx": number // 2, "group": number // 2, "sample": number % 2}
    logprobs = [-0.5 * (t + 1) for t in range(length)]
    fields = {"reward": reward, "logprobs": logprobs, **place, **changes}
    return make_trajectory(length, prompt_tokens=PROMPT, **fields)


def step(**changes: Any) -> list[Trajectory]:
    """Two groups of two; `changes` are of the last trajectory."""
    return [
        trajectory(i, **({"reward": reward, "length": length} | (changes if i == 3 else {})))
        for i, (reward, length) in enumerate(zip(REWARDS, LENGTHS, strict=True))
    ]


def config(loss: LossConfig | None = None, **grpo: Any) -> Config:
    return Config(grpo=GRPOConfig(num_generations_per_prompt=2, **grpo), loss_fn=loss or LossConfig())


def advantages_of(config: Config, trajectories: list[Trajectory], **tokens: torch.Tensor) -> list[list[float]]:
    """By trajectory, prompt tokens included."""
    batch = to_sequence_batch(trajectories, overlong_filtering=False)
    batch.tokens |= tokens
    flat = token_advantages(config, trajectories, learning_rewards(config, trajectories), batch)
    return [piece.tolist() for piece in flat.split(batch.lengths)]


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({}, {"leave_one_out": True, "normalize": True}),
        ({"use_leave_one_out_baseline": False}, {"leave_one_out": False, "normalize": True}),
        ({"normalize_rewards": False}, {"leave_one_out": True, "normalize": False}),
        ({"normalize_rewards_over": "batch"}, {"leave_one_out": True, "normalize": True, "over_batch": True}),
    ],
)
def test_the_sampled_tokens_get_their_responses_advantage(keys: dict[str, Any], options: dict[str, bool]) -> None:
    expected = group_advantages(torch.tensor(REWARDS).view(2, 2), **options).flatten().tolist()
    for tokens, advantage, length in zip(advantages_of(config(**keys), step()), expected, LENGTHS, strict=True):
        assert tokens == pytest.approx([0.0] * PROMPT + [advantage] * length)


def test_spans_say_which_tokens_were_sampled() -> None:
    two_turns = [Span(1, 2, 0), Span(3, 5, 1)]
    tokens = advantages_of(config(), step(token_ids=list(range(6)), spans=two_turns, logprobs=[0.0] * 3))
    assert [value != 0 for value in tokens[3]] == [False, True, False, True, True, False]


def test_advantages_are_clipped_after_normalising() -> None:
    clipped = advantages_of(config(advantage_clip_low=-0.1, advantage_clip_high=0.2), step())
    assert [tokens[-1] for tokens in clipped] == pytest.approx([0.2, -0.1, -0.1, 0.2])


def test_scaling_comes_before_shaping() -> None:
    scaling = RewardScalingConfig(enabled=True, source_max=0.5, target_max=10.0)
    shaping = RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.5)
    keys = config(reward_scaling=scaling, reward_shaping=shaping)
    assert learning_rewards(keys, step(stop_reason="length")).tolist() == [[10.0, 0.0], [5.0, 5.0]]


def test_a_penalty_for_length_is_no_signal() -> None:
    alike = [trajectory(i, 1.0 if i < 2 else float(i), length) for i, length in enumerate(LENGTHS)]
    shaping = RewardShapingConfig(enabled=True, overlong_buffer_length=3, max_response_length=3)
    keys = config(reward_shaping=shaping)
    assert learning_rewards(keys, alike)[0, 0] != learning_rewards(keys, alike)[0, 1]
    assert groups_with_signal(keys, alike).tolist() == [False, True]


def test_a_lone_success_is_a_signal_with_leave_one_out() -> None:
    keys = Config(grpo=GRPOConfig(num_generations_per_prompt=4))
    lone = [trajectory(i, float(i == 2), 1, group=0, sample=i) for i in range(4)]
    assert groups_with_signal(keys, lone).tolist() == [True]
    assert all(tokens[-1] != 0 for tokens in advantages_of(keys, lone))


@pytest.mark.parametrize(
    "shaping",
    [
        RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.0),
        RewardShapingConfig(enabled=True, overlong_buffer_length=3, max_response_length=3, overlong_buffer_penalty=3.0),
    ],
    ids=["stop_properly", "overlong"],
)
def test_a_penalty_can_take_the_signal_away(shaping: RewardShapingConfig) -> None:
    """The only success was cut off, or so long that it is worth no more than the failure."""
    alike = [trajectory(0, 1.0, 1, stop_reason="length"), trajectory(1, 0.0, 1, stop_reason="length")]
    if shaping.overlong_buffer_length is not None:
        alike = [trajectory(0, 1.0, 2), trajectory(1, 0.0, 1)]  # 1 - 3 * 2/3 = 0 - 3 * 1/3
    keys = config(reward_shaping=shaping)
    assert learning_rewards(keys, alike).flatten().tolist() == [learning_rewards(keys, alike)[0, 0].item()] * 2
    assert groups_with_signal(keys, alike).tolist() == [False]


def test_kl_in_the_reward_lowers_it_by_the_sum_over_the_response() -> None:
    loss = LossConfig(reference_policy_kl_penalty=0.5, reference_policy_kl_type="k1", use_kl_in_reward=True)
    keys = config(loss, normalize_rewards=False)
    trajectories = step()
    # The reference is always at -1 and the policy at -0.5, -1, -1.5 in turn: log ratios 0.5, 0, -0.5.
    policy = to_sequence_batch(trajectories, overlong_filtering=False).tokens["generation_logprobs"]
    reference = torch.full((sum(LENGTHS) + 4 * PROMPT,), -1.0)
    kl = [sum(0.5 - 0.5 * t for t in range(length)) for length in LENGTHS]
    rewards = torch.tensor([r - 0.5 * k for r, k in zip(REWARDS, kl, strict=True)]).view(2, 2)
    expected = group_advantages(rewards, leave_one_out=True, normalize=False).flatten().tolist()
    actual = advantages_of(keys, trajectories, reference_logprobs=reference, prev_logprobs=policy)
    assert [tokens[-1] for tokens in actual] == pytest.approx(expected)
    exact = torch.full_like(reference, -1.0)
    prev = advantages_of(keys, trajectories, reference_logprobs=reference, prev_logprobs=exact)
    without = group_advantages(torch.tensor(REWARDS).view(2, 2), leave_one_out=True, normalize=False)
    assert [tokens[-1] for tokens in prev] == pytest.approx(without.flatten().tolist())


@pytest.mark.parametrize(
    ("keys", "kl"),
    [
        ({"reference_policy_kl_type": "k1"}, [0.5, 0.0, -0.5]),
        ({"reference_policy_kl_type": "k2"}, [0.125, 0.0, 0.125]),
        ({"reference_policy_kl_type": "k3"}, [math.exp(-0.5) - 0.5, 0.0, math.exp(0.5) - 1.5]),
        ({"reference_policy_kl_type": "k1", "kl_input_clamp_value": 0.2}, [0.2, 0.0, -0.2]),
        ({"reference_policy_kl_type": "k2", "kl_input_clamp_value": 0.2}, [0.02, 0.0, 0.02]),
        ({"reference_policy_kl_type": "k1", "kl_output_clamp_value": 0.3}, [0.3, 0.0, -0.3]),
        ({"reference_policy_kl_type": "k2", "kl_output_clamp_value": 0.1}, [0.1, 0.0, 0.1]),
        (
            {"reference_policy_kl_type": "k2", "kl_input_clamp_value": 0.4, "kl_output_clamp_value": 0.05},
            [0.05, 0.0, 0.05],
        ),
    ],
)
def test_kl_in_the_reward_is_the_configured_estimate(keys: dict[str, Any], kl: list[float]) -> None:
    """By hand at log ratios 0.5, 0, -0.5; in a pair, the advantage is what the mate has less."""
    loss = LossConfig(reference_policy_kl_penalty=0.5, use_kl_in_reward=True, **keys)
    policy = to_sequence_batch(step(), overlong_filtering=False).tokens["generation_logprobs"]
    actual = advantages_of(
        config(loss, normalize_rewards=False),
        step(),
        reference_logprobs=torch.full_like(policy, -1.0),
        prev_logprobs=policy,
    )
    a, b, c, d = (reward - 0.5 * sum(kl[:length]) for reward, length in zip(REWARDS, LENGTHS, strict=True))
    assert [tokens[-1] for tokens in actual] == pytest.approx([a - b, b - a, c - d, d - c])


@pytest.mark.parametrize("minus_baseline", [True, False])
def test_reinforce_plus_plus_charges_each_token_for_what_follows(minus_baseline: bool) -> None:
    loss = LossConfig(reference_policy_kl_penalty=0.5, reference_policy_kl_type="k1", use_kl_in_reward=True)
    estimator = AdvantageEstimatorConfig(name="reinforce_plus_plus", minus_baseline=minus_baseline)
    reference = torch.full((sum(LENGTHS) + 4 * PROMPT,), -1.0)
    policy = to_sequence_batch(step(), overlong_filtering=False).tokens["generation_logprobs"]
    keys = config(loss, adv_estimator=estimator)
    actual = advantages_of(keys, step(), reference_logprobs=reference, prev_logprobs=policy)
    penalty = torch.tensor([0.5 * (0.5 - 0.5 * t) for length in LENGTHS for t in range(length)])
    expected = reinforce_plus_plus_advantages(
        torch.tensor(REWARDS).view(2, 2), LENGTHS, token_penalty=penalty, minus_baseline=minus_baseline
    )
    assert [value for tokens in actual for value in tokens[PROMPT:]] == pytest.approx(expected.tolist())


def gdpo_step(parts: list[dict[str, float]]) -> tuple[Config, list[Trajectory]]:
    environment = EnvironmentConfig(
        type="reward_functions", reward_funcs=["rewards.right", "rewards.short"], reward_weights=[1.0, 0.5]
    )
    keys = Config(
        grpo=GRPOConfig(num_generations_per_prompt=2, adv_estimator=AdvantageEstimatorConfig(name="gdpo")),
        env={"task": environment},
    )
    trajectories = [trajectory(i, 0.0, 1, reward_parts=given) for i, given in enumerate(parts)]
    return keys, trajectories


def test_gdpo_takes_the_parts_and_their_weights() -> None:
    """By hand: in a pair, the better sample is at 1/sqrt(2) and the other at -1/sqrt(2) of whatever reward."""
    keys, trajectories = gdpo_step([{"right": 1.0, "short": 2.0}, {"right": 0.0}, {"short": 1.0}, {"short": 5.0}])
    scores = [1.0, -1.0, -0.5, 0.5]  # times 1/sqrt(2), which the normalisation over the step takes away
    spread = (sum(score**2 for score in scores) / 3) ** 0.5
    expected = [score / spread for score in scores]
    assert [tokens[-1] for tokens in advantages_of(keys, trajectories)] == pytest.approx(expected, rel=1e-5)


def test_gdpo_keeps_groups_whose_sum_is_the_same() -> None:
    keys, trajectories = gdpo_step(
        [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 2.0}, {"right": 1.0}, {"right": 1.0}]
    )
    assert groups_with_signal(keys, trajectories).tolist() == [True, False]
    rewards = learning_rewards(keys, trajectories)
    assert rewards.unique().numel() == 1
    assert signal_metrics(keys, trajectories, rewards) == {"groups_without_signal": 0.5}
    keys.env["task"].reward_weights = [1.0, 0.0]  # a function that is only watched teaches nothing
    told_apart_by_the_second = trajectories[:1] + trajectories[2:3]
    assert groups_with_signal(keys, told_apart_by_the_second).tolist() == [False]


def test_gdpo_drops_groups_whose_rewards_cancel_out() -> None:
    keys, trajectories = gdpo_step(
        [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0}, {"right": 1.0}, {"right": 0.0}]
    )
    keys.env["task"].reward_weights = [1.0, 1.0]
    assert groups_with_signal(keys, trajectories).tolist() == [False, True]


def test_a_single_sample_is_not_compared() -> None:
    keys = Config(grpo=GRPOConfig(num_generations_per_prompt=1))
    assert signal_metrics(keys, step(), learning_rewards(keys, step())) == {}
    pairs = config()
    assert signal_metrics(pairs, step(), learning_rewards(pairs, step())) == {"groups_without_signal": 0.0}


def test_a_response_without_a_reward_is_left_out() -> None:
    trajectories = step(reward=None)
    assert advantages_of(config(), trajectories)[2:] == [[0.0] * 4] * 2, "its only mate has nobody to compare with"
    batch = to_sequence_batch(trajectories, overlong_filtering=False)
    assert [piece.sum().item() for piece in batch.tokens["loss_mask"].split(batch.lengths)] == [3, 1, 2, 0]
    assert groups_with_signal(config(), trajectories).tolist() == [True, False]


def test_the_batch_of_a_step() -> None:
    trajectories = step(stop_reason="length", correct=True)
    batch = to_sequence_batch(trajectories, overlong_filtering=True, mark_positive=True)
    rows = {name: [piece.tolist() for piece in values.split(batch.lengths)] for name, values in batch.tokens.items()}
    assert rows["loss_mask"] == [[0, 0, 1, 1, 1], [0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]]
    assert rows["positive"] == [[0.0] * 5, [0.0] * 3, [0.0] * 4, [0, 0, 1, 1]]
    assert rows["generation_logprobs"][0] == [0, 0, -0.5, -1.0, -1.5]
    assert batch.token_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3]
