"""What a replica computes on, from the arrays of its shards, against loops; and how it travels to the ranks."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_grpo.data.batch import STORED_DTYPES, ReplicaWork, TokenFields
from tests.support.token_fields import as_lists, pieces

Arrays = dict[str, NDArray[Any]]
"""The arrays of one shard, by name of the entry."""
FOLLOWING = {"loss_mask": "in_loss", "positive": "positive", "advantages": "advantages"}
"""Entries that follow from a number for each response: the name of the entry, and that of the number."""


class Response(NamedTuple):
    """Tokens of a prompt and of the response to it, and what is known of the response."""

    prompt: int
    sampled: int
    in_loss: bool
    positive: bool
    advantages: float

    @property
    def tokens(self) -> int:
        """Length of the sequence."""
        return self.prompt + self.sampled

    def spread(self, number: float) -> list[float]:
        """The number at every sampled token, 0 at those of the prompt."""
        return [0.0] * self.prompt + [float(number)] * self.sampled


def stored_arrays(responses: list[Response], names: list[str], first: int) -> Arrays:
    """A shard as the object store gives it: arrays of the stored types, read-only; numbers ascend from `first`."""
    tokens = sum(one.tokens for one in responses)
    arrays = {name: np.arange(first, first + tokens).astype(STORED_DTYPES[name]) + i for i, name in enumerate(names)}
    if "sampled" in arrays:
        arrays["sampled"] = np.array([number for one in responses for number in one.spread(1.0)], dtype=np.bool_)
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def make_work(shards: list[list[Response]], rows: list[int], following: set[str]) -> ReplicaWork:
    """Work on the responses of these rows, with the numbers of these names (in_loss in any case)."""
    every = [one for responses in shards for one in responses]

    def numbers(name: str, dtype: type[np.generic]) -> NDArray[Any]:
        return np.array([getattr(every[row], name) for row in rows], dtype=dtype)

    return ReplicaWork(
        shards=[{} for _ in shards],
        shard_lengths=[np.array([one.tokens for one in responses], dtype=np.int64) for responses in shards],
        rows=np.array(rows, dtype=np.int64),
        microbatches=[[index] for index in range(len(rows))],
        in_loss=numbers("in_loss", np.bool_),
        positive=numbers("positive", np.bool_) if "positive" in following else None,
        advantages=numbers("advantages", np.float32) if "advantages" in following else None,
    )


RESPONSES = st.builds(
    Response,
    prompt=st.integers(1, 3),
    sampled=st.integers(0, 4),
    in_loss=st.booleans(),
    positive=st.booleans(),
    advantages=st.floats(-9, 9, width=32),
)


@settings(deadline=None)
@given(
    shards=st.lists(st.lists(RESPONSES, min_size=1, max_size=4), min_size=1, max_size=3),
    names=st.lists(st.sampled_from(sorted(STORED_DTYPES)), unique=True),
    following=st.sets(st.sampled_from(["positive", "advantages"])),
    data=st.data(),
)
def test_a_replica_computes_on_the_wanted_rows_of_its_shards(
    shards: list[list[Response]], names: list[str], following: set[str], data: st.DataObject
) -> None:
    following -= {*names}  # advantages are one number a response, or stored for every token
    every = [one for responses in shards for one in responses]
    rows = data.draw(st.lists(st.sampled_from(range(len(every))), unique=True))
    stored = [stored_arrays(responses, names, first=100 * i) for i, responses in enumerate(shards)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of arrays that it must not write to
        batch = make_work(shards, rows, following).token_batch(stored)

    assert batch.lengths == [every[row].tokens for row in rows]
    assert all(type(length) is int for length in batch.lengths)
    expected: dict[str, list[float]] = {}
    for name in names:
        by_shard = [pieces(arrays[name], [one.tokens for one in shards[i]]) for i, arrays in enumerate(stored)]
        by_sequence = [values for of_shard in by_shard for values in of_shard]
        expected[name] = [value for row in rows for value in by_sequence[row]]
    if "sampled" in names:
        for name in {"loss_mask"} | following:
            numbers = [(every[row], getattr(every[row], FOLLOWING[name])) for row in rows]
            expected[name] = [value for one, number in numbers for value in one.spread(number)]
    assert as_lists(batch.fields) == expected
    for name, values in batch.fields.present().items():
        assert values.numpy().dtype == STORED_DTYPES.get(name, np.float32), name


SHARDS = [
    [Response(2, 3, True, True, 0.5), Response(1, 0, True, False, -1.0), Response(1, 4, False, True, 2.0)],
    [Response(3, 1, True, False, -0.25), Response(2, 2, True, True, 1.5)],
]


def example() -> tuple[ReplicaWork, list[Arrays]]:
    """Four of the sequences of two shards, with everything that is known of them."""
    names = sorted(STORED_DTYPES.keys() - {"advantages"})
    stored = [stored_arrays(responses, names, first=100 * i) for i, responses in enumerate(SHARDS)]
    return make_work(SHARDS, [3, 0, 2, 4], {"positive", "advantages"}), stored


def test_what_was_fetched_may_be_changed() -> None:
    """The store's arrays are everybody's."""
    work, stored = example()
    before = [{name: array.tolist() for name, array in arrays.items()} for arrays in stored]
    for values in work.token_batch(stored).fields.present().values():
        values.fill_(1)
    assert [{name: array.tolist() for name, array in arrays.items()} for arrays in stored] == before


def test_without_the_sampled_tokens_nothing_follows_from_them() -> None:
    """The first pipeline stage fetches token ids, one in the middle nothing; both know how long sequences are."""
    work, stored = example()
    first = work.token_batch([{"token_ids": arrays["token_ids"]} for arrays in stored])
    assert list(first.fields.present()) == ["token_ids"]
    middle = work.token_batch([{} for _ in stored])
    assert middle.fields == TokenFields()
    assert middle.lengths == first.lengths == [4, 5, 5, 4]


def through_pickle(value: Any) -> tuple[Any, list[pickle.PickleBuffer], int]:
    """As Ray sends it: the copy, the buffers that travel beside the pickle, and the pickle's bytes."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=buffers), buffers, len(data)


def arrays_of(work: ReplicaWork) -> list[NDArray[Any]]:
    """All that the driver says of the sequences."""
    return [*work.shard_lengths, work.rows, work.in_loss, work.positive, work.advantages]


def test_work_travels_as_arrays() -> None:
    """Beside the pickle rather than in it, and without a copy."""
    work, stored = example()
    copy, buffers, size = through_pickle(work)
    assert len(buffers) == len(arrays_of(work))
    for array, other in zip(arrays_of(work), arrays_of(copy), strict=True):
        assert array.dtype == other.dtype
        assert np.array_equal(array, other)
        assert np.shares_memory(array, other)
    assert copy.microbatches == work.microbatches
    assert as_lists(copy.token_batch(stored).fields) == as_lists(work.token_batch(stored).fields)
    longer = replace(work, shard_lengths=[1000 * lengths for lengths in work.shard_lengths])
    assert through_pickle(longer)[2] == size, "the driver's part does not grow with the tokens"


def test_stored_entries_travel_as_arrays() -> None:
    for arrays in example()[1]:
        for name, array in arrays.items():
            other, (buffer,), _ = through_pickle(array)
            assert buffer.raw().nbytes == len(array) * np.dtype(STORED_DTYPES[name]).itemsize
            assert np.shares_memory(array, other)


def test_four_bytes_a_token_and_entry() -> None:
    """token_ids fit a vocabulary, log-probabilities are what the engine gave; nothing is stored wider."""
    widths = {name: np.dtype(dtype).itemsize for name, dtype in STORED_DTYPES.items()}
    assert widths.pop("sampled") == 1
    assert set(widths.values()) == {4}
    assert torch.from_numpy(np.zeros(1, STORED_DTYPES["token_ids"])).dtype == torch.int32
