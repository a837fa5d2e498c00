"""Dynamic sampling: which groups are kept, in which order, and what waits for the rest of the step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.algorithms.samples import dynamic_sampling
from megatron_grpo.losses.advantages import group_advantages, has_signal


def test_a_lone_success_keeps_its_signal_under_leave_one_out() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0], [1.0] * 4, [0.0] * 4])
    assert has_signal(rewards).tolist() == [True, True, False, False]
    # What a per-sample deviation would lose: the other samples of the lone success are all equal.
    assert rewards[0, [0, 1, 3]].std() == 0
    advantages = group_advantages(rewards, leave_one_out=True, normalize=True)
    assert (advantages[:2] != 0).all()
    assert (advantages[2:] == 0).all()


def test_equal_rewards_have_no_signal_whatever_their_mean_rounds_to() -> None:
    assert not has_signal(torch.full((1, 3), 0.1)).any()


def test_a_partial_batch_waits_and_the_next_one_completes_it() -> None:
    first = dynamic_sampling(list("abcd"), torch.tensor([True, False, True, False]), num_prompts_per_step=3)
    assert (first.groups, first.is_batch_complete, first.batch_cache) == ([], False, ["a", "c"])
    assert first.dropped == ["b", "d"]
    second = dynamic_sampling(
        list("efgh"), torch.tensor([False, True, True, True]), num_prompts_per_step=3, batch_cache=first.batch_cache
    )
    assert (second.groups, second.is_batch_complete, second.batch_cache) == (["a", "c", "f"], True, [])
    assert second.dropped == ["e", "g", "h"]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=8), st.integers(1, 8))
def test_steps_take_the_useful_groups_in_order_until_they_are_full(
    batches: list[list[bool]], expected_count: int
) -> None:
    """Against a plain loop over single groups."""
    expected: list[list[int]] = []
    filling: list[int] = []
    number = 0
    for batch in batches:
        for useful in batch:
            if useful and len(filling) < expected_count:
                filling.append(number)
            number += 1
        if len(filling) == expected_count:  # a step begins with a new batch
            expected.append(filling)
            filling = []
    steps: list[list[int]] = []
    cache: list[int] = []
    number = 0
    for batch in batches:
        groups = list(range(number, number + len(batch)))
        number += len(batch)
        outcome = dynamic_sampling(groups, torch.tensor(batch), num_prompts_per_step=expected_count, batch_cache=cache)
        cache = outcome.batch_cache
        if outcome.is_batch_complete:
            steps.append(outcome.groups)
    assert steps == expected
    assert cache == filling


def test_a_signal_for_each_group() -> None:
    with pytest.raises(AssertionError):
        dynamic_sampling(["a", "b"], torch.tensor([True]), num_prompts_per_step=1)
