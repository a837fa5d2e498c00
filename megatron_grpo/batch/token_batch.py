"""The batch of a rank: tensors with a value for each token, of sequences laid end to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.batch.images import Images
from megatron_grpo.batch.step_batch import StepBatch


@dataclass(slots=True, kw_only=True)
class TokenFields:
    """Tensors with a value for each token; None: not computed.

    All tensors share one shape, here called [...]: [tokens], sequences laid end to end, or [sequences, length], padded
    with zeros on the right. A value describes the token at its own index: `prev_logprobs[t]` is the log-probability of
    `token_ids[t]` given the tokens before it in its sequence, and 0 at the first token, which nothing predicts.

    Example: two sequences, of 4 and of 3 tokens, whose last two tokens were sampled
        TokenFields(
            token_ids=tensor([11, 12, 40, 41, 13, 50, 51]),
            sampled=tensor([False, False, True, True, False, True, True]),
            generation_logprobs=tensor([0, 0, -0.7, -0.1, 0, -1.2, -0.4]),
            advantages=tensor([0, 0, 1.0, 1.0, 0, -1.0, -1.0]),
        )
    """

    token_ids: Tensor | None = None  # token ids: [...], int32 in storage, int64 in a padded batch
    sampled: Tensor | None = None  # True where the policy drew the token: [...], bool
    loss_mask: Tensor | None = None  # 1 where the loss is taken, else 0: [...], float32
    generation_logprobs: Tensor | None = None  # log-probability when the engine drew the token, else 0: [...], float32
    prev_logprobs: Tensor | None = None  # log-probability in training, at the start of the step: [...], float32
    reference_logprobs: Tensor | None = None  # log-probability in training, under the reference policy: [...], float32
    unfiltered_logprobs: Tensor | None = None
    """Log-probability under the policy over the full vocabulary: [...], float32, in training with gradient. None: no
    filter removes tokens. With one, the policy's other log-probabilities are over the tokens that it keeps, and -inf
    for those that it removes."""
    advantages: Tensor | None = None  # advantage of the token, 0 where none was sampled: [...], float32
    prev_entropy: Tensor | None = None  # entropy in training, at the start of the step: [...], float32
    score_sizes: Tensor | None = None  # squared size of the gradient by the logits: [...], float32
    selected: Tensor | None = None  # 1 for tokens that a rule chose among all of the step, else 0: [...], float32
    positive: Tensor | None = None  # 1 in the sampled tokens of correct responses, else 0: [...], float32
    imitated: Tensor | None = None
    """Weight of tokens that the loss imitates (`StepBatch.imitated_tokens`), 0 at others: [...], float32."""
    weight: Tensor | None = None
    """Weight of the sequence in the loss, 0 where no token was sampled: [...], float32. None: all weigh 1."""
    rollout_share: Tensor | None = None
    """Share of its rollout's sampled tokens that the sequence has, 0 where none was sampled: [...], float32. None: each
    rollout is one sequence."""
    values: Tensor | None = None  # return predicted before the token, at the start of the step: [...], float32
    returns: Tensor | None = None  # target of the value model before the token: [...], float32
    entropy: Tensor | None = None  # in nats, of the distribution that drew the token: [...], float32, with gradient
    teacher: Tensor | None = None  # number of the sequence's teacher, 0 where no token was sampled: [...], float32
    teacher_outputs: Tensor | None = None
    """The teacher's distribution of the token, 0 where none was sampled. Either the hidden state that its head
    multiplies, [..., width of the widest teacher], float32, or bfloat16 whose bits are stored as int16; or its k
    likeliest tokens, [..., 2 k + 1], float32: ids, log-probabilities, and the log-probability of all others."""
    divergence: Tensor | None = None  # of the policy from the teacher at the token: [...], float32, with gradient
    routed_experts: Tensor | None = None
    """Experts that the engine chose for the token, in this rank's layers: [..., bytes], uint8 (`RoutedForm`); 0 where
    they are unknown, as for a sequence's last token, which the engine never runs."""

    def as_dict(self) -> dict[str, Tensor]:
        """The fields that are not None, by name."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def require_field(field: Tensor | None) -> Tensor:
    assert field is not None, "the field was not computed or not fetched"
    return field


_LOGPROBS = ("generation_logprobs", "prev_logprobs", "reference_logprobs", "unfiltered_logprobs")
STORED_DTYPES: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "sampled": np.bool_,
    **dict.fromkeys(
        (*_LOGPROBS, "prev_entropy", "score_sizes", "selected", "advantages", "values", "returns"), np.float32
    ),
}
"""Types of the fields in the object store. `WIDE_FIELDS` are stored too, routed_experts as bytes (`RoutedForm`); the
other fields are computed on the rank."""
WIDE_FIELDS = ("routed_experts", "teacher_outputs")  # fields with several values for a token


@dataclass(slots=True)
class TokenBatch:
    """A replica's sequences on a rank, laid end to end.

    Example: the two sequences of `TokenFields`' example
        batch = TokenBatch([4, 3], fields)
        batch.select([1]).fields.token_ids  # tensor([13, 50, 51])
    """

    lengths: list[int]
    fields: TokenFields  # of [sum(lengths)] tokens
    images: list[Images] | None = None  # of each sequence; None: no sequence has one

    def __post_init__(self) -> None:
        for name, tensor in self.fields.as_dict().items():
            expected = (sum(self.lengths), *(tensor.shape[1:] if name in WIDE_FIELDS else ()))
            assert tensor.shape == expected, f"{name} has shape {tuple(tensor.shape)}, expected {expected}"

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, indices: Sequence[int]) -> TokenBatch:
        """Select the sequences with these indices, in this order."""
        tokens = torch.from_numpy(find_token_indices(np.asarray(self.lengths), np.asarray(indices, dtype=np.int64)))
        selected = {name: tensor[tokens] for name, tensor in self.fields.as_dict().items()}
        images = None if self.images is None else [self.images[index] for index in indices]
        return TokenBatch([self.lengths[index] for index in indices], TokenFields(**selected), images)

    @staticmethod
    def from_replica(batch: StepBatch, arrays: Mapping[str, Sequence[NDArray[Any]]]) -> TokenBatch:
        """Join a replica's partitions, and repeat numbers per token.

        `arrays` has for each fetched field an array per partition: [tokens of the partition], in the types of
        `STORED_DTYPES`, and for routed_experts [tokens of the partition, bytes].
        """
        fields = TokenFields(**{name: torch.from_numpy(np.concatenate(parts)) for name, parts in arrays.items()})
        # A number that all tokens of a response share travels once per sequence, and is repeated only here.
        if fields.sampled is not None:
            fields.loss_mask = repeat_per_token(batch.in_loss, batch.lengths, fields.sampled)
            if batch.positive is not None:
                fields.positive = repeat_per_token(batch.positive, batch.lengths, fields.sampled)
            if batch.imitated_tokens is not None:
                fields.imitated = _weigh_imitated(batch, fields.sampled)
            if batch.loss_weights is not None:
                fields.weight = repeat_per_token(batch.loss_weights, batch.lengths, fields.sampled)
            if batch.rollout_shares is not None:
                fields.rollout_share = repeat_per_token(batch.rollout_shares, batch.lengths, fields.sampled)
            if batch.teachers is not None:
                fields.teacher = repeat_per_token(batch.teachers, batch.lengths, fields.sampled)
            if batch.advantages is not None:
                fields.advantages = repeat_per_token(batch.advantages, batch.lengths, fields.sampled)
        return TokenBatch(batch.lengths.tolist(), fields, batch.images)


def repeat_per_token(by_sequence: NDArray[Any], lengths: NDArray[np.integer], sampled: Tensor) -> Tensor:
    """Repeat a sequence's number for its `sampled` tokens, else 0: [sum(lengths)], float32."""
    by_token = torch.from_numpy(np.repeat(by_sequence.astype(np.float32), lengths))
    return torch.where(sampled, by_token, by_token.new_zeros(()))


def find_observed(sampled: NDArray[np.bool_], lengths: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Find the tokens that others wrote after a sequence's first sampled token: [sum(lengths)]."""
    counts = np.cumsum(sampled)  # sampled tokens up to each token
    starts = np.cumsum(lengths) - lengths
    before = np.repeat(counts[starts] - sampled[starts], lengths)
    return ~sampled & (counts > before)


def _weigh_imitated(batch: StepBatch, sampled: Tensor) -> Tensor:
    """Compute the field `imitated`."""
    weights = np.ones(len(batch)) if batch.loss_weights is None else batch.loss_weights
    if batch.demonstrated is not None:
        return repeat_per_token(weights * batch.demonstrated, batch.lengths, sampled)
    observed = torch.from_numpy(find_observed(sampled.numpy(), batch.lengths))
    return repeat_per_token(weights * batch.in_loss, batch.lengths, observed)


def scatter_sampled(by_token: Tensor, sampled: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Place values of sampled tokens among all tokens, else 0: [tokens], float32."""
    scattered = np.zeros(len(sampled), dtype=np.float32)
    scattered[sampled] = by_token.float().cpu().numpy()
    return scattered


def find_token_indices(lengths: NDArray[np.integer], sequences: NDArray[np.integer]) -> NDArray[np.int64]:
    """Find the token indices of chosen sequences: [tokens of these sequences], int64.

    `lengths` are those of all sequences, whose tokens lie end to end.
    """
    # Arithmetic on whole arrays: a Python loop over 16,384 sequences would cost more than fetching their tokens.
    all_lengths = lengths.astype(np.int64)
    starts = np.cumsum(all_lengths) - all_lengths
    chosen = all_lengths[sequences]
    return np.repeat(starts[sequences] - (np.cumsum(chosen) - chosen), chosen) + np.arange(chosen.sum())
