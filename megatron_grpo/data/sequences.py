"""A batch as a list of sequences, flat and unpadded; rectangles are made only where a kernel needs one."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class SequenceBatch:
    """Sequences of different lengths laid end to end.

    Per-token entries are aligned with the token they speak of: `tokens["advantages"][t]` belongs to `token_ids[t]`, and
    `tokens["prev_logprobs"][t]` is the log-probability of `token_ids[t]` given what precedes it in its sequence (0 at
    the first token of a sequence, which nothing predicts).
    """

    lengths: list[int]
    """Tokens of each sequence."""
    token_ids: Tensor
    """[sum(lengths)], int64."""
    tokens: dict[str, Tensor] = field(default_factory=dict)
    """Per-token values by name, each [sum(lengths)], float32; "loss_mask" is 1.0 where the loss is taken."""

    def __post_init__(self) -> None:
        total = sum(self.lengths)
        for name, values in {"token_ids": self.token_ids, **self.tokens}.items():
            assert values.shape == (total,), f"{name} has shape {tuple(values.shape)}, expected ({total},)"

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, indices: list[int]) -> SequenceBatch:
        """The sequences with these indices, in this order."""
        token_ids = self.token_ids.split(self.lengths)
        return SequenceBatch(
            lengths=[self.lengths[i] for i in indices],
            token_ids=torch.cat([token_ids[i] for i in indices]) if indices else self.token_ids[:0],
            tokens={
                name: torch.cat([parts[i] for i in indices]) if indices else values[:0]
                for name, values in self.tokens.items()
                for parts in [values.split(self.lengths)]
            },
        )

    def to(self, device: torch.device) -> SequenceBatch:
        """The same batch on another device."""
        return SequenceBatch(
            lengths=self.lengths,
            token_ids=self.token_ids.to(device),
            tokens={name: values.to(device) for name, values in self.tokens.items()},
        )

    def padded(self, name: str, length: int) -> Tensor:
        """One entry as a rectangle, padded on the right with zeros.

        Args:
            name: "token_ids" or a key of `tokens`.
            length: columns; at least the longest sequence.

        Returns:
            [len(self), length], the entry's dtype.
        """
        flat = self.token_ids if name == "token_ids" else self.tokens[name]
        out = flat.new_zeros(len(self), length)
        out[self._mask(length)] = flat
        return out

    def unpad(self, rectangle: Tensor) -> Tensor:
        """[len(self), length] -> [sum(lengths)]: the inverse of `padded`."""
        return rectangle[self._mask(rectangle.shape[1])]

    def _mask(self, length: int) -> Tensor:
        lengths = torch.tensor(self.lengths, device=self.token_ids.device)
        return torch.arange(length, device=self.token_ids.device) < lengths[:, None]
