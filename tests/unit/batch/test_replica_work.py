"""What a replica computes on, from the arrays of its partitions, against loops; and how it travels to the ranks."""

import pickle
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_grpo.batch.packing import TOKEN_COST
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.token_batch import STORED_DTYPES, TokenBatch, TokenFields
from megatron_grpo.cluster.actor_processes import ActorProcesses
from megatron_grpo.config.schema import ParallelConfig, PolicyConfig
from megatron_grpo.trainer import model_ranks
from megatron_grpo.trainer.messages import RankReport
from megatron_grpo.trainer.microbatch_schedule import assign_microbatches
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from tests.support.token_fields import as_lists

Arrays = dict[str, NDArray[Any]]
"""The arrays of one partition, by name of the entry."""
FOLLOWING = {"loss_mask": "in_loss", "positive": "positive", "weight": "weight", "advantages": "advantages"}
"""Entries that follow from a number for each response: the name of the entry, and that of the number."""


class Response(NamedTuple):
    """Tokens of a prompt and of the response to it, and what is known of the response."""

    prompt: int
    sampled: int
    in_loss: bool
    positive: bool
    advantages: float
    weight: float = 1.0

    @property
    def tokens(self) -> int:
        """Length of the sequence."""
        return self.prompt + self.sampled

    def spread(self, number: float) -> list[float]:
        """The number at every sampled token, 0 at those of the prompt."""
        return [0.0] * self.prompt + [float(number)] * self.sampled


def stored_arrays(responses: list[Response], names: list[str], first: int) -> Arrays:
    """A partition as the object store gives it: arrays of the stored types, read-only; numbers ascend from `first`."""
    tokens = sum(response.tokens for response in responses)
    arrays = {name: np.arange(first, first + tokens).astype(STORED_DTYPES[name]) + i for i, name in enumerate(names)}
    if "sampled" in arrays:
        arrays["sampled"] = np.array(
            [number for response in responses for number in response.spread(1.0)], dtype=np.bool_
        )
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def make_part(partitions: list[list[Response]], following: set[str]) -> StepBatch:
    """The part of a replica with these partitions, with the numbers of these names (in_loss in any case)."""
    every = [response for responses in partitions for response in responses]

    def numbers(name: str, dtype: type[np.generic]) -> NDArray[Any]:
        return np.array([getattr(response, name) for response in every], dtype=dtype)

    return StepBatch(
        lengths=numbers("tokens", np.int64),
        response_tokens=numbers("sampled", np.int64),
        in_loss=numbers("in_loss", np.bool_),
        positive=numbers("positive", np.bool_) if "positive" in following else None,
        advantages=numbers("advantages", np.float32) if "advantages" in following else None,
        loss_weights=numbers("weight", np.float32) if "weight" in following else None,
        partitions=np.split(np.arange(len(every)), np.cumsum([len(responses) for responses in partitions])[:-1]),
    )


def by_name(stored: list[Arrays]) -> dict[str, list[NDArray[Any]]]:
    """What was fetched of partitions, as `TokenBatch.from_replica` takes it."""
    return {name: [arrays[name] for arrays in stored] for name in stored[0]}


RESPONSES = st.builds(
    Response,
    prompt=st.integers(1, 3),
    sampled=st.integers(0, 4),
    in_loss=st.booleans(),
    positive=st.booleans(),
    advantages=st.floats(-9, 9, width=32),
    weight=st.floats(0, 1, width=32),
)


@given(
    partitions=st.lists(st.lists(RESPONSES, min_size=1, max_size=4), min_size=1, max_size=3),
    names=st.lists(st.sampled_from(sorted(STORED_DTYPES)), unique=True),
    following=st.sets(st.sampled_from(["positive", "advantages", "weight"])),
)
def test_a_replica_computes_on_the_sequences_of_its_partitions(
    partitions: list[list[Response]], names: list[str], following: set[str]
) -> None:
    following -= {*names}  # advantages are one number a response, or stored for every token
    every = [response for responses in partitions for response in responses]
    stored = [stored_arrays(responses, names, first=100 * i) for i, responses in enumerate(partitions)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of arrays that it must not write to
        batch = TokenBatch.from_replica(make_part(partitions, following), by_name(stored))

    assert batch.lengths == [response.tokens for response in every]
    assert all(type(length) is int for length in batch.lengths)
    expected = {name: [value for arrays in stored for value in arrays[name].tolist()] for name in names}
    if "sampled" in names:
        for name in {"loss_mask"} | following:
            numbers = [(response, getattr(response, FOLLOWING[name])) for response in every]
            expected[name] = [value for response, number in numbers for value in response.spread(number)]
    assert as_lists(batch.fields) == expected
    for name, values in batch.fields.as_dict().items():
        assert values.numpy().dtype == STORED_DTYPES.get(name, np.float32), name


PARTITIONS = [
    [Response(2, 3, True, True, 0.5), Response(1, 0, True, False, -1.0), Response(1, 4, False, True, 2.0)],
    [Response(3, 1, True, False, -0.25), Response(2, 2, True, True, 1.5)],
]


def example() -> tuple[StepBatch, list[Arrays]]:
    """The sequences of two partitions, with everything that is known of them."""
    names = sorted(STORED_DTYPES.keys() - {"advantages"})
    stored = [stored_arrays(responses, names, first=100 * i) for i, responses in enumerate(PARTITIONS)]
    return make_part(PARTITIONS, {"positive", "advantages", "weight"}), stored


def test_what_was_fetched_may_be_changed() -> None:
    """The store's arrays are everybody's."""
    part, stored = example()
    before = [{name: array.tolist() for name, array in arrays.items()} for arrays in stored]
    for values in TokenBatch.from_replica(part, by_name(stored)).fields.as_dict().values():
        values.fill_(1)
    assert [{name: array.tolist() for name, array in arrays.items()} for arrays in stored] == before


def test_without_the_sampled_tokens_nothing_follows_from_them() -> None:
    """The first pipeline stage fetches token ids, one in the middle nothing; both know how long sequences are."""
    part, stored = example()
    first = TokenBatch.from_replica(part, {"token_ids": by_name(stored)["token_ids"]})
    assert list(first.fields.as_dict()) == ["token_ids"]
    middle = TokenBatch.from_replica(part, {})
    assert middle.fields == TokenFields()
    assert middle.lengths == first.lengths == [5, 1, 5, 4, 4]


def test_a_part_of_a_batch_has_its_shards_and_their_sequences_counted_anew() -> None:
    batch = make_step()
    part = batch.select_partitions(slice(1, 3))
    assert [partition.tolist() for partition in part.partitions] == [[0, 1], [2, 3, 4]]
    assert part.lengths.tolist() == [11, 14, 12, 15, 16]
    assert part.response_tokens.tolist() == [1, 4, 2, 5, 6]
    assert part.in_loss.tolist() == [True, True, False, False, True]
    chosen = [1, 4, 2, 5, 6]
    for name, offset in NUMBERS.items():
        assert getattr(part, name).tolist() == [offset + number for number in chosen], name
    assert part.positive.tolist() == [False, True, True, False, True]
    assert part.fields == {"token_ids": ["second", "third"]}


NUMBERS = {"advantages": -9.0, "loss_weights": 0.5, "rollout_shares": 0.25, "teachers": 3}
"""Numbers of sequences in `make_step`: each is that of the sequence, and this more."""


def make_step() -> StepBatch:
    """Eight sequences in four partitions, whose tokens are names."""
    numbers = np.arange(8)
    return StepBatch(
        lengths=10 + numbers,
        response_tokens=numbers,
        in_loss=np.isin(numbers, [1, 4, 6]),
        positive=numbers % 2 == 0,
        **{name: numbers + offset for name, offset in NUMBERS.items()},
        partitions=[np.array([0, 3]), np.array([1, 4]), np.array([2, 5, 6]), np.array([7])],
        fields={"token_ids": ["first", "second", "third", "fourth"]},
    )


def test_every_rank_is_sent_the_part_and_the_microbatches_of_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Microbatches are planned over the wanted sequences, by number, and sent by place."""
    policy = MegatronPolicy.__new__(MegatronPolicy)  # no processes: what is tested is bookkeeping
    policy._config = PolicyConfig(parallel=ParallelConfig(data=2, tensor=2))
    monkeypatch.setattr(MegatronPolicy, "cost", TOKEN_COST)
    policy.actors = ["a", "b", "c", "d"]
    policy._reports = [
        RankReport(data_rank=replica, device_name="cpu", startup_s={}, processes=ActorProcesses("here", ()))
        for replica in (0, 0, 1, 1)
    ]
    monkeypatch.setattr(model_ranks, "ray", SimpleNamespace(put=lambda work: work))
    batch = make_step()
    plans = assign_microbatches(policy._config, policy.cost, batch, np.array([1, 2, 3, 4, 5, 7]), 32)
    assert [sorted(np.concatenate(plan).tolist()) for plan in plans] == [[1, 3, 4], [2, 5, 7]]
    works = policy._store_work(batch, plans)
    assert [actor for actor, _ in works] == policy.actors
    for replica, (part, microbatches) in enumerate([works[0][1], works[2][1]]):
        assert works[2 * replica][1] is works[2 * replica + 1][1], "put once"
        part_lengths = [part.lengths[indices].tolist() for indices in microbatches]
        assert part_lengths == [batch.lengths[numbers].tolist() for numbers in plans[replica]]
        assert all(sum(lengths) <= 32 for lengths in part_lengths)


def test_a_sequence_with_an_output_that_is_not_finite_is_found_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas answer for their sequences, partition after partition, and in any order."""
    policy = MegatronPolicy.__new__(MegatronPolicy)
    policy._config = PolicyConfig(parallel=ParallelConfig(data=2))
    monkeypatch.setattr(MegatronPolicy, "cost", TOKEN_COST)
    policy.actors = ["second", "first"]
    policy._reports = [
        RankReport(data_rank=replica, device_name="cpu", startup_s={}, processes=ActorProcesses("here", ()))
        for replica in (1, 0)
    ]
    monkeypatch.setattr(model_ranks, "ray", SimpleNamespace(put=lambda work: work))
    monkeypatch.setattr(model_ranks, "call_actor", lambda actor, method, work, field: (actor, work[0]))
    bad = {3, 5}

    def answer(calls: list[tuple[str, StepBatch]], _: str) -> list[tuple[list[str], NDArray[np.bool_]]]:
        return [([actor], np.array([length - 10 not in bad for length in part.lengths])) for actor, part in calls]

    monkeypatch.setattr(policy, "_gather", answer, raising=False)
    references, finite = policy._forward(make_step(), "prev_logprobs", "log-probabilities")
    assert references == ["first", "second"]
    assert {*np.flatnonzero(~finite).tolist()} == bad


def through_pickle(value: Any) -> tuple[Any, list[pickle.PickleBuffer], int]:
    """As Ray sends it: the copy, the buffers that travel beside the pickle, and the pickle's bytes."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=buffers), buffers, len(data)


def test_a_part_travels_as_arrays() -> None:
    """Beside the pickle rather than in it, and without a copy."""
    part, stored = example()
    copy, buffers, size = through_pickle(part)
    names = ["lengths", "response_tokens", "in_loss", "positive", "loss_weights", "advantages"]
    pairs = [(getattr(part, name), getattr(copy, name)) for name in names]
    pairs += zip(part.partitions, copy.partitions, strict=True)
    assert len(buffers) == len(pairs)
    for array, received in pairs:
        assert array.dtype == received.dtype
        assert np.array_equal(array, received)
        assert np.shares_memory(array, received)
    fields = TokenBatch.from_replica(copy, by_name(stored)).fields
    assert as_lists(fields) == as_lists(TokenBatch.from_replica(part, by_name(stored)).fields)
    assert through_pickle(replace(part, lengths=1000 * part.lengths))[2] == size, "does not grow with the tokens"


def test_stored_entries_travel_as_arrays() -> None:
    for arrays in example()[1]:
        for name, array in arrays.items():
            copy, (buffer,), _ = through_pickle(array)
            assert buffer.raw().nbytes == len(array) * np.dtype(STORED_DTYPES[name]).itemsize
            assert np.shares_memory(array, copy)


def test_four_bytes_a_token_and_entry() -> None:
    """token_ids fit a vocabulary, log-probabilities are what the engine gave; nothing is stored wider."""
    widths = {name: np.dtype(dtype).itemsize for name, dtype in STORED_DTYPES.items()}
    assert widths.pop("sampled") == 1
    assert set(widths.values()) == {4}
    assert torch.from_numpy(np.zeros(1, STORED_DTYPES["token_ids"])).dtype == torch.int32
