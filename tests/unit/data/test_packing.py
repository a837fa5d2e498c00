"""The plan of microbatches keeps its promises for any lengths."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.data.packing import plan_microbatches


def padded(lengths: list[int], microbatch: list[int], multiple: int) -> int:
    """Tokens of a microbatch as a rectangle."""
    return math.ceil(max(lengths[i] for i in microbatch) / multiple) * multiple * len(microbatch)


@settings(deadline=None)
@given(
    data_parallel=st.integers(1, 4),
    per_rank=st.integers(1, 12),
    budget=st.integers(1, 300),
    multiple=st.sampled_from([1, 2, 8]),
    data=st.data(),
)
def test_any_plan_keeps_its_promises(
    data_parallel: int, per_rank: int, budget: int, multiple: int, data: st.DataObject
) -> None:
    count = data_parallel * per_rank
    lengths = data.draw(st.lists(st.integers(1, 120), min_size=count, max_size=count))
    plan = plan_microbatches(lengths, data_parallel=data_parallel, microbatch_tokens=budget, pad_to_multiple=multiple)
    assert len(plan) == data_parallel
    assert len({len(rank) for rank in plan}) == 1, "every rank has the same number of microbatches"
    microbatches = [microbatch for rank in plan for microbatch in rank]
    assert sorted(i for microbatch in microbatches for i in microbatch) == list(range(count)), "each sequence once"
    for microbatch in microbatches:
        assert microbatch
        assert len(microbatch) == 1 or padded(lengths, microbatch, multiple) <= budget
    again = plan_microbatches(lengths, data_parallel=data_parallel, microbatch_tokens=budget, pad_to_multiple=multiple)
    assert again == plan


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=40), budget=st.integers(1, 400))
def test_one_rank_gets_the_fewest_microbatches(lengths: list[int], budget: int) -> None:
    """Against dynamic programming over all ways to cut the sequences in order of length."""
    order = sorted(lengths, reverse=True)
    fewest = [0] + [len(order)] * len(order)
    for end in range(1, len(order) + 1):
        for start in range(end):
            if end - start == 1 or order[start] * (end - start) <= budget:
                fewest[end] = min(fewest[end], fewest[start] + 1)
    (plan,) = plan_microbatches(lengths, data_parallel=1, microbatch_tokens=budget, pad_to_multiple=1)
    assert len(plan) == fewest[-1]


def test_equal_sequences_are_shared_out_equally() -> None:
    plan = plan_microbatches([16] * 384, data_parallel=4, microbatch_tokens=2048, pad_to_multiple=1)
    assert [[len(microbatch) for microbatch in rank] for rank in plan] == [[96]] * 4


@settings(deadline=None)
@given(data_parallel=st.integers(2, 4), data=st.data())
def test_ranks_are_balanced(data_parallel: int, data: st.DataObject) -> None:
    count = data_parallel * 32
    lengths = data.draw(st.lists(st.integers(20, 100), min_size=count, max_size=count))
    plan = plan_microbatches(lengths, data_parallel=data_parallel, microbatch_tokens=400, pad_to_multiple=1)
    areas = [[padded(lengths, microbatch, 1) for microbatch in rank] for rank in plan]
    loads = [sum(rank) for rank in areas]
    assert max(loads) - min(loads) <= max(area for rank in areas for area in rank)


def test_long_sequences_stand_alone() -> None:
    plan = plan_microbatches([500, 10, 10, 10], data_parallel=1, microbatch_tokens=40, pad_to_multiple=1)
    assert plan == [[[0], [1, 2, 3]]]


@pytest.mark.parametrize(
    ("lengths", "ranks", "message"),
    [([5], 2, "1 sequences"), ([], 1, "0 sequences"), ([50, 50, 50], 2, "a multiple of 2")],
)
def test_what_cannot_be_shared_out_is_an_error(lengths: list[int], ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_microbatches(lengths, data_parallel=ranks, microbatch_tokens=40, pad_to_multiple=1)
