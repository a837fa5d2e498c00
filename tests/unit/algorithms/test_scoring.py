"""From what environments said to rewards, and to the question which groups can teach anything; against plain loops."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.algorithms.step_advantages import Scores, score
from megatron_grpo.batch.trajectory import Outcome
from megatron_grpo.config.loss_schema import RewardShapingConfig
from megatron_grpo.config.schema import (
    AdvantageEstimatorConfig,
    Config,
    EnvironmentConfig,
    GenerationConfig,
    GRPOConfig,
    RewardScalingConfig,
)
from tests.support.trajectories import failed_trajectory, make_outcome

LENGTHS = [3, 1, 2, 2]
REWARDS = [1.0, 0.0, 0.25, 0.75]
LONGEST = 6
NAN = math.nan


def config(samples: int = 2, **grpo: Any) -> Config:
    generation = GenerationConfig(max_new_tokens=LONGEST)
    return Config(grpo=GRPOConfig(num_generations_per_prompt=samples, **grpo), generation=generation)


def gdpo_config(weights: tuple[float, float] = (1.0, 0.5), samples: int = 2) -> Config:
    functions = ["rewards.right", "rewards.short"]
    environment = EnvironmentConfig(type="reward_functions", reward_funcs=functions, reward_weights=list(weights))
    gdpo_settings = config(samples, adv_estimator=AdvantageEstimatorConfig(name="gdpo"))
    gdpo_settings.env = {"task": environment}
    return gdpo_settings


def step(**changes: Any) -> list[Outcome]:
    """Two groups of two; `changes` are of the last."""
    return [
        make_outcome(length, **({"reward": reward} | (changes if i == 3 else {})))
        for i, (reward, length) in enumerate(zip(REWARDS, LENGTHS, strict=True))
    ]


def scale_reward(reward: float, keys: RewardScalingConfig) -> float:
    """By the definition, on numbers."""
    if not keys.enabled:
        return reward
    share = (min(max(reward, keys.source_min), keys.source_max) - keys.source_min) / (keys.source_max - keys.source_min)
    return keys.target_min + share * (keys.target_max - keys.target_min)


def shape_reward(reward: float, outcome: Outcome, keys: RewardShapingConfig) -> float:
    """By the definition, on numbers."""
    if not keys.enabled:
        return reward
    if keys.stop_properly_penalty_coef is not None and outcome.truncated and reward > 0:
        reward *= keys.stop_properly_penalty_coef
    if keys.overlong_buffer_length is not None:
        begins = (keys.max_response_length or LONGEST) - keys.overlong_buffer_length
        excess = (outcome.response_tokens - begins) / keys.overlong_buffer_length
        reward -= keys.overlong_buffer_penalty * min(max(excess, 0.0), 1.0)
    return reward


def differ(rewards: list[float | None]) -> bool:
    """Whether some two of the rewards that were given are different, as the float32 that is computed with."""
    finite = [torch.tensor(reward).item() for reward in rewards if reward is not None]
    return any(a != b for a, b in combinations(finite, 2))


OUTCOMES = st.builds(
    make_outcome,
    st.integers(0, LONGEST),
    reward=st.none() | st.sampled_from([-2.0, -0.5, 0.0, 0.1, 0.5, 1.0, 3.0]),
    stop_reason=st.sampled_from(["stop", "length"]),
)
SCALINGS = [
    RewardScalingConfig(),
    RewardScalingConfig(enabled=True, source_max=0.5, target_max=8.0),
    RewardScalingConfig(enabled=True, source_min=-1.0, source_max=1.0, target_min=0.5, target_max=-0.5),
]
SHAPINGS = [
    RewardShapingConfig(),
    RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.25),
    RewardShapingConfig(enabled=True, overlong_buffer_length=2, overlong_buffer_penalty=0.5),
    RewardShapingConfig(enabled=True, overlong_buffer_length=4, max_response_length=5),
]


@given(
    st.integers(1, 4).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.lists(OUTCOMES, min_size=n, max_size=n), min_size=1, max_size=5))
    ),
    st.sampled_from(SCALINGS),
    st.sampled_from(SHAPINGS),
)
def test_rewards_and_signals_against_loops(
    sampled: tuple[int, list[list[Outcome]]], scaling: RewardScalingConfig, shaping: RewardShapingConfig
) -> None:
    samples, groups = sampled
    keys = config(samples, reward_scaling=scaling, reward_shaping=shaping)
    scores = score(keys, [outcome for group in groups for outcome in group])
    assert scores.rewards.dtype == torch.float32
    assert scores.reward_parts is scores.function_weights is None
    for group, rewards, differs, has_signal in zip(
        groups, scores.rewards, scores.differs, scores.has_signal, strict=True
    ):
        before = [None if outcome.reward is None else scale_reward(outcome.reward, scaling) for outcome in group]
        after = [
            None if value is None else shape_reward(value, outcome, shaping)
            for outcome, value in zip(group, before, strict=True)
        ]
        expected = [NAN if value is None else value for value in after]
        assert rewards.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6, nan_ok=True)
        # On a tie that rounding alone could break, the numbers themselves decide.
        values = [None if math.isnan(value) else value for value in rewards.tolist()]
        assert differs == differ(values)
        assert has_signal == (differ(values) and differ(before))


def test_scaling_comes_before_shaping() -> None:
    scaling = RewardScalingConfig(enabled=True, source_max=0.5, target_max=10.0)
    shaping = RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.5)
    keys = config(reward_scaling=scaling, reward_shaping=shaping)
    assert score(keys, step(stop_reason="length")).rewards.tolist() == [[10.0, 0.0], [5.0, 5.0]]


def test_a_penalty_for_length_is_no_signal() -> None:
    alike = [make_outcome(length, reward=1.0 if i < 2 else float(i)) for i, length in enumerate(LENGTHS)]
    shaping = RewardShapingConfig(enabled=True, overlong_buffer_length=3, max_response_length=3)
    scores = score(config(reward_shaping=shaping), alike)
    assert scores.rewards[0, 0] != scores.rewards[0, 1]
    assert scores.differs.tolist() == [True, True]
    assert scores.has_signal.tolist() == [False, True]


def test_a_lone_success_is_a_signal() -> None:
    assert score(config(4), [make_outcome(1, reward=float(i == 2)) for i in range(4)]).has_signal.tolist() == [True]


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
    alike = [make_outcome(1, reward=1.0, stop_reason="length"), make_outcome(1, reward=0.0, stop_reason="length")]
    if shaping.overlong_buffer_length is not None:
        alike = [make_outcome(2, reward=1.0), make_outcome(1, reward=0.0)]  # 1 - 3 * 2/3 = 0 - 3 * 1/3
    scores = score(config(reward_shaping=shaping), alike)
    assert scores.rewards.flatten().tolist() == [scores.rewards[0, 0].item()] * 2
    assert (scores.has_signal.tolist(), scores.differs.tolist()) == ([False], [False])


def test_what_nobody_scored_is_no_difference() -> None:
    failed = failed_trajectory().outcome
    scores = score(config(), [make_outcome(reward=0.5), failed, *step(reward=None)[2:]])
    assert scores.has_signal.tolist() == [False, False]
    assert scores.rewards.isnan().tolist() == [[False, True], [False, True]]
    three = [make_outcome(reward=0.5), failed, make_outcome(reward=0.25)]
    assert score(config(3), three).has_signal.tolist() == [True]
    assert score(config(3), [failed] * 3).has_signal.tolist() == [False]


def gdpo_step(parts: list[dict[str, float]]) -> list[Outcome]:
    return [make_outcome(1, reward=0.0, reward_parts=part) for part in parts]


def test_gdpo_keeps_what_each_function_said() -> None:
    parts = [{"right": 1.0, "short": 2.0}, {"right": 0.0}, {"short": 1.0}, {}]
    scores = score(gdpo_config(), gdpo_step(parts))
    assert scores.reward_parts is not None
    assert scores.function_weights is not None
    expected = [[[1.0, 0.0], [NAN, NAN]], [[2.0, NAN], [1.0, NAN]]]
    assert torch.equal(scores.reward_parts.nan_to_num(-9), torch.tensor(expected).nan_to_num(-9))
    assert scores.function_weights.tolist() == [1.0, 0.5]


def test_gdpo_keeps_groups_whose_sum_is_the_same() -> None:
    outcomes = gdpo_step([{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 2.0}, {"right": 1.0}, {"right": 1.0}])
    scores = score(gdpo_config(), outcomes)
    assert scores.has_signal.tolist() == scores.differs.tolist() == [True, False]
    assert scores.rewards.unique().numel() == 1
    told_apart_by_the_second = outcomes[:1] + outcomes[2:3]
    watched = score(gdpo_config((1.0, 0.0)), told_apart_by_the_second)
    assert watched.has_signal.tolist() == [False], "a function that is only watched teaches nothing"


def test_gdpo_drops_groups_whose_rewards_cancel_out() -> None:
    parts = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0}, {"right": 1.0}, {"right": 0.0}]
    assert score(gdpo_config((1.0, 1.0)), gdpo_step(parts)).has_signal.tolist() == [False, True]


def entries(scores: Scores, groups: list[int]) -> dict[str, Any]:
    """Those of some groups to the last digit, and for equality: NaN is a number that no test gives."""
    chosen = {"rewards": scores.rewards[groups], "differs": scores.differs[groups], "kept": scores.has_signal[groups]}
    if scores.reward_parts is not None:
        chosen["reward_parts"] = scores.reward_parts[:, groups]
    return {name: value.float().nan_to_num(-9.0).tolist() for name, value in chosen.items()}


@settings(max_examples=50)
@given(
    st.lists(st.lists(OUTCOMES, min_size=3, max_size=3), min_size=2, max_size=6).flatmap(
        lambda groups: st.tuples(
            st.just(groups), st.lists(st.integers(0, len(groups) - 1), min_size=1, max_size=6), st.data()
        )
    ),
    st.booleans(),
)
def test_scores_of_groups_are_those_of_the_groups_alone(drawn: tuple[Any, list[int], Any], gdpo: bool) -> None:
    """A group scores the same beside any others, so a step trains on the scores that dynamic sampling saw."""
    groups, chosen, data = drawn
    for outcome in [outcome for group in groups for outcome in group]:
        outcome.reward_parts = data.draw(
            st.dictionaries(st.sampled_from(["right", "short"]), st.sampled_from([0.0, 1.0]))
        )
    shaping = RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.25)
    keys = gdpo_config(samples=3) if gdpo else config(3, reward_shaping=shaping)
    full = score(keys, [outcome for group in groups for outcome in group])
    alone = score(keys, [outcome for number in chosen for outcome in groups[number]])
    assert entries(full, chosen) == entries(alone, list(range(len(chosen))))
    joined = Scores.join([score(keys, groups[number]) for number in chosen])
    assert entries(joined, list(range(len(chosen)))) == entries(alone, list(range(len(chosen))))


@pytest.mark.parametrize(("turns", "longest"), [(1, LONGEST), (3, 3 * LONGEST), (9, 40)])
def test_the_overlong_penalty_is_full_for_the_longest_rollout(turns: int, longest: int) -> None:
    """DAPO's penalty counts the tokens of all turns, of which each has LONGEST at most."""
    settings = config(
        3, reward_shaping=RewardShapingConfig(enabled=True, overlong_buffer_length=2), max_rollout_turns=turns
    )
    settings.policy.max_total_sequence_length = 40
    outcomes = [make_outcome(tokens, reward=1.0) for tokens in (longest - 2, longest - 1, longest)]
    assert score(settings, outcomes).rewards.tolist() == [[1.0, 0.5, 0.0]]
