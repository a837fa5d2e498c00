"""Bins and the plan of microbatches keep their promises for any lengths."""

import math
import random
import re
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.batch.packing import TOKEN_COST, Cost, Lengths, SequencePacker, SequencePadder


def plan_microbatches(
    lengths: Lengths, *, data_parallel: int, microbatch_tokens: int, pad_to_multiple: int = 1
) -> list[list[list[int]]]:
    return SequencePadder(microbatch_tokens, pad_to_multiple).assign_microbatches(lengths, data_parallel)


def count_padded_tokens(lengths: list[int], microbatch: list[int], multiple: int) -> int:
    """Tokens of a microbatch as a rectangle."""
    return math.ceil(max(lengths[i] for i in microbatch) / multiple) * multiple * len(microbatch)


def plainly_planned(
    lengths: list[int], *, data_parallel: int, microbatch_tokens: int, pad_to_multiple: int
) -> list[list[list[int]]]:
    """The plan that is promised, step by step and in quadratic time.

    Cut in order of length; try areas by bisection; halve the largest of more than one sequence; give each rectangle,
    largest first, to the rank with the least area among those that lack microbatches.
    """
    if not lengths or len(lengths) < data_parallel:
        raise ValueError(f"{len(lengths)} sequences do not give each of {data_parallel} data-parallel ranks one")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    widths = [math.ceil(max(lengths[i], 1) / pad_to_multiple) * pad_to_multiple for i in order]
    fewest = len(plainly_cut(widths, microbatch_tokens))
    microbatch_count = min(math.ceil(fewest / data_parallel) * data_parallel, len(lengths))
    areas = plain_rectangles(widths, microbatch_count, microbatch_tokens)
    shares: list[list[int]] = [[] for _ in range(data_parallel)]
    for start in sorted(areas, key=lambda s: (-areas[s][0], s)):
        lacking = [
            rank for rank in range(data_parallel) if len(shares[rank]) < math.ceil(microbatch_count / data_parallel)
        ]
        least = min(lacking, key=lambda rank: (sum(areas[s][0] for s in shares[rank]), rank))
        shares[least].append(start)
    return [[order[start : start + areas[start][1]] for start in share] for share in shares]


def plain_rectangles(widths: list[int], rectangle_count: int, budget: int) -> dict[int, tuple[int, int]]:
    """(area, count) of each of the wanted rectangles, by the place where it starts."""
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        enough = len(plainly_cut(widths, middle)) <= rectangle_count
        low, high = (low, middle) if enough else (middle + 1, high)
    areas = {start: (count * widths[start], count) for start, count in plainly_cut(widths, low)}
    while len(areas) < rectangle_count:
        largest = max((start for start, (_, count) in areas.items() if count > 1), key=lambda s: (areas[s][0], -s))
        count = areas[largest][1]
        for start, part in (largest, count // 2), (largest + count // 2, count - count // 2):
            areas[start] = (part * widths[start], part)
    return areas


def plainly_cut(widths: list[int], area: int) -> list[tuple[int, int]]:
    """(start, count) of each rectangle of at most `area`; a sequence that is wider gets its own."""
    cut = []
    start = 0
    while start < len(widths):
        count = min(max(area // widths[start], 1), len(widths) - start)
        cut.append((start, count))
        start += count
    return cut


def same_plan_or_error(lengths: list[int], data_parallel: int, budget: int, multiple: int) -> bool:
    """Compare with `plainly_planned`; whether there is a plan, rather than an error."""
    options = {"data_parallel": data_parallel, "microbatch_tokens": budget, "pad_to_multiple": multiple}
    try:
        expected = plainly_planned(lengths, **options)
    except ValueError as error:
        with pytest.raises(ValueError, match=f"^{re.escape(str(error))}$"):
            plan_microbatches(lengths, **options)
        return False
    assert plan_microbatches(lengths, **options) == expected
    return True


@settings(max_examples=500)
@given(
    lengths=st.lists(st.integers(0, 60), max_size=40),
    data_parallel=st.integers(1, 8),
    budget=st.integers(-1, 400),
    multiple=st.sampled_from([1, 2, 3, 8]),
)
def test_plan_is_the_plain_one(lengths: list[int], data_parallel: int, budget: int, multiple: int) -> None:
    same_plan_or_error(lengths, data_parallel, budget, multiple)


DISTRIBUTIONS: dict[str, Callable[[random.Random, int], list[int]]] = {
    "log-normal": lambda rng, n: [min(max(round(rng.lognormvariate(6.2, 1.0)), 1), 4096) for _ in range(n)],
    "long log-normal": lambda rng, n: [min(max(round(rng.lognormvariate(8.3, 1.0)), 1), 32768) for _ in range(n)],
    "bimodal": lambda rng, n: [rng.choice((rng.randint(50, 200), rng.randint(15_000, 32_768))) for _ in range(n)],
    "all equal": lambda rng, n: [rng.randint(1, 4096)] * n,
    "all 1": lambda rng, n: [1] * n,
}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("data_parallel", [1, 8, 64])
def test_plan_is_the_plain_one_at_real_lengths(distribution: str, data_parallel: int) -> None:
    rng = random.Random(f"{distribution} {data_parallel}")
    planned = 0
    for case in range(24):
        count = rng.randint(1, 12) * data_parallel + (case % 4 == 0) * rng.randint(0, data_parallel)
        lengths = DISTRIBUTIONS[distribution](rng, count)
        budget = rng.choice((8192, 16_384, 32_768, 65_536, rng.randint(8192, 65_536)))
        planned += same_plan_or_error(lengths, data_parallel, budget, rng.choice((1, 2, 8)))
    assert planned >= 18


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint64])
def test_lengths_may_be_an_array(dtype: type[np.integer]) -> None:
    lengths = [200, 3, 250, 3, 17, 40, 200, 1]
    plan = plan_microbatches(np.array(lengths, dtype), data_parallel=2, microbatch_tokens=500, pad_to_multiple=8)
    assert plan == plan_microbatches(tuple(lengths), data_parallel=2, microbatch_tokens=500, pad_to_multiple=8)
    assert {type(i) for rank in plan for microbatch in rank for i in microbatch} == {int}
    with pytest.raises(ValueError, match="0 sequences"):
        plan_microbatches(np.array([], dtype), data_parallel=1, microbatch_tokens=500)


@pytest.mark.slow
def test_planning_scales() -> None:
    """`plainly_planned` would take many minutes."""
    lengths = DISTRIBUTIONS["long log-normal"](random.Random(0), 2**17)
    began = time.process_time()
    plan = plan_microbatches(lengths, data_parallel=64, microbatch_tokens=8192)
    assert time.process_time() - began < 10.0
    assert sum(len(microbatch) for rank in plan for microbatch in rank) == len(lengths)


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
        assert len(microbatch) == 1 or count_padded_tokens(lengths, microbatch, multiple) <= budget
    again = plan_microbatches(lengths, data_parallel=data_parallel, microbatch_tokens=budget, pad_to_multiple=multiple)
    assert again == plan


def fewest_by_programming(lengths: list[int], budget: int) -> int:
    """The fewest microbatches, by dynamic programming over all ways to cut the sequences in order of length."""
    order = sorted(lengths, reverse=True)
    fewest = [0] + [len(order)] * len(order)
    for end in range(1, len(order) + 1):
        for start in range(end):
            if end - start == 1 or order[start] * (end - start) <= budget:
                fewest[end] = min(fewest[end], fewest[start] + 1)
    return fewest[-1]


@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=40), budget=st.integers(1, 400))
def test_one_rank_gets_the_fewest_microbatches(lengths: list[int], budget: int) -> None:
    (plan,) = plan_microbatches(lengths, data_parallel=1, microbatch_tokens=budget, pad_to_multiple=1)
    assert len(plan) == fewest_by_programming(lengths, budget)


def test_equal_sequences_are_shared_out_equally() -> None:
    plan = plan_microbatches([16] * 384, data_parallel=4, microbatch_tokens=2048, pad_to_multiple=1)
    assert [[len(microbatch) for microbatch in rank] for rank in plan] == [[96]] * 4


@given(data_parallel=st.integers(2, 4), data=st.data())
def test_ranks_are_balanced(data_parallel: int, data: st.DataObject) -> None:
    count = data_parallel * 32
    lengths = data.draw(st.lists(st.integers(20, 100), min_size=count, max_size=count))
    plan = plan_microbatches(lengths, data_parallel=data_parallel, microbatch_tokens=400, pad_to_multiple=1)
    areas = [[count_padded_tokens(lengths, microbatch, 1) for microbatch in rank] for rank in plan]
    loads = [sum(rank) for rank in areas]
    assert max(loads) - min(loads) <= max(area for rank in areas for area in rank)


def test_long_sequences_stand_alone() -> None:
    plan = plan_microbatches([500, 10, 10, 10], data_parallel=1, microbatch_tokens=40, pad_to_multiple=1)
    assert plan == [[[0], [1, 2, 3]]]


@pytest.mark.parametrize(("lengths", "ranks", "message"), [([5], 2, "1 sequences"), ([], 1, "0 sequences")])
def test_what_cannot_be_shared_out_is_an_error(lengths: list[int], ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_microbatches(lengths, data_parallel=ranks, microbatch_tokens=40, pad_to_multiple=1)


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=40),
    budget=st.integers(1, 400),
    multiple=st.sampled_from([1, 2, 3, 8]),
)
def test_the_only_replica_has_the_plan_of_one_rank(lengths: list[int], budget: int, multiple: int) -> None:
    planner = SequencePadder(budget, multiple)
    fewest = planner.count_microbatches(lengths)
    (expected,) = planner.assign_microbatches(lengths, 1)
    assert fewest == len(expected)
    assert planner.make_replica_microbatches(lengths, fewest) == expected
    arrays = np.array(lengths, np.int64)
    assert planner.count_microbatches(arrays) == fewest
    from_array = planner.make_replica_microbatches(arrays, fewest)
    assert from_array == expected
    assert {type(i) for microbatch in from_array for i in microbatch} == {int}


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=40),
    budget=st.integers(1, 400),
    multiple=st.sampled_from([1, 2, 3, 8]),
    further=st.integers(0, 50),
)
def test_a_replica_makes_as_many_microbatches_as_the_others(
    lengths: list[int], budget: int, multiple: int, further: int
) -> None:
    """`further` more than its own sequences need, as long as each has one."""
    planner = SequencePadder(budget, multiple)
    count = planner.count_microbatches(lengths) + further
    plan = planner.make_replica_microbatches(lengths, count)
    assert len(plan) == min(count, len(lengths))
    assert sorted(i for microbatch in plan for i in microbatch) == list(range(len(lengths))), "each sequence once"
    areas = [count_padded_tokens([max(length, 1) for length in lengths], microbatch, multiple) for microbatch in plan]
    assert areas == sorted(areas, reverse=True), "the largest comes first"
    for microbatch, area in zip(plan, areas, strict=True):
        assert len(microbatch) == 1 or area <= budget
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    widths = [math.ceil(max(lengths[i], 1) / multiple) * multiple for i in order]
    plain = plain_rectangles(widths, len(plan), budget)
    starts = sorted(plain, key=lambda s: (-plain[s][0], s))
    assert plan == [order[start : start + plain[start][1]] for start in starts]


@given(
    shares=st.integers(1, 12).flatmap(
        lambda size: st.lists(st.lists(st.integers(1, 120), min_size=size, max_size=size), min_size=1, max_size=4)
    ),
    budget=st.integers(1, 300),
    multiple=st.sampled_from([1, 2, 8]),
)
def test_replicas_with_equally_many_sequences_make_equally_many_microbatches(
    shares: list[list[int]], budget: int, multiple: int
) -> None:
    """As the driver plans: sequences are dealt out before they are packed, and the largest share sets the number."""
    planner = SequencePadder(budget, multiple)
    count = max(planner.count_microbatches(share) for share in shares)
    assert {len(planner.make_replica_microbatches(share, count)) for share in shares} == {count}


@given(lengths=st.lists(st.integers(1, 100), max_size=40), budget=st.integers(1, 400))
def test_fewest_microbatches_by_dynamic_programming(lengths: list[int], budget: int) -> None:
    assert SequencePadder(budget, 1).count_microbatches(lengths) == fewest_by_programming(lengths, budget)


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
COSTS = st.sampled_from([TOKEN_COST, Cost(per_token=1.0, per_pair=0.25)])


def widths(lengths: list[int], multiple: int) -> list[int]:
    return [-(-length // multiple) * multiple for length in lengths]


@settings(max_examples=300)
@given(LENGTHS, st.integers(1, 5), st.integers(8, 200), st.sampled_from([1, 4]), COSTS)
def test_every_sequence_has_its_bin_and_every_bin_its_limit(
    lengths: list[int], replicas: int, budget: int, multiple: int, cost: Cost
) -> None:
    array, bins = np.array(lengths), SequencePacker(budget, multiple, cost)
    try:
        shares = bins.assign_to_replicas(array, replicas)
    except ValueError:
        assert len(lengths) % replicas, "any multiple of the replicas can be shared out"
        return
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    assert all(shares), "no replica is without work"
    plans = bins.make_microbatches([array[share] for share in shares])
    largest_count = max(map(len, plans))
    for share, plan in zip(shares, plans, strict=True):
        assert sorted(index for microbatch in plan for index in microbatch) == list(range(len(share)))
        assert len(plan) == min(largest_count, len(share)), "as many as on the other replicas, as far as sequences go"
        for microbatch in plan:
            assert microbatch == sorted(microbatch)
            padded_widths = widths([lengths[share[index]] for index in microbatch], multiple)
            assert padded_widths
            assert sum(padded_widths) <= budget or len(padded_widths) == 1
    assert bins.assign_to_replicas(array, replicas) == shares, "equal arguments give equal plans"


@pytest.mark.parametrize("replicas", [1, 2, 8, 64])
@pytest.mark.parametrize("spread", ["lognormal", "bimodal"])
def test_replicas_and_microbatches_are_level_in_what_they_compute(spread: str, replicas: int) -> None:
    draw = np.random.default_rng(3)
    if spread == "lognormal":
        lengths = np.clip(draw.lognormal(5.5, 0.8, 4096), 16, 4096).astype(np.int64)
    else:
        lengths = np.concatenate([draw.integers(50, 200, 3072), draw.integers(2000, 4000, 1024)])
    cost = Cost(per_token=1.0, per_pair=1 / 2000)
    bins = SequencePacker(8192, 1, cost)
    shares = bins.assign_to_replicas(lengths, replicas)
    work = [float(cost.compute(lengths[share]).sum()) for share in shares]
    assert max(work) / (sum(work) / replicas) < 1.02
    plans = bins.make_microbatches([lengths[share] for share in shares])
    fewest = int(lengths.sum()) / 8192 / replicas
    # Level bins are filled less well than the fewest possible, where few sequences make a bin.
    assert len(plans[0]) <= max({"lognormal": 1.03, "bimodal": 1.15}[spread] * fewest, fewest + 1.5)


def test_replicas_without_a_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="2 sequences do not give each of 3 data-parallel ranks one"):
        SequencePacker(10, 1, TOKEN_COST).assign_to_replicas(np.array([3, 4]), 3)


def test_replicas_share_any_number_of_sequences() -> None:
    """Segments of rollouts are of any number, and each of these needs a microbatch of its own."""
    shares = SequencePacker(10, 1, TOKEN_COST).assign_to_replicas(np.array([9, 9, 9, 8, 8]), 2)
    assert sorted(map(len, shares)) == [2, 3]
    assert sorted(index for share in shares for index in share) == [0, 1, 2, 3, 4]


def test_a_pair_costs_what_a_pair_costs() -> None:
    assert Cost(2.0, 3.0).compute(np.array([1, 4])).tolist() == [2 + 3, 8 + 30]
