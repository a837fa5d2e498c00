"""How the rollouts of a step are laid out: what is in the loss, and which replicas work on which sequences."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_grpo.algorithms.stages import build_batch
from megatron_grpo.batch.packing import TOKEN_COST, SequencePacker
from megatron_grpo.batch.step_batch import StepBatch, partition_sequences
from megatron_grpo.batch.trajectory import Span, Trajectory
from megatron_grpo.config.schema import Config, GRPOConfig, LossConfig, PPOConfig
from tests.support.fake_rollouts import FakeRollouts, by_sequence, stored_names
from tests.support.trajectories import failed_trajectory, make_trajectory


def laid_out(trajectories: list[Trajectory], *, samples: int = 2, replicas: int = 1, **keys: Any) -> StepBatch:
    positive = keys.pop("positive", 0.0)
    config = Config(grpo=GRPOConfig(**keys), loss_fn=LossConfig(positive_example_nll_weight=positive))
    config.policy.parallel.data = replicas
    rollouts: Any = FakeRollouts()
    groups = [trajectories[start : start + samples] for start in range(0, len(trajectories), samples)]
    return build_batch(config, rollouts.put(groups), rollouts)


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_batch_of_a_step(replicas: int) -> None:
    drawn = [[-0.5, -1.0, -1.5], [-0.25], [-2.0, -1.0], [-0.125, -0.75]]
    trajectories = [make_trajectory(len(row), prompt_tokens=2, logprobs=row) for row in drawn]
    trajectories[3] = replace(trajectories[3], stop_reason="length", correct=True)
    batch = laid_out(trajectories, replicas=replicas, overlong_filtering=True, positive=0.1)
    assert batch.lengths.tolist() == [5, 3, 4, 4]
    assert batch.response_tokens.tolist() == [3, 1, 2, 2]
    assert batch.in_loss.tolist() == [True, True, True, False]
    assert batch.positive is not None
    assert batch.positive.tolist() == [False, False, False, True]
    assert batch.loss_tokens == 6
    assert batch.advantages is None
    assert len(batch.partitions) == replicas
    rows = {name: [row.tolist() for row in by_sequence(batch, name)] for name in stored_names(batch)}
    assert rows == {
        "token_ids": [[0, 1, 2, 3, 4], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]],
        "sampled": [[False] * 2 + [True] * len(row) for row in drawn],
        "generation_logprobs": [[0.0, 0.0, *row] for row in drawn],
    }


def test_spans_say_which_tokens_were_sampled() -> None:
    two_turns = [Span(1, 2, 0), Span(3, 5, 1)]
    trajectory = make_trajectory(token_ids=[7, 8, 9, 7, 8, 9], spans=two_turns, logprobs=[-1.0, -2.0, -3.0])
    batch = laid_out([trajectory], samples=1)
    assert (batch.lengths.tolist(), batch.response_tokens.tolist()) == ([6], [3])
    assert by_sequence(batch, "generation_logprobs")[0].tolist() == [0, -1, 0, -2, -3, 0]


OUTCOMES = st.builds(
    make_trajectory,
    st.integers(0, 5),
    reward=st.none() | st.just(0.0) | st.just(1.0),
    correct=st.none() | st.booleans(),
    loss_multiplier=st.sampled_from([0.0, 0.5, 1.0]),
    stop_reason=st.sampled_from(["stop", "length"]),
) | st.builds(failed_trajectory)


@given(st.lists(OUTCOMES, min_size=1, max_size=8), st.booleans(), st.booleans())
def test_what_is_in_the_loss_against_a_loop(trajectories: list[Trajectory], overlong: bool, imitate: bool) -> None:
    batch = laid_out(trajectories, samples=1, overlong_filtering=overlong, positive=0.1 * imitate)
    expected = []
    for trajectory in trajectories:
        inside = True
        if trajectory.reward is None:  # nobody had an opinion, or the rollout failed
            inside = False
        if trajectory.loss_multiplier == 0:
            inside = False
        if overlong and trajectory.stop_reason == "length":
            inside = False
        expected.append(inside)
    assert batch.in_loss.dtype == np.bool_
    assert batch.in_loss.tolist() == expected
    weights = [trajectory.loss_multiplier or 1.0 for trajectory in trajectories]
    assert (None if batch.loss_weights is None else batch.loss_weights.tolist()) == (
        None if {*weights} == {1.0} else weights
    )
    if imitate:
        assert batch.positive is not None
        assert batch.positive.dtype == np.bool_
        assert batch.positive.tolist() == [trajectory.correct is True for trajectory in trajectories]
    else:
        assert batch.positive is None
    tokens = sum(
        trajectory.response_tokens for trajectory, inside in zip(trajectories, expected, strict=True) if inside
    )
    assert batch.loss_tokens == tokens


class Layouts(NamedTuple):
    """Replicas and minibatches of both models; without a value model its numbers are None."""

    policy: int
    minibatch: int | None
    value: int | None
    value_minibatch: int | None

    def config(self, microbatch_tokens: int = 400) -> Config:
        config = Config(algorithm="grpo" if self.value is None else "ppo", ppo=PPOConfig())
        config.policy.parallel.data = self.policy
        config.policy.train_global_batch_samples = self.minibatch
        config.policy.microbatch_tokens = microbatch_tokens
        if self.value is not None:
            config.value.parallel.data = self.value
            config.value.train_global_batch_samples = self.value_minibatch
        return config

    @property
    def models(self) -> list[tuple[int, int | None]]:
        """Replicas and minibatch of each model."""
        policy = (self.policy, self.minibatch)
        return [policy] if self.value is None else [policy, (self.value, self.value_minibatch)]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layouts, int]:
    """Layouts that the checks of a configuration let pass, and the sequences of a step."""
    policy = draw(st.integers(1, 6))
    value = draw(st.none() | st.integers(1, 6))
    partitions = math.lcm(policy, value or 1)
    # Minibatches of both models divide the step, and not always each other.
    minibatch, value_minibatch = (partitions * draw(st.sampled_from([1, 2, 3, 4])) for _ in range(2))
    sequences = math.lcm(minibatch, value_minibatch) * draw(st.integers(1, 2))
    if draw(st.booleans()):
        minibatch = None
    if value is None or draw(st.booleans()):
        value_minibatch = None
    return Layouts(policy, minibatch, value, value_minibatch), sequences


def a_step(lengths: list[int]) -> StepBatch:
    tokens = np.array(lengths, dtype=np.int64)
    return StepBatch(lengths=tokens, response_tokens=tokens, in_loss=np.ones(len(tokens), dtype=np.bool_))


def owners(partitions: list[NDArray[np.int64]], replicas: int, sequences: int) -> list[int]:
    """The replica of each sequence, when each owns as many neighbouring partitions as the others."""
    assert len(partitions) % replicas == 0, "every replica owns whole partitions"
    size = len(partitions) // replicas
    owner = {int(number): partition // size for partition, numbers in enumerate(partitions) for number in numbers}
    return [owner[number] for number in range(sequences)]


@settings(max_examples=200)
@given(layouts(), st.data(), st.sampled_from([40, 400, 4000]))
def test_every_replica_has_its_share_of_every_minibatch(
    drawn: tuple[Layouts, int], data: st.DataObject, microbatch_tokens: int
) -> None:
    layout, sequences = drawn
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=sequences, max_size=sequences))
    batch, config = a_step(lengths), layout.config(microbatch_tokens)
    partitions = partition_sequences(config, batch)
    assert sorted(int(number) for numbers in partitions for number in numbers) == list(range(sequences)), "each once"
    for numbers in partitions:
        assert numbers.dtype == np.int64
        assert numbers.tolist() == sorted(numbers.tolist())
    assert len(partitions) == math.lcm(layout.policy, layout.value or 1)
    for replicas, minibatch in layout.models:
        owner = owners(partitions, replicas, sequences)
        size = minibatch or sequences
        for start in range(0, sequences, size):
            assert set(owner[start : start + size]) == set(range(replicas)), "nobody waits for a replica without work"
    again = partition_sequences(config, batch)
    assert [numbers.tolist() for numbers in again] == [numbers.tolist() for numbers in partitions]


def test_one_replica_keeps_the_order_of_the_step() -> None:
    (numbers,) = partition_sequences(Layouts(1, None, 1, 2).config(), a_step([9, 1, 5, 3]))
    assert numbers.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("layout", [Layouts(2, None, None, None), Layouts(2, 8, None, None), Layouts(2, 8, 2, 16)])
def test_shards_are_the_shares_of_the_plan_of_each_minibatch(layout: Layouts) -> None:
    """With one layout throughout, a replica trains on what it would get if minibatches were dealt out one by one."""
    lengths = np.random.default_rng(3).integers(1, 60, 32).tolist()
    partitions = partition_sequences(layout.config(), a_step(lengths))
    size = layout.minibatch or len(lengths)
    for start in range(0, len(lengths), size):
        shares = SequencePacker(400, 1, TOKEN_COST).assign_to_replicas(np.array(lengths[start : start + size]), 2)
        for numbers, share in zip(partitions, shares, strict=True):
            share_numbers = [number for number in numbers.tolist() if start <= number < start + size]
            assert share_numbers == sorted(start + index for index in share)


@pytest.mark.parametrize(
    "layout", [Layouts(8, None, None, None), Layouts(4, 256, None, None), Layouts(2, None, 8, 512)]
)
@pytest.mark.parametrize("spread", ["uniform", "lognormal"])
def test_shards_are_level_in_tokens(layout: Layouts, spread: str) -> None:
    """Within 3%: a replica's time is that of its tokens, and all wait for the slowest."""
    draw = np.random.default_rng(7)
    if spread == "uniform":
        lengths = draw.integers(50, 1000, 1024)
    else:
        lengths = np.minimum(np.exp(draw.normal(5.5, 0.8, 1024)), 1000).astype(np.int64) + 20
    batch = a_step(lengths.tolist())
    tokens = [int(batch.lengths[numbers].sum()) for numbers in partition_sequences(layout.config(2048), batch)]
    assert max(tokens) / (sum(tokens) / len(tokens)) < 1.03
    assert min(tokens) / (sum(tokens) / len(tokens)) > 0.97
