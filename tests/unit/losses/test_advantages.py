"""Estimators of advantages against plain Python and TRL; scaling and shaping of rewards."""

import inspect
import math
import statistics
import textwrap
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_grpo.config.loss_schema import RewardShapingConfig
from megatron_grpo.config.schema import RewardScalingConfig
from megatron_grpo.losses.advantages import (
    STD_EPSILON,
    gdpo,
    group_advantages,
    leave_one_out_baseline,
    reinforce_plus_plus,
    reward_to_go,
    scale_rewards,
    shape_rewards,
)

GROUPS = st.lists(st.lists(st.floats(-5, 5, width=32), min_size=4, max_size=4), min_size=1, max_size=4)


def brute_force(group: list[float], leave_one_out: bool, normalize: bool) -> list[float]:
    """One group in plain Python floats."""
    advantages = []
    for i, reward in enumerate(group):
        others = group[:i] + group[i + 1 :] if leave_one_out else group
        advantage = reward - statistics.fmean(others)
        if normalize:
            advantage /= statistics.stdev(group) + STD_EPSILON
        advantages.append(0.0 if len(set(group)) == 1 else advantage)
    return advantages


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@given(groups=GROUPS)
def test_advantages_match_brute_force(leave_one_out: bool, normalize: bool, groups: list[list[float]]) -> None:
    rewards = torch.tensor(groups, dtype=torch.float64)
    actual = group_advantages(rewards, leave_one_out=leave_one_out, normalize=normalize)
    expected = torch.tensor([brute_force(group, leave_one_out, normalize) for group in groups], dtype=torch.float64)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_leave_one_out_baseline_is_the_mean_of_the_others() -> None:
    rewards = torch.tensor([[1.0, 2.0, 6.0]])
    torch.testing.assert_close(leave_one_out_baseline(rewards), torch.tensor([[4.0, 3.5, 1.5]]))


def test_a_lone_success_keeps_its_signal_with_leave_one_out() -> None:
    rewards = torch.zeros(1, 8)
    rewards[0, 3] = 1.0
    advantages = group_advantages(rewards, leave_one_out=True, normalize=True)
    # Unbiased variance of one 1 among n is 1/n, so the success is worth sqrt(n) and each failure -sqrt(n) / (n - 1).
    expected = torch.full((1, 8), -(8**0.5) / 7)
    expected[0, 3] = 8**0.5
    torch.testing.assert_close(advantages, expected, atol=1e-4, rtol=0)


def test_large_rewards_keep_their_advantages() -> None:
    huge = group_advantages(torch.tensor([[1e20, 0.0, 0.0, 0.0]]), leave_one_out=False, normalize=True)
    torch.testing.assert_close(huge, torch.tensor([[1.5, -0.5, -0.5, -0.5]]))
    by_step = reinforce_plus_plus(
        torch.tensor([[1e20, 0.0, 0.0, 0.0]]),
        torch.ones(4, dtype=torch.int64),
        token_penalty=None,
        minus_baseline=False,
    )
    torch.testing.assert_close(by_step, torch.tensor([3.0, -1.0, -1.0, -1.0]) / 3**0.5)


def test_large_rewards_that_hardly_differ_keep_their_advantages() -> None:
    """Float32 has these rewards exactly, and rounds their mean to the reward of the failures."""
    close = torch.tensor([[1e8 + 8, 1e8, 1e8, 1e8]])
    normalized = group_advantages(close, leave_one_out=False, normalize=True)
    torch.testing.assert_close(normalized, torch.tensor([[1.5, -0.5, -0.5, -0.5]]))
    left_out = group_advantages(close, leave_one_out=True, normalize=False)
    torch.testing.assert_close(left_out, torch.tensor([[8.0, -8 / 3, -8 / 3, -8 / 3]]))


@pytest.mark.parametrize("leave_one_out", [True, False])
def test_equal_rewards_give_exact_zeros(leave_one_out: bool) -> None:
    # 0.1 is not a binary fraction: the mean of seven of them is not 0.1 in float32.
    advantages = group_advantages(torch.full((2, 7), 0.1), leave_one_out=leave_one_out, normalize=True)
    assert torch.equal(advantages, torch.zeros(2, 7))


def test_advantages_follow_their_samples() -> None:
    rewards = torch.rand(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    advantages = group_advantages(rewards, leave_one_out=True, normalize=True)
    torch.testing.assert_close(
        group_advantages(rewards[:, order], leave_one_out=True, normalize=True), advantages[:, order]
    )


@pytest.mark.parametrize("shape", [(4, 1), (4,)])
def test_nothing_to_compare_is_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"samples"):
        group_advantages(torch.zeros(shape), leave_one_out=False, normalize=True)


@given(groups=GROUPS)
def test_the_batch_standard_deviation_is_that_of_all_rewards(groups: list[list[float]]) -> None:
    rewards = torch.tensor(groups, dtype=torch.float64)
    actual = group_advantages(rewards, leave_one_out=False, normalize=True, over_batch=True)
    std = statistics.stdev([reward for group in groups for reward in group]) + STD_EPSILON
    expected = [[advantage / std for advantage in brute_force(group, False, False)] for group in groups]
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=1e-6)


def brute_force_gdpo(parts: list[list[list[float | None]]], weights: list[float]) -> list[list[float]]:
    """[functions][groups][samples] in plain Python floats."""
    totals = [[0.0] * len(group) for group in parts[0]]
    scored = [[any(function[g][i] is not None for function in parts) for i in range(4)] for g in range(len(totals))]
    for function, weight in zip(parts, weights, strict=True):
        for g, group in enumerate(function):
            given = [reward for reward in group if reward is not None]
            if len(set(given)) < 2:
                continue
            for i, reward in enumerate(group):
                if reward is not None:
                    advantage = (reward - statistics.fmean(given)) / (statistics.stdev(given) + STD_EPSILON)
                    totals[g][i] += weight * advantage
    everything = [total for g, group in enumerate(totals) for i, total in enumerate(group) if scored[g][i]]
    if max(map(abs, everything), default=0.0) < 1e-9:
        return [[0.0] * len(group) for group in totals]
    mean, std = statistics.fmean(everything), statistics.stdev(everything) + STD_EPSILON
    return [
        [(total - mean) / std if scored[g][i] else 0.0 for i, total in enumerate(group)]
        for g, group in enumerate(totals)
    ]


PARTS = st.lists(
    st.lists(st.lists(st.one_of(st.none(), st.integers(-3, 3)), min_size=4, max_size=4), min_size=2, max_size=2),
    min_size=1,
    max_size=3,
)


@given(parts=PARTS)
def test_gdpo_matches_brute_force(parts: list[list[list[int | None]]]) -> None:
    weights = [1.0, 0.5, 2.0][: len(parts)]
    nan = float("nan")
    values = [[[nan if r is None else r for r in group] for group in function] for function in parts]
    tensors = torch.tensor(values, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
    actual = gdpo(*tensors)
    expected = torch.tensor(brute_force_gdpo(parts, weights), dtype=torch.float64)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_gdpo_tells_apart_what_the_sum_does_not() -> None:
    """Two rewards that disagree: the sum is the same for three samples, a rare success in one is worth more."""
    parts = torch.tensor([[[1.0, 0.0, 0.0, 0.0]], [[0.0, 1.0, 1.0, 0.0]]])
    summed = group_advantages(parts.sum(0), leave_one_out=False, normalize=True)
    assert summed[0, 0] == summed[0, 1]
    advantages = gdpo(parts, torch.ones(2))
    assert advantages[0, 0] > advantages[0, 1] > advantages[0, 3]


@pytest.mark.parametrize("scale", [1.0, 3.0, 0.37])
def test_gdpo_rewards_that_cancel_out_teach_nothing(scale: float) -> None:
    """The rounding of their sum must not be blown up to advantages by the normalisation over the step."""
    right = torch.rand(3, 4, generator=torch.Generator().manual_seed(3))
    parts = torch.stack([right, 7 - scale * right])
    assert torch.equal(gdpo(parts, torch.ones(2)), torch.zeros(3, 4))
    told_apart = parts.clone()
    told_apart[1, 0, 0] = 100.0
    advantages = gdpo(told_apart, torch.ones(2))
    assert (advantages[0] != 0).all()


def test_a_small_weight_is_no_cancellation() -> None:
    """The heavy function says the same of all samples of the group, so the light one alone tells them apart."""
    parts = torch.tensor([[[1.0, 1.0, 1.0, 1.0]], [[0.0, 1.0, 0.0, 1.0]]])
    advantages = gdpo(parts, torch.tensor([1.0, 1e-4]))
    assert advantages.sign().tolist() == [[-1, 1, -1, 1]]


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@given(groups=st.lists(st.lists(st.none() | st.integers(-3, 3), min_size=5, max_size=5), min_size=1, max_size=3))
def test_a_sample_without_a_reward_takes_no_part(
    leave_one_out: bool, normalize: bool, groups: list[list[int | None]]
) -> None:
    rewards = torch.tensor([[math.nan if r is None else r for r in group] for group in groups], dtype=torch.float64)
    actual = group_advantages(rewards, leave_one_out=leave_one_out, normalize=normalize).tolist()
    for group, advantages in zip(groups, actual, strict=True):
        given = [float(reward) for reward in group if reward is not None]
        rest = iter(brute_force(given, leave_one_out, normalize) if len(given) > 1 else [0.0] * len(given))
        assert advantages == pytest.approx([0.0 if reward is None else next(rest) for reward in group], abs=1e-6)


@pytest.mark.parametrize("minus_baseline", [True, False])
@pytest.mark.parametrize("with_penalty", [True, False])
@given(data=st.data(), groups=st.lists(st.lists(st.integers(-2, 2), min_size=2, max_size=2), min_size=1, max_size=3))
def test_reinforce_plus_plus_matches_brute_force(
    minus_baseline: bool, with_penalty: bool, data: st.DataObject, groups: list[list[int]]
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=2 * len(groups), max_size=2 * len(groups)))
    penalty = data.draw(st.lists(st.floats(-1, 1), min_size=sum(lengths), max_size=sum(lengths)))
    actual = reinforce_plus_plus(
        torch.tensor(groups, dtype=torch.float64),
        torch.tensor(lengths),
        token_penalty=torch.tensor(penalty, dtype=torch.float64) if with_penalty else None,
        minus_baseline=minus_baseline,
    )
    returns, begin = [], 0
    rewards = [r - (statistics.fmean(group) if minus_baseline else 0.0) for group in groups for r in group]
    for reward, length in zip(rewards, lengths, strict=True):
        of_tokens = penalty[begin : begin + length] if with_penalty else [0.0] * length
        returns += [reward - sum(of_tokens[t:]) for t in range(length)]
        begin += length
    mean, std = statistics.fmean(returns), max(statistics.pvariance(returns), 1e-8) ** 0.5
    expected = torch.tensor([(value - mean) / std for value in returns], dtype=torch.float64)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_a_token_answers_for_its_own_penalty_and_the_later_ones() -> None:
    penalties = torch.tensor([1.0, 2.0, 4.0, 10.0, 20.0])
    torch.testing.assert_close(reward_to_go(penalties, [3, 2]), torch.tensor([7.0, 6.0, 4.0, 30.0, 20.0]))


def test_reinforce_plus_plus_needs_no_group() -> None:
    advantages = reinforce_plus_plus(
        torch.tensor([[1.0], [0.0]]), torch.tensor([1, 3]), token_penalty=None, minus_baseline=False
    )
    torch.testing.assert_close(advantages, torch.tensor([3**0.5] + [-(3**-0.5)] * 3))


@pytest.mark.parametrize("minus_baseline", [True, False])
def test_reinforce_plus_plus_leaves_out_what_has_no_reward(minus_baseline: bool) -> None:
    rewards, lengths = torch.tensor([[1.0, math.nan, 0.0], [2.0, 0.5, math.nan]]), [2, 3, 1, 2, 4, 1]
    options = {"token_penalty": None, "minus_baseline": minus_baseline}
    actual = reinforce_plus_plus(rewards, torch.tensor(lengths), **options).split(lengths)
    scored = reinforce_plus_plus(torch.tensor([[1.0, 0.0], [2.0, 0.5]]), torch.tensor([2, 1, 2, 4]), **options)
    expected = iter(scored.split([2, 1, 2, 4]))
    for reward, piece in zip(rewards.flatten(), actual, strict=True):
        torch.testing.assert_close(piece, torch.zeros_like(piece) if reward.isnan() else next(expected))


TRL_ADVANTAGES = {
    "group": ({"scale_rewards": "group"}, {"normalize": True}),
    "none": ({"scale_rewards": "none"}, {"normalize": False}),
    "batch": ({"scale_rewards": "batch"}, {"normalize": True, "over_batch": True}),
}


@pytest.mark.parametrize("case", TRL_ADVANTAGES)
def test_group_relative_advantages_equal_trl(case: str) -> None:
    """TRL adds 1e-4 to the standard deviation where we add STD_EPSILON, hence the tolerance."""
    trl_options, ours = TRL_ADVANTAGES[case]
    rewards = torch.rand(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rewards[1, 2] = rewards[3, 0] = torch.nan  # every reward function returned None
    expected = trl_advantages(rewards[None], torch.ones(1), multi_objective="sum_then_normalize", **trl_options)
    torch.testing.assert_close(group_advantages(rewards, leave_one_out=False, **ours), expected, atol=2e-3, rtol=0)


def test_gdpo_equals_trl_also_with_missing_rewards() -> None:
    parts = torch.rand(3, 5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    parts[1, 2, 3] = parts[2, 0, 0] = torch.nan
    parts[:, 4, 1] = torch.nan
    weights = torch.tensor([1.0, 0.3, 2.0], dtype=torch.float64)
    expected = trl_advantages(parts, weights, multi_objective="normalize_then_sum", scale_rewards="group")
    torch.testing.assert_close(gdpo(parts, weights), expected, atol=2e-3, rtol=0)


def trl_advantages(parts: Tensor, weights: Tensor, *, multi_objective: str, scale_rewards: str) -> Tensor:
    """The statements of GRPOTrainer._generate_and_score_completions between rewards and advantages, run as they are."""
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    source = textwrap.dedent(inspect.getsource(grpo_trainer.GRPOTrainer._generate_and_score_completions))
    lines = source.splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith("unscorable_mask ="))
    end = next(i for i, line in enumerate(lines) if line.strip().startswith("advantages = torch.nan_to_num"))
    names = {
        "self": SimpleNamespace(
            multi_objective_aggregation=multi_objective,
            scale_rewards=scale_rewards,
            reward_weights=weights,
            reward_funcs=list(parts),
        ),
        "torch": torch,
        "nanstd": grpo_trainer.nanstd,
        "rewards_per_func": parts.flatten(1).T,
        "num_generations": parts.shape[2],
        "device": parts.device,
    }
    exec(textwrap.dedent("\n".join(lines[start : end + 1])), names)
    advantages = names["advantages"]
    assert isinstance(advantages, Tensor)
    return advantages.view(parts.shape[1:])


def test_rewards_are_clamped_and_mapped_linearly() -> None:
    config = RewardScalingConfig(enabled=True, source_min=-1.0, source_max=3.0, target_min=0.0, target_max=2.0)
    scaled = scale_rewards(torch.tensor([-5.0, -1.0, 0.0, 3.0, 9.0]), config)
    torch.testing.assert_close(scaled, torch.tensor([0.0, 0.0, 0.5, 2.0, 2.0]))


def test_the_default_range_is_the_unit_interval() -> None:
    scaled = scale_rewards(torch.tensor([-0.5, 0.25, 7.0]), RewardScalingConfig(enabled=True))
    torch.testing.assert_close(scaled, torch.tensor([0.0, 0.25, 1.0]))


def test_scaling_that_is_off_changes_nothing() -> None:
    rewards = torch.tensor([-5.0, 7.0])
    assert torch.equal(scale_rewards(rewards, RewardScalingConfig(target_max=9.0)), rewards)


def test_an_empty_source_interval_is_an_error() -> None:
    with pytest.raises(ValueError, match="source_max"):
        scale_rewards(torch.zeros(1), RewardScalingConfig(enabled=True, source_min=1.0, source_max=1.0))


def dapo_penalty(length: int, longest: int, cache: int) -> float:
    """DAPO's eq. 13, by its three cases."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@pytest.mark.parametrize("max_response_length", [None, 15])
def test_overlong_shaping_is_dapos(max_response_length: int | None) -> None:
    lengths = torch.arange(1, 21).view(2, 10)
    rewards = torch.linspace(-1, 1, 20, dtype=torch.float64).view(2, 10)
    config = RewardShapingConfig(
        enabled=True, overlong_buffer_length=6, overlong_buffer_penalty=0.5, max_response_length=max_response_length
    )
    shaped = shape_rewards(rewards, lengths, torch.zeros(2, 10, dtype=torch.bool), config, most_tokens=18)
    penalties = [dapo_penalty(length, max_response_length or 18, 6) for length in range(1, 21)]
    torch.testing.assert_close(shaped, rewards + 0.5 * torch.tensor(penalties, dtype=torch.float64).view(2, 10))


def test_only_earned_rewards_of_truncated_responses_are_reduced() -> None:
    rewards = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    truncated = torch.tensor([[True, False, True, False]])
    config = RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.25)
    shaped = shape_rewards(rewards, torch.full((1, 4), 9), truncated, config, most_tokens=9)
    assert shaped.tolist() == [[0.25, 1.0, -1.0, -1.0]]


def test_shaping_that_is_off_changes_nothing() -> None:
    rewards, config = torch.ones(1, 2), RewardShapingConfig(overlong_buffer_length=1, stop_properly_penalty_coef=0.0)
    truncated = torch.ones(1, 2, dtype=torch.bool)
    assert torch.equal(shape_rewards(rewards, torch.full((1, 2), 9), truncated, config, most_tokens=9), rewards)
