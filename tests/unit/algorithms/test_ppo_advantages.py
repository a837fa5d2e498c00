"""Advantages and returns of a step: where they stand, what they are normalised over, what penalises them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_grpo.algorithms.stages import build_batch
from megatron_grpo.algorithms.step_advantages import add_advantages, score
from megatron_grpo.algorithms.token_functions import compute_ppo_token_advantages as compute_token_advantages
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.schema import Config
from megatron_grpo.losses.divergence import kl_estimate
from megatron_grpo.losses.value import estimate_advantages, token_rewards, whiten
from megatron_grpo.rollouts.partitions import compute_over_tokens
from tests.support.fake_rollouts import FakeRollouts, add_entry, by_sequence, split
from tests.support.ppo_batch import VALUES, advantages_of, make_config, make_trajectories
from tests.support.trajectories import failed_trajectory, make_trajectory

PLAIN = {"gae_lambda": 1.0, "normalize_advantages": False}
COMPUTED = ("values", "prev_logprobs", "reference_logprobs")


def test_monte_carlo_advantages_are_reward_minus_value_at_sampled_tokens_only() -> None:
    batch = advantages_of(make_config(PLAIN))
    returns = torch.tensor([0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0.5, 0.5])
    torch.testing.assert_close(batch["returns"], returns)
    torch.testing.assert_close(batch["advantages"], returns - VALUES)


def test_they_are_normalised_over_the_tokens_in_the_loss_alone() -> None:
    """A truncated response that is filtered out takes no part; its returns stay what they are."""
    raw = advantages_of(make_config(PLAIN))["advantages"]
    batch = advantages_of(make_config({**PLAIN, "normalize_advantages": True}, overlong_filtering=True))
    inside = batch["loss_mask"] > 0
    assert inside.sum() == 5
    expected = (raw[inside] - raw[inside].mean()) / raw[inside].std()
    torch.testing.assert_close(batch["advantages"][inside], expected, atol=1e-5, rtol=1e-5)
    assert (batch["advantages"][~inside] == 0).all()


def test_clipping_comes_last() -> None:
    batch = advantages_of(make_config(PLAIN, advantage_clip_low=-0.1, advantage_clip_high=0.5))
    raw = advantages_of(make_config(PLAIN))["advantages"]
    torch.testing.assert_close(batch["advantages"], raw.clamp(-0.1, 0.5))


def test_a_penalty_in_the_reward_counts_at_every_later_token() -> None:
    """k1 at log ratio 0.25 and weight 0.2 takes 0.05 a token from what follows."""
    loss = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.2, "reference_policy_kl_type": "k1"}
    batch = advantages_of(make_config(PLAIN, loss))
    expected = torch.tensor([0, 0, 0.85, 0.9, 0.95, 0, 0, -0.05, 0, 0, 0.4, 0.45])
    torch.testing.assert_close(batch["returns"], expected)


@pytest.mark.parametrize("name", ["gae", "raw_reward"])
def test_raw_reward_alone_does_not_look_at_the_values(name: str) -> None:
    advantages = advantages_of(make_config({**PLAIN, "name": name}))["advantages"]
    to_go = torch.tensor([0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0.5, 0.5])
    assert torch.equal(advantages, to_go) == (name == "raw_reward")


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    replicas=st.integers(1, 3),
    estimator=st.sampled_from([{}, {"length_adaptive_alpha": 0.7}, {"name": "raw_reward"}, {"gae_lambda_value": 0.5}]),
    penalty=st.booleans(),
)
def test_spread_over_shards_they_are_those_of_the_whole_step(
    seed: int, replicas: int, estimator: dict[str, Any], penalty: bool
) -> None:
    """To the last digit, against the formula over plain lists of whole responses, in float64 as ever."""
    draw = np.random.default_rng(seed)
    loss = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.2} if penalty else {}
    config = make_config(estimator, loss, overlong_filtering=True, advantage_clip_high=1.5)
    config.policy.parallel.data = replicas
    sequences = replicas * int(draw.integers(1, 4))
    responses = [random_response(draw, number) for number in range(sequences)]
    rollouts: Any = FakeRollouts()
    batch = build_batch(config, rollouts.put([[response] for response in responses]), rollouts)
    entries = {name: draw.normal(size=batch.lengths.sum()).astype(np.float32) for name in COMPUTED}
    for name, values in entries.items():
        add_entry(batch, name, values)
    finite = add_advantages(config, score(config, [response.outcome for response in responses]), batch, rollouts)
    assert len(batch.partitions) == replicas
    assert finite.all()
    expected = by_formula(config, responses, {name: split(entries[name], batch.lengths) for name in COMPUTED})
    for name, rows in expected.items():
        assert [row.tolist() for row in by_sequence(batch, name)] == rows


def random_response(draw: np.random.Generator, number: int) -> Trajectory:
    """Of 1 to 6 tokens; perhaps cut off, perhaps without a reward, perhaps not there at all."""
    if draw.random() < 0.15:
        return failed_trajectory(prompt_tokens=2, prompt_idx=number, group=number)
    return make_trajectory(
        int(draw.integers(1, 7)),
        prompt_tokens=int(draw.integers(1, 4)),
        prompt_idx=number,
        group=number,
        reward=None if draw.random() < 0.15 else float(draw.normal()),
        stop_reason="length" if draw.random() < 0.3 else "stop",
    )


def by_formula(
    config: Config, responses: list[Trajectory], entries: dict[str, list[NDArray[Any]]]
) -> dict[str, list[list[float]]]:
    """Advantages and returns by sequence; tokens that were not sampled have 0."""
    begins = [len(response.token_ids) - response.response_tokens for response in responses]
    sampled = {
        name: torch.from_numpy(np.concatenate([row[begin:] for row, begin in zip(rows, begins, strict=True)]))
        for name, rows in entries.items()
    }
    counts = [response.response_tokens for response in responses]
    loss = config.loss_fn
    kl = kl_estimate(sampled["prev_logprobs"], sampled["reference_logprobs"], loss.reference_policy_kl_type)
    rewards = torch.tensor([np.float32(response.reward or 0.0) for response in responses], dtype=torch.float64)
    by_token = token_rewards(rewards, counts, loss.kl_in_reward * kl if loss.use_kl_in_reward else None)
    estimate = estimate_advantages(by_token, sampled["values"].double(), counts, config.ppo.adv_estimator)
    in_loss = [response.reward is not None and not response.truncated for response in responses]
    mask = torch.tensor([inside for inside, count in zip(in_loss, counts, strict=True) for _ in range(count)]).bool()
    whitened = whiten(estimate.advantages, mask).clamp(max=config.ppo.advantage_clip_high)
    by_name: dict[str, list[list[float]]] = {}
    for name, values in {"advantages": whitened, "returns": estimate.returns}.items():
        pieces = values.float().split(counts)
        by_name[name] = [[0.0] * begin + piece.tolist() for begin, piece in zip(begins, pieces, strict=True)]
    return by_name


@pytest.mark.usefixtures("fake_ray")
def test_the_driver_computes_what_a_worker_does() -> None:
    """As with calculate_advantages_on_gpu, which brings the tokens to the driver's GPU; here to its CPU."""
    config = make_config({})
    added = []
    for in_driver in (False, True):
        config.policy.parallel.data = 3
        rollouts: Any = FakeRollouts()
        batch = build_batch(config, rollouts.put([[trajectory] for trajectory in make_trajectories()]), rollouts)
        add_entry(batch, "values", VALUES.numpy())
        rewards = score(config, [trajectory.outcome for trajectory in make_trajectories()]).rewards
        arguments = (config, rewards, batch.response_tokens, np.repeat(batch.in_loss, batch.response_tokens))
        entries = ("sampled", "values")
        if in_driver:
            references, finite = compute_over_tokens(compute_token_advantages, batch, entries, arguments)
            batch.fields |= references
        else:
            finite = rollouts.compute(compute_token_advantages, batch, entries, *arguments)
        assert rollouts.computed == [] if in_driver else ["compute_token_advantages"]
        rows = {name: [row.tolist() for row in by_sequence(batch, name)] for name in ("advantages", "returns")}
        added.append((finite.tolist(), rows))
    assert added[0] == added[1]


def test_a_response_whose_advantages_are_not_finite_is_named() -> None:
    config = make_config(PLAIN)
    rollouts: Any = FakeRollouts()
    batch = build_batch(config, rollouts.put([[trajectory] for trajectory in make_trajectories()]), rollouts)
    values = VALUES.clone()
    values[3] = float("nan")
    add_entry(batch, "values", values.numpy())
    finite = add_advantages(
        config, score(config, [trajectory.outcome for trajectory in make_trajectories()]), batch, rollouts
    )
    assert finite.tolist() == [False, True, True]
