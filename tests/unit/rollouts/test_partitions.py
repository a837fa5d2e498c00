"""Flat arrays of partitions against slices of single sequences."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.batch.trajectory import Span
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.rollouts.partitions import (
    choose_evenly,
    concatenate_trajectories,
    gather_partitions,
    list_rollout_fields,
    locate_sequences,
    split_by_partition,
)
from tests.support.trajectories import failed_trajectory, make_trajectory


def test_tokens_masks_and_logprobs_of_several_turns() -> None:
    trajectory = make_trajectory(token_ids=[9, 8, 7, 6, 5], spans=[Span(1, 3, 0), Span(4, 5, 1)], logprobs=[-1, -2, -3])
    two = failed_trajectory(prompt_tokens=2)
    arrays = concatenate_trajectories([two, trajectory])
    assert {name: array.dtype for name, array in arrays.items()} == {
        "token_ids": np.int32,
        "sampled": np.bool_,
        "generation_logprobs": np.float32,
    }
    assert arrays["token_ids"].tolist() == [0, 1, 9, 8, 7, 6, 5]
    assert arrays["sampled"].tolist() == [False, False, False, True, True, False, True]
    assert arrays["generation_logprobs"].tolist() == [0, 0, 0, -1, -2, 0, -3]
    assert all(len(array) == 0 for array in concatenate_trajectories([]).values())


def test_routed_experts_stand_at_their_tokens_and_are_unknown_elsewhere() -> None:
    form = RoutedForm(layers=(1, 2), top_k=2, experts=200)
    packed = form.pack(np.arange(8).reshape(2, 2, 2))
    trajectories = [make_trajectory(routed=packed), failed_trajectory(prompt_tokens=2), make_trajectory(routed=packed)]
    routed = concatenate_trajectories(trajectories, form)["routed_experts"]
    nothing = [[-1, -1]] * 2
    experts = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert form.unpack(routed).tolist() == [*experts, nothing, nothing, nothing, *experts, nothing]
    assert tuple(concatenate_trajectories(trajectories, form)) == list_rollout_fields(form)
    assert tuple(concatenate_trajectories(trajectories)) == list_rollout_fields(None)
    assert concatenate_trajectories([], form)["routed_experts"].shape == (0, 4)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 2**32))
def test_gathering_undoes_splitting(lengths: list[int], shards: int, seed: int) -> None:
    owner = np.random.default_rng(seed).integers(0, shards, len(lengths))
    sequences = [np.flatnonzero(owner == shard) for shard in range(shards)]
    tokens = np.arange(sum(lengths), dtype=np.int32)
    begins = np.cumsum([0, *lengths])
    for array in (tokens, tokens.astype(np.float32)):
        split = split_by_partition(array, sequences, np.array(lengths))
        for numbers, part in zip(sequences, split, strict=True):
            expected = [token for number in numbers for token in range(begins[number], begins[number + 1])]
            assert part.tolist() == expected
        gathered = gather_partitions(split, sequences, np.array(lengths))
        assert gathered.dtype == array.dtype
        np.testing.assert_array_equal(gathered, array)


def test_places_in_groups_of_any_size() -> None:
    sizes = [2, 0, 3, 1]
    everywhere = [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2), (3, 0)]
    assert locate_sequences([np.array([0, 2, 5]), np.array([], dtype=np.int64)], sizes) == [
        [everywhere[number] for number in (0, 2, 5)],
        [],
    ]
    assert locate_sequences([np.arange(6)], sizes) == [everywhere]


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (None, [[0, 1], [0, 1, 2], [0]]),
        (9, [[0, 1], [0, 1, 2], [0]]),
        (3, [[0], [0, 2], []]),
        (1, [[0], [], []]),
    ],
)
def test_a_choice_is_spread_over_the_step(number: int | None, expected: list[list[int]]) -> None:
    assert choose_evenly([2, 3, 1], number) == expected
