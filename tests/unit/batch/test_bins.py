"""Packing into bins keeps its promises for any lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.batch.packing import TOKEN_COST, Cost, SequencePacker

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
COSTS = st.sampled_from([TOKEN_COST, Cost(per_token=1.0, per_pair=0.25)])


def widths(lengths: list[int], multiple: int) -> list[int]:
    return [-(-length // multiple) * multiple for length in lengths]


@settings(deadline=None, max_examples=300)
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
    most = max(map(len, plans))
    for share, plan in zip(shares, plans, strict=True):
        assert sorted(index for microbatch in plan for index in microbatch) == list(range(len(share)))
        assert len(plan) == min(most, len(share)), "as many as on the other replicas, as far as sequences go"
        for microbatch in plan:
            assert microbatch == sorted(microbatch)
            taken = widths([lengths[share[index]] for index in microbatch], multiple)
            assert taken
            assert sum(taken) <= budget or len(taken) == 1
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
