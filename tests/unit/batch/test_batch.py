"""The typed batch against loops over tokens in plain Python: selecting, padding, places, optimizer steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.token_batch import STORED_DTYPES, TokenBatch, TokenFields, find_token_indices, require_field
from tests.support.token_fields import as_lists, pieces

ENTRIES = [one.name for one in fields(TokenFields)]
LENGTHS = st.lists(st.integers(0, 7), max_size=8)
"""Tokens of some sequences; a sequence may have none, and there may be no sequences."""
ODD = [3, 1, 7, 0, 5]


@st.composite
def lengths_and_indices(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Lengths, and indices into them in any order, some more than once."""
    lengths = draw(LENGTHS)
    indices = st.lists(st.sampled_from(range(len(lengths))), max_size=10) if lengths else st.just([])
    return lengths, draw(indices)


def flat_entries(lengths: Sequence[int]) -> dict[str, Tensor]:
    """An entry of every name; numbers differ from token to token, and floating ones from entry to entry."""
    total = sum(lengths)
    numbers = torch.arange(1, total + 1)
    entries = {name: numbers / (3.0 + i) for i, name in enumerate(ENTRIES)}
    routed = torch.stack([numbers % 7, -(numbers % 5), numbers % 3], dim=1).to(torch.int8)
    return entries | {"token_ids": numbers.int(), "sampled": numbers % 3 == 0, "routed_experts": routed}


def make_batch(lengths: Sequence[int]) -> TokenBatch:
    """Sequences of these lengths with every entry."""
    return TokenBatch(list(lengths), TokenFields(**flat_entries(lengths)))


def test_entries_are_named_once() -> None:
    """What is stored is an entry; what is not there is None; no other name can be set."""
    assert set(ENTRIES) >= STORED_DTYPES.keys()
    tokens = TokenFields(advantages=torch.ones(2), token_ids=torch.ones(2, dtype=torch.int32))
    assert list(tokens.as_dict()) == ["token_ids", "advantages"]
    assert all(getattr(tokens, name) is None for name in set(ENTRIES) - tokens.as_dict().keys())
    with pytest.raises(TypeError, match="advantage'"):
        TokenFields(advantage=torch.ones(2))
    with pytest.raises(AttributeError, match="advantage"):
        tokens.advantage = torch.ones(2)


def test_an_entry_that_is_not_there_is_noticed() -> None:
    values = torch.ones(2)
    assert require_field(values) is values
    with pytest.raises(AssertionError, match="not computed or not fetched"):
        require_field(None)


@pytest.mark.parametrize("shape", [(3,), (5,), (4, 1), ()])
def test_entries_of_another_shape_are_a_defect(shape: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="advantages has shape"):
        TokenBatch([3, 1], TokenFields(token_ids=torch.ones(4, dtype=torch.int32), advantages=torch.ones(shape)))


@pytest.mark.parametrize("tokens", [3, 5])
def test_only_routed_experts_are_many_numbers_a_token(tokens: int) -> None:
    routed = torch.zeros(4, 6, dtype=torch.int8)
    assert TokenBatch([3, 1], TokenFields(routed_experts=routed)).fields.routed_experts is routed
    with pytest.raises(AssertionError, match="routed_experts has shape"):
        TokenBatch([3, 1], TokenFields(routed_experts=torch.zeros(tokens, 6, dtype=torch.int8)))


@settings(deadline=None)
@given(lengths_and_indices())
def test_selecting_takes_the_sequences_in_the_order_asked_for(case: tuple[list[int], list[int]]) -> None:
    lengths, indices = case
    batch = make_batch(lengths)
    for asked in (indices, tuple(indices), np.array(indices, dtype=np.int64)):
        selected = batch.select(asked)
        assert selected.lengths == [lengths[i] for i in indices]
        assert len(selected) == len(indices)
        assert list(selected.fields.as_dict()) == ENTRIES
        for name, values in batch.fields.as_dict().items():
            chosen = getattr(selected.fields, name)
            by_sequence = pieces(values, lengths)
            assert chosen.dtype == values.dtype
            assert pieces(chosen, selected.lengths) == [by_sequence[i] for i in indices], name


def test_selecting_copies() -> None:
    """What is done to a part in place does not reach the batch."""
    batch = make_batch(ODD)
    selected = batch.select(range(len(ODD)))
    before = as_lists(batch.fields)
    for values in selected.fields.as_dict().values():
        values.zero_()
    assert as_lists(batch.fields) == before


@settings(deadline=None)
@given(lengths_and_indices(), st.sampled_from([np.int32, np.int64, np.uint16]))
def test_token_indices_are_those_of_the_sequences_laid_end_to_end(
    case: tuple[list[int], list[int]], dtype: type[np.integer]
) -> None:
    lengths, indices = case
    starts = [0, *itertools.accumulate(lengths)]
    expected = [starts[i] + t for i in indices for t in range(lengths[i])]
    places = find_token_indices(np.array(lengths, dtype=dtype), np.array(indices, dtype=np.int64))
    assert places.dtype == np.int64
    assert places.tolist() == expected


def test_places_of_many_tokens_do_not_overflow() -> None:
    """More tokens than a 16-bit length, or its sum over a step, can hold."""
    lengths = np.full(70_000, 60_000, dtype=np.uint16)
    assert find_token_indices(lengths, np.array([69_999]))[[0, -1]].tolist() == [69_999 * 60_000, 70_000 * 60_000 - 1]


def make_step(sequences: int) -> StepBatch:
    """Responses of 0 to 4 tokens, every third outside the loss, in two partitions."""
    numbers = np.arange(sequences, dtype=np.int64)
    return StepBatch(
        lengths=numbers + 10,
        response_tokens=numbers % 5,
        in_loss=numbers % 3 != 0,
        partitions=[numbers[0::2], numbers[1::2]],
    )


@settings(deadline=None)
@given(sequences=st.integers(0, 20), samples=st.integers(1, 25))
def test_minibatches_are_neighbours_and_together_the_step(sequences: int, samples: int) -> None:
    minibatches = list(make_step(sequences).split_minibatches(samples))
    assert [number for numbers in minibatches for number in numbers.tolist()] == list(range(sequences))
    assert all(len(numbers) == samples for numbers in minibatches[:-1])
    assert all(0 < len(numbers) <= samples for numbers in minibatches[-1:])
    assert all(numbers.dtype == np.int64 for numbers in minibatches)


@pytest.mark.parametrize("sequences", [0, 1, 2, 17])
def test_tokens_in_the_loss_are_counted_by_sequence(sequences: int) -> None:
    batch = make_step(sequences)
    assert len(batch) == sequences
    assert batch.loss_tokens == sum(number % 5 for number in range(sequences) if number % 3)
    assert type(batch.loss_tokens) is int
