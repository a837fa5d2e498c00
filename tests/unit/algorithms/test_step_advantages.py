"""From scores to the advantage of each token: what the configuration chooses, and where it lands; in any layout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_grpo.algorithms.report import sampling_metrics
from megatron_grpo.algorithms.samples import StepSamples
from megatron_grpo.algorithms.scoring import score
from megatron_grpo.algorithms.step_advantages import add_advantages, finite_sequences
from megatron_grpo.algorithms.training_batch import training_batch
from megatron_grpo.config.schema import (
    AdvantageEstimatorConfig,
    Config,
    EnvironmentConfig,
    GRPOConfig,
    LossConfig,
    RewardShapingConfig,
)
from megatron_grpo.data.batch import StepBatch
from megatron_grpo.data.trajectory import Span, Trajectory
from megatron_grpo.losses.advantages import group_advantages, reinforce_plus_plus_advantages, reward_to_go
from megatron_grpo.losses.kl import kl_estimate
from tests.support.fake_rollouts import FakeRollouts, add_entry, by_sequence, stored_names
from tests.support.trajectories import failed_trajectory, make_trajectory

PROMPT = 2
LENGTHS = [3, 1, 2, 2]
REWARDS = [1.0, 0.0, 0.25, 0.75]


@pytest.fixture(autouse=True, params=[1, 2], ids="{} shard(s)".format)
def replicas(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many shards the tokens of a step lie in."""
    monkeypatch.setattr(Layout, "replicas", request.param)
    replicas: int = request.param
    return replicas


class Layout:
    """Of the configurations that `config` makes."""

    replicas = 1


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
    made = Config(grpo=GRPOConfig(**{"num_generations_per_prompt": 2, **grpo}), loss_fn=loss or LossConfig())
    made.policy.parallel.data = Layout.replicas
    return made


def laid_out(config: Config, trajectories: list[Trajectory]) -> tuple[StepBatch, FakeRollouts]:
    """The batch of a step, and the workers that computed it."""
    rollouts: Any = FakeRollouts()
    samples = config.loop.num_generations_per_prompt
    groups = [trajectories[start : start + samples] for start in range(0, len(trajectories), samples)]
    return training_batch(config, rollouts.put(groups), rollouts), rollouts


def advantages_of(
    config: Config, trajectories: list[Trajectory], **entries: NDArray[np.float32] | list[float]
) -> list[list[float]]:
    """By trajectory, prompt tokens included; `entries` are further ones of all tokens."""
    batch, rollouts = laid_out(config, trajectories)
    for name, values in entries.items():
        add_entry(batch, name, np.asarray(values))
    workers: Any = rollouts
    finite = add_advantages(config, score(config, [one.outcome for one in trajectories]), batch, workers)
    assert finite.all()
    assert (batch.advantages is None) == ("advantages" in stored_names(batch)), "in one place or the other"
    if batch.advantages is None:
        return [row.tolist() for row in by_sequence(batch, "advantages")]
    assert rollouts.computed == [], "no token is looked at"
    assert batch.advantages.dtype == np.float32
    return [
        [float(advantage) if one else 0.0 for one in sampled]
        for advantage, sampled in zip(batch.advantages, by_sequence(batch, "sampled"), strict=True)
    ]


def policy_logprobs(trajectories: list[Trajectory]) -> NDArray[np.float32]:
    """Of all tokens: those of sampling."""
    batch, _ = laid_out(config(), trajectories)
    logprobs: NDArray[np.float32] = np.concatenate(by_sequence(batch, "generation_logprobs"))
    return logprobs


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
    estimator = AdvantageEstimatorConfig(name="reinforce_plus_plus")
    keys = config(adv_estimator=estimator)
    tokens = advantages_of(keys, step(token_ids=list(range(6)), spans=two_turns, logprobs=[0.0] * 3))
    assert [value != 0 for value in tokens[3]] == [False, True, False, True, True, False]


def test_advantages_are_clipped_after_normalising() -> None:
    clipped = advantages_of(config(advantage_clip_low=-0.1, advantage_clip_high=0.2), step())
    assert [tokens[-1] for tokens in clipped] == pytest.approx([0.2, -0.1, -0.1, 0.2])


def test_a_lone_success_is_a_signal_with_leave_one_out() -> None:
    keys = config(num_generations_per_prompt=4)
    lone = [trajectory(i, float(i == 2), 1, group=0, sample=i) for i in range(4)]
    assert all(tokens[-1] != 0 for tokens in advantages_of(keys, lone))


def test_kl_in_the_reward_lowers_it_by_the_sum_over_the_response() -> None:
    loss = LossConfig(reference_policy_kl_penalty=0.5, reference_policy_kl_type="k1", use_kl_in_reward=True)
    keys = config(loss, normalize_rewards=False)
    trajectories = step()
    # The reference is always at -1 and the policy at -0.5, -1, -1.5 in turn: log ratios 0.5, 0, -0.5.
    policy = policy_logprobs(trajectories)
    reference = np.full_like(policy, -1.0)
    kl = [sum(0.5 - 0.5 * t for t in range(length)) for length in LENGTHS]
    rewards = torch.tensor([r - 0.5 * k for r, k in zip(REWARDS, kl, strict=True)]).view(2, 2)
    expected = group_advantages(rewards, leave_one_out=True, normalize=False).flatten().tolist()
    actual = advantages_of(keys, trajectories, reference_logprobs=reference, prev_logprobs=policy)
    assert [tokens[-1] for tokens in actual] == pytest.approx(expected)
    exact = np.full_like(reference, -1.0)
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
    policy = policy_logprobs(step())
    actual = advantages_of(
        config(loss, normalize_rewards=False),
        step(),
        reference_logprobs=np.full_like(policy, -1.0),
        prev_logprobs=policy,
    )
    a, b, c, d = (reward - 0.5 * sum(kl[:length]) for reward, length in zip(REWARDS, LENGTHS, strict=True))
    assert [tokens[-1] for tokens in actual] == pytest.approx([a - b, b - a, c - d, d - c])


@pytest.mark.parametrize("minus_baseline", [True, False])
def test_reinforce_plus_plus_charges_each_token_for_what_follows(minus_baseline: bool) -> None:
    loss = LossConfig(reference_policy_kl_penalty=0.5, reference_policy_kl_type="k1", use_kl_in_reward=True)
    estimator = AdvantageEstimatorConfig(name="reinforce_plus_plus", minus_baseline=minus_baseline)
    policy = policy_logprobs(step())
    keys = config(loss, adv_estimator=estimator)
    actual = advantages_of(keys, step(), reference_logprobs=np.full_like(policy, -1.0), prev_logprobs=policy)
    penalty = torch.tensor([0.5 * (0.5 - 0.5 * t) for length in LENGTHS for t in range(length)])
    expected = reinforce_plus_plus_advantages(
        torch.tensor(REWARDS).view(2, 2), LENGTHS, token_penalty=penalty, minus_baseline=minus_baseline
    )
    assert [value for tokens in actual for value in tokens[PROMPT:]] == pytest.approx(expected.tolist())


ESTIMATORS = [
    AdvantageEstimatorConfig(),
    AdvantageEstimatorConfig(name="reinforce_plus_plus"),
    AdvantageEstimatorConfig(name="reinforce_plus_plus", minus_baseline=True),
]


@settings(deadline=None, max_examples=60)
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
    made = config(loss, num_generations_per_prompt=samples, adv_estimator=estimator, advantage_clip_high=1.25, **keys)
    made.policy.parallel.data = shards
    trajectories = [random_response(draw) for _ in range(samples * shards * int(draw.integers(1, 3)))]
    total = sum(len(one.token_ids) for one in trajectories)
    prev, reference = (draw.normal(-1, 0.5, size=total).astype(np.float32) for _ in range(2))
    actual = advantages_of(made, trajectories, prev_logprobs=prev, reference_logprobs=reference)
    assert actual == by_formula(made, trajectories, prev, reference)


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
    lengths = [len(one.token_ids) for one in trajectories]
    counts = [one.response_tokens for one in trajectories]
    begins = [length - count for length, count in zip(lengths, counts, strict=True)]
    sampled = np.concatenate([np.arange(length) >= begin for length, begin in zip(lengths, begins, strict=True)])
    drawn = [torch.from_numpy(values[sampled]) for values in (prev, reference)]
    loss, grpo, samples = config.loss_fn, config.grpo, config.grpo.num_generations_per_prompt
    penalty = loss.kl_in_reward * kl_estimate(*drawn, loss.reference_policy_kl_type)
    given = [math.nan if one.reward is None else one.reward for one in trajectories]
    rewards = torch.tensor(given).view(-1, samples)
    if grpo.adv_estimator.name == "reinforce_plus_plus":
        by_token = reinforce_plus_plus_advantages(
            rewards,
            counts,
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


@pytest.mark.parametrize("in_reward", [True, False])
def test_advantages_that_are_not_finite_are_traced_to_their_responses(in_reward: bool) -> None:
    """Rewards that float32 can hold, and whose difference it cannot; as a number a token and as one a response."""
    loss = LossConfig(reference_policy_kl_penalty=0.5 * in_reward, use_kl_in_reward=in_reward)
    keys, trajectories = config(loss, normalize_rewards=False), step()
    trajectories[2].reward, trajectories[3].reward = 3e38, -3e38
    batch, rollouts = laid_out(keys, trajectories)
    for name in ("prev_logprobs", "reference_logprobs"):
        add_entry(batch, name, policy_logprobs(trajectories))
    workers: Any = rollouts
    finite = add_advantages(keys, score(keys, [one.outcome for one in trajectories]), batch, workers)
    assert finite.tolist() == [True, True, False, False]
    assert rollouts.computed == ["token_advantages"] * in_reward


def gdpo_step(parts: list[dict[str, float]]) -> tuple[Config, list[Trajectory]]:
    environment = EnvironmentConfig(
        type="reward_functions", reward_funcs=["rewards.right", "rewards.short"], reward_weights=[1.0, 0.5]
    )
    keys = config(adv_estimator=AdvantageEstimatorConfig(name="gdpo"))
    keys.env = {"task": environment}
    return keys, [trajectory(i, 0.0, 1, reward_parts=given) for i, given in enumerate(parts)]


def test_gdpo_takes_the_parts_and_their_weights() -> None:
    """By hand: in a pair, the better sample is at 1/sqrt(2) and the other at -1/sqrt(2) of whatever reward."""
    keys, trajectories = gdpo_step([{"right": 1.0, "short": 2.0}, {"right": 0.0}, {"short": 1.0}, {"short": 5.0}])
    scores = [1.0, -1.0, -0.5, 0.5]  # times 1/sqrt(2), which the normalisation over the step takes away
    spread = (sum(score**2 for score in scores) / 3) ** 0.5
    expected = [score / spread for score in scores]
    assert [tokens[-1] for tokens in advantages_of(keys, trajectories)] == pytest.approx(expected, rel=1e-5)


def signal_metric(config: Config, trajectories: list[Trajectory]) -> float | None:
    """The share of groups without a signal that a step reports."""
    outcomes = [one.outcome for one in trajectories]
    groups = FakeRollouts().put([trajectories])
    metrics = sampling_metrics(config, StepSamples(groups, None, outcomes), score(config, outcomes))
    return metrics.get("groups_without_signal")


def test_the_share_of_groups_without_a_signal() -> None:
    assert signal_metric(config(), step()) == 0.0
    assert signal_metric(config(), step(reward=0.25)) == 0.5
    # Penalties for length are learnt from, though dynamic sampling would not keep the group for them.
    shaping = RewardShapingConfig(enabled=True, overlong_buffer_length=3, max_response_length=3)
    assert signal_metric(config(reward_shaping=shaping), [trajectory(i, 1.0, 1 + i % 2) for i in range(4)]) == 0.0
    # GDPO's functions tell the first pair apart, whose sum is the same; nobody tells the second pair apart.
    parts = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 2.0}, {"right": 1.0}, {"right": 1.0}]
    assert signal_metric(*gdpo_step(parts)) == 0.5


def test_a_single_sample_is_not_compared() -> None:
    assert signal_metric(config(num_generations_per_prompt=1), step()) is None


def test_a_response_without_a_reward_is_left_out() -> None:
    trajectories = step(reward=None)
    assert advantages_of(config(), trajectories)[2:] == [[0.0] * 4] * 2, "its only mate has nobody to compare with"
    batch, _ = laid_out(config(), trajectories)
    assert batch.in_loss.tolist() == [True, True, True, False]


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, math.nan, math.inf, -math.inf]), max_size=4), min_size=1, max_size=6)
)
def test_finite_sequences_against_a_loop(rows: list[list[float]]) -> None:
    """Sequences without a token are finite, and change nothing for their neighbours."""
    entry = np.array([value for row in rows for value in row], dtype=np.float32)
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    assert finite_sequences(entry, lengths).tolist() == [all(map(math.isfinite, row)) for row in rows]


def test_what_follows_a_token_is_charged_to_it() -> None:
    """The helper that REINFORCE++ charges by, with a response that has no token between two that have."""
    assert reward_to_go(torch.tensor([1.0, 2.0, 4.0]), [2, 0, 1]).tolist() == [3.0, 2.0, 4.0]
