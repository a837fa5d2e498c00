"""From scores to the advantage of each token: what the configuration chooses, and where it lands; in any layout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron_grpo.algorithms.samples import StepSamples
from megatron_grpo.algorithms.step_advantages import add_advantages, score
from megatron_grpo.algorithms.step_report import compute_sampling_metrics
from megatron_grpo.batch.trajectory import Span, Trajectory
from megatron_grpo.config.loss_schema import RewardShapingConfig
from megatron_grpo.config.schema import AdvantageEstimatorConfig, Config, EnvironmentConfig, GRPOConfig, LossConfig
from megatron_grpo.losses.advantages import group_advantages, otb, reinforce_plus_plus
from tests.support.fake_rollouts import FakeRollouts, add_entry, by_sequence
from tests.support.step_advantages import advantages_of, laid_out
from tests.support.trajectories import make_trajectory

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
    indices = {"prompt_idx": number // 2, "group": number // 2, "sample": number % 2}
    logprobs = [-0.5 * (t + 1) for t in range(length)]
    fields = {"reward": reward, "logprobs": logprobs, **indices, **changes}
    return make_trajectory(length, prompt_tokens=PROMPT, **fields)


def step(**changes: Any) -> list[Trajectory]:
    """Two groups of two; `changes` are of the last trajectory."""
    return [
        trajectory(i, **({"reward": reward, "length": length} | (changes if i == 3 else {})))
        for i, (reward, length) in enumerate(zip(REWARDS, LENGTHS, strict=True))
    ]


def config(loss: LossConfig | None = None, **grpo: Any) -> Config:
    config = Config(grpo=GRPOConfig(**{"num_generations_per_prompt": 2, **grpo}), loss_fn=loss or LossConfig())
    config.policy.parallel.data = Layout.replicas
    return config


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


def test_kl_in_the_reward_is_of_whole_distributions_when_sampling_filters() -> None:
    loss = LossConfig(reference_policy_kl_penalty=0.5, reference_policy_kl_type="k1", use_kl_in_reward=True)
    keys = config(loss, normalize_rewards=False)
    trajectories = step()
    policy = policy_logprobs(trajectories)
    reference = np.full_like(policy, -1.0)
    expected = advantages_of(keys, trajectories, reference_logprobs=reference, prev_logprobs=policy)
    keys.generation.top_k = 5
    removed = np.full_like(policy, -np.inf)
    entries = {"reference_logprobs": reference, "prev_logprobs": removed, "unfiltered_logprobs": policy}
    assert advantages_of(keys, trajectories, **entries) == expected


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
    expected = reinforce_plus_plus(
        torch.tensor(REWARDS).view(2, 2), torch.tensor(LENGTHS), token_penalty=penalty, minus_baseline=minus_baseline
    )
    assert [value for tokens in actual for value in tokens[PROMPT:]] == pytest.approx(expected.tolist())


def test_the_optimal_token_baseline_gets_sizes_of_sampled_tokens() -> None:
    sizes = np.arange(1, PROMPT * 4 + sum(LENGTHS) + 1, dtype=np.float32)
    actual = advantages_of(config(adv_estimator=AdvantageEstimatorConfig(name="otb")), step(), score_sizes=sizes)
    is_sampled = np.concatenate([np.arange(PROMPT + length) >= PROMPT for length in LENGTHS])
    rewards, lengths = torch.tensor(REWARDS).view(2, 2), torch.tensor(LENGTHS).view(2, 2)
    expected = otb(rewards, lengths, None, torch.from_numpy(sizes[is_sampled]))
    assert [value for tokens in actual for value in tokens[PROMPT:]] == pytest.approx(expected.tolist())


def test_running_baselines_are_part_of_the_runs_state() -> None:
    keys = config(adv_estimator=AdvantageEstimatorConfig(name="rae", baseline_decay=0.5))
    trajectories = step()
    batch, workers = laid_out(keys, trajectories)
    scores = score(keys, [trajectory.outcome for trajectory in trajectories])
    name = trajectories[0].outcome.task_name
    state: Any = {"task_baselines": {name: 0.5}}
    add_advantages(keys, scores, batch, workers, state)  # type: ignore[arg-type]
    # 0.5 -> 0.75 -> 0.375 -> 0.3125 -> 0.53125
    assert batch.advantages is not None
    assert batch.advantages.tolist() == pytest.approx([0.25, -0.375, -0.0625, 0.21875])
    assert state["task_baselines"] == {name: 0.53125}


@pytest.mark.parametrize("rule", ["kl_cov", "high-entropy"])
@pytest.mark.parametrize("by_token", [True, False])
def test_tokens_are_chosen_among_all_of_the_step(rule: str, by_token: bool) -> None:
    """Whatever shards they lie in, and without those of a response that is left out of the loss."""
    estimator = AdvantageEstimatorConfig(name="reinforce_plus_plus" if by_token else "grpo")
    if rule == "kl_cov":
        loss = LossConfig(objective="kl_cov", kl_cov_share=0.4)
    else:
        loss = LossConfig(corrections=["high-entropy"], top_entropy_quantile=0.4)
    keys, trajectories = config(loss, adv_estimator=estimator), step()
    figures = policy_logprobs(trajectories) * (1 if rule == "kl_cov" else -1)
    batch, workers = laid_out(keys, trajectories)
    add_entry(batch, "prev_logprobs" if rule == "kl_cov" else "prev_entropy", figures)
    batch.in_loss[3] = False
    scores = score(keys, [trajectory.outcome for trajectory in trajectories])
    add_advantages(keys, scores, batch, workers)  # type: ignore[arg-type]
    advantages = (
        np.concatenate(by_sequence(batch, "advantages")) if by_token else np.repeat(batch.advantages, batch.lengths)
    )
    sampled = np.concatenate(by_sequence(batch, "sampled")) & np.repeat([True, True, True, False], batch.lengths)
    chosen = np.concatenate(by_sequence(batch, "selected"))
    assert set(np.flatnonzero(chosen)) <= set(np.flatnonzero(sampled))
    measure = figures
    if rule == "kl_cov":
        measure = (figures - figures[sampled].mean()) * (advantages - advantages[sampled].mean())
    left_out = measure[sampled & (chosen == 0)]
    assert len(left_out) in (3, 4)
    assert measure[chosen > 0].min() >= left_out.max() - 1e-6


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
    finite = add_advantages(keys, score(keys, [trajectory.outcome for trajectory in trajectories]), batch, workers)
    assert finite.tolist() == [True, True, False, False]
    assert rollouts.computed == ["compute_token_advantages"] * in_reward


def gdpo_step(parts: list[dict[str, float]]) -> tuple[Config, list[Trajectory]]:
    environment = EnvironmentConfig(
        type="reward_functions", reward_funcs=["rewards.right", "rewards.short"], reward_weights=[1.0, 0.5]
    )
    keys = config(adv_estimator=AdvantageEstimatorConfig(name="gdpo"))
    keys.env = {"task": environment}
    return keys, [trajectory(i, 0.0, 1, reward_parts=part) for i, part in enumerate(parts)]


def test_gdpo_takes_the_parts_and_their_weights() -> None:
    """By hand: in a pair, the better sample is at 1/sqrt(2) and the other at -1/sqrt(2) of whatever reward."""
    keys, trajectories = gdpo_step([{"right": 1.0, "short": 2.0}, {"right": 0.0}, {"short": 1.0}, {"short": 5.0}])
    scores = [1.0, -1.0, -0.5, 0.5]  # times 1/sqrt(2), which the normalisation over the step takes away
    spread = (sum(score**2 for score in scores) / 3) ** 0.5
    expected = [score / spread for score in scores]
    assert [tokens[-1] for tokens in advantages_of(keys, trajectories)] == pytest.approx(expected, rel=1e-5)


def signal_metric(config: Config, trajectories: list[Trajectory]) -> float | None:
    """The share of groups without a signal that a step reports."""
    outcomes = [trajectory.outcome for trajectory in trajectories]
    groups = FakeRollouts().put([trajectories])
    metrics = compute_sampling_metrics(config, StepSamples(groups, score(config, outcomes), outcomes, {}))
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
