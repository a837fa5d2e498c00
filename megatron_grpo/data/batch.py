"""The batch of a rank: per-token entries of sequences, flat or as rectangles, made of the arrays of its shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(slots=True, kw_only=True)
class TokenFields:
    """Entries of tokens, in the ranks of a model; an entry that a stage does not need, or that is not computed yet, is
    None.

    All tensors begin with one shape, here called [...]: [tokens], sequences laid end to end, or [sequences, length],
    padded with zeros on the right; only `routed_experts` has a dimension more. An entry describes the token at its own
    index: `prev_logprobs[t]` is the log-probability of `token_ids[t]` given what precedes it in its sequence, and 0 at
    the first token, which nothing predicts.
    """

    token_ids: Tensor | None = None
    """[...], int32 in storage, int64 in rectangles: vocabulary entries."""
    sampled: Tensor | None = None
    """[...], bool: whether the token was drawn by the policy, rather than given."""
    loss_mask: Tensor | None = None
    """[...], float32: 1 where the loss is taken, else 0."""
    generation_logprobs: Tensor | None = None
    """[...], float32: log-probability under which the engine drew the token; 0 where it was given."""
    prev_logprobs: Tensor | None = None
    """[...], float32: log-probability under the policy at the start of the step, in the training framework."""
    reference_logprobs: Tensor | None = None
    """[...], float32: log-probability under the reference policy, in the training framework."""
    advantages: Tensor | None = None
    """[...], float32: advantage of the token; 0 where nothing was sampled."""
    positive: Tensor | None = None
    """[...], float32: 1 in the sampled tokens of correct responses, else 0."""
    values: Tensor | None = None
    """[...], float32: return that the value model predicts before the token, at the start of the step."""
    returns: Tensor | None = None
    """[...], float32: target of the value model before the token."""
    entropy: Tensor | None = None
    """[...], float32, with gradient: entropy in nats of the distribution that the token was drawn from."""
    routed_experts: Tensor | None = None
    """[..., layers with experts * experts of a token], int8 or int16: the experts that the engine chose for the token,
    layer by layer; -1 where they are not known, as for a sequence's last token, which the engine never runs."""

    def present(self) -> dict[str, Tensor]:
        """The entries that are not None by name, each [tokens] or [sequences, length]."""
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in named.items() if value is not None}

    def to(self, device: torch.device) -> TokenFields:
        """The entries on a device. From pinned memory the copies do not wait for it."""
        return TokenFields(**{name: value.to(device, non_blocking=True) for name, value in self.present().items()})


def given(entry: Tensor | None) -> Tensor:
    """Unwrap an optional entry of TokenFields, [tokens] or [sequences, length]."""
    assert entry is not None, "an entry that was not computed or not fetched"
    return entry


STORED_DTYPES: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "sampled": np.bool_,
    "generation_logprobs": np.float32,
    "prev_logprobs": np.float32,
    "reference_logprobs": np.float32,
    "advantages": np.float32,
    "values": np.float32,
    "returns": np.float32,
}
"""Entries that live in the object store, one array a shard, with their types; so does `routed_experts`, in the type
that its model has (`RoutedForm`). The others follow on the rank."""


@dataclass(slots=True)
class TokenBatch:
    """Sequences of different lengths laid end to end, on one device: a replica's sequences, as its ranks hold them."""

    lengths: list[int]
    """Tokens of each sequence."""
    fields: TokenFields
    """Entries of [sum(lengths)] tokens, the sequences laid end to end."""

    def __post_init__(self) -> None:
        total = sum(self.lengths)
        for name, values in self.fields.present().items():
            numbers = values.shape[1:] if name == "routed_experts" else ()
            expected = (total, *numbers)
            assert values.shape == expected, f"{name} has shape {tuple(values.shape)}, expected {expected}"

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, indices: Sequence[int]) -> TokenBatch:
        """The sequences with these indices, in this order."""
        places = torch.from_numpy(token_places(np.asarray(self.lengths), np.asarray(indices, dtype=np.int64)))
        chosen = {name: values[places] for name, values in self.fields.present().items()}
        return TokenBatch([self.lengths[i] for i in indices], TokenFields(**chosen))

    def rectangles(self, width: int) -> TokenFields:
        """Every entry as [sequences, width], padded on the right with zeros; token ids become int64.

        Args:
            width: columns; at least the longest sequence.
        """
        places = self.places(width)

        # One scatter with places made on the host: a loop over the sequences would be a kernel launch for each.
        def padded(values: Tensor) -> Tensor:
            """[sum(lengths), ...] to [sequences, width, ...], of any dtype; 0 on padding."""
            out = values.new_zeros(len(self) * width, *values.shape[1:])
            out[places] = values
            return out.view(len(self), width, *values.shape[1:])

        made = TokenFields(**{name: padded(values) for name, values in self.fields.present().items()})
        return made if made.token_ids is None else replace(made, token_ids=made.token_ids.long())

    def places(self, width: int) -> Tensor:
        """[sum(lengths)], int64: where each token stands in a rectangle of `width` columns that is read row by row."""
        lengths = np.asarray(self.lengths, dtype=np.int64)
        longest = max(self.lengths, default=0)
        assert longest <= width, f"a sequence of {longest} tokens in {width} columns"
        # A token keeps its distance from the start of its sequence: what moves is the start, from flat to its row's.
        starts = np.arange(len(lengths), dtype=np.int64) * width
        return torch.from_numpy(np.repeat(starts - _starts(lengths), lengths) + np.arange(lengths.sum()))


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """[sequences], int64, of lengths to starts: where each sequence begins when they lie end to end."""
    return np.cumsum(lengths) - lengths


def token_places(lengths: NDArray[np.integer], sequences: NDArray[np.integer]) -> NDArray[np.int64]:
    """Places of the tokens of some sequences, one sequence after the other.

    Args:
        lengths: [sequences], integers: tokens of every sequence; the sequences lie end to end.
        sequences: [chosen], integers: numbers of the wanted sequences.

    Returns:
        [tokens of the chosen], int64: indices into the flat entries of all sequences.
    """
    # Arithmetic on whole arrays: a Python loop over 16,384 sequences would cost more than fetching their tokens.
    all_lengths = lengths.astype(np.int64)
    chosen = all_lengths[sequences]
    return np.repeat(_starts(all_lengths)[sequences] - _starts(chosen), chosen) + np.arange(chosen.sum())


@dataclass(slots=True, kw_only=True)
class ReplicaWork:
    """The message from the driver to the ranks of one replica for one call: sequences of its shards, in microbatches.

    `RankGroup` makes it, and each rank turns it into a `TokenBatch` with the entries that its pipeline stage reads.
    """

    shards: list[dict[str, Any]]
    """For each shard, Ray's references to its entries by name."""
    shard_lengths: list[NDArray[np.int64]]
    """For each shard, [sequences of the shard], int64: tokens of each sequence."""
    rows: NDArray[np.int64]
    """[sequences], int64: places of the wanted sequences among those of all shards, counted through."""
    microbatches: list[list[int]]
    """For each microbatch, the indices of its sequences in `rows`."""
    in_loss: NDArray[np.bool_]
    """[sequences], bool, in the order of `rows`: whether the loss is taken over the response."""
    positive: NDArray[np.bool_] | None
    """[sequences], bool, in the order of `rows`: whether the response is correct; None: the loss does not use it."""
    advantages: NDArray[np.float32] | None
    """[sequences], float32, in the order of `rows`: advantage of the response; None: in the shards, or not needed."""

    def token_batch(self, stored: list[dict[str, NDArray[Any]]]) -> TokenBatch:
        """The sequences of `rows` in their order, with the entries that were fetched and those that follow from them.

        Args:
            stored: for each shard its arrays by name, [tokens of the shard], in the types of `STORED_DTYPES`, and
                routed_experts, [tokens of the shard, numbers]; every shard has entries of equal names.
        """
        lengths = np.concatenate(self.shard_lengths)
        places = token_places(lengths, self.rows)
        chosen_lengths = lengths[self.rows]
        arrays = {name: np.concatenate([one[name] for one in stored])[places] for name in stored[0]}
        made = TokenFields(**{name: torch.from_numpy(array) for name, array in arrays.items()})
        # A number that all tokens of a response share travels once, and is repeated for its tokens only here.
        if made.sampled is not None:
            made.loss_mask = self._spread(self.in_loss, chosen_lengths, made.sampled)
            if self.positive is not None:
                made.positive = self._spread(self.positive, chosen_lengths, made.sampled)
            if self.advantages is not None:
                made.advantages = self._spread(self.advantages, chosen_lengths, made.sampled)
        return TokenBatch(chosen_lengths.tolist(), made)

    @staticmethod
    def _spread(by_sequence: NDArray[Any], lengths: NDArray[np.int64], sampled: Tensor) -> Tensor:
        """One number a sequence -> [tokens], float32: that number at its sampled tokens, 0 at the others."""
        by_token = torch.from_numpy(np.repeat(by_sequence.astype(np.float32), lengths))
        return torch.where(sampled, by_token, by_token.new_zeros(()))
