"""The batch of a rank: fields with an entry for each token, of sequences laid end to end, from arrays of its shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.batch.step_batch import StepBatch


@dataclass(slots=True, kw_only=True)
class TokenFields:
    """Tensors with an entry for each token, on the ranks of a model; a field that a stage does not need, or that is not
    computed yet, is None.

    All tensors share one shape, here called [...]: [tokens], sequences laid end to end, or [sequences, length], padded
    with zeros on the right; only `routed_experts` has one more dimension. An entry describes the token at its own
    index: `prev_logprobs[t]` is the log-probability of `token_ids[t]` given the tokens before it in its sequence, and 0
    at the first token, which nothing predicts.
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
    whole_logprobs: Tensor | None = None
    """[...], float32: log-probability under the policy, in training with gradient, over the whole vocabulary. None: no
    filter removes tokens. With a filter the other log-probabilities of the policy are over the tokens that it keeps,
    and -inf for a token that it removes."""
    advantages: Tensor | None = None
    """[...], float32: advantage of the token; 0 where nothing was sampled."""
    positive: Tensor | None = None
    """[...], float32: 1 in the sampled tokens of correct responses, else 0."""
    weight: Tensor | None = None
    """[...], float32: weight of the sequence in the loss, 0 where nothing was sampled; None: all weigh 1."""
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
        """The fields that are not None, by name, each [tokens] or [sequences, length]."""
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in named.items() if value is not None}


def given(entry: Tensor | None) -> Tensor:
    """Unwrap an optional field of TokenFields, [tokens] or [sequences, length]."""
    assert entry is not None, "the field was not computed or not fetched"
    return entry


STORED_DTYPES: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "sampled": np.bool_,
    "generation_logprobs": np.float32,
    "prev_logprobs": np.float32,
    "reference_logprobs": np.float32,
    "whole_logprobs": np.float32,
    "advantages": np.float32,
    "values": np.float32,
    "returns": np.float32,
}
"""Types of fields in the object store, which has one array for each shard. `routed_experts` is stored too, in the type
of its model (`RoutedForm`); the other fields are computed on the rank."""


@dataclass(slots=True)
class TokenBatch:
    """Sequences of different lengths laid end to end, on one device: a replica's sequences, as its ranks hold them."""

    lengths: list[int]
    """Tokens of each sequence."""
    fields: TokenFields
    """Fields of [sum(lengths)] tokens, the sequences laid end to end."""

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

    @staticmethod
    def of_replica(batch: StepBatch, stored: Mapping[str, Sequence[NDArray[Any]]]) -> TokenBatch:
        """The sequences of a replica, with the fetched fields and the fields computed from numbers of each sequence.

        Args:
            batch: the replica's part of the step (`StepBatch.of_shards`).
            stored: arrays of each fetched field, one for each shard: [tokens of the shard], in the types of
                `STORED_DTYPES`, and for routed_experts [tokens of the shard, `RoutedForm.columns`].
        """
        made = TokenFields(**{name: torch.from_numpy(np.concatenate(parts)) for name, parts in stored.items()})
        # A number that all tokens of a response share is sent once, and repeated for its tokens only here.
        if made.sampled is not None:
            made.loss_mask = _spread(batch.in_loss, batch.lengths, made.sampled)
            if batch.positive is not None:
                made.positive = _spread(batch.positive, batch.lengths, made.sampled)
            if batch.weights is not None:
                made.weight = _spread(batch.weights, batch.lengths, made.sampled)
            if batch.advantages is not None:
                made.advantages = _spread(batch.advantages, batch.lengths, made.sampled)
        return TokenBatch(batch.lengths.tolist(), made)


def _spread(by_sequence: NDArray[Any], lengths: NDArray[np.int64], sampled: Tensor) -> Tensor:
    """One number for each sequence to [tokens], float32: that number at its sampled tokens, 0 at the others."""
    by_token = torch.from_numpy(np.repeat(by_sequence.astype(np.float32), lengths))
    return torch.where(sampled, by_token, by_token.new_zeros(()))


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
    starts = np.cumsum(all_lengths) - all_lengths
    chosen = all_lengths[sequences]
    return np.repeat(starts[sequences] - (np.cumsum(chosen) - chosen), chosen) + np.arange(chosen.sum())
