"""Rewards by turn become advantages as plain loops over turns, samples and tokens compute them."""

from __future__ import annotations

from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest

from megatron_grpo.algorithms.step_advantages import Scores, score
from megatron_grpo.batch.trajectory import Span, Trajectory
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.load import compose_config
from tests.support.step_advantages import advantages_of
from tests.support.trajectories import failed_trajectory, make_trajectory

# Two groups of three samples: rewards and sampled tokens of each turn. One sample of the second group failed, and one
# has a single turn.
GROUPS = [
    [([0.5, 1.0], [2, 1]), ([0.0, 0.25, -1.0], [1, 2, 3]), ([1.0, 0.5], [1, 1])],
    [([0.25], [2]), None, ([0.75, 0.0, 2.0], [1, 1, 2])],
]


def make_rollout(turns: tuple[list[float], list[int]] | None, **fields: int) -> Trajectory:
    if turns is None:
        return failed_trajectory(**fields)
    rewards, tokens = turns
    spans, start = [], 1  # an observation of one token stands before each turn
    for count in tokens:
        spans.append(Span(start, start + count, 0))
        start += count + 1
    return make_trajectory(
        sum(tokens), token_ids=list(range(start - 1)), spans=spans, reward=sum(rewards),
        turn_rewards=list(rewards), turn_tokens=list(tokens), **fields,
    )  # fmt: skip


def make_step(groups: Any = GROUPS) -> list[Trajectory]:
    return [make_rollout(turns, group=g, sample=s) for g, group in enumerate(groups) for s, turns in enumerate(group)]


def make_config(**values: Any) -> Config:
    overrides = [f"{'' if '.' in key else 'grpo.'}{key}={value}" for key, value in values.items()]
    return compose_config(["+exp=quickstart", "grpo.num_generations_per_prompt=3", *overrides])


def compute_expected(discount: float, leave_one_out: bool, normalize: bool) -> list[list[float]]:
    """Advantage of each token of each trajectory, by the definition; 0 for prompt and observations."""
    expected = []
    for group in GROUPS:
        returns = [
            None if turns is None else
            [sum(discount ** (k - t) * turns[0][k] for k in range(t, len(turns[0]))) for t in range(len(turns[0]))]
            for turns in group
        ]  # fmt: skip
        for rollout_returns, turns in zip(returns, group, strict=True):
            row: list[float] = []
            for t, count in enumerate([] if turns is None else turns[1]):
                peers = [
                    peer_returns[t] for peer_returns in returns if peer_returns is not None and len(peer_returns) > t
                ]
                other_returns = [
                    peer_returns[t]
                    for peer_returns in returns
                    if peer_returns is not None and len(peer_returns) > t and peer_returns is not rollout_returns
                ]
                advantage = 0.0
                if other_returns and len({*peers}) > 1:
                    advantage = rollout_returns[t] - fmean(other_returns if leave_one_out else peers)
                    advantage /= (stdev(peers) + 1e-6) if normalize else 1
                row += [0.0] + [advantage] * count
            expected.append(row or [0.0])
    return expected


@pytest.mark.parametrize("discount", [1.0, 0.5])
@pytest.mark.parametrize(("leave_one_out", "normalize"), [(True, True), (False, True), (True, False)])
def test_each_turn_has_an_advantage(discount: float, leave_one_out: bool, normalize: bool) -> None:
    config = make_config(
        turn_credit="turn",
        turn_discount=discount,
        use_leave_one_out_baseline=leave_one_out,
        normalize_rewards=normalize,
    )
    actual = advantages_of(config, make_step())
    expected = compute_expected(discount, leave_one_out, normalize)
    assert [len(row) for row in actual] == [len(row) for row in expected]
    np.testing.assert_allclose(np.concatenate(actual), np.concatenate(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", ["quickstart_distillation", "quickstart_async"])
def test_turns_have_advantages_beside_a_teacher_and_in_asynchronous_runs(recipe: str) -> None:
    loss = "loss_fn.policy_loss_weight" if recipe == "quickstart_distillation" else "grpo.turn_discount"
    overrides = ["grpo.num_generations_per_prompt=3", "grpo.turn_credit=turn", f"{loss}=1"]
    config = compose_config([f"+exp={recipe}", *overrides])
    loop = config.loop
    expected = compute_expected(1.0, loop.use_leave_one_out_baseline, loop.normalize_rewards)
    np.testing.assert_allclose(
        np.concatenate(advantages_of(config, make_step())), np.concatenate(expected), rtol=1e-5, atol=1e-6
    )


def test_rewards_are_discounted_to_the_start() -> None:
    scores = score(make_config(turn_discount=0.5), [outcome.outcome for outcome in make_step()])
    assert scores.rewards.flatten().tolist() == pytest.approx(
        [1.0, 0.125 - 0.25, 1.25, 0.25, float("nan"), 0.75 + 0.5], nan_ok=True
    )


def test_without_rewards_by_turn_nothing_changes() -> None:
    trajectories = make_step()
    for trajectory in trajectories:
        trajectory.turn_rewards, trajectory.turn_tokens = [], []
    plain = advantages_of(make_config(), trajectories)
    assert any(any(row) for row in plain)
    for credit in ("turn", "response"):
        again = advantages_of(make_config(turn_credit=credit, turn_discount=0.5), trajectories)
        assert again == plain


def test_the_undiscounted_sum_is_the_default() -> None:
    with_turns, without = make_step(), make_step()
    for trajectory in without:
        trajectory.turn_rewards, trajectory.turn_tokens = [], []
    assert advantages_of(make_config(), with_turns) == advantages_of(make_config(), without)


def test_turns_tell_responses_of_equal_sums_apart() -> None:
    """Dynamic sampling keeps such a group, and joins sets whose numbers of turns differ."""
    group = [([1.0, 0.0], [1, 1]), ([0.0, 1.0], [1, 1]), ([0.5, 0.5], [1, 1])]
    outcomes = [outcome.outcome for outcome in make_step([group])]
    turn = score(make_config(turn_credit="turn"), outcomes)
    assert not score(make_config(), outcomes).has_signal.any()
    assert turn.has_signal.all()
    both = Scores.join([turn, score(make_config(turn_credit="turn"), [outcome.outcome for outcome in make_step()])])
    assert both.turns is not None
    assert both.turns.returns.shape == both.turns.tokens.shape == (3, 3, 3)
    assert both.turns.tokens[2].tolist() == [[0, 0, 0], [0, 3, 0], [0, 0, 2]]


def test_a_length_penalty_counts_in_the_last_turn() -> None:
    shaping = {"grpo.reward_shaping.enabled": "true", "grpo.reward_shaping.overlong_buffer_length": 1}
    config = make_config(
        turn_credit="turn", **shaping, **{"grpo.reward_shaping.max_response_length": 3, "generation.max_new_tokens": 5}
    )
    outcomes = [outcome.outcome for outcome in make_step()]
    penalised = score(config, outcomes).turns
    plain = score(make_config(turn_credit="turn"), outcomes).turns
    assert penalised is not None
    assert plain is not None
    lowered = (plain.returns - penalised.returns)[:, 0]  # of the first group: 3, 6 and 2 sampled tokens
    np.testing.assert_allclose(lowered, [[1, 1, 0], [1, 1, 0], [np.nan, 1, np.nan]])
