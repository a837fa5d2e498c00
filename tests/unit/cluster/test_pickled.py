"""Pickled values arrive as they were, their large arrays without a copy."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from megatron_grpo.cluster.futures import IN_BAND_BYTES, wrap_for_pickling
from tests.support.trajectories import make_trajectory, plain


def sent(value: Any) -> tuple[Any, list[pickle.PickleBuffer]]:
    """What arrives, and the buffers that travelled beside it."""
    beside: list[pickle.PickleBuffer] = []
    data = pickle.dumps(wrap_for_pickling(value), protocol=5, buffer_callback=beside.append)
    return pickle.loads(data, buffers=beside), beside


def test_a_value_arrives_as_itself() -> None:
    groups = ([make_trajectory(3, reward=None), make_trajectory(1)], [])
    arrived, beside = sent(groups)
    assert isinstance(arrived, tuple)
    assert [[plain(one) for one in group] for group in arrived] == [[plain(one) for one in group] for group in groups]
    assert not beside, "small arrays are among the rest"


@pytest.mark.parametrize("more", [0, 1])
def test_only_large_arrays_travel_beside_it(more: int) -> None:
    array = np.arange(IN_BAND_BYTES + more, dtype=np.uint8)
    arrived, beside = sent([array, "text"])
    np.testing.assert_array_equal(arrived[0], array)
    assert len(beside) == more
    assert np.shares_memory(arrived[0], array) == bool(more)
